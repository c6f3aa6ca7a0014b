"""`build_model`: one way from any source to a model ready for the engine, at every ZeRO stage.

Values are drawn by the plain constructor in torch's default dtype (fp32) from the seed, and rounded once to `dtype`: the
reference is the same constructor without ZeRO, same seed, followed by `.to(dtype)` on its parameters. Stage, world size and
offload do not change a bit of them.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bigtrain import ranks, zero
from bigtrain.config import refuse_kept
from bigtrain.errors import ModelError
from bigtrain.meeting import naming_the_lost
from bigtrain.memory import heap
from bigtrain.models.batchnorm import compute_in_fp32
from bigtrain.models.buffers import take_dtypes
from bigtrain.models.checkpointing import disable_cache
from bigtrain.models.compiled import without_wrappers
from bigtrain.models.frozen import freeze
from bigtrain.models.info import BuildInfo, tied_groups
from bigtrain.models.kept import kept_names
from bigtrain.models.pretrained import initialise_missing, load_weights, staging_for
from bigtrain.models.seeding import seeded
from bigtrain.models.sharding import DtypeRule, dtype_rule, explain_bare_forward, shard, thaw
from bigtrain.models.source import Source, fetched, resolve, set_config_dtype
from bigtrain.models.window import Window, gather

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Target:
    """Where and how parameters end up."""

    stage: int
    seed: int
    device: torch.device
    rule: DtypeRule
    partitioner: zero.Partitioner | None
    shard_device: torch.device | None

    def window(self, draw: bool = True) -> Window:
        return Window(shard_device=self.shard_device, draw=draw)


@naming_the_lost()
def build_model(
    source: Any,
    *,
    ds_config: Mapping[str, Any] | str | Path | None = None,
    seed: int = 42,
    dtype: torch.dtype = torch.bfloat16,
    init_device: str | torch.device | None = None,
    freeze: Sequence[str] = (),
    attn_implementation: str | None = "sdpa",
    resize_vocab_to: int | None = None,
    trust_remote_code: bool = False,
    keep_in_fp32: Sequence[str] = (),
    allow_missing: Sequence[str] = (),
    allow_unexpected: Sequence[str] = (),
    verify_load: bool = False,
    **config_overrides: Any,
) -> torch.nn.Module:
    """Build a model, sharded from its first parameter on where the ds_config says stage 3. All ranks call it alike.

    Args:
        source: a Hugging Face folder (with weights: they are loaded; with only config.json: drawn from the seed), hub id,
            config object or dict, "preset:NAME", or any callable that returns an nn.Module.
        ds_config: dict or file; only its ZeRO section matters here. None: stage 0.
        seed: sets torch's, numpy's and Python's generators for the build; the caller's state is restored afterwards.
        dtype: of floating parameters, and of the buffers that a transformers class makes in it (`models.buffers`); others keep theirs.
        init_device: where values are drawn; None: this rank's own CUDA device, or the CPU.
        freeze: module or parameter names that do not train (see `bigtrain.models.frozen.freeze`). A part with a checkpoint of its own:
            `frozen_module` in the callable.
        attn_implementation: for transformers models.
        resize_vocab_to: new number of token embeddings (transformers' resize_token_embeddings).
        trust_remote_code: allow a folder's own Python code to run.
        keep_in_fp32: names of parameters that are not rounded (`models.kept.is_kept`); stage 0 only.
        allow_missing: name patterns (`*` is a wildcard) of the model's tensors that the weight files may lack; they are
            drawn from the seed and named in the log and in `bigtrain_info.initialised`.
        allow_unexpected: name patterns of tensors in the files that the model may lack.
        verify_load: after loading, compare a hash of every gathered tensor with the file, which is read once more.
        **config_overrides: settings of the transformers config, or keyword arguments of the callable.

    Returns:
        The module in training mode, with `bigtrain_info: BuildInfo`.

    Raises:
        ModelError: the source, a name or a setting cannot be used; some parameter cannot be partitioned.
        WeightsError: a weight file is damaged or does not match; tensors are missing or unexpected that were not allowed.
    """
    config = _config(ds_config)
    stage = _stage(config)
    refuse_kept(keep_in_fp32, stage, dtype != torch.float32)
    _check_ranks(stage)
    source = fetched(source)
    with ranks.together("reading the model's config"):
        recipe = resolve(
            source, attn_implementation=attn_implementation, trust_remote_code=trust_remote_code, overrides=config_overrides
        )
    if verify_load and not recipe.directory:
        raise ModelError(f"verify_load: {recipe.label} has no weight files; its values are drawn from the seed.")
    target = _target(config, stage, seed, dtype, init_device, keep_in_fp32)
    if recipe.directory:
        allowed = (_patterns(allow_missing), _patterns(allow_unexpected))
        model, info = _build_pretrained(recipe, target, resize_vocab_to, allowed, verify_load)
    else:
        model, info = _build_fresh(recipe, target, resize_vocab_to)
    info.source, info.dtype, info.ds_config, info.keep_in_fp32 = recipe.label, dtype, config, tuple(keep_in_fp32)
    if recipe.config is not None:
        take_dtypes(model, dtype, recipe.construct)
    _settle(model, info, target, freeze)
    # What was drawn in fp32 is gone, the heap that held it is not. Where every value came from files, nothing was drawn.
    heap.give_back(garbage=recipe.directory is None or bool(info.initialised) or resize_vocab_to is not None)
    return model


def _patterns(given: str | Sequence[str]) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) else tuple(given)


def _config(ds_config: Mapping[str, Any] | str | Path | None) -> dict[str, Any]:
    if isinstance(ds_config, (str, Path)):
        from bigtrain.config import load

        return load(ds_config)
    return dict(ds_config or {})


def _stage(config: Mapping[str, Any]) -> int:
    stage = (config.get("zero_optimization") or {}).get("stage", 0)
    if stage not in (0, 1, 2, 3):
        raise ModelError(f"zero_optimization.stage is {stage!r}: a model can be built for stage 0, 1, 2 or 3.")
    return int(stage)


def _check_ranks(stage: int) -> None:
    """A process group must exist before the first parameter is cut, or every rank would see a world of one."""
    import os

    if zero.inside_zero_init():
        raise ModelError(
            "build_model is called inside `with deepspeed.zero.Init()`: leave the context, build_model partitions itself."
        )
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if not ranks.is_distributed() and (stage == 3 or launched > 1):
        zero.init_distributed()
    if ranks.is_distributed() and ranks.world_size() == 1 and launched > 1:
        raise ModelError(
            f"the launcher started {launched} ranks, but the process group has one: other code made its own before. "
            "Call bigtrain.zero.init_distributed() first in every rank, then build the model."
        )


def _target(
    config: dict[str, Any], stage: int, seed: int, dtype: torch.dtype, init_device: Any, keep_in_fp32: Sequence[str]
) -> _Target:
    partitioner = zero.Partitioner(config, dtype) if stage == 3 else None
    shard_device = None
    section = config.get("zero_optimization") or {}
    offloads = [section.get("offload_optimizer"), section.get("offload_param")]
    # fp32 slices take twice the room of the final ones; where the host will hold the optimizer's state, it holds them too.
    on_host = any(isinstance(o, Mapping) and o.get("device") in ("cpu", "nvme") for o in offloads)
    if partitioner is not None:
        shard_device = torch.device("cpu") if on_host else partitioner.partition_device
    elif on_host and ranks.world_size() == 1 and ranks.device().type == "cuda":
        shard_device = torch.device("cpu")
    device = ranks.device() if init_device is None else torch.device(init_device)
    if device.type == "meta":
        raise ModelError("init_device='meta' draws no values; leave it out, the model is never whole on a device anyway.")
    return _Target(stage, seed, device, dtype_rule(dtype, keep_in_fp32), partitioner, shard_device)


def _construct(recipe: Source, target: _Target) -> torch.nn.Module:
    with target.device if target.device.type != "cpu" else contextlib.nullcontext():
        model = recipe.construct()
    if not isinstance(model, torch.nn.Module):
        raise ModelError(f"{recipe.label} returned a {type(model).__name__}, not an nn.Module.")
    without_wrappers(model)
    return model


def _build_fresh(recipe: Source, target: _Target, vocab: int | None) -> tuple[torch.nn.Module, BuildInfo]:
    window = target.window() if target.shard_device is not None else None
    with seeded(target.seed), window or ranks.together(f"building {recipe.label}"):
        model = _construct(recipe, target)
        if vocab is not None:
            _resize(model, vocab)
    _close(model, target, window)
    info = _info(target)
    info.peak_whole_bytes = window.peak_bytes if window else 0
    return model, info


def _build_pretrained(
    recipe: Source,
    target: _Target,
    vocab: int | None,
    allowed: tuple[tuple[str, ...], tuple[str, ...]],
    verify: bool,
) -> tuple[torch.nn.Module, BuildInfo]:
    assert recipe.directory is not None
    window = target.window(draw=False)
    with staging_for(recipe.directory, target.partitioner.partition_device if target.partitioner else target.device):
        with seeded(target.seed), window:
            model = _construct(recipe, target)
        if target.partitioner:
            shard(model, window, target.partitioner, target.rule)
        else:
            _allocate(model, window, target)
    missing, rounded = load_weights(model, recipe.directory, *allowed, verify)
    info = _info(target)
    info.initialised = tuple(missing)
    info.finer_files = recipe.directory if rounded else None
    parameters = dict(model.named_parameters(remove_duplicate=False))
    fresh = [parameters[name] for name in missing if name in parameters]
    resized = _embeddings(model) if vocab is not None else []
    if fresh or resized:
        dtype = torch.get_default_dtype()
        opened = _open(target, drop=fresh, keep=resized, dtype=dtype)
        with seeded(target.seed), opened or contextlib.nullcontext():
            initialise_missing(model, fresh)
            if vocab is not None:
                _resize(model, vocab)
        _close(model, target, opened)
    return model, info


def _info(target: _Target) -> BuildInfo:
    return BuildInfo(source="", dtype=torch.get_default_dtype(), stage=target.stage, seed=target.seed)


def _allocate(model: torch.nn.Module, window: Window, target: _Target) -> None:
    """Stages 0 to 2: real, unset memory for a skeleton's parameters."""
    for name, param in model.named_parameters():
        parked = window.close(param)
        param.data = torch.empty(parked.shape, dtype=target.rule(name, parked.dtype), device=target.device)


def _close(model: torch.nn.Module, target: _Target, window: Window | None) -> None:
    """Round, and at stage 3 partition, what is not yet."""
    if target.partitioner is not None and window is not None:
        shard(model, window, target.partitioner, target.rule)
        return
    if window is not None:
        for name, param in model.named_parameters():
            parked = window.close(param)
            assert parked.shard is not None
            param.data = gather(parked.shard, parked.shape, param.device).to(target.rule(name, parked.dtype))
        window.restore_others()
        return
    for name, param in model.named_parameters():
        param.data = param.data.to(target.rule(name, param.dtype))


def _open(
    target: _Target,
    *,
    drop: Sequence[torch.nn.Parameter] = (),
    keep: Sequence[torch.nn.Parameter] = (),
    dtype: torch.dtype | None = None,
) -> Window | None:
    """Let code change parameters of a finished model as if they were whole, `drop` without their values, `keep` with them, until `_close`.

    Returns:
        The window to do it in; None where nothing is partitioned.
    """
    window = target.window() if target.partitioner is not None else None
    dropped = {id(p) for p in drop}
    for p in dict.fromkeys([*drop, *keep]):
        if window is not None:
            thaw(p, window, dtype, values=id(p) not in dropped)
        else:
            p.data = torch.empty_like(p.data, dtype=dtype) if id(p) in dropped else p.data.to(dtype or p.dtype)
    return window


def _resize(model: torch.nn.Module, vocab: int) -> None:
    if not hasattr(model, "resize_token_embeddings"):
        raise ModelError(f"resize_vocab_to={vocab}: {type(model).__name__} has no resize_token_embeddings.")
    model.resize_token_embeddings(vocab)  # type: ignore[operator]


def _embeddings(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    parts = [getattr(model, f"get_{side}_embeddings", lambda: None)() for side in ("input", "output")]
    return [p for part in parts if part is not None for p in part.parameters()]


def _settle(model: torch.nn.Module, info: BuildInfo, target: _Target, frozen: Sequence[str]) -> None:
    """Everything that does not touch values."""
    model.bigtrain_info = info  # type: ignore[assignment]
    config = getattr(model, "config", None)
    if hasattr(config, "to_dict"):
        set_config_dtype(config, info.dtype)
        disable_cache(model)
    kept_names(model, info.keep_in_fp32, info.stage, info.dtype != torch.float32)  # each pattern means something
    if info.dtype != torch.float32:
        compute_in_fp32(model)
    for tensor in [*model.parameters(), *model.buffers()]:
        tensor.__dict__.pop("_is_hf_initialized", None)  # a mark of the build, not of the model
    freeze(model, frozen)
    info.frozen = tuple(n for n, p in model.named_parameters(remove_duplicate=False) if not p.requires_grad)
    info.tied = tied_groups(model)
    info.fp32_wanted = tuple(sorted(getattr(model, "_keep_in_fp32_modules_strict", None) or ()))
    if info.fp32_wanted and info.dtype != torch.float32 and not info.keep_in_fp32:
        logger.warning(
            "%s wants these in fp32: %s. Their parameters are %s in forward; DeepSpeed's master copy of them is fp32.",
            info.source, ", ".join(info.fp32_wanted), str(info.dtype).removeprefix("torch."),
        )  # fmt: skip
    if target.partitioner is not None:
        for buffer in model.buffers():  # DeepSpeed moves no buffers of a model that is partitioned already
            buffer.data = buffer.data.to(target.partitioner.local_device)
        target.partitioner.install_efficient_linear()
        explain_bare_forward(model)
        zero.refuse_empty_reads(model)


def edit_model(model: torch.nn.Module, edit: Callable[[torch.nn.Module], Any], *, seed: int | None = None) -> torch.nn.Module:
    """Run code that adds or changes parameters over a built model: adapters (`lambda m: get_peft_model(m, config)`), new heads.

    At stage 3 the code sees full shapes and values, in the parameters' own dtype, with no more than a window of them whole;
    afterwards everything is partitioned again and new parameters have the model's dtype. Call it before the engine exists.

    Args:
        edit: gets the model; may return another module that holds it.
        seed: for values that `edit` draws; None: the build's.

    Returns:
        What `edit` returned, or the model.
    """
    info: BuildInfo = model.bigtrain_info  # type: ignore[assignment]
    seed = info.seed if seed is None else seed
    target = _target(info.ds_config, info.stage, seed, info.dtype, None, info.keep_in_fp32)
    window = _open(target, keep=list(model.parameters()))
    with seeded(seed), window or contextlib.nullcontext():
        edited = edit(model)
    result = edited if isinstance(edited, torch.nn.Module) else model
    _close(result, target, window)
    result.bigtrain_info = info  # type: ignore[assignment]
    info.frozen = tuple(n for n, p in result.named_parameters(remove_duplicate=False) if not p.requires_grad)
    info.tied = tied_groups(result)
    return result
