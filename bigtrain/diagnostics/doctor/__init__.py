"""`bigtrain doctor`: tests whether this machine is fit to train, and says what to do where it is not.

Each area has a module: a frozen dataclass of facts, `measure_*` which gathers them by doing, and pure `check_*` functions which
judge them. So a check can be tested with the facts of any machine.

    versions  tools  devices  limits  network  storage     facts, in a second, without torch
    native (probe.py in a process of its own)              DeepSpeed's native parts, rates of memory and bus
    comm (rank.py, one process a rank; collectives.py)     collectives and a ZeRO-3 step; variations when they fail
    calibration                                            the rates, for `bigtrain plan --calibration`
    examine  show  cli                                     order, report, command
"""
