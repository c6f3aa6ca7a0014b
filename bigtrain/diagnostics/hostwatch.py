"""A thread that looks at the host's memory a few times a second: it warns once, and acts before the kernel's killer would."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from bigtrain.plan.room import Room, room, verdict

logger = logging.getLogger(__name__)

INTERVAL_S = 0.2


class HostWatch:
    """Runs from `start` to `stop`.

    Args:
        on_warning: called once, when use first passes `plan.room.WARNING_SHARE`; must be quick, as nobody looks meanwhile.
        on_full: called once, when the limit is about to be reached; the thread ends after it.
        look: reads the present use; None: unknown, look again later.
    """

    def __init__(
        self,
        on_warning: Callable[[Room], None],
        on_full: Callable[[Room], None],
        look: Callable[[], Room | None] = room,
        interval_s: float = INTERVAL_S,
    ):
        self._warn, self._full, self._look, self._interval_s = on_warning, on_full, look, interval_s
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="bigtrain-host-memory", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """No call comes after this."""
        self._end.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        before: Room | None = None
        warned = False
        while not self._end.wait(self._interval_s):
            now = self._look()
            if now is None:
                continue
            said = verdict(now, before)
            before = now
            if said == "warning" and not warned:
                warned = True
                logger.warning("host memory: %s; the run is stopped before the kernel would kill it", now.describe())
                self._warn(now)
            if said == "full":
                self._full(now)
                return
