"""The model's tensors as slots, and the elements of each that this rank owns."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from bigtrain import partition, zero
from bigtrain.errors import ModelError


@dataclass
class Slot:
    """One tensor of the model, with every name it goes by (tied weights have several).

    Attributes:
        names: names in the model's state dict, in its order.
        tensor: the parameter or buffer itself; at ZeRO-3 an empty stand-in.
        shape: full shape.
        dtype: element type in the model.
    """

    names: list[str]
    tensor: torch.Tensor
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def name(self) -> str:
        """The first name."""
        return self.names[0]

    @property
    def numel(self) -> int:
        """Number of elements of the full tensor."""
        return math.prod(self.shape)

    @property
    def partitioned(self) -> bool:
        """True if ZeRO-3 owns it."""
        return isinstance(self.tensor, torch.nn.Parameter) and zero.is_partitioned(self.tensor)


@dataclass
class Piece:
    """Elements `[start, start + flat.numel())` of a slot, in flat contiguous memory of this rank.

    `finish` runs after the elements were filled (for memory that is not laid out flat).
    """

    start: int
    flat: torch.Tensor
    finish: Callable[[], object] | None = field(default=None, repr=False)


_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")  # torch.compile, checkpoint_wrapper, FSDP


def without_wrappers(name: str) -> str:
    """A state dict name without the parts that wrapping modules put into it."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def slots_of(model: torch.nn.Module) -> list[Slot]:
    """Every parameter and persistent buffer, each once.

    Raises:
        ModelError: a tensor has no memory (meta device).
    """
    by_identity: dict[int, Slot] = {}
    for raw, tensor in model.state_dict(keep_vars=True).items():
        name = without_wrappers(raw)
        if not isinstance(tensor, torch.Tensor):
            continue  # extra state of a module: not a weight
        slot = by_identity.get(id(tensor))
        if slot is not None:
            slot.names.append(name)
            continue
        shape = tuple(zero.full_shape(tensor)) if isinstance(tensor, torch.nn.Parameter) else tuple(tensor.shape)
        by_identity[id(tensor)] = Slot([name], tensor, shape, tensor.dtype)
    slots = list(by_identity.values())
    bare = [slot.name for slot in slots if slot.tensor.is_meta]
    if bare:
        raise ModelError(
            f"{len(bare)} tensors have no memory (meta device), first {bare[0]}: build the model with build_model, or call "
            "model.to_empty(device=...) first.",
            bare,
        )
    return slots


def meta_state(slots: list[Slot]) -> dict[str, torch.Tensor]:
    """Every name -> a meta tensor of full shape and right dtype, in the order of the state dict."""
    return {name: torch.empty(slot.shape, dtype=slot.dtype, device="meta") for slot in slots for name in slot.names}


def pieces_of(slot: Slot) -> list[Piece]:
    """What this rank has to fill of `slot`; the padding of a partition is set to zero here."""
    if not slot.partitioned:
        return [_whole(slot.tensor)] if slot.numel else []
    rank, world, flat = zero.partition_of(slot.tensor)
    start, stop = partition.owned_range(slot.numel, rank, world)
    flat[stop - start :].zero_()
    pieces = [Piece(start, flat[: stop - start])] if stop > start else []
    if zero.is_available(slot.tensor) and slot.tensor.numel() == slot.numel:
        pieces.append(_whole(slot.tensor))  # a persistent or gathered parameter: its whole copy must change as well
    return pieces


def owned_piece(slot: Slot, rank: int, world: int) -> Piece | None:
    """What this rank writes of `slot`: its partition, or an equal share of a tensor that every rank holds whole."""
    if slot.partitioned:
        rank, world, flat = zero.partition_of(slot.tensor)
        start, stop = partition.owned_range(slot.numel, rank, world)
        return Piece(start, flat[: stop - start]) if stop > start else None
    start, stop = partition.owned_range(slot.numel, rank, world)
    return Piece(start, slot.tensor.detach().reshape(-1)[start:stop]) if stop > start else None


def _whole(tensor: torch.Tensor) -> Piece:
    data = tensor.detach()
    if data.is_contiguous():
        return Piece(0, data.view(-1))
    flat = torch.empty(data.numel(), dtype=data.dtype, device=data.device)
    return Piece(0, flat, lambda: data.copy_(flat.view(data.shape)))
