"""The port on which the ranks of a launch meet: one that is free, and the same for all of them."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bigtrain.errors import BigtrainError, UsageError
from bigtrain.hosts.ports import free_port, is_free

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def meeting_port(env: dict[str, str] | Any = os.environ, wait_s: float = 600.0) -> Iterator[int | None]:
    """Inside, MASTER_PORT is one that can be bound, the same on every rank.

    `deepspeed` says port 29500 unless told otherwise, so a second job on the host dies with EADDRINUSE. Where the launcher
    started all ranks on this host, rank 0 looks, moves to a free port if need be, and tells its siblings through a
    private file named after the launcher's process. Several hosts, torchrun (whose agent owns the port) and single
    processes are left alone.

    Raises:
        UsageError: variables that say which rank this is cannot be.
    """
    if problems := launch_problems(env):
        raise UsageError(
            f"the launcher's variables in the environment cannot be used: {'; '.join(problems)}. deepspeed and torchrun set them "
            "all; for a single process unset RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT"
        )
    launcher = _deepspeed_launcher() if _all_ranks_here(env) else None
    if launcher is None:
        yield None
        return
    note = Path(tempfile.gettempdir(), f"bigtrain-{os.getuid()}-{launcher}.port")
    if env["RANK"] == "0":
        asked = int(env["MASTER_PORT"])
        port = asked if is_free(asked) else free_port()
        if port != asked:
            logger.warning("port %d is in use on this host; the ranks meet on %d instead", asked, port)
        _leave(note, port)
    else:
        port = _await(note, wait_s)
    env["MASTER_PORT"] = str(port)
    try:
        yield port
    finally:
        if env["RANK"] == "0":
            note.unlink(missing_ok=True)


def launch_problems(env: Mapping[str, str] = os.environ) -> list[str]:
    """What a launcher, or a shell's leftovers, said of this rank that cannot be; none for a process without a launcher."""
    if "RANK" not in env:
        alone = env.get("WORLD_SIZE", "1") == "1"  # else each of several processes would train by itself, into one folder
        return [] if alone else [f"WORLD_SIZE is {env['WORLD_SIZE']!r}, but RANK is not set"]
    problems = [f"RANK is set, but {name} is not" for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in env]
    whole = {"RANK": (0, 2**31), "WORLD_SIZE": (1, 2**31), "LOCAL_RANK": (0, 2**31), "MASTER_PORT": (1, 65536)}
    for name, (low, above) in whole.items():
        if name in env and not (re.fullmatch("[0-9]{1,10}", env[name]) and low <= int(env[name]) < above):
            problems.append(f"{name} is {env[name]!r}: a whole number from {low} to {above - 1} is needed")
    if not problems and int(env["RANK"]) >= int(env["WORLD_SIZE"]):
        problems.append(f"RANK is {env['RANK']}, but WORLD_SIZE is {env['WORLD_SIZE']}: ranks count from 0")
    return problems


def _all_ranks_here(env: Mapping[str, str]) -> bool:
    """True if DeepSpeed's launcher started every rank on this host (LOCAL_SIZE is its own variable; torchrun has another)."""
    needed = ("RANK", "MASTER_PORT", "WORLD_SIZE", "LOCAL_SIZE")
    return all(k in env for k in needed) and env["LOCAL_SIZE"] == env["WORLD_SIZE"] and "TORCHELASTIC_RUN_ID" not in env


def _deepspeed_launcher() -> str | None:
    """A name for the launcher process that is this one's parent, or None if the parent is something else."""
    import psutil

    with contextlib.suppress(psutil.Error):
        parent = psutil.Process().parent()
        if parent is not None and any("deepspeed.launcher" in word for word in parent.cmdline()):
            return f"{parent.pid}-{int(parent.create_time())}"
    return None


def _leave(note: Path, port: int) -> None:
    draft = note.with_suffix(f".{os.getpid()}")
    handle = os.open(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW, 0o600)
    with os.fdopen(handle, "w") as file:
        file.write(str(port))
    os.replace(draft, note)


def _await(note: Path, wait_s: float) -> int:
    end = time.monotonic() + wait_s
    while time.monotonic() < end:
        with contextlib.suppress(FileNotFoundError):
            status = os.lstat(note)
            if stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid():
                return int(note.read_text())
        time.sleep(0.05)
    raise BigtrainError(f"rank 0 did not say within {wait_s:.0f} s which port to meet on: it died earlier, look at its output")


def explain_port(error: BaseException) -> UsageError | None:
    """The remedy for an occupied or unreachable meeting port, None if `error` is about something else."""
    text = str(error)
    if not any(sign in text for sign in ("EADDRINUSE", "already in use", "errno: 98")):
        return None
    port = os.environ.get("MASTER_PORT", "29500")
    return UsageError(
        f"the ranks cannot meet on port {port}: another process listens there.\n"
        f"See which one: ss -ltnp 'sport = :{port}'. Or choose another port: "
        "deepspeed --master_port PORT launch/train.py ..., or torchrun --standalone (one host), or "
        "torchrun --master_port PORT."
    )
