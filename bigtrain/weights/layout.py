"""What an export will write: names, shapes, types, shards and exact sizes, before anything is written."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from bigtrain.errors import WeightsError
from bigtrain.weights import mapping
from bigtrain.weights.dtypes import NAMES, kept_in_fp32
from bigtrain.weights.header import byte_length, encode_header
from bigtrain.weights.mapping import Part
from bigtrain.weights.replace import METADATA
from bigtrain.weights.slots import Slot, meta_state


@dataclass
class Shard:
    """One file: its tensors in order, the bytes it begins with, each tensor's first byte, and its whole size."""

    name: str
    parts: list[Part]
    head: bytes = b""
    begins: list[int] = field(default_factory=list)
    size: int = 0


@dataclass
class Layout:
    """The files of an export. `slots` maps the names that parts are made of to the model's tensors."""

    shards: list[Shard]
    slots: dict[str, Slot]
    dtypes: dict[str, torch.dtype]

    @property
    def total_bytes(self) -> int:
        """Bytes of all weight files."""
        return sum(shard.size for shard in self.shards)

    @property
    def tensor_bytes(self) -> int:
        """Bytes of all tensors, as the index states it."""
        return sum(byte_length(NAMES[self.dtypes[p.name]], p.shape) for shard in self.shards for p in shard.parts)

    @property
    def numel(self) -> int:
        """Number of values."""
        return sum(math.prod(p.shape) for shard in self.shards for p in shard.parts)

    def index(self) -> dict[str, Any]:
        """The content of model.safetensors.index.json."""
        weight_map = {part.name: shard.name for shard in self.shards for part in shard.parts}
        return {"metadata": {"total_parameters": self.numel, "total_size": self.tensor_bytes}, "weight_map": weight_map}


def plan_layout(model: torch.nn.Module, slots: Sequence[Slot], dtype: torch.dtype, max_shard_bytes: int) -> Layout:
    """Decide the files of an export.

    Raises:
        WeightsError: a tensor is empty, or a conversion cannot be reverted.
    """
    by_name = saved_names(model, slots)
    # A placeholder is flat; a parameter whose shape has a 0 in it, or whose module was made so, is what it says.
    empty = [name for name, slot in by_name.items() if tuple(slot.shape) == (0,) and not _is_meant(model, name)]
    if empty:
        raise WeightsError(
            f"refusing to write {len(empty)} empty tensors, first {empty[0]} of shape {list(by_name[empty[0]].shape)}: "
            "the model is only a stand-in (a ZeRO-3 module outside its engine?).",
            tensor=empty[0],
        )
    parts = list(mapping.model_to_file(model, meta_state(list(slots)), by_name).parts.values())
    stored = _stored(model, by_name, dtype)
    dtypes = {part.name: stored[part.sources[0]] for part in parts}
    return Layout(_shards(parts, dtypes, max_shard_bytes), by_name, dtypes)


def _is_meant(model: torch.nn.Module, name: str) -> bool:
    """Whether the module of an empty vector has another tensor with a size of 0 besides it, as nn.Linear(n, 0) has."""
    owner = dict(model.named_modules()).get(name.rpartition(".")[0])
    return owner is not None and any(p.dim() > 1 and p.numel() == 0 for p in owner.parameters(recurse=False))


def _stored(model: torch.nn.Module, slots: Mapping[str, Slot], wanted: torch.dtype) -> dict[str, torch.dtype]:
    """The element type of each tensor in the files.

    Not all floats have the one that is asked for: what a transformers class wants in fp32 is in fp32, as in what `save_pretrained` writes,
    and no buffer loses bits. A router's correction or a rotary table would come back as others than those that were trained with.
    """
    fp32, buffers = kept_in_fp32(model, wanted), {id(b) for b in model.buffers()}

    def of(name: str, slot: Slot) -> torch.dtype:
        if not slot.dtype.is_floating_point:
            return slot.dtype
        if fp32 is not None and fp32.search(name):
            return torch.float32
        return torch.promote_types(slot.dtype, wanted) if id(slot.tensor) in buffers else wanted

    return {name: of(name, slot) for name, slot in slots.items()}


def saved_names(model: torch.nn.Module, slots: Sequence[Slot]) -> dict[str, Slot]:
    """The names under which each tensor is saved: tied weights once, under the name that `from_pretrained` ties from.

    Source: `remove_tied_weights_from_state_dict`, transformers 5.24. A tie that the class does not declare would not be
    made again on load, so such a tensor is saved under each of its names.
    """
    patterns = [
        f"{name}.{key}" if name else key
        for name, module in model.named_modules()
        for key in (getattr(module, "_tied_weights_keys", None) or {})
    ]
    ignored = getattr(model, "_keys_to_ignore_on_save", None) or ()
    known = hasattr(model, "_tied_weights_keys")  # a transformers model
    chosen: dict[str, Slot] = {}
    for slot in slots:
        names = list(slot.names)
        for name in sorted(slot.names):
            if len(names) > 1 and any(re.search(pattern, name) for pattern in patterns):
                names.remove(name)
        for name in names if known else names[:1]:
            if name not in ignored:
                chosen[name] = slot
    return chosen


def _shards(parts: Sequence[Part], dtypes: dict[str, torch.dtype], max_shard_bytes: int) -> list[Shard]:
    groups: list[list[Part]] = []
    room = 0
    for part in parts:
        nbytes = byte_length(NAMES[dtypes[part.name]], part.shape)
        if not groups or nbytes > room:
            groups.append([])
            room = max_shard_bytes
        groups[-1].append(part)
        room -= nbytes
    shards = []
    for number, group in enumerate(groups, 1):
        name = "model.safetensors" if len(groups) == 1 else f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        shards.append(_laid_out(Shard(name, group), dtypes))
    return shards


def _laid_out(shard: Shard, dtypes: dict[str, torch.dtype]) -> Shard:
    # wide types first, as safetensors itself does, so that every tensor starts at a multiple of its item size
    shard.parts.sort(key=lambda part: -dtypes[part.name].itemsize)
    shard.head, shard.begins = encode_header(
        [(part.name, NAMES[dtypes[part.name]], part.shape) for part in shard.parts], METADATA
    )
    last = shard.parts[-1]
    shard.size = shard.begins[-1] + byte_length(NAMES[dtypes[last.name]], last.shape)
    return shard
