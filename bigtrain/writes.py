"""Weights that somebody else wrote: between two steps a script may load a state dict, swap in averaged weights, or zero rows.

An update makes weights anew from their fp32 masters, at every stage. What was written into the weights since the last one would be
gone with the next step, without a word. So before an update or a save, masters take over what was written. Torch counts writes in place
(`Tensor._version`); which elements are meant is told by comparing them with the rounded masters, so that weights that were swapped
out and in again change nothing. Adam's moments stay as they are.

Not seen are writes through `.data`, which torch does not count: write under torch.no_grad() instead, and at stage 3 inside
`bigtrain.zero.gathered(params, modifier_rank=0)`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

from bigtrain import zero
from bigtrain.guards import listing

log = logging.getLogger(__name__)

MasterOf = Callable[[Any], tuple[int, torch.Tensor] | None]


class ForeignWrites:
    """Watches the trained parameters of one engine; asked before each update and each save.

    Args:
        names, params: the trained parameters.
        master_of: as `zero.master_of`. A parameter without a master needs nothing: its weights are what is updated.

    Attributes:
        before: called before a master is changed: a save may still be reading it.
    """

    def __init__(self, names: Sequence[str], params: Sequence[torch.nn.Parameter], master_of: MasterOf):
        self._names, self._params, self._master_of = names, params, master_of
        self.before: Callable[[], None] = lambda: None
        self.settled()

    def settled(self) -> None:
        """All writes so far were the engine's own."""
        self._seen, self._written = [_writes(p) for p in self._params], 0

    @torch.no_grad()
    def take_over(self) -> int:
        """Let masters take over what was written into weights since `settled`; a rank looks at the elements it owns.

        Returns:
            As `RankStep.written`, since `settled`: a save in between does not hide a write from the step that compares ranks.
        """
        now = [_writes(p) for p in self._params]
        if now == self._seen:
            return self._written
        self._seen, before = now, self._seen
        changed = [(n, p, a[0] != b[0]) for n, p, a, b in zip(self._names, self._params, before, now) if a != b]
        taken = [name for name, param, whole in changed if self._take(param, whole)]
        if taken:
            log.warning(
                "weights of %s were written from outside of the engine since the last step: their fp32 masters take the new "
                "values, the optimizer's moments stay",
                listing(taken),
            )
        self._written = max(self._written, 2 if taken else 1)
        return self._written

    def _take(self, param: Any, whole: bool) -> bool:
        """Whether the master of a written parameter differed; `whole`: the parameter itself was written, not this rank's slice."""
        found = self._master_of(param)
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


def _writes(param: Any) -> tuple[int, int]:
    """How often the parameter, and this rank's slice of it, were written in place."""
    return param._version, param.ds_tensor._version if zero.is_partitioned(param) else 0
