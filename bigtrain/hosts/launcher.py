"""The launcher above this rank. Who kills it wants the run to end, and nobody is left to end its ranks: they do so themselves."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from bigtrain.stopping import StopSignal

if TYPE_CHECKING:
    import psutil

logger = logging.getLogger("bigtrain")

LOOK_S = 1.0
_ENDED = {"dead", "zombie"}
_BELOW_DEEPSPEED = "deepspeed.launcher.launch"  # started by `deepspeed` on each host; starts the ranks
_PROGRAMS = {"torchrun", "deepspeed", "ds", "accelerate"}
_MODULES = {
    "torch.distributed.run", "torch.distributed.launch", "deepspeed.launcher.runner", _BELOW_DEEPSPEED, "accelerate.commands.launch",
}  # fmt: skip
# Who adopts orphans. Any other parent may have started this rank itself: a shell in which variables of a launch were left, a program that
# launches by torch's elastic_launch (`tune run`), a `timeout`. slurmstepd starts what a rank submits, variables of the launch and all.
_INITS = {"systemd", "init", "tini", "docker-init", "dumb-init", "catatonit", "podman-init", "s6-svscan", "conmon"}


_watched_by: list[int] = []  # processes: a fork inherits the list, and no thread


def watch(stop: StopSignal | None = None) -> None:
    """From now on the end of a launcher asks this rank to stop. A rank without one outlives whatever started it, as under nohup.

    Args:
        stop: whom to ask. None: the end of a launcher is the SIGTERM that it sends its ranks when it is told to end, unless it is watched
            already, or this is no rank of it: a program that a rank started for itself, without a rank's variables.
    """
    if stop is None and os.getpid() in _watched_by:
        return
    _watched_by.append(os.getpid())
    ask = _terminate if stop is None else stop.ask
    try:
        if stop is None and not _is_rank():
            return
        above = launchers()
        left = _was_left(above)
    except ImportError:  # psutil: the run will say so itself
        return
    if left:
        ask("the end of the launcher, which started this rank and is gone,")
    if above:
        threading.Thread(target=_stop_without, args=(above, ask), daemon=True, name="bigtrain-launcher").start()


def _is_rank() -> bool:
    """Whether this process was started with a launcher's variables; `accelerate launch` of one process has none but its own."""
    import psutil

    env = psutil.Process().environ()  # not os.environ: an engine without a launcher gives itself a LOCAL_RANK
    return "LOCAL_RANK" in env or any(name.startswith("ACCELERATE_") for name in env)


def _terminate(why: str) -> None:
    logger.warning("SIGTERM for %s", why.rstrip(","))
    os.kill(os.getpid(), signal.SIGTERM)


def launchers() -> list[psutil.Process]:
    """Launchers among the processes above this one, the nearest first: `deepspeed` is two of them, and each may be killed alone."""
    import psutil

    found = []
    with contextlib.suppress(psutil.Error):
        for process in psutil.Process().parents():
            with contextlib.suppress(psutil.Error):  # of another user
                if is_launcher(process.cmdline()):
                    found.append(process)
    return found


def was_launched() -> bool:
    """Whether torchrun (`accelerate` too) or `deepspeed` started this rank: they end all ranks of the host when one of them fails."""
    return "TORCHELASTIC_RUN_ID" in os.environ or {"CROSS_RANK", "LOCAL_SIZE"} <= os.environ.keys()


def _was_left(above: Sequence[psutil.Process]) -> bool:
    """Whether a launcher started this rank, or the one launcher that is `above` it, and was gone before it was looked for.

    Its child's parent is then whoever adopts orphans. `deepspeed` imports torch in both of its processes before a rank begins: many
    seconds in which whoever notices a mistake kills the first, which does not tell the second.
    """
    import psutil

    if not was_launched() or os.getsid(0) == 0:  # in a container of its own, from where the launcher is not seen
        return False
    with contextlib.suppress(psutil.Error, OSError):
        top = above[-1] if above else psutil.Process()
        own, parent = top.cmdline(), top.parent()
        # Not on several hosts: there ssh starts it, with a --node_rank.
        if parent is None or (above and (_BELOW_DEEPSPEED not in own or any(w.startswith("--node_rank") for w in own))):
            return False
        by_deepspeed = above or "TORCHELASTIC_RUN_ID" not in os.environ
        # Whatever a container's first process is: no part of DeepSpeed begins a session of its own, so that one did not start it.
        adopts = parent.name() in _INITS or (parent.pid == 1 and by_deepspeed and os.getsid(1) != os.getsid(top.pid))
        return bool(adopts) and parent.cmdline()[1:][-len(own) :] != own  # `tini -- python train.py` has started it
    return False


def is_launcher(words: Sequence[str]) -> bool:
    """Whether a process with this command line is a launcher itself, not a shell or a `timeout` around one."""
    first, *rest = [os.path.basename(word) for word in words] or [""]
    if first.startswith("python"):  # -u -m MODULE, or a file
        first = next((word for word in rest if not word.startswith("-")), "")
    return first in _PROGRAMS | _MODULES


def _stop_without(above: Sequence[psutil.Process], ask: Callable[[str], None]) -> None:
    told: set[int] = set()
    while not (gone := [process for process in above if _state(process) in _ENDED]):
        stopped = {process.pid for process in above if _state(process) == "stopped"}
        for pid in stopped - told if os.environ.get("LOCAL_RANK", "0") == "0" else ():
            logger.warning(
                "the launcher (process %d) is stopped (Ctrl-Z, kill -STOP): this rank waits wherever it needs it, as torchrun to connect to the "
                "others. `fg`, or `kill -CONT %d`, lets it go on.", pid, pid
            )  # fmt: skip
        told = stopped
        time.sleep(LOOK_S)
    ask(f"the end of the launcher (process {gone[0].pid})")


def _state(process: psutil.Process) -> str:
    import psutil

    try:
        return process.status()  # not is_running: it compares times of start, which change with the clock in psutil before 7.1
    except psutil.NoSuchProcess:
        return "dead"
    except psutil.AccessDenied:
        return "hidden"
