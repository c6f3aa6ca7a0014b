"""Weights that somebody else wrote: between two steps a script may load a state dict, swap in averaged weights, or zero rows.

An update makes weights anew from their fp32 masters, at every stage. What was written into the weights since the last one would be
gone with the next step, without a word. So before an update or a save, masters take over what was written. Torch counts writes in place
(`Tensor._version`); which elements are meant is told by comparing them with the rounded masters, so that weights that were swapped
out and in again change nothing. Adam's moments stay as they are.

Writes through `.data` torch does not count. Of each parameter with a master a few elements are remembered, so that one that was written
whole that way is seen too; a single row may not be: write under torch.no_grad() instead, and at stage 3 inside
`bigtrain.zero.gathered(params, modifier_rank=0)`. Weights in another dtype (`.half()` of a layer) or shape cannot be taken over: no update
would reach them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

from bigtrain import zero
from bigtrain.guards import listing
from bigtrain.zero.flat import MasterOf

log = logging.getLogger(__name__)

_Place = tuple[int, torch.dtype, torch.Size | None]
_SAMPLES = 16  # elements of each parameter that are remembered


class ForeignWrites:
    """Watches the trained parameters of one engine; asked before each update and each save.

    Args:
        names, params: the trained parameters.
        master_of: from `zero.flat.master_of`. A parameter without a master needs nothing: its weights are what is updated.
        sampled: indices of parameters that have a master on some rank, and whose weights move in steps only.
        anywhere: an update finds a parameter wherever its memory is, or lays it back.
        emptied: gradients are put away during backward, and none may be there at the step.

    Attributes:
        master_of: as given.
        before: called before a master is changed: a save may still be reading it.
    """

    def __init__(
        self,
        names: Sequence[str],
        params: Sequence[torch.nn.Parameter],
        master_of: MasterOf,
        sampled: Sequence[int] = (),
        anywhere: bool = False,
        emptied: bool = False,
    ):
        self._names, self._params, self.master_of = names, params, master_of
        self._sampled, self._anywhere, self._emptied = sampled, anywhere, emptied
        self.before: Callable[[], None] = lambda: None
        self._places: list[_Place] = []
        self._samples = _Samples(params, [])
        self.settled()

    def settled(self) -> None:
        """All writes so far were the engine's own."""
        self._seen, self._written = [_writes(p) for p in self._params], 0
        self._remember()

    def _remember(self) -> None:
        places = [_place(p) for p in self._params]
        if places != self._places:
            self._places, self._samples = places, _Samples(self._params, self._sampled)
        self._samples.keep()

    def _moved(self) -> str:
        moved = [n for n, p, was in zip(self._names, self._params, self._places) if self._unreachable(_place(p), was)]
        if not moved:
            return ""
        return (
            f"{listing(moved)} lie elsewhere or have another dtype or shape since the last step (p.data = x, or .to(), .half(), .float() "
            "of a part of the model): no update would reach them. Write values in place under torch.no_grad(): p.copy_(x), p.mul_(0.5)."
        )

    def lost(self) -> str:
        """The message if something was written that the update would not use, else an empty string; for the end of a step."""
        if (moved := self._moved()) or not self._emptied:
            return moved
        # DeepSpeed leaves alone what has no elements; at stage 3 that is all, and such parameters are refused.
        set_ = [n for n, p in zip(self._names, self._params) if p.grad is not None and (p.numel() or zero.is_partitioned(p))]
        if not set_:
            return ""
        return (
            f"p.grad of {listing(set_)} was set between engine.backward() and engine.step(): gradients are put away during backward, so "
            "that this one would not be used. Change the loss, or a gradient on its way (p.register_hook)."
        )

    def _unreachable(self, now: _Place, was: _Place) -> bool:
        return now[1:] != was[1:] or (now[0] != was[0] and not self._anywhere)

    def before_save(self, refuse: Callable[[str], NoReturn]) -> None:
        """`take_over`, unless weights lie where no update finds them: after a save that would be known, and not told any more."""
        if why := self._moved():
            refuse(why)
        self.take_over()

    def masters(self) -> MasterOf:
        """Where the fp32 master of a parameter is; it knows what a script wrote into weights until now."""
        self.take_over()
        return self.master_of

    @torch.no_grad()
    def take_over(self) -> int:
        """Let masters take over what was written into weights since `settled`; a rank looks at the elements it owns.

        Returns:
            As `RankStep.written`, since `settled`: a save in between does not hide a write from the step that compares ranks.
        """
        now, hidden = [_writes(p) for p in self._params], self._hidden()
        if now == self._seen and not hidden:
            return self._written
        self._seen, before = now, self._seen
        each = enumerate(zip(self._names, self._params, before, now))
        changed = [(n, p, a[0] != b[0]) for i, (n, p, a, b) in each if a != b or i in hidden]
        taken = [name for name, param, whole in changed if self._take(param, whole)]
        self._remember()
        if gone := [n for n, p, whole in changed if whole and n not in taken and _was_lost(p)]:
            log.warning(
                "%s were written while ZeRO-3 had them partitioned, or without a modifier_rank: nothing of it is left. Write inside "
                "bigtrain.zero.gathered(params, modifier_rank=0)",
                listing(gone),
            )
        if taken:
            log.warning(
                "weights of %s were written from outside of the engine since the last step: their fp32 masters take the new "
                "values, the optimizer's moments stay",
                listing(taken),
            )
        self._written = max(self._written, 2 if taken else 1)
        return self._written

    def _hidden(self) -> set[int]:
        """Indices of parameters that were written otherwise than torch counts; waits for the device."""
        moved = {i for i in self._sampled if _place(self._params[i]) != self._places[i]}
        return moved | self._samples.changed()

    def _take(self, param: Any, whole: bool) -> bool:
        """Whether the master of a written parameter differed; `whole`: the parameter itself was written, not this rank's slice."""
        found = self.master_of(param)
        if found is None:
            return False
        start, master = found
        if zero.is_partitioned(param) and not (whole and zero.is_available(param)):
            written = param.ds_tensor.data[: master.numel()]
        else:
            written = param.detach().reshape(-1)[start : start + master.numel()]
        master = master[: written.numel()]
        values = written.to(master.device)
        differs = values != master.to(values.dtype)
        if not differs.any():
            return False
        self.before()
        master.copy_(torch.where(differs, values.to(master.dtype), master))
        if zero.is_partitioned(param):
            param.ds_tensor.data[: written.numel()].copy_(written)
        return True


