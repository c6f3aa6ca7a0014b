"""The state of a running engine as named flat slices, and back.

What DeepSpeed holds in flat partitions is described by `flat.partition_layouts`; at stage 0 every rank holds everything. The
names are the same at every stage, so that a state saved at one stage fills another.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch

from bigtrain import ranks, zero
from bigtrain.checkpoint.blocks import MOMENTS, SCALES, Reblock, in_place, reblock
from bigtrain.checkpoint.reshard import Index, Wanted, plan_reads
from bigtrain.checkpoint.slices import LocalSlice
from bigtrain.errors import CheckpointError
from bigtrain.guards import listing
from bigtrain.optim import OPTIMIZERS
from bigtrain.optim.split import first_codes
from bigtrain.weights.dtypes import NAMES, TORCH
from bigtrain.zero.flat import partition_layouts

READING_RANKS = 4  # up to so many CPU ranks, each reads all masters
SCALAR_TYPES = (int, float)
WEIGHT_KINDS = ("master", "weight", "buffer")  # all others are the optimizer's
SETTINGS = ("scheduler", "warmup_steps", "total_steps", "scheduler_kwargs", "max_grad_norm")
COUNTERS = ("global_step", "updates", "tokens", "data_position", "seed")
Piece = tuple[str, tuple[int, ...], int, int, int]


class Flat:
    """A flat tensor that the optimizer updates, its optimizer state, and the parameters in it.

    Attributes:
        key: the tensor itself, as the optimizer knows it.
        tensor: as 1-D: fp32 master weights, or the bf16 weights themselves where the optimizer keeps the rest as state.
        state: the optimizer's dict for it; empty before the first step.
        pieces: (parameter name, full shape, first element of the parameter, offset in the tensor, number of elements).
        whole: every rank holds the same (stage 0).
        own_name: names it in a checkpoint, for state that makes sense only for this very tensor.
    """

    def __init__(self, number: int, tensor: torch.Tensor, state: dict[str, Any], pieces: list[Piece], whole: bool):
        self.key, self.tensor, self.shape = tensor, tensor.detach().view(-1), tensor.shape
        self.state, self.pieces, self.whole = state, pieces, whole
        self.own_name = f"partition-{number}" if whole else f"partition-{number}-{ranks.rank()}-of-{ranks.world_size()}"

    @property
    def kind(self) -> str:
        """The logical tensor that `tensor` is a part of."""
        return "master" if self.tensor.dtype == torch.float32 else "weight"


def flat_tensors(engine: Any) -> list[Flat]:
    """All flat tensors of an engine on this rank."""
    ds, names = engine.deepspeed, _names(engine)
    layouts = partition_layouts(ds.optimizer)
    if layouts:
        inner = ds.optimizer.optimizer
        return [
            Flat(i, tensor, inner.state[tensor], list(_pieces(layout, names)), False)
            for i, (tensor, layout) in enumerate(layouts.items())
        ]
    wrapped = ds.optimizer  # stage 0: bigtrain.engine.master.MasterOptimizer
    return [
        Flat(i, master, wrapped.state[master], [(names[id(p)], tuple(p.shape), 0, 0, p.numel())], True)
        for i, (p, master) in enumerate(zip(wrapped.model_params, wrapped.masters))
    ]


def _names(engine: Any) -> dict[int, str]:
    return {id(p): n for n, p in engine.module.named_parameters()}


def _pieces(layout: Any, names: Mapping[int, str]) -> Iterator[Piece]:
    for placed in layout.matrices:
        start, count = placed.spans[layout.rank]
        if count:
            yield names[id(placed.param)], tuple(placed.shape), start, placed.at, count


def slices_of(engine: Any) -> list[LocalSlice]:
    """Every tensor that a checkpoint of `engine` holds, as this rank's slices.

    Args:
        engine: `bigtrain.engine.Engine`, between steps.
    """
    out = [s for flat in flat_tensors(engine) for s in (*_elementwise_slices(flat), *_blockwise(flat))]
    return out + _outside_optimizer(engine)


@contextlib.contextmanager
def state_kept(engine: Any) -> Iterator[None]:
    """A load that is refused must not leave an optimizer that has half of its state, such as moments without a step count."""
    before = [(flat.state, dict(flat.state)) for flat in flat_tensors(engine)]
    try:
        yield
    except BaseException:
        for state, held in before:
            state.clear()
            state.update(held)
        raise


def slices_to_fill(engine: Any, index: Index) -> tuple[list[LocalSlice], list[Reblock]]:
    """What a load reads: as `slices_of`, with optimizer state that does not exist yet made to match the checkpoint.

    Returns:
        The slices, and 8-bit moments that lie in other blocks here: `finish` each when all slices are read.
    """
    below = OPTIMIZERS[engine.settings.optimizer].fp32_below_elems
    out: list[LocalSlice] = []
    again: list[Reblock] = []
    with_state = {param for kind, param in index if kind not in WEIGHT_KINDS}
    for flat in flat_tensors(engine):
        if flat.pieces and not any(name in with_state for name, *_ in flat.pieces):  # saved before the first step
            flat.state.clear()
        _make_on_host(engine.deepspeed.basic_optimizer, flat, index)
        moved = not in_place(index, flat.own_name, flat.pieces, flat.tensor.numel() < below)
        _make_state(flat, index, leave=(*MOMENTS, *SCALES) if moved else ())
        if not moved:
            out += [*_elementwise_slices(flat), *_blockwise(flat)]
            continue
        for kind in (*MOMENTS, *SCALES):
            flat.state.pop(kind, None)
        out += _elementwise_slices(flat)
        again += reblock(flat.state, flat.tensor.view(flat.shape), flat.pieces, index, below)
    return out + _outside_optimizer(engine) + [s for r in again for s in r.slices], again


def copies_weights(engine: Any) -> bool:
    """True where every rank holds all weights and masters for a part of them, on CPUs: stages 1 and 2.

    On GPUs, weights are gathered.
    """
    return engine.stage in (1, 2) and engine.device.type == "cpu" and engine.world_size > 1


def weights_of_others(engine: Any) -> list[LocalSlice] | None:
    """The parts of the weights whose masters other ranks own, to be read too; for where ranks cannot see each other's memory.

    From the page cache, reading the others' masters and rounding them is quicker than gathering the weights through gloo; it
    reads more from a cold disk (docs/results/checkpoint.md). With many ranks gathering is cheaper: None then.
    """
    if engine.world_size > READING_RANKS:
        return None
    names = _names(engine)
    out: list[LocalSlice] = []
    for master, layout in partition_layouts(engine.deepspeed.optimizer).items():
        kind = "master" if master.dtype == torch.float32 else "weight"
        for placed in layout.matrices:
            weight = placed.param.detach().view(-1)
            for rank, (start, count) in enumerate(placed.spans):
                if rank != layout.rank and count:
                    out.append(
                        LocalSlice(
                            param=names[id(placed.param)], kind=kind, shape=tuple(placed.shape), start=start,
                            tensor=weight[start : start + count], rounded=kind == "master",
                        )
                    )  # fmt: skip
    return out


def _outside_optimizer(engine: Any) -> list[LocalSlice]:
    frozen = [s for n, p in engine.module.named_parameters() if not p.requires_grad for s in _frozen(n, p)]
    return frozen + list(_buffers(engine.module))


def check_names(index: Index, module: torch.nn.Module) -> None:
    """What a checkpoint has and the model lacks; the other direction is found by the plan.

    Raises:
        CheckpointError: names the tensors that would be dropped.
    """
    params = dict(module.named_parameters())
    mine = {*params, *(name for name, _ in persistent_buffers(module))}
    extra = sorted({param for kind, param in index if kind in WEIGHT_KINDS and param not in mine})
    if extra:
        raise CheckpointError(
            f"the checkpoint is of another model: it holds {len(extra)} tensors that this one lacks ({listing(extra)})."
        )
    trained = {param for kind, param in index if kind not in WEIGHT_KINDS}
    frozen = sorted(name for name in trained & params.keys() if not params[name].requires_grad)
    masters = {param for kind, param in index if kind == "master"}  # all that was trained has one, or nothing has
    thawed = sorted(n for n, p in params.items() if masters and p.requires_grad and n not in masters and ("weight", n) in index)
    for names, how in (
        (frozen, "trained in the checkpoint and frozen in this run"),
        (thawed, "frozen in the checkpoint and trained in this run"),
    ):
        if names:
            raise CheckpointError(
                f"{len(names)} parameters are {how}, first {names[0]}: resume with the same frozen parts, or start a new run from the "
                "exported model (bigtrain export)."
            )


def check_shapes(index: Index, module: torch.nn.Module) -> None:
    """Every tensor of a whole model (`models.skeleton`) must be in a checkpoint, in its shape.

    Raises:
        CheckpointError: lists those that are not.
    """
    tensors = [("buffer", n, b) for n, b in persistent_buffers(module)]
    tensors += [("master" if ("master", n) in index else "weight", n, p) for n, p in module.named_parameters()]
    plan_reads(index, [Wanted(param=n, kind=k, shape=tuple(t.shape), start=0, stop=t.numel()) for k, n, t in tensors])


def _elementwise_slices(flat: Flat) -> Iterator[LocalSlice]:
    """The flat tensor and its elementwise state, cut into parameters."""
    blocks = any(True for _ in _blockwise(flat))
    for kind, tensor in {flat.kind: flat.tensor.detach(), **_elementwise(flat)}.items():
        for name, shape, start, offset, count in flat.pieces:
            yield LocalSlice(
                param=name, kind=kind, shape=shape, start=start, tensor=tensor.view(-1)[offset : offset + count],
                replicated=flat.whole, flat=(flat.own_name, offset) if blocks and kind in MOMENTS else None,
            )  # fmt: skip


def _elementwise(flat: Flat) -> dict[str, torch.Tensor]:
    """Optimizer state with one value for each element."""
    return {
        k: t
        for k, t in flat.state.items()
        if torch.is_tensor(t) and not _is_count(flat, k, t) and t.numel() == flat.tensor.numel()
    }


def _blockwise(flat: Flat) -> Iterator[LocalSlice]:
    """Optimizer state with one value for a block of the flat tensor (scales of 8-bit moments): belongs to this layout alone."""
    for kind, t in flat.state.items():
        if torch.is_tensor(t) and t.dim() > 0 and t.numel() != flat.tensor.numel():
            yield LocalSlice(
                param=flat.own_name, kind=kind, shape=tuple(t.shape), start=0, tensor=t.view(-1), replicated=flat.whole
            )


def _frozen(name: str, param: torch.nn.Parameter) -> Iterator[LocalSlice]:
    shape = tuple(zero.full_shape(param))
    if not zero.is_partitioned(param):
        yield LocalSlice(param=name, kind="weight", shape=shape, start=0, tensor=flat_view(param), replicated=True)
        return
    start, own = zero.slice_of(param)
    yield LocalSlice(param=name, kind="weight", shape=shape, start=start, tensor=own)


def _buffers(module: torch.nn.Module) -> Iterator[LocalSlice]:
    """Persistent buffers: the same on every rank, and free to change in any forward."""
    for name, buffer in persistent_buffers(module):
        if buffer.numel():
            yield LocalSlice(
                param=name, kind="buffer", shape=tuple(buffer.shape), start=0, tensor=flat_view(buffer), replicated=True,
                volatile=True,
            )  # fmt: skip


def persistent_buffers(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, buffer) of those that are saved."""
    for prefix, child in module.named_modules():
        for name, buffer in child._buffers.items():
            if buffer is not None and name not in child._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer


