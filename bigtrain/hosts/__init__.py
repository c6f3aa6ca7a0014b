"""Runs over several hosts: how their ranks meet, and what must be the same on each before anything is built.

`roll_call` brings all ranks to one store and names those that do not come, or that come with an error of their own: a host on
which a file is missing must not leave the others waiting. `refuse_different` compares versions, the ds_config, and the content of
the model's, tokenizer's and data files, and names the hosts that differ. With all ranks on one host both do nothing.
`after_restart` lets a job that its launcher starts again go on where it was.
"""

from bigtrain.hosts.restart import after_restart
from bigtrain.hosts.rollcall import roll_call, tell
from bigtrain.hosts.sameness import refuse_different, refuse_split_output

__all__ = ["after_restart", "refuse_different", "refuse_split_output", "roll_call", "tell"]