class _Samples:
    """A few elements of each parameter, as they were at `keep`.

    Args:
        params: all of them.
        which: indices of those that are looked at. At stage 3 the elements are of this rank's slice.
    """

    def __init__(self, params: Sequence[Any], which: Sequence[int]):
        self._views: dict[torch.device, list[torch.Tensor]] = {}
        self._owners: dict[torch.device, list[int]] = {}
        self._kept: list[torch.Tensor] = []
        for index in which:
            held = _held(params[index])
            count = min(_SAMPLES, held.numel())
            if count:
                view = held.as_strided((count,), (held.numel() // count,), held.storage_offset())
                self._views.setdefault(held.device, []).append(view)
                self._owners.setdefault(held.device, []).extend([index] * count)

    def _now(self) -> list[torch.Tensor]:
        return [torch.cat(views) for views in self._views.values()]

    @torch.no_grad()
    def keep(self) -> None:
        """These are the values to compare with."""
        self._kept = self._now()

    @torch.no_grad()
    def changed(self) -> set[int]:
        """Indices of parameters whose elements are others now; waits for the device."""
        pairs = zip(self._owners.values(), self._now(), self._kept)
        return {owners[at] for owners, now, kept in pairs for at in (_bits(now) != _bits(kept)).nonzero().flatten().tolist()}


def _bits(values: torch.Tensor) -> torch.Tensor:
    """As whole numbers: a NaN is not equal to itself, and has not been written for that."""
    return values.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()])


def _held(param: Any) -> torch.Tensor:
    """The parameter's elements that this rank holds between steps; the last slice's padding, whose memory is anyone's, is none of them."""
    return zero.slice_of(param)[1] if zero.is_partitioned(param) else param.detach()


def _was_lost(param: Any) -> bool:
    """True if the last counted write into a partitioned parameter was not inside of `zero.gathered` with a `modifier_rank`."""
    if not zero.is_partitioned(param) or zero.is_available(param):
        return False
    return bool(getattr(param, "bigtrain_delivered", -1) != param._version)


def _place(param: Any) -> _Place:
    """Where these lie, and as what; 0 for the first, and no shape, where they come and go (NVMe)."""
    held = param.ds_tensor if zero.is_partitioned(param) else param
    return (0, held.dtype, None) if zero.on_nvme(param) else (held.data_ptr(), held.dtype, held.shape)


def _writes(param: Any) -> tuple[int, int]:
    """How often the parameter, and this rank's slice of it, were written in place."""
    return param._version, param.ds_tensor._version if zero.is_partitioned(param) else 0
