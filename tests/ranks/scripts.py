"""Scripts in processes of their own that begin with everything imported: real exit codes and signals, without seconds of importing.

`run` is what `python FILE WORDS` would be, on one rank or as a launcher starts several. What a launcher itself does (its exit code,
ports, signals that it passes on) needs the launcher; so does a promise about the start of an interpreter.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import runpy
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from bigtrain.hosts.ports import free_port
from tests import ROOT
from tests.ranks.pool import forks


class Script:
    """One process; what it says goes to a file."""

    def __init__(self, words: Sequence[object], env: Mapping[str, str], log: Path, cwd: Path = ROOT):
        self._log = log
        told = ([str(w) for w in words], dict(env), str(log), str(cwd))
        self._process = forks().Process(target=_run, args=told, daemon=True)  # ended with pytest, if a test forgets it
        self._process.start()
        self.pid: int = self._process.pid

    def poll(self) -> int | None:
        """The exit code, or None while it runs; killed by a signal: its number, negative."""
        return self._process.exitcode

    def wait(self, limit_s: float = 800.0) -> int:
        """The exit code; whatever runs longer than `limit_s` is killed, and that is an error."""
        self._process.join(limit_s)
        if self._process.exitcode is None:
            self._process.kill()
            raise AssertionError(f"still running after {limit_s:.0f} s:\n{self.said()[-4000:]}")
        return self._process.exitcode

    def said(self) -> str:
        """Output and errors so far."""
        return self._log.read_text(errors="replace") if self._log.exists() else ""


class Ranks:
    """The same script on several ranks of this host, with the environment that launchers set.

    They say into one file, as under a launcher; `apart`: each into its own, named by the rank.
    """

    def __init__(
        self, words: Sequence[object], env: Mapping[str, str], log: Path, world: int = 2, cwd: Path = ROOT, apart: bool = False
    ):
        port = str(free_port())
        self.ranks = [
            Script(words, {
                **env, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world),
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
            }, log.with_suffix(f".{rank}") if apart else log, cwd)
            for rank in range(world)
        ]  # fmt: skip

    def poll(self) -> int | None:
        """None while any rank runs, then the code of the first that failed, or 0."""
        codes = [rank.poll() for rank in self.ranks]
        return None if None in codes else next(filter(None, codes), 0)

    def wait(self, limit_s: float = 800.0) -> int:
        """Until all have ended; see `poll`."""
        end = time.monotonic() + limit_s
        try:
            return next(filter(None, [rank.wait(max(0.0, end - time.monotonic())) for rank in self.ranks]), 0)
        finally:
            for rank in self.ranks:
                if rank.poll() is None:
                    os.kill(rank.pid, signal.SIGKILL)

    def said(self) -> str:
        """Output and errors of all so far."""
        return self.ranks[0].said()


def run(words: Sequence[object], env: Mapping[str, str], expect: int = 0, world: int | None = None, cwd: Path = ROOT) -> str:
    """Run to the end, with `world` ranks or without a launcher (None); what was said. The exit code must be `expect`."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "said"
        process = Script(words, env, log, cwd) if world is None else Ranks(words, env, log, world, cwd)
        code = process.wait()
        assert code == expect, f"exit code {code}, expected {expect}:\n{process.said()[-6000:]}"
        return process.said()


def _run(words: list[str], env: dict[str, str], log: str, cwd: str) -> None:
    """In the forked process: what an interpreter does from its first line to its end."""
    multiprocessing.set_start_method(None, force=True)  # the default again, not that of this process
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # data workers are its children
    said = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(said, 1)
    os.dup2(said, 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    sys.argv = words
    sys.path[:0] = [str(Path(words[0]).parent), *filter(None, env.get("PYTHONPATH", "").split(os.pathsep))]
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    try:
        runpy.run_path(words[0], run_name="__main__")
    finally:
        with contextlib.suppress(BaseException):
            atexit._run_exitfuncs()
