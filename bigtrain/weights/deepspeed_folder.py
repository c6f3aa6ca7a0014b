"""DeepSpeed's own checkpoint folders (ZeRO 1, 2, 3), read without running what is in them.

`engine.save_checkpoint` writes pickles. They are read here through an unpickler that knows tensors, containers and numbers;
DeepSpeed's own classes become inert stand-ins, anything else is refused by name. Tensors stay memory-mapped, and a value is
found by arithmetic (`bigtrain.partition`), so that any number of ranks can read any part.

Layout (DeepSpeed 0.19.8, `engine.py: _get_zero_param_shapes`, `stage_1_and_2.py`, `stage3.py: state_dict`):
  model states:  module (stages 1-2: all weights; stage 3: buffers), param_shapes (per group: name -> shape, in the order of
                 the flat buffers), buffer_names, shared_params (tied names), frozen_param_shapes, frozen_param_fragments
  optim states, one file a rank:  single_partition_of_fp32_groups (stages 1-2) or fp32_flat_groups (stage 3)
"""

from __future__ import annotations

import glob
import math
import os
import pickle
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from bigtrain import partition
from bigtrain.errors import WeightsError
from bigtrain.weights.slots import Piece

_SAFE = {
    "collections": {"OrderedDict", "defaultdict"},
    "builtins": {"set", "frozenset", "int", "float", "complex", "bool", "str", "bytes", "bytearray", "list", "dict", "tuple",
                 "slice", "range"},
    "torch": {"Size", "device", "float32", "float16", "bfloat16", "float64", "int64", "int32", "int16", "int8", "uint8", "bool",
              "Tensor"},
    "torch._utils": {"_rebuild_tensor_v2", "_rebuild_tensor", "_rebuild_parameter"},
    "torch.nn.parameter": {"Parameter"},
    "_codecs": {"encode"},
    "numpy": {"ndarray", "dtype"},
    "numpy.core.multiarray": {"_reconstruct", "scalar"},
    "numpy._core.multiarray": {"_reconstruct", "scalar"},
}  # fmt: skip
_INERT = ("deepspeed.", "argparse", "transformers.", "accelerate.", "bigtrain.")


class Inert:
    """Stands for an object of a class whose code must not run; keeps what was pickled, does nothing."""

    def __init__(self, *args: Any, **kwargs: Any):
        self.args = args

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __int__(self) -> int:
        return int(self.args[0])  # an enum's value


def _without_state(function: Any, kind: Any, arguments: Any, state: Any) -> Any:
    """In place of `_rebuild_from_type_v2`: the tensor alone, without the attributes that were pickled with it."""
    return function(*arguments)


def _parameter_without_state(data: Any, requires_grad: bool, hooks: Any, state: Any) -> Any:
    return data


_STAGES = {"disabled": 0, "optimizer_states": 1, "gradients": 2, "weights": 3}  # DeepSpeed's ZeroStageEnum


def _stage_by_name(kind: Any, name: Any) -> Any:
    """In place of `getattr`, by which Python 3.11.2 pickles a member of an enum: DeepSpeed's stage and nothing else."""
    if kind is not Inert or name not in _STAGES:
        raise pickle.UnpicklingError(f"getattr of {name!r} is not a tensor, a container or a number")
    return Inert(_STAGES[name])


