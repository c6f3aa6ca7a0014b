"""Putting a model, an optimizer and DeepSpeed together."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from bigtrain import guards, optim, ranks, weights, zero
from bigtrain.engine import agreement, buffers
from bigtrain.engine.flags import GradientFlags
from bigtrain.engine.leafs import carry_gradients
from bigtrain.engine.master import MasterOptimizer
from bigtrain.engine.misuse import refuse_compiled
from bigtrain.engine.precision import refuse_other_dtypes, refuse_other_kinds, to_bf16
from bigtrain.engine.reduction import Reduction
from bigtrain.engine.settings import Settings
from bigtrain.engine.writes import ForeignWrites
from bigtrain.errors import ModelError
from bigtrain.memory import heap
from bigtrain.models.batchnorm import compute_in_fp32
from bigtrain.models.buffers import take_dtypes
from bigtrain.models.sharding import explain_bare_forward, generate_in_step, refuse_empty
from bigtrain.optim.build import build_optimizer
from bigtrain.optim.groups import param_groups
from bigtrain.weights.guard import guard_state_dict
from bigtrain.zero import flat
from bigtrain.zero.startup import SharedMaster

log = logging.getLogger(__name__)


@dataclass
class Assembled:
    """A model under DeepSpeed.

    Attributes:
        ds: DeepSpeed's engine.
        names, params: the trainable parameters, in the model's order.
        frozen_map: every parameter with its requires_grad at this moment.
        running: BatchNorm's and InstanceNorm's statistics, which ranks must share.
        flags: marks of non-finite gradients.
        reduction: how gradients reach the optimizer.
        writes: weights that a script wrote between two steps.
        leafs: hooks on ZeRO-3's leaf modules.
    """

    ds: Any
    names: list[str]
    params: list[torch.nn.Parameter]
    frozen_map: list[tuple[str, torch.nn.Parameter, bool]]
    running: buffers.RunningStats
    flags: GradientFlags
    reduction: Reduction
    writes: ForeignWrites
    leafs: list[RemovableHandle]

    def release(self) -> None:
        """End DeepSpeed's engine and take all hooks off the model: another may have it."""
        self.reduction.finish_update(states=True)
        self.ds.destroy()
        for hook in (self.ds.module_forward_pre_hook, self.ds.module_forward_post_hook, *self.flags.handles, *self.leafs):
            hook.remove()


def assemble(
    model: torch.nn.Module, settings: Settings, keep_in_fp32: set[str], leaf_modules: Sequence[type], trace_gradients: bool
) -> Assembled:
    """Hand the model to DeepSpeed with our optimizer; buffers keep their dtype and rank 0's values.

    Raises:
        RanksDisagreeError: if ranks built different models.
        ModelError: if leaf_modules match nothing, no parameter is trainable, some are of a kind that cannot be trained, or the model was
            built for another stage or dtype.
    """
    s = settings
    with ranks.together("looking at the model"):
        _refuse(model, s, leaf_modules)
    agreement.same_model(model)
    if s.bf16:
        if not hasattr(model, "bigtrain_info"):
            take_dtypes(model, torch.bfloat16)
        compute_in_fp32(model)
        buffers.parametrize_in_fp32(model)
    saved = buffers.snapshot(model)
    if s.bf16 and s.stage == 0:
        to_bf16(model, keep_in_fp32)
    for param in model.parameters():
        param.grad = None  # of plain torch before, or of an engine that was closed in the middle of a step
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    frozen_map = [(n, p, p.requires_grad) for n, p in model.named_parameters()]
    names, params = [n for n, _ in named], [p for _, p in named]
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    flags = GradientFlags(params if trace_gradients else [], device)
    optimizer = _optimizer(param_groups(model, s.options.weight_decay), s)
    own = s.stage in (1, 2) and optim.OPTIMIZERS[s.optimizer].own_offload
    with SharedMaster() if own else contextlib.nullcontext():
        ds = zero.initialize(model, s.config, optimizer, through_host=bool(s.options.offload and s.options.offload.gradients))
    optim.after_initialize(s.optimizer, ds)
    if isinstance(optimizer, MasterOptimizer):
        optimizer.take_weights()
    master_of = flat.master_of(ds.optimizer)
    _fill_masters(model, master_of)
    heap.give_back()
    restored = buffers.restore(model, saved)
    if restored:
        log.info("kept %d buffers in the dtype they were built with: %s", len(restored), guards.listing(restored))
    buffers.take_from_rank_0(model, device)
    return Assembled(
        ds,
        names,
        params,
        frozen_map,
        buffers.RunningStats(model),
        flags,
        Reduction(ds, params, flags),
        ForeignWrites(
            names,
            params,
            master_of,
            _with_masters(params, master_of, s),
            anywhere=zero.optimizer_kind(ds.optimizer) in ("plain", "zero12"),
            # DeepSpeed's BF16_Optimizer keeps gradients in place.
            emptied=zero.optimizer_kind(ds.optimizer) != "bf16" and not _zenflow(s),
        ),
        carry_gradients(model) if s.stage == 3 else [],
    )


