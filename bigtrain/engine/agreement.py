"""State that must be equal on all ranks: short fingerprints of it, and the comparisons, which raise on all ranks alike."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
import xxhash

from bigtrain import guards, ranks, zero
from bigtrain.checkpoint.live import persistent_buffers
from bigtrain.engine.branches import REMEDY
from bigtrain.errors import ModelError, RanksDisagreeError
from bigtrain.meeting import Point, announce_failure, meet, naming_the_lost

log = logging.getLogger(__name__)

_ORDER_BITS = 40


def digest(value: Any) -> int:
    """63-bit hash of a value's repr, equal on all ranks and Python processes."""
    return xxhash.xxh64_intdigest(repr(value).encode()) >> 1


def fold(index: int, order: int) -> int:
    """Put a small index (-1 or more) and a hash into one integer."""
    return ((index + 1) << _ORDER_BITS) | (order & ((1 << _ORDER_BITS) - 1))


def unfold(packed: int) -> tuple[int, int]:
    """The index and the shortened hash behind `fold`."""
    return (packed >> _ORDER_BITS) - 1, packed & ((1 << _ORDER_BITS) - 1)


def same_model(module: torch.nn.Module) -> None:
    """Check that all ranks built one model, before DeepSpeed or the engine gives rank 0's values to all; one small exchange.

    Raises:
        RanksDisagreeError: on all ranks, naming parameters or persistent buffers that some lack, or hold in another shape or dtype.
    """
    mine = {
        n: f"{tuple(zero.full_shape(p))} {p.dtype}{' frozen' * (not p.requires_grad)}" for n, p in module.named_parameters()
    }
    mine.update((n, f"buffer {tuple(b.shape)} {b.dtype}") for n, b in persistent_buffers(module))
    if len(set(ranks.all_gather_object(digest(tuple(mine.items())), "comparing the model"))) == 1:
        return
    everyone = ranks.all_gather_object(mine, "comparing the model")
    apart: dict[Any, list[Any]] = guards.differing(everyone)
    if not apart:  # the same in another order
        apart = {i: list(names) for i, names in enumerate(zip(*everyone)) if len(set(names)) > 1}
    lines = [f"{what}: " + ", ".join(f"rank {r} {v}" for r, v in enumerate(values)) for what, values in apart.items()]
    raise RanksDisagreeError(
        f"the ranks built different models: {guards.listing(lines)}. Every rank must register the same parameters and persistent buffers "
        "in the same order, shape and dtype: build from the same arguments and files, without a branch on the rank.",
        {r: {what: values[r] for what, values in apart.items()} for r in range(ranks.world_size())},
    )


@torch.no_grad()
def state_digests(module: torch.nn.Module) -> dict[str, Any]:
    """A checksum of every replicated parameter and persistent buffer, by name; one wait for the device.

    Partitioned parameters differ between ranks by design and are left out, and so may buffers that no checkpoint keeps (rotary
    frequencies that follow the longest row). The checksum is made where the tensor is: the sum
    of its bits as integers, and of their squares; any single changed value changes it.
    """
    tensors: dict[str, torch.Tensor] = {}
    for name, param in module.named_parameters():
        if not zero.is_partitioned(param) or (zero.is_persistent(param) and zero.is_available(param)):
            tensors[name] = param.data
    tensors.update(persistent_buffers(module))
    if not tensors:
        return {}
    sums = torch.stack([_checksum(t) for t in tensors.values()]).tolist()
    return {name: xxhash.xxh64_hexdigest(repr(pair).encode())[:12] for name, pair in zip(tensors, sums)}


def _checksum(tensor: torch.Tensor) -> torch.Tensor:
    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    tensor = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    bits = tensor.view(kinds[min(8, tensor.element_size())])  # of complex128 the parts
    if tensor.element_size() == 8:
        return torch.stack([bits.sum(), (bits ^ (bits >> 7)).sum()])
    return torch.stack([bits.sum(dtype=torch.int64), (bits.bitwise_right_shift(3) ^ bits).sum(dtype=torch.int64)])


def same_parameters(used: list[bool], names: Sequence[str], step: int, micro: int, stage: int) -> bool:
    """Whether all ranks will use the same parameters in this backward.

    Raises:
        RanksDisagreeError: if they will not and the stage is 3, or if a rank is somewhere else.
    """
    told = meet(Point.BACKWARD, step, micro, (digest(used),))
    if all(row == told[0] for row in told):
        return True
    everyone = ranks.all_gather_object(used)
    differing = [n for i, n in enumerate(names) if len({u[i] for u in everyone}) > 1]
    if stage == 3:
        raise RanksDisagreeError(
            f"step {step + 1}: ranks used different parameters at ZeRO stage 3: {guards.listing(differing)}. {REMEDY}",
            {r: [n for n, yes in zip(names, u) if yes and n in differing] for r, u in enumerate(everyone)},
        )
    log.debug("step %d: parameters used on some ranks only count as zero elsewhere: %s", step + 1, differing)
    return False


def same_freezing(
    parameters: Sequence[tuple[str, torch.nn.Parameter, bool]], step: int, module: torch.nn.Module | None = None
) -> None:
    """Check that no parameter was frozen or unfrozen since the engine was built; no communication unless one was.

    Args:
        parameters: those of then, with their names and requires_grad.
        step: steps done.
        module: look also for parameters that came into it or left it since.

    Raises:
        ModelError: naming them.
    """
    names, before = [n for n, *_ in parameters], [was for *_, was in parameters]
    new: list[str] = []
    gone: list[str] = []
    if module is not None:
        known, held = {id(p) for _, p, _ in parameters}, _held(module)
        gone = [n for n, p, was in parameters if was and id(p) not in held]
        if any(p.requires_grad for p in map(held.get, held.keys() - known) if p is not None):
            new = [n for n, p in module.named_parameters() if p.requires_grad and id(p) not in known]
    changed = guards.changed_freezing(before, [p.requires_grad for _, p, _ in parameters], names, new, gone)
    if changed:
        announce_failure(step)
        raise ModelError(changed)


def _held(module: torch.nn.Module) -> dict[int, torch.nn.Parameter | None]:
    """The module's parameters by id, None too: torch's own walk makes names and sets, a millisecond for 230 modules."""
    found: dict[int, torch.nn.Parameter | None] = {}
    ahead: list[Any] = [module]
    while ahead:
        here = ahead.pop()
        if here is None:
            continue
        for param in here._parameters.values():
            found[id(param)] = param
        ahead += here._modules.values()
    return found


@naming_the_lost()
def same_state(module: torch.nn.Module, counters: dict[str, Any], step: int) -> None:
    """Compare replicated tensors and counters between ranks.

    Raises:
        RanksDisagreeError: on all ranks, naming what differs, or who is elsewhere.
    """
    meet(Point.AGREEMENT, step, 0)
    mine = {**state_digests(module), **counters}
    if len(set(ranks.all_gather_object(digest(tuple(sorted(mine.items())))))) == 1:
        return
    differences = guards.differing(ranks.all_gather_object(mine))
    others = [name for name, _ in persistent_buffers(module) if name in differences]
    by_rank = {r: {n: v[r] for n, v in differences.items()} for r in range(ranks.world_size())}
    raise RanksDisagreeError(guards.report_differences(differences, step, buffers=others), by_rank)
