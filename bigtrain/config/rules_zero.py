"""Rules on `zero_optimization`: stage, offload, buckets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from bigtrain import defaults
from bigtrain.config.problems import Problem
from bigtrain.config.rules import Context, Z
from bigtrain.config.rules_training import dtype_name


def stage(ctx: Context) -> Iterator[Problem]:
    """A missing stage is stage 0, whatever else stands in the section."""
    block = ctx.get(Z)
    if isinstance(block, bool):
        yield Problem(Z, block, "warning", "the oldest form, deprecated: true means stage 1",
                      'write {"stage": 1}')  # fmt: skip
    elif block is None:
        yield Problem(Z, None, "note", "left out: stage 0, every rank holds everything",
                      'write {"stage": 2} or {"stage": 3} to shard')  # fmt: skip
    elif isinstance(block, Mapping) and "stage" not in block:
        yield Problem(f"{Z}.stage", None, "error", "left out: DeepSpeed takes stage 0 and shards nothing",
                      "write stage 1, 2 or 3 (or 0 when that is meant)")  # fmt: skip
    if ctx.get(f"{Z}.stage") == "auto":
        yield Problem(f"{Z}.stage", "auto", "error", 'DeepSpeed reads "auto" as stage 0', "write 1, 2 or 3")
    if ctx.on(f"{Z}.legacy_stage1"):
        yield Problem(f"{Z}.legacy_stage1", True, "error", "DeepSpeed stops on it since 0.5.9", "remove it")


def offload(ctx: Context) -> Iterator[Problem]:
    """Where states may go at which stage."""
    for what in ("offload_optimizer", "offload_param"):
        path, device = f"{Z}.{what}", ctx.offload(what)
        old = {"offload_optimizer": "cpu_offload", "offload_param": "cpu_offload_param"}[what]
        if ctx.get(path) is not None and ctx.get(f"{Z}.{old}") is not None:
            yield Problem(f"{Z}.{old}", ctx.get(f"{Z}.{old}"), "error",
                          f"{what} stands beside it; DeepSpeed refuses both", f"keep only {what}")  # fmt: skip
        if isinstance(ctx.get(path), Mapping) and "device" not in ctx.get(path):
            yield Problem(f"{path}.device", None, "error", 'left out: DeepSpeed takes "none" and offloads nothing',
                          'write "cpu", "nvme" or "none"')  # fmt: skip
        if ctx.get(f"{path}.device") == "auto":
            yield Problem(f"{path}.device", "auto", "error", 'DeepSpeed reads "auto" as "none": nothing is offloaded',
                          'write "cpu", "nvme" or "none"')  # fmt: skip
        if device == "nvme":
            yield from _nvme(ctx, what, path)
    yield from _offload_stage(ctx)
    yield from _partial(ctx)


def _nvme(ctx: Context, what: str, path: str) -> Iterator[Problem]:
    if not ctx.get(f"{path}.nvme_path"):
        yield Problem(f"{path}.nvme_path", ctx.get(f"{path}.nvme_path"), "error", "device nvme needs a folder",
                      "write the path of a folder on a local NVMe disk")  # fmt: skip
    if what == "offload_optimizer" and ctx.stage in (1, 2):
        yield Problem(f"{path}.device", "nvme", "warning", f"at stage {ctx.stage} DeepSpeed takes it as cpu: nothing "
                      "goes to the disk", 'write "cpu", or stage 3')  # fmt: skip


def _offload_stage(ctx: Context) -> Iterator[Problem]:
    if ctx.offload("offload_optimizer") != "none" and ctx.stage == 0:
        yield Problem(f"{Z}.offload_optimizer", ctx.get(f"{Z}.offload_optimizer", "cpu"), "error",
                      "at stage 0 DeepSpeed builds the CPU optimizer but leaves the states on the GPU",
                      "write stage 1, 2 or 3")  # fmt: skip
    if ctx.offload("offload_param") != "none" and ctx.stage < 3:
        yield Problem(f"{Z}.offload_param", ctx.get(f"{Z}.offload_param", "cpu"), "warning",
                      f"does nothing at stage {ctx.stage}: parameters are offloaded at stage 3 only",
                      "write stage 3, or remove it")  # fmt: skip


def _splits(ctx: Context) -> bool:
    """The optimizer keeps its masters and its offloaded state itself (optim/table.py, own_offload), at any stage."""
    return str(getattr(ctx.run, "optim", None) or "").startswith("adamw_split")


def _partial(ctx: Context) -> Iterator[Problem]:
    path = f"{Z}.offload_optimizer"
    ratio = ctx.number(f"{path}.ratio")
    if ratio is not None and ratio < 1 and ctx.stage != 3 and not _splits(ctx):
        yield Problem(f"{path}.ratio", ratio, "error", "partial offload works at stage 3 only",
                      "write 1.0, or stage 3, or use optimizer adamw_split or adamw_split_8bit")  # fmt: skip
    if ctx.on(f"{path}.super_offload") and ctx.stage != 3:
        yield Problem(f"{path}.super_offload", True, "warning", "SuperOffload works at stage 3 only",
                      "write stage 3, or false")  # fmt: skip
    if ctx.get(f"{Z}.zenflow") is not None and ctx.offload("offload_optimizer") == "none":
        yield Problem(f"{Z}.zenflow", ctx.get(f"{Z}.zenflow"), "warning", "ZenFlow is about optimizer offload, which "
                      "is off", 'write offload_optimizer {"device": "cpu"}, or remove zenflow')  # fmt: skip


def reduction(ctx: Context) -> Iterator[Problem]:
    """How gradients are reduced (stage_1_and_2.py:340-352, stage3.py:390-396, config.py:_do_error_check)."""
    sums = dtype_name(ctx.get("data_types.grad_accum_dtype")) or "fp32"
    as_2 = ctx.stage == 1 and _splits(ctx) and sums == "fp32"  # optim/table.py, engine_config_patch
    scattered = (ctx.stage in (2, 3) or as_2) and ctx.get(f"{Z}.reduce_scatter", True) is True
    why = "not possible with reduce_scatter at stage 2" + (", as which this optimizer runs stage 1" if as_2 else " or 3")
    factor = ctx.number("gradient_predivide_factor")
    if scattered and factor not in (None, 1):
        yield Problem("gradient_predivide_factor", factor, "error", why, f"write 1.0, or {Z}.reduce_scatter false")
    if scattered and ctx.on("prescale_gradients"):
        yield Problem("prescale_gradients", True, "error", why, f"write false, or {Z}.reduce_scatter false")
    if str(ctx.get("gradient_allreduce_op", "mean")).lower() == "sum":
        blocker = "stage 3" if ctx.stage == 3 else "ZenFlow" if ctx.get(f"{Z}.zenflow") else ""
        severity = "error" if blocker else "warning"
        why = f"not possible with {blocker}" if blocker else "gradients grow with the number of ranks"
        yield Problem("gradient_allreduce_op", "sum", severity, why, "write mean")  # type: ignore[arg-type]
    bucket = ctx.number(f"{Z}.allgather_bucket_size")
    if bucket is not None and bucket % 2 and ctx.stage in (1, 2):
        yield Problem(f"{Z}.allgather_bucket_size", bucket, "error", "must be even", f"write {int(bucket) + 1}")
    if ctx.on(f"{Z}.zero_quantized_gradients") and ctx.get(f"{Z}.reduce_scatter") is False:
        yield Problem(f"{Z}.zero_quantized_gradients", True, "error", "needs reduce_scatter",
                      "write reduce_scatter true")  # fmt: skip
    yield from _gradient_norm(ctx)


def _gradient_norm(ctx: Context) -> Iterator[Problem]:
    if ctx.get(f"{Z}.compute_grad_norm") is not False:
        return
    path = f"{Z}.compute_grad_norm"
    if ctx.stage not in (1, 2):
        yield Problem(path, False, "error", "possible at stage 1 or 2 only", "write true")
    elif ctx.get("gradient_clipping", 1.0) != 0:
        yield Problem(path, False, "error", "clipping needs the norm (gradient_clipping is not 0)",
                      "write true, or gradient_clipping 0")  # fmt: skip
    elif ctx.offload("offload_optimizer") != "none":
        yield Problem(path, False, "error", "not possible with optimizer offload", "write true")
    elif ctx.stage == 1 and ctx.bf16 and dtype_name(ctx.get("data_types.grad_accum_dtype")) == "fp32":
        yield Problem(path, False, "error", "not possible at stage 1 with bf16 and fp32 accumulation", "write true")


def persistence(ctx: Context) -> Iterator[Problem]:
    """A threshold above the largest parameter switches stage 3 off without a word."""
    threshold = ctx.number(f"{Z}.stage3_param_persistence_threshold")
    largest = ctx.model.largest_parameter_elems if ctx.model else None
    if ctx.stage == 3 and threshold is not None and largest and threshold >= largest:
        yield Problem(f"{Z}.stage3_param_persistence_threshold", threshold, "warning",
                      f"the largest parameter has {largest} elements: none would be partitioned",
                      'write a smaller number, or "auto" (10 x hidden size)')  # fmt: skip


def leafs(ctx: Context) -> Iterator[Problem]:
    """Blocks that are gathered whole: they must be the model's, and fit what is gathered ahead."""
    names = ctx.get(f"{Z}.leaf_module.classes")
    named = [names] if isinstance(names, str) else names if isinstance(names, list) else []
    model, path = ctx.model, f"{Z}.leaf_module.classes"
    if ctx.stage != 3 or model is None or not model.block_class:
        return
    classes = [name.rpartition(".")[2] for name in named if isinstance(name, str)]
    for name in classes:
        if name != model.block_class and name in model.other_blocks:
            yield Problem(path, name, "warning", f"'{model.model_type}' has no such module: nothing is gathered whole",
                          f"write {model.block_class}")  # fmt: skip
    size, key = f"{Z}.stage3_prefetch_bucket_size", "stage3_prefetch_bucket_size"
    auto = defaults.bucket_elems(model.hidden_size)[key] if model.hidden_size and ctx.get(size) == "auto" else None
    ahead = next(n for n in (ctx.number(size), auto, defaults.BUCKET_ELEMS[key]) if n is not None)
    if model.block_class in classes and ahead < model.block_elems:
        yield Problem(size, ctx.get(size), "note",
                      f"{ahead:.0f} elements are gathered ahead, a {model.block_class} has {model.block_elems}: it is not there whole when it begins",
                      f"write {model.block_elems}, where memory allows")  # fmt: skip


def worlds(ctx: Context) -> Iterator[Problem]:
    """Group sizes must divide the number of ranks."""
    if ctx.world_size is None:
        return
    for path in (f"{Z}.zero_hpz_partition_size", "tensor_parallel.autotp_size", "sequence_parallel_size",
                 "expert_parallel.autoep_size"):  # fmt: skip
        size = ctx.number(path)
        if size and (size > ctx.world_size or ctx.world_size % size):
            yield Problem(path, size, "error", f"does not divide the {ctx.world_size} ranks",
                          f"write a divisor of {ctx.world_size}")  # fmt: skip
    dp, sp = ctx.number("data_parallel_size"), ctx.number("sequence_parallel_size")
    if dp and sp and dp * sp != ctx.world_size:
        yield Problem("data_parallel_size", dp, "error",
                      f"{dp:g} x sequence_parallel_size {sp:g} is not the {ctx.world_size} ranks",
                      f"write {max(1, int(ctx.world_size // sp))}")  # fmt: skip


RULES = (stage, offload, reduction, persistence, leafs, worlds)