def flat_view(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself as 1-D; one that is transposed, expanded or a conjugate view is laid out anew for it."""
    if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        tensor.data = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return tensor.detach().view(-1)


def _make_on_host(optimizer: Any, flat: Flat, index: Index) -> None:
    """An optimizer that keeps its state in host memory (optim/stream.py) makes it itself: on the GPU there may be no room."""
    if getattr(optimizer, "stream", None) is not None and not flat.state and any(("low", n) in index for n, *_ in flat.pieces):
        flat.state.update(optimizer.new_state(flat.key))


def _make_state(flat: Flat, index: Index, leave: Collection[str]) -> None:
    """Give a fresh optimizer the state tensors that the checkpoint holds for this flat tensor and its parameters."""
    held = {name for name, *_ in flat.pieces}
    for (kind, param), saved in index.items():
        if kind in WEIGHT_KINDS or kind in flat.state or kind in leave or param not in held | {flat.own_name}:
            continue
        first = saved[0][1]
        shape = flat.shape if param in held else first.shape
        made = flat.state[kind] = torch.zeros(shape, dtype=TORCH[first.dtype], device=flat.tensor.device)
        if made.dtype == torch.uint8:  # the padding is not in the checkpoint, and would be the smallest value with code 0
            first_codes({kind: made})


# ---------------------------------------------------------------- counters


def run_state(engine: Any) -> dict[str, Any]:
    """What a checkpoint keeps beside weights, optimizer and random state."""
    s, skipped = engine.settings, engine.nonfinite
    counters = {name: getattr(engine, name) for name in COUNTERS}
    skips = {"skipped": skipped.total, "skipped_in_a_row": skipped.in_a_row}
    run = {"world_size": engine.world_size, "stage": s.stage, "config": s.config}
    names = {"optimizer": s.optimizer, "schedule": s.scheduler, "bf16": s.bf16, "settings": settings_of(engine)}
    return {**counters, **skips, **run, **names, "deepspeed_steps": engine.deepspeed.global_steps}


def settings_of(engine: Any) -> dict[str, Any]:
    """What a user chose that decides how training goes on; JSON."""
    s, o = engine.settings, engine.settings.options
    chosen = {name: getattr(s, name) for name in SETTINGS}
    optimizer = {"learning_rate": o.lr, "eps": o.eps, "weight_decay": o.weight_decay}
    return {**optimizer, **chosen, "betas": list(o.betas), "global_batch": s.micro_batch * s.accumulation * engine.world_size}


def changed_settings(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """One line for each setting that differs from the checkpoint's; none for those it does not tell."""
    told = {**saved.get("settings", {}), "seed": saved.get("seed")}
    mine = {**now["settings"], "seed": now["seed"]}
    return [f"{k}: {told[k]!r} in the checkpoint, {v!r} in this run" for k, v in mine.items() if k in told and told[k] != v]


def set_run_state(engine: Any, run: dict[str, Any]) -> None:
    """Restore the counters of `run_state`."""
    for name in COUNTERS:
        setattr(engine, name, run[name])
    engine.nonfinite.total, engine.nonfinite.in_a_row = run["skipped"], run["skipped_in_a_row"]


# ---------------------------------------------------------------- scalars: step counts of the optimizer


def scalars_of(engine: Any) -> list[dict[str, Any]]:
    """Numbers in the optimizer's state (step counts), with the parameters they belong to, of all ranks; every rank calls it."""
    out: list[dict[str, Any]] = []
    for flat in flat_tensors(engine):
        values = {k: _scalar(v) for k, v in flat.state.items() if isinstance(v, SCALAR_TYPES) or _is_count(flat, k, v)}
        if values:
            out.append({"params": sorted({name for name, *_ in flat.pieces}), "values": values})
    return [entry for entries in ranks.all_gather_object(out) for entry in entries]


def set_scalars(engine: Any, saved: list[dict[str, Any]]) -> None:
    """Put back what `scalars_of` gave, the count of steps as this engine's optimizer keeps it: another may have saved it."""
    by_param = {p: entry["values"] for entry in saved for p in entry["params"]}
    outer = engine.deepspeed.optimizer
    inner = getattr(outer, "optimizer", None) or getattr(outer, "inner", outer)
    fused = bool(inner.defaults.get("fused"))
    counts_in = "F32" if isinstance(inner, torch.optim.AdamW) else "int"  # DeepSpeed's CPU Adam, our own, bitsandbytes
    for flat in flat_tensors(engine):
        # A tensor without elements has no moments in a checkpoint; torch's AdamW would take a count of steps for all of its state.
        for name, *_ in flat.pieces[:1] if flat.tensor.numel() else ():
            for key, (type_name, value) in by_param.get(name, {}).items():
                type_name = counts_in if key == "step" else type_name
                flat.state[key] = _unscalar(type_name, value, flat.tensor.device if fused else torch.device("cpu"))
    zero.replay_cpu_adam(getattr(outer, "optimizer", None))


def _is_count(flat: Flat, key: str, value: Any) -> bool:
    """A number of the whole tensor; a parameter without dimensions (stage 0) has moments without, which are no count."""
    return torch.is_tensor(value) and value.dim() == 0 and (len(flat.shape) > 0 or key == "step")


def _scalar(value: Any) -> tuple[str, float | int]:
    if torch.is_tensor(value):
        return NAMES[value.dtype], value.item()
    return type(value).__name__, value


def _unscalar(type_name: str, value: float | int, device: torch.device) -> Any:
    """torch's fused optimizers keep their step count beside the parameter, the others on the CPU."""
    if type_name in TORCH:
        return torch.tensor(value, dtype=TORCH[type_name], device=device)
    return int(value) if type_name == "int" else float(value)


def layout_of(*, optimizer: str, bf16: bool, stage: int, world_size: int) -> dict[str, Any]:
    """What decides, beside the model, whether a checkpoint's state fits a run."""
    return {"optimizer": optimizer, "precision": "bf16" if bf16 else "fp32", "stage": stage, "world_size": world_size}


def check_layout(saved: Mapping[str, Any], now: Mapping[str, Any], index: Index) -> None:
    """Explain field by field why a checkpoint's optimizer state cannot fill this run.

    Raises:
        CheckpointError: other optimizer or precision; or 8-bit state under another partition whose place was not recorded.
    """
    fields = ["optimizer", "precision"]
    if any(s.flat is None and s.dtype == "U8" for (kind, _), held in index.items() if kind in MOMENTS for _, s in held):
        fields += ["stage", "world_size"]
    different = [f for f in fields if saved.get(f) != now.get(f)]
    if different:
        lines = "\n".join(f"  {f}: {saved.get(f)!r} in the checkpoint, {now.get(f)!r} in this run" for f in different)
        raise CheckpointError(
            f"the checkpoint's optimizer state does not fit this run:\n{lines}\nResume with the same settings, or start a new run "
            "from the exported model (bigtrain export)."
        )
