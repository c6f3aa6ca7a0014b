"""Where a rank is in the model, and what to do when nothing moves.

At ZeRO stage 3 a module's parameters are gathered by all ranks together. If ranks take different branches, NCCL waits for ever
and gloo aborts. On the CPU the ranks compare module by module before each gather. On GPUs, where that would cost time, a
thread notices that nothing has moved for `hang_s` on any rank, prints where each one is, and ends the processes.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable

import torch

from bigtrain import meeting, ranks, zero
from bigtrain.errors import RanksDisagreeError

log = logging.getLogger(__name__)
EXIT_HANG = 1


class Whereabouts:
    """Records the module that this rank entered last.

    Args:
        model: the module; hooks are put on all its submodules.
        compare: at each module whose parameters ZeRO-3 must gather, compare with the other ranks first.
        step: gives the current step number.

    Attributes:
        place: what this rank is doing, for people.
        moved: increases with every module entered and every call of the engine.
        inside: True while in a forward, backward or step, where other ranks are needed.
    """

    def __init__(self, model: torch.nn.Module, compare: bool, step: Callable[[], int]):
        self.place = "starting"
        self.moved = 0
        self.inside = False
        self.comparing = False
        self._step = step
        self._names = [name or type(model).__name__ for name, _ in model.named_modules()]
        for i, module in enumerate(model.modules()):
            gathers = compare and any(
                zero.is_partitioned(p) and not zero.is_persistent(p) for p in module.parameters(recurse=False)
            )
            module.register_forward_pre_hook(self._entering(i, gathers), prepend=True)

    def at(self, place: str, inside: bool) -> None:
        """Note what the engine is doing."""
        self.place, self.inside = place, inside
        self.moved += 1

    def _entering(self, index: int, gathers: bool) -> Callable[..., None]:
        name = self._names[index]

        def note(*_: object) -> None:
            self.place = f"in module {name}"
            self.moved += 1
            if gathers and self.comparing:
                self._compare(index)

        return note

    def _compare(self, index: int) -> None:
        try:
            told = meeting.meet(meeting.Point.FORWARD, self._step(), 0, (index,))
        except RanksDisagreeError as error:
            raise RanksDisagreeError(f"{error}\nThis rank was about to enter module {self._names[index]}. {_REMEDY}") from error
        names = {r: f"enters module {self._names[row[0]]}" for r, row in enumerate(told)}
        if len(set(names.values())) > 1:
            listing = "\n".join(f"  rank {r} {text}" for r, text in names.items())
            raise RanksDisagreeError(f"ranks run different modules at ZeRO stage 3:\n{listing}\n{_REMEDY}", names)


_REMEDY = (
    "At stage 3 every rank must run the same modules: run the branch on every rank and multiply its result by zero where it is "
    "not wanted, or pass leaf_modules=(the class of the module that contains the branch,) to the Engine, or use stage 2."
)


class Watcher(threading.Thread):
    """Ends all ranks, with a report, when none of them has moved for `hang_s` seconds and one is waiting inside the engine.

    It talks through the process group's store, which works while collectives are stuck. A rank that is merely slow (reading
    data, saving) keeps the others waiting but not for the run's life: they only warn until it, too, has not moved for `hang_s`.
    """

    def __init__(self, where: Whereabouts, hang_s: float, end: Callable[[int], None] = os._exit):
        super().__init__(daemon=True, name="bigtrain-watch")
        self._where, self._hang_s, self._end = where, hang_s, end
        self._store = meeting.store_for("watch")
        self._quit = threading.Event()

    def stop(self) -> None:
        """End the thread."""
        self._quit.set()

    def run(self) -> None:
        last, since = self._where.moved, time.monotonic()
        told = False
        while not self._quit.wait(min(1.0, self._hang_s / 4)):
            if self._where.moved != last:
                if told and self._store is not None:
                    self._store.delete_key(str(ranks.rank()))
                last, since, told = self._where.moved, time.monotonic(), False
                continue
            if time.monotonic() - since < self._hang_s or self._store is None:
                continue
            if not told:
                kind = "waits" if self._where.inside else "outside the engine"
                self._store.set(str(ranks.rank()), f"{kind}: {self._where.place}")
                told = True
            self._look(time.monotonic() - since)

    def _look(self, idle_s: float) -> None:
        """All ranks idle and one waiting: report and end."""
        assert self._store is not None
        world = ranks.world_size()
        if not all(self._store.check([str(r)]) for r in range(world)):
            return
        places = {r: self._store.get(str(r)).decode() for r in range(world)}
        if not any(text.startswith("waits") for text in places.values()):
            return
        listing = "\n".join(f"  rank {r} {text}" for r, text in places.items())
        different = len(set(places.values())) > 1
        hint = _REMEDY if different else "All are at the same place: a collective is stuck, look at the network and the GPUs."
        print(f"bigtrain: no rank has moved for {idle_s:.0f} s:\n{listing}\n{hint}", file=sys.stderr, flush=True)
        time.sleep(1.0)  # let every rank see the report before the store's host goes away
        self._end(EXIT_HANG)
