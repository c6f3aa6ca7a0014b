"""The launcher above this rank. Who kills it wants the run to end, and nobody is left to end its ranks: they do so themselves."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from bigtrain.stopping import StopSignal

if TYPE_CHECKING:
    import psutil

logger = logging.getLogger("bigtrain")

LOOK_S = 1.0
_ENDED = {"dead", "zombie"}
_PROGRAMS = {"torchrun", "deepspeed", "accelerate"}
_MODULES = {"torch.distributed.run", "torch.distributed.launch", "deepspeed.launcher.launch", "accelerate.commands.launch"}
_SHELLS = {"sh", "bash", "dash", "zsh", "ksh", "fish"}  # variables of a launch may be left in one


_watched_by: list[int] = []  # processes: a fork inherits the list, and no thread


def watch(stop: StopSignal | None = None) -> None:
    """From now on the end of a launcher asks this rank to stop. A rank without one outlives whatever started it, as under nohup.

    Args:
        stop: whom to ask. None: the end of a launcher is the SIGTERM that it sends its ranks when it is told to end, unless it is watched
            already.
    """
    if stop is None and os.getpid() in _watched_by:
        return
    _watched_by.append(os.getpid())
    ask = _terminate if stop is None else stop.ask
    try:
        above = launchers()
        left = not above and _was_left()
    except ImportError:  # psutil: the run will say so itself
        return
    if left:
        ask("the end of the launcher, which started this rank and is gone,")
    if above:
        threading.Thread(target=_stop_without, args=(above, ask), daemon=True, name="bigtrain-launcher").start()


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


def _was_left(env: Mapping[str, str] = os.environ) -> bool:
    """Whether a launcher started this rank and was gone before it was looked for: the parent is whoever adopts orphans."""
    import psutil

    launched = "TORCHELASTIC_RUN_ID" in env or {"CROSS_RANK", "LOCAL_SIZE"} <= env.keys()
    if not launched or os.getsid(0) == 0:  # in a container of its own, from where the launcher is not seen
        return False
    with contextlib.suppress(psutil.Error):
        parent = psutil.Process(os.getppid()).name()
        return parent not in _SHELLS and not parent.startswith("python")  # programs start ranks with torch's elastic_launch
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
        return process.status() if process.is_running() else "dead"
    except psutil.NoSuchProcess:
        return "dead"
