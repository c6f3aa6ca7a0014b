"""How a run ends: at Ctrl-C, a scheduler's SIGTERM, SIGUSR1 or SIGUSR2, and a closed terminal's SIGHUP it finishes the step, saves, leaves with exit code 75.

The handler only notes the wish; ranks agree on it after each step, so that all stop after the same one. A second Ctrl-C
leaves at once. Launchers pass a Ctrl-C on to ranks that the terminal has already told, so what comes within
`ECHO_S` of the first is taken for its echo. While the ranks meet there is nothing to finish: any of these leaves at once. So does a
rank whose launcher is gone, until it trains; after that it stops as at a signal.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import io
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NoReturn

from bigtrain.errors import BigtrainError, StoppedError, UsageError
from bigtrain.versions import missing_package

ECHO_S = 2.0
EXIT_INTERRUPTED = 130
_IF_NOBODY_ELSES = (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)  # by default they kill
STOPS = (signal.SIGINT, signal.SIGTERM, *_IF_NOBODY_ELSES)


class StopSignal:
    """Whether this process was asked to stop: inside `with StopSignal() as stop:`, `stop.requested` names the signal.

    `trains`: steps are being made, so that there is something to finish and to save. `over`: the run ends as it is, and has said
    why; a launcher tells the ranks of each other's end by a signal.
    """

    def __init__(self) -> None:
        self.requested: str | None = None
        self.trains = self.over = False
        self._first_at = 0.0
        self._before: dict[int, Any] = {}
        self._pid = os.getpid()
        self._terminals = [fd for fd in (1, 2) if os.isatty(fd)]

    def __enter__(self) -> StopSignal:
        for number in STOPS:
            if number in _IF_NOBODY_ELSES and signal.getsignal(number) != signal.SIG_DFL:
                continue  # nohup ignores SIGHUP; a debugger has its own use for SIGUSR1
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextlib.contextmanager
    def leaving_at_once(self) -> Iterator[None]:
        """Inside, a stop ends the process at once, as does one that came before: torch waits for other ranks in C++, where no handler of Python's runs."""
        if self.requested is not None:
            _say(f"\nstopped by {self.requested} before anything was trained\n".encode())
            os._exit(StoppedError.exit_code)
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        before = signal.set_wakeup_fd(writer)  # written to by the interpreter's own handler, whatever the main thread does
        threading.Thread(target=_leave_when_told, args=(reader,), daemon=True, name="bigtrain-stop").start()
        try:
            yield
        finally:
            signal.set_wakeup_fd(before)
            os.close(writer)  # the thread ends

    def ask(self, why: str) -> None:
        """Stop as at a signal, from another thread; where nothing has been trained yet, leave at once."""
        if not self.trains:
            _say(f"\nstopped by {why} before anything was trained\n".encode())
            os._exit(StoppedError.exit_code)
        if self.requested is None:
            self.requested, self._first_at = why, time.monotonic()
            if not self.over:
                _say(f"\nstopping after this step: {why}\n".encode())

    def _let_go_of_what_is_closed(self) -> None:
        """Each write to a terminal that is gone fails, and would end the run before it is through."""
        for fd in (fd for fd in self._terminals if not os.isatty(fd)):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, fd)
            os.close(nowhere)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:  # a data worker that was forked with this handler: its rank decides
            return
        now = time.monotonic()
        if number == signal.SIGHUP:
            self._let_go_of_what_is_closed()
        if self.requested is None:
            self.requested, self._first_at = signal.Signals(number).name, now
            if os.environ.get("RANK", "0") != "0" or self.over:
                return
            if self.trains:
                _say(b"\nstopping after this step; Ctrl-C again leaves at once\n")
            elif number != signal.SIGTERM:  # which is also how a launcher ends the others of a rank that failed first
                _say(b"\nstopping; Ctrl-C again leaves at once\n")
        elif number == signal.SIGINT and now - self._first_at > ECHO_S:
            _say(b"\nsecond Ctrl-C: leaving at once\n")
            os._exit(EXIT_INTERRUPTED)


def _leave_when_told(reader: int) -> None:
    for told in iter(lambda: os.read(reader, 1), b""):
        if told[0] in STOPS:
            _say(b"\nstopped while the ranks were meeting, before anything was trained\n")
            os._exit(StoppedError.exit_code)
    os.close(reader)


def _say(text: bytes) -> None:
    """To stderr, which may be gone: where a launcher on another host was stopped, its ssh connection went first."""
    with contextlib.suppress(OSError):
        os.write(2, text)


def open_what_is_closed() -> None:
    """Let a program that was started without stdin, stdout or stderr (`2>&-`, some daemons) have one that leads nowhere.

    The next file to be opened, or connection, would get the free number, and be written into by whoever writes to stderr.
    """
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(fd)
        except OSError:
            nowhere = os.open(os.devnull, os.O_RDWR)
            if nowhere != fd:  # a lower one was closed by hand since
                os.dup2(nowhere, fd)
                os.close(nowhere)
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(fd, "r" if fd == 0 else "w", closefd=False))


# What a path or its disk refuses: a sentence with its name, no traceback.
_OF_A_PATH = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EDQUOT, errno.ENAMETOOLONG, errno.ELOOP, errno.EIO, errno.ESTALE,
              errno.ENOENT, errno.EEXIST, errno.ENOTDIR, errno.EISDIR)  # fmt: skip


def exit_code(command: Callable[[], int]) -> int:
    """Run what a command line asks for; Ctrl-C, a reader that is gone, a disk and errors of bigtrain's own end it without a traceback."""
    open_what_is_closed()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a name that this terminal cannot show is no reason to fail
    try:
        _refuse_no_folder()
        code = command()
        sys.stdout.flush()  # here, where it can be told that the disk is full
        return code
    except BigtrainError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except ModuleNotFoundError as error:
        if (missing := missing_package(error)) is None:
            raise
        print(missing, file=sys.stderr)
        return missing.exit_code
    except BrokenPipeError:  # `bigtrain ... | head`
        _let_go_of_stdout()
        return BigtrainError.exit_code
    except OSError as error:
        if error.errno == errno.ENOSPC:
            print(f"{error.filename or 'the output'} cannot be written: no space is left there", file=sys.stderr)
            _let_go_of_stdout()
        elif error.filename is not None and error.errno in _OF_A_PATH:
            print(f"{error.filename}: {error.strerror}", file=sys.stderr)
        else:
            raise
        return BigtrainError.exit_code


def _refuse_no_folder() -> None:
    try:
        os.getcwd()
    except FileNotFoundError as error:
        raise UsageError("the folder that this was called in has been removed: cd to one that is there") from error


def _let_go_of_stdout() -> None:
    """What is left in its buffer would be tried again when the interpreter ends, which complains."""
    if sys.stdout is sys.__stdout__:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def end_process(code: int) -> NoReturn:
    """End as the interpreter would, but without taking apart what torch and transformers have built: 4 s of computing and more.

    Threads and executors are waited for, what `atexit` holds is done (trackers, worker processes), output is written.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # whoever reads it has gone
            stream.flush()
    os._exit(code)
