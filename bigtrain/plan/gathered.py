"""Which whole weights a rank of ZeRO-3 holds at each moment: DeepSpeed's coordinator, module call by module call.

Follows deepspeed 0.19.8 runtime/zero/partitioned_param_coordinator.py (names in quotes) once it has recorded its trace, which is
from the third step on. Every call of a module, also of one without weights of its own, gathers ahead in the order of the trace
until it has asked for a prefetch bucket or `max_live` elements are there: so within a few blocks nearly that many are there, and
the head is, from the blocks before it on until backward is done with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

from bigtrain.plan.parameters import Parameter
from bigtrain.plan.zero_settings import ZeroSettings

# One module call: the indices of its weights that are gathered.
Call = tuple[int, ...]
Visit = tuple[str, list[int]]


_NONE: Mapping[int, str] = MappingProxyType({})


def calls_of(
    items: Sequence[Parameter], members: Sequence[int], persistence_elems: int, leafs: Mapping[int, str] = _NONE
) -> list[Call]:
    """The modules of a block, or of a part outside of blocks, in the order of a forward; modules that hold modules come first.

    `leafs`: the leaf module of each parameter that lies in one: one call, whatever else lies in it.
    """
    found: dict[str, list[int]] = {}
    for i in members:
        path = leafs[i].split(".") if i in leafs else items[i].name.split(".")[:-1]
        start = 1 + next((k for k, part in enumerate(path) if part.isdigit()), len(path) - 1)
        for end in range(start, len(path) + 1):
            found.setdefault(".".join(path[:end]), [])
        if items[i].elems > persistence_elems:
            found.setdefault(".".join(path), []).append(i)
    return [tuple(params) for params in found.values()]


@dataclass
class Gathered:
    """The trace of a step, and what is there.

    Args:
        items: of the model. visits: key and parameters of each part, in the order in which forward and backward come to it.
        recomputed: keys of the backwards that recompute.
        zero: bucket, limits and distances, in elements.
        leafs: the leaf module of each parameter that lies in one.

    Attributes:
        here: indices of the parameters that are whole.
    """

    items: Sequence[Parameter]
    visits: Sequence[Visit]
    recomputed: frozenset[str]
    zero: ZeroSettings
    leafs: Mapping[int, str] = field(default_factory=dict)
    here: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.calls: list[Call] = []
        self.backward_at = -1
        self.ends: list[int] = []
        for key, members in self.visits:
            calls = calls_of(self.items, members, self.zero.persistence_elems, self.leafs)
            if key[0] == "b":
                calls = (calls if key in self.recomputed else []) + calls[::-1]
            elif key == "head":
                self.backward_at = len(self.calls) + len(calls)
                calls = 2 * calls  # forward and backward of the loss
            self.calls += calls
            self.ends.append(len(self.calls))
        self.queue = [(step, i) for step, call in enumerate(self.calls) for i in call]
        self.start()

    def start(self) -> None:
        """'reset_step'."""
        self.at = self.step = self.visit = self.count = 0
        self.recent: dict[int, int] = {}

    def fetch(self) -> list[list[int]]:
        """All module calls of the next visit; what is gathered, in groups, in order."""
        found: list[list[int]] = []
        for step in range(self.step, self.ends[self.visit]):
            call = self.calls[step]
            missing = [i for i in call if i not in self.here]
            found += [missing] if missing and missing[0] in self.leafs else [[i] for i in missing]
            self._take(missing)
            self._forget_queued({i for i in call if self.recent.get(i, -1) < step})
            ahead = self._ahead()
            self._take(ahead)
            found += [ahead] if ahead else []
        self.step, self.visit = self.ends[self.visit], self.visit + 1
        return found

    def _take(self, params: Sequence[int]) -> None:
        self.here.update(params)
        self.count += sum(self.items[i].elems for i in params)

    def _forget_queued(self, wanted: set[int]) -> None:
        seen: set[int] = set()
        while self.at < len(self.queue) and len(seen) < len(wanted):
            used, i = self.queue[self.at]
            self.recent[i] = used
            seen.add(i)
            self.at += 1

    def _ahead(self) -> list[int]:
        most = min(self.zero.max_live_elems - self.count, self.zero.prefetch_elems)
        group: list[int] = []
        elems = 0
        while self.at < len(self.queue) and elems < most:
            step, i = self.queue[self.at]
            self.at += 1
            self.recent[i] = max(self.recent.get(i, -1), step)
            if i not in self.here and i not in group:
                group.append(i)
                elems += self.items[i].elems
        return group

    def release(self) -> list[int]:
        """'__params_to_release' of all modules of the last visit: what is not used again soon, nor skipped by what gathers ahead.

        Whoever releases a leaf module looks into the modules to come with all that they hold. The first of backward is the model.
        """
        members = self.visits[self.visit - 1][1]
        going = {i for i in members if i in self.here and self.recent.get(i, -1) <= self.step}
        passed = 0
        for step, call in enumerate(self.calls[self.step :], self.step):
            if passed >= self.zero.max_reuse_elems or not going:
                break
            if step == self.backward_at:
                going.difference_update(self.leafs)
            going.difference_update(call)
            passed += sum(self.items[i].elems for i in call)
        self.here -= going
        self.count -= sum(self.items[i].elems for i in going)
        return sorted(going)


class Stop(NamedTuple):
    """One visit.

    Attributes:
        gathered: in groups, in order. released: afterwards.
    """

    gathered: list[list[int]]
    released: list[int]


class Recording:
    """What `Gathered` does in the micro steps of a run, played once for all plans that share it."""

    def __init__(self, trace: Gathered):
        self._trace = trace
        self._played: list[list[Stop]] = []

    def micro_step(self, number: int) -> list[Stop]:
        """Its visits, in order."""
        while len(self._played) <= number:
            self._played.append([Stop(self._trace.fetch(), self._trace.release()) for _ in self._trace.visits])
            self._trace.start()
        return self._played[number]