_REPLACED = {
    ("builtins", "getattr"): _stage_by_name,
    ("__builtin__", "getattr"): _stage_by_name,
    ("torch._tensor", "_rebuild_from_type_v2"): _without_state,
    ("torch._utils", "_rebuild_parameter_with_state"): _parameter_without_state,
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _REPLACED:
            return _REPLACED[module, name]
        if name in _SAFE.get(module, ()):
            return super().find_class(module, name)
        if module.startswith(_INERT):
            return Inert
        raise pickle.UnpicklingError(f"{module}.{name} is not a tensor, a container or a number")


def _load(file: Any, **kwargs: Any) -> Any:
    return _Unpickler(file, **kwargs).load()


_RESTRICTED = SimpleNamespace(
    Unpickler=_Unpickler, load=_load, UnpicklingError=pickle.UnpicklingError, __name__="bigtrain.weights.deepspeed_folder"
)


def unpickle(file: str) -> Any:
    """One of DeepSpeed's .pt files; tensors memory-mapped, no code run.

    Raises:
        WeightsError: damaged, or it holds objects of other kinds.
    """
    try:
        return torch.load(file, map_location="cpu", mmap=True, weights_only=False, pickle_module=_RESTRICTED)
    except Exception as error:
        raise WeightsError(
            f"{file}: not readable as a DeepSpeed checkpoint: {type(error).__name__}: {str(error).splitlines()[0]}. "
            "Damaged, or it holds objects that would run code, which are never loaded.",
            file=file,
        ) from error


@dataclass
class DeepSpeedFolder:
    """The weights of one DeepSpeed checkpoint.

    Attributes:
        path: the folder of the tag.
        stage: ZeRO stage that wrote it.
        world: number of ranks that wrote it.
        shapes: every weight -> full shape; trained, frozen, and buffers.
        tied: further names of tied weights -> the name under which the values are.
        pieces: name -> where its values lie, as flat memory-mapped tensors. Trained weights are the fp32 masters.
        moments: the optimizer's states of the trained weights, such as exp_avg and exp_avg_sq: kind -> name -> pieces.
        steps: updates that the optimizer has made.
        counters: what the model states count: global_steps, skipped_steps, global_samples.
    """

    path: str
    stage: int
    world: int
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)
    pieces: dict[str, list[Piece]] = field(default_factory=dict)
    moments: dict[str, dict[str, list[Piece]]] = field(default_factory=dict)
    steps: int = 0
    counters: dict[str, int] = field(default_factory=dict)


def _latest(path: str) -> str | None:
    file = os.path.join(path, "latest")
    if not os.path.isfile(file):
        return None
    with open(file, encoding="utf-8", errors="replace") as handle:
        tag = os.path.join(path, os.path.basename(handle.read().strip()))
    return tag if model_files(tag) else None


def open_deepspeed(path: str | Path, tag: str | None = None) -> DeepSpeedFolder:
    """Find every weight in a DeepSpeed checkpoint; nothing but small headers is read.

    Args:
        path: the folder of a tag, or the one that holds tags and `latest`.
        tag: which one; by default what `latest` says.

    Raises:
        WeightsError: files are missing, damaged, empty, or do not belong together.
    """
    root = os.path.join(str(path), tag) if tag else str(path)
    root = root if model_files(root) else (_latest(root) or root)
    models = model_files(root)
    optims = _numbered(root, "*_optim_states.pt")
    if not models or not optims:
        raise WeightsError(
            f"{root}: no checkpoint of bigtrain or DeepSpeed: {len(models)} *_model_states.pt and {len(optims)} *_optim_states.pt files. Give "
            "the folder that holds `latest`, or one of its tags.",
            file=root,
        )
    _refuse_model_parallel(root, models)
    first = unpickle(models[0])
    shards = [_optimizer(file) for file in optims]
    stage = int(shards[0]["zero_stage"])
    counts = shards[0]["partition_count"]
    world = max(counts) if isinstance(counts, list) else int(counts)
    if world != len(optims) or (stage == 3 and len(models) != world):
        raise WeightsError(
            f"{root}: written by {world} ranks, but {len(optims)} optimizer files and {len(models)} model files are there: "
            "a rank's file is missing, or files of an older save remain.",
            file=root,
        )
    states = [first] + [unpickle(file) for file in (models[1:] if stage == 3 else [])]
    _refuse_mixed(root, optims, [(int(s["zero_stage"]), steps_in(_optimizer_dict(s))) for s in shards], "(ZeRO stage, updates)")
    _refuse_mixed(root, models, [counters_of(state) for state in states], "counters")
    folder = DeepSpeedFolder(root, stage, world)
    _find_trained(folder, first, shards)
    find_frozen(folder, states)
    find_whole(folder, first)
    folder.counters = counters_of(first)
    folder.tied = {new: old for new, old in dict(first.get("shared_params") or {}).items() if old in folder.shapes}
    return folder


