"""The hosts of a run: how its ranks find a place on them, and each other.

ports      of this host, that nobody else takes
network    whether there are other hosts, and which interface leads to them
meeting    which of them the ranks of a launch meet on
placement  which device each one takes
launcher   whose end is a stop
rollcall   ranks of several hosts, or without a launcher, meet at one store; those that do not come, or come with an error, are named
"""
