"""Native ops compiled at run time: builds that died, and what a failed one is about.

Internal symbol of torch used: utils.cpp_extension._get_build_directory. Of DeepSpeed's builders: name, cxx_args.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch.utils.cpp_extension import _get_build_directory

log = logging.getLogger(__name__)
TELL_S = 30.0  # between two words to somebody who waits


def why_no_tools() -> str | None:
    """Why no op can be compiled here; None if it can."""
    compiler = os.environ.get("CXX", "c++").split()[0]
    if shutil.which(compiler) is None:
        return f"no C++ compiler: {compiler!r} is not on PATH; install g++ or set CXX"
    if shutil.which("ninja") is None:
        return "no ninja on PATH; `pip install ninja`"
    return None


def wait_for_build(op: str, idle_s: float = 300.0, poll_s: float = 0.5) -> bool:
    """Wait while another process builds native op `op`; torch would wait for the lock of a killed one without end or word.

    A build is taken for dead when nothing in its folder changed for `idle_s` seconds (it takes about a minute), and nothing on this
    host runs in there. Its lock is removed.

    Returns:
        Whether there was one.
    """
    base = _get_build_directory(op, verbose=False)
    lock, told_at = os.path.join(base, "lock"), time.monotonic()
    changed: float | None = None
    while os.path.exists(lock):
        if (
            last := _last_change(base)
        ) != changed:  # before the first look, the wall clock alone tells, which may have been set back
            quiet_from = time.monotonic() - (max(0.0, time.time() - last) if changed is None else 0.0)
            changed = last
        idle = time.monotonic() - quiet_from
        if idle >= idle_s and not _is_worked_in(base):
            log.warning("removing %s: the build it belongs to has done nothing for %.0f s", lock, idle)
            with contextlib.suppress(FileNotFoundError):
                os.remove(lock)
            return True
        if time.monotonic() >= told_at:
            log.warning(
                "waiting for another process that builds %s. If there is none, a killed one has left %s: it is removed %.0f s from now, "
                "or remove it yourself",
                op,
                lock,
                max(0.0, idle_s - idle),
            )
            told_at = time.monotonic() + TELL_S
        time.sleep(poll_s)
    return False


def _last_change(folder: str) -> float:
    times = [os.stat(folder).st_mtime]
    for entry in os.scandir(folder):
        with contextlib.suppress(FileNotFoundError):  # the build goes on
            times.append(entry.stat().st_mtime)
    return max(times)


def _is_worked_in(folder: str, besides: str = "") -> bool:
    """Whether a process of this host is there, as a compiler that writes nothing for minutes is; one of a name `besides` does not count."""
    here = os.path.realpath(folder)
    for process in Path("/proc").glob("[0-9]*/cwd"):
        with contextlib.suppress(OSError):  # it has ended, or is somebody else's
            if os.readlink(process) == here and process.with_name("comm").read_text().strip() != besides:
                return True
    return False


def load_op(builder: Any) -> Any:
    """The native op of DeepSpeed's `builder`, compiled if it is not there; whoever loads one by other flags compiles it anew for all."""
    wait_for_build(builder.name)
    with telling_of_compilers(builder.name):
        return without_symbols(builder).load(verbose=False)


@contextlib.contextmanager
def telling_of_compilers(op: str, look_s: float = 0.2) -> Iterator[None]:
    """Inside, native op `op` is loaded: a line as soon as a compiler runs for it, and one each half minute, as silence looks like a run that hangs.

    Warnings, as a script may not show anything below. Only ninja knows beforehand whether what is there is out of date, as after an
    upgrade of torch.
    """
    folder, loaded = _get_build_directory(op, verbose=False), threading.Event()

    def look() -> None:
        said, began = 0, time.monotonic()
        while not loaded.wait(look_s):
            if time.monotonic() - began < said * TELL_S or not _is_worked_in(folder, besides="ninja"):
                continue
            if said == 0:
                began = time.monotonic()
                log.warning(
                    "compiling %s into %s, once: this takes a minute or more, several where the machine is busy", op, folder
                )
            else:
                log.warning("still compiling %s, for %.0f s", op, time.monotonic() - began)
            said += 1

    thread = threading.Thread(target=look, daemon=True, name=f"compiling-{op}")
    thread.start()
    try:
        yield
    finally:
        loaded.set()
        thread.join()


def without_symbols(builder: Any) -> Any:
    """DeepSpeed's `builder` of a native op, told to compile without debug information (-g), which is half of the time.

    What another program compiled with it stays: other flags would compile it anew, and again when that program comes back.
    """
    with contextlib.suppress(FileNotFoundError):
        if " -g " in Path(_get_build_directory(builder.name, verbose=False), "build.ninja").read_text(encoding="utf-8"):
            return builder
    flags = builder.cxx_args
    builder.cxx_args = lambda: [flag for flag in flags() if flag != "-g"]
    return builder


def first_cause(error: BaseException) -> str:
    """The compiler's first `error:` line if there is one anywhere in the chain, else the error at its bottom.

    torch puts the compiler's output one link above the bottom, which is only "ninja returned 1".
    """
    link: BaseException | None = error
    bottom = error
    while link is not None:
        lines = [line.strip() for line in str(link).splitlines() if "error:" in line]
        if lines:
            return f"{type(link).__name__}: {lines[0]}"
        bottom, link = link, link.__cause__
    text = str(bottom).strip() or type(bottom).__name__
    return f"{type(bottom).__name__}: {text.splitlines()[0]}"