def _refuse_mixed(root: str, files: list[str], told: list[Any], what: str) -> None:
    """The files of all ranks are of one save."""
    numbers = [int(found.group(1)) for file in files if (found := re.search(r"zero_pp_rank_(\d+)_", os.path.basename(file)))]
    if numbers not in ([], list(range(len(numbers)))):
        raise WeightsError(f"{root}: files of the ranks {numbers}: files of two saves are mixed.", file=root)
    other = next((i for i, value in enumerate(told) if value != told[0]), None)
    if other is not None:
        raise WeightsError(
            f"{files[other]}: {what} {told[other]}, in {os.path.basename(files[0])} {told[0]}: files of two saves are mixed.",
            file=files[other],
        )


def find_whole(folder: DeepSpeedFolder, first: dict[str, Any]) -> None:
    """Buffers, and at stages 1 and 2 the frozen parameters, which the module's own state dict holds whole."""
    module = first.get("module") or {}
    buffers, tied = set(first.get("buffer_names") or ()), dict(first.get("shared_params") or {})
    for name, value in module.items():
        wanted = name in buffers or (folder.stage < 3 and name not in tied)
        if wanted and name not in folder.shapes and isinstance(value, torch.Tensor):
            _add(folder, name, tuple(value.shape), [Piece(0, value.reshape(-1))])


def _numbered(root: str, pattern: str) -> list[str]:
    def key(file: str) -> list[int]:
        return [int(number) for number in re.findall(r"\d+", os.path.basename(file))]

    return sorted(glob.glob(os.path.join(glob.escape(root), pattern)), key=key)


def model_files(root: str) -> list[str]:
    """The files of model states in the folder of a tag, by rank."""
    return _numbered(root, "*_model_states.pt")


def counters_of(first: dict[str, Any]) -> dict[str, int]:
    """The counters in a file of model states."""
    return {name: int(first.get(name) or 0) for name in ("global_steps", "skipped_steps", "global_samples")}


def steps_in(held: Any) -> int:
    """Updates that a torch optimizer's state dict tells; DeepSpeed's fused Adam counts them in its groups. 0 if it does not say."""
    table = held.get("state", {}) if isinstance(held, dict) else {}
    groups = held.get("param_groups", ()) if isinstance(held, dict) else ()
    told = [entry for entry in (*table.values(), *groups) if isinstance(entry, dict)]
    return max((int(entry["step"]) for entry in told if "step" in entry), default=0)


def _refuse_model_parallel(root: str, models: list[str]) -> None:
    others = [file for file in models if not re.search(r"mp_rank_00_model_states\.pt$", file)]
    if others or glob.glob(os.path.join(glob.escape(root), "layer_*")):
        raise WeightsError(f"{root}: written with tensor or pipeline parallelism, which is not supported.", file=root)


def _optimizer(file: str) -> dict[str, Any]:
    if os.path.getsize(file) == 0:
        raise WeightsError(f"{file}: 0 bytes: the save was interrupted. Use an older tag.", file=file)
    state = unpickle(file).get("optimizer_state_dict")
    if (
        isinstance(state, dict) and "group_paddings" in state
    ):  # bf16_optimizer.py: stage 1 with fp32 accumulation does not say so
        state.setdefault("zero_stage", 1)
    if not isinstance(state, dict) or "zero_stage" not in state:
        raise WeightsError(f"{file}: has no ZeRO optimizer state: stage 0, or not a DeepSpeed file.", file=file)
    return state


def _add(folder: DeepSpeedFolder, name: str, shape: tuple[int, ...], pieces: list[Piece]) -> None:
    held = sum(piece.flat.numel() for piece in pieces)
    if held != math.prod(shape):
        raise WeightsError(
            f"{folder.path}: {name}: {held} values are there, its shape {list(shape)} needs {math.prod(shape)}.",
            folder.path,
            name,
        )
    folder.shapes[name] = shape
    folder.pieces[name] = pieces