def _refuse(model: torch.nn.Module, s: Settings, leaf_modules: Sequence[type]) -> None:
    """What cannot be trained so; and what must be told of the model before DeepSpeed takes it."""
    if s.stage < 3 and any(zero.is_partitioned(p) for p in model.parameters()):
        raise ModelError(
            f"the model is partitioned as for ZeRO stage 3, and the Engine's ds_config says stage {s.stage}: give build_model and "
            "Engine the same ds_config."
        )
    refuse_other_kinds(model, s.stage, ranks.world_size())
    if s.stage == 3:
        refuse_empty({name: zero.full_shape(p) for name, p in model.named_parameters()})
        guard_state_dict(model)
        explain_bare_forward(model)
        if ranks.world_size() > 1:
            generate_in_step(model)
    refuse_compiled(model, s.stage)
    refuse_other_dtypes(model, s.bf16)
    if leaf_modules and s.stage == 3 and not zero.set_leaf_modules(model, leaf_modules):
        raise ModelError(f"leaf_modules: the model has no module of {[c.__name__ for c in leaf_modules]}")


def _with_masters(params: Sequence[torch.nn.Parameter], master_of: flat.MasterOf, s: Settings) -> list[int]:
    """Indices of parameters that have a master on some rank, and move in steps only; ranks share masters at stages 1 and 2."""
    if _zenflow(s):
        return []  # its updates run on beside the next steps
    mine = [i for i, p in enumerate(params) if not zero.on_nvme(p) and master_of(p) is not None]
    return sorted({i for some in ranks.all_gather_object(mine, "which parameters have masters") for i in some})


def _zenflow(s: Settings) -> bool:
    return bool((s.config.get("zero_optimization") or {}).get("zenflow"))


def _fill_masters(model: torch.nn.Module, master_of: flat.MasterOf) -> None:
    """Give the fp32 masters the bits that the model's own bf16 weights lost when they were read from finer files."""
    directory = getattr(getattr(model, "bigtrain_info", None), "finer_files", None)
    if directory is None:
        return
    found = sum(ranks.all_gather_object(weights.load_masters(model, directory, master_of=master_of)))
    log.info(
        "the fp32 masters hold the unrounded values of %s" if found else "%s is finer than bf16: this setup has no fp32 masters "
        "to hold its lower bits",
        directory,
    )  # fmt: skip


def _optimizer(groups: list[dict[str, Any]], s: Settings) -> torch.optim.Optimizer:
    build = partial(build_optimizer, s.optimizer, options=s.options)
    if s.stage > 0:
        return build(groups)
    if torch.cuda.is_available():
        for group in groups:
            for param in group["params"]:
                param.data = param.data.cuda()
    return MasterOptimizer(groups, build, s.max_grad_norm)