def _find_trained(folder: DeepSpeedFolder, first: dict[str, Any], shards: list[dict[str, Any]]) -> None:
    groups = [{name: tuple(shape) for name, shape in group.items()} for group in first["param_shapes"]]
    shapes = {name: shape for group in groups for name, shape in group.items()}
    gaps = shards[0].get("param_alignment_paddings") if folder.stage < 3 else None
    key = "fp32_flat_groups" if folder.stage == 3 else "single_partition_of_fp32_groups"
    for name, pieces in _located(folder, groups, [list(shard[key]) for shard in shards], gaps).items():
        _add(folder, name, shapes[name], pieces)
    states = [_optimizer_states(shard) for shard in shards]
    kinds = {kind for rank in states for state in rank for kind, value in state.items() if _is_flat(value)}
    kinds = {kind for kind in kinds if all(kind in state for rank in states for state in rank)}
    folder.steps = max(steps_in(_optimizer_dict(shard)) for shard in shards)
    for kind in sorted(kinds):
        buffers = [[state[kind] for state in rank] for rank in states]
        folder.moments[kind] = _located(folder, groups, buffers, gaps)


def _is_flat(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 1


def _optimizer_states(shard: dict[str, Any]) -> list[dict[str, Any]]:
    """The optimizer's state of each flat buffer, in the order of the buffers; [] if it was saved in another form."""
    table = _optimizer_dict(shard).get("state", {})
    return [table[number] for number in sorted(table)]


def _optimizer_dict(shard: dict[str, Any]) -> dict[str, Any]:
    """The state dict of the optimizer inside ZeRO's; {} if it was saved in another form."""
    held = shard.get("optimizer_state_dict") or shard.get("base_optimizer_state") or {}
    return held if isinstance(held, dict) else {}


def _located(
    folder: DeepSpeedFolder,
    groups: list[dict[str, tuple[int, ...]]],
    buffers: list[list[torch.Tensor]],
    gaps: list[list[int]] | None,
) -> dict[str, list[Piece]]:
    """Each parameter's values inside the flat buffers of every rank (`buffers[rank]`)."""
    found: dict[str, list[Piece]] = {name: [] for group in groups for name in group}
    if folder.stage == 3:  # the buffers are sub-groups laid end to end, whatever group they belong to
        merged = {name: shape for group in groups for name, shape in group.items()}
        for rank, mine in enumerate(buffers):
            for name, piece in _named(merged, partition.parameter_pieces(_numels(merged), rank, folder.world)):
                found[name] += _slices(mine, piece)
        return found
    for index, group in enumerate(groups):
        for rank, mine in enumerate(buffers):
            own = partition.group_pieces(_numels(group), rank, folder.world, gaps=gaps[index] if gaps else None)
            for name, piece in _named(group, own):
                found[name] += _slices([mine[index]], piece)
    return found


def _numels(shapes: dict[str, tuple[int, ...]]) -> list[int]:
    return [math.prod(shape) for shape in shapes.values()]


def _named(shapes: dict[str, Any], pieces: list[partition.Piece]) -> Iterator[tuple[str, partition.Piece]]:
    names = list(shapes)
    return ((names[piece.index], piece) for piece in pieces)


def _slices(buffers: list[torch.Tensor], piece: partition.Piece) -> list[Piece]:
    """Elements `[offset, offset + length)` of buffers laid end to end (stage 3 sub-groups may cut a partition)."""
    out, begin, done = [], 0, 0
    for buffer in buffers:
        low = max(piece.offset + done, begin)
        high = min(piece.offset + piece.length, begin + buffer.numel())
        if high > low:
            out.append(Piece(piece.start + done, buffer[low - begin : high - begin]))
            done += high - low
        begin += buffer.numel()
    return out


def find_frozen(folder: DeepSpeedFolder, states: list[dict[str, Any]]) -> None:
    """Frozen parameters, of which each rank keeps its part at stage 3."""
    shapes = states[0].get("frozen_param_shapes") or {}
    for name, size in shapes.items():
        shape, numel = tuple(size), math.prod(size)
        pieces = []
        for rank, state in enumerate(states):
            fragment = state["frozen_param_fragments"][name].reshape(-1)
            start, stop = partition.owned_range(numel, rank, folder.world) if folder.stage == 3 else (0, numel)
            if stop > start:
                pieces.append(Piece(start, fragment[: stop - start]))
        _add(folder, name, shape, pieces)
