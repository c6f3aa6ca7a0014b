"""From arguments to what a run needs: the resolved ds_config, tokenizer, rows, step plan, model.

Everything that can be wrong is looked at in this order, cheapest first, and before the model is built.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from bigtrain import config as ds
from bigtrain import data, defaults, models, optim, ranks
from bigtrain.checkpoint import fit
from bigtrain.checkpoint.live import layout_of
from bigtrain.config import ModelShape, Resolved, RunValues
from bigtrain.engine import settings
from bigtrain.errors import CheckpointError
from bigtrain.kernels.attach import use_liger
from bigtrain.models.source import config_from
from bigtrain.plan.spilled import asked_share
from bigtrain.run import attention
from bigtrain.run.argument_problems import all_of
from bigtrain.run.arguments import TrainArguments
from bigtrain.run.auto import AUTO
from bigtrain.run.model_files import (
    about_files,
    choose_seq_len,
    load_tokenizer,
    refuse_too_many_blocks,
    tell_foreign_tokenizer,
    vocabulary,
)
from bigtrain.weights.companions import also_end_at

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Job:
    """What a run trains on and how.

    Attributes:
        rows, eval_rows, steps (a `data.StepPlan`): None before `with_data`.
        checkpoint_bytes, model_bytes: of one checkpoint and of the exported model; None for a model that only building tells.
        offload_gradients: share of the gradients that leave the GPU in backward; 0.0 until "auto" is decided (`capacity`).
        block_classes: of the modules that are recomputed as a whole; None for a model that only building tells.
        leaf_blocks: whether these are leaf modules of ZeRO-3; None where only the ds_config says which are, and at other stages.
    """

    args: TrainArguments
    resolved: Resolved
    tokenizer: Any
    seq_len: int
    rows: Any = None
    eval_rows: Any = None
    steps: Any = None
    model_config: Any
    config_overrides: dict[str, Any]
    resize_vocab_to: int | None
    checkpoint_bytes: int | None = None
    model_bytes: int | None = None
    offload_gradients: float = 0.0
    block_classes: tuple[str, ...] | None = None
    leaf_blocks: bool | None = None

    @property
    def tokens_per_step(self) -> int:
        """Positions that go through the model in one step over all ranks, padding included."""
        return self.steps.global_batch * self.seq_len

    @property
    def data_told(self) -> dict[str, Any]:
        """What decides which row stands where; a checkpoint keeps it, and `tell_changed_data` compares."""
        counts = data.stats_dict(self.rows)
        told = {"seq_len": self.seq_len, "packing": self.args.packing, "data_seed": self.args.order_seed}
        return {**told, **{name: counts[name] for name in ("documents", "tokens", "rows")}, "content": self.rows.content}

    @property
    def eval_told(self) -> dict[str, str]:
        """What the evaluation data is; a checkpoint keeps it, and `tell_changed_evaluation` compares."""
        return {} if self.eval_rows is None else {"eval_content": self.eval_rows.content}

    def going_on(self, saved: Mapping[str, Any], step: int, position: int, planned: tuple[int, int]) -> Job:
        """The job from a checkpoint with this `state` on, whose next step begins at row `position`.

        Raises:
            CheckpointError: it is not the one that the steps were `planned` from, which was damaged, and they would be others.
        """
        if planned != (0, 0) and step != planned[0] and self.steps.position(step) != position:
            raise CheckpointError(
                f"checkpoint-{planned[0]} is damaged, and the steps of this run were planned to go on from it with another global batch: "
                f"move it away, and start again from checkpoint-{step}"
            )
        self.tell_changed_data(saved)
        self.tell_changed_evaluation(saved)
        return replace(self, steps=self.steps.resumed(step, position, saved.get("global_batch")))

    def tell_changed_data(self, saved: Mapping[str, Any]) -> None:
        """Warn of each number of `data_told` that differs from the checkpoint's."""
        now = self.data_told
        lines = [f"\n  {k}: {saved[k]!r} in the checkpoint, {v!r} in this run" for k, v in now.items() if saved.get(k, v) != v]
        if lines and ranks.is_main():
            logger.warning("these are other rows than those of the checkpoint; as many are passed over:%s", "".join(lines))

    def tell_changed_evaluation(self, saved: Mapping[str, Any]) -> None:
        """Warn of losses that stand side by side in eval.jsonl and are of different rows."""
        if any(saved.get(name, value) != value for name, value in self.eval_told.items()) and ranks.is_main():
            best = " --load_best_model_at_end compares them all the same." if self.args.load_best_model_at_end else ""
            logger.warning(
                "the evaluation data is not that of the checkpoint: losses in eval.jsonl from before are of other rows.%s", best
            )


def device_type() -> str:
    """`cuda` or `cpu`."""
    return "cuda" if torch.cuda.is_available() else "cpu"


# ---------------------------------------------------------------- before the ranks meet


def read_ds_config(args: TrainArguments) -> dict[str, Any]:
    """The ds_config as written, and linted against what is known before the data is read.

    Raises:
        ConfigError: every problem of the file in one report.
    """
    if args.ds_config == AUTO:
        return {}  # chosen once the ranks have met and know what memory each has
    inline = args.ds_config.lstrip().startswith("{")
    config = ds.parse(args.ds_config) if inline else ds.load(args.ds_config)
    known = {"world_size": ranks.world_size(), "run": args.run_values(), "device": device_type()}
    ds.check(config, **known, name=_config_name(args), also=ds.undone(config))
    return config


def _config_name(args: TrainArguments) -> str:
    return "ds_config" if args.ds_config.lstrip().startswith("{") else args.ds_config


# ---------------------------------------------------------------- together


def prepare(args: TrainArguments, config: dict[str, Any], resume: Path | None = None) -> Job:
    """A job but for its data, which may take hours to tokenise: tokenizer, model config, and the ds_config. Collective.

    Args:
        resume: the folder of the checkpoint that the run starts from.

    Raises:
        UsageError, ConfigError, ModelError: on every rank alike, before anything is built.
        CheckpointError, WeightsError: the checkpoint is damaged.
    """
    name = args.tokenizer_name_or_path or args.model_name_or_path
    # First: the tokenizer's library reads it too, and would be blamed for it.
    with ranks.together("reading the model's config"):
        model_config = config_from(args.model_name_or_path, args.trust_remote_code)
    with ranks.main_first("reading the tokenizer"), about_files(f"tokenizer of {name}", name):
        tokenizer = load_tokenizer(args)
    with ranks.together("comparing the tokenizer with the model's config"):
        (overrides, resize_to), seq_len, *_ = all_of(
            lambda: vocabulary(args, model_config, tokenizer),
            lambda: choose_seq_len(args, model_config),
            lambda: refuse_too_many_blocks(args, model_config),
            lambda: data.isolation_for(model_config, args.packing),
            lambda: attention.choose(args, model_config),
        )
        tell_foreign_tokenizer(args, tokenizer)
        shape = ModelShape.from_config(model_config)
    first = resolve(args, config, shape, None)
    share = asked_share(args.offload_gradients) or 0.0
    job = Job(
        args=args,
        resolved=first,
        tokenizer=tokenizer,
        seq_len=seq_len,
        model_config=model_config,
        config_overrides=overrides,
        resize_vocab_to=resize_to,
        offload_gradients=share,
    )
    check_engine(job)
    sizes = ranks.main_decides(lambda: look_ahead(args, first, model_config, overrides, resume), "looking at the model's shape")
    return replace(job, **sizes)


def with_data(job: Job, config: dict[str, Any], reached: tuple[int, int] = (0, 0)) -> Job:
    """The job with its rows, its steps, and a ds_config that knows how many there are. Collective.

    Args:
        config: the ds_config as written. reached: (step, rows used) of the checkpoint that the run starts from.

    Raises:
        DataError, ConfigError: on every rank alike.
    """
    args, run = job.args, job.resolved.run
    assert run.micro_batch and run.accumulation
    files = args.train_data, args.eval_data, args.eval_fraction, args.order_seed
    rows, eval_rows = data.load_rows(*files, job.tokenizer, job.seq_len, args.packing, job.model_config)
    batch = run.micro_batch, run.accumulation, ranks.world_size()
    steps = data.plan_steps(len(rows), *batch, args.num_train_epochs, args.max_steps, done=reached)
    ranks.agree((steps.describe(), len(eval_rows or ())), "the step plan")
    done = resolve(args, config, ModelShape.from_config(job.model_config), steps.steps)
    return replace(job, rows=rows, eval_rows=eval_rows, steps=steps, resolved=_as_planned(done, job.resolved))


def _as_planned(done: Resolved, planned: Resolved) -> Resolved:
    """With what the plan had decided (`left_open.settle`), which the number of steps does not change."""
    known = {decision.path for decision in done.decisions}
    more = [decision for decision in planned.decisions if decision.path not in known]
    config = {**done.config, **{name: planned.config[name] for name in ("zero_optimization",) if name in planned.config}}
    run = replace(done.run, gradient_checkpointing=planned.run.gradient_checkpointing)
    return replace(done, config=config, decisions=[*done.decisions, *more], run=run)


def look_ahead(
    args: TrainArguments, resolved: Resolved, model_config: Any, overrides: Mapping[str, Any], resume: Path | None
) -> dict[str, Any]:
    """`checkpoint_bytes`, `model_bytes` and `block_classes` of a run that may go on from `resume`.

    Raises:
        UsageError: it may not, see `checkpoint.fit.refuse_other`. ModelError: `--freeze` names nothing; there are no tiles.
    """
    try:
        model = models.skeleton(model_config, overrides=overrides, trust_remote_code=args.trust_remote_code)
    except Exception as error:  # a model's own code may not know the meta device; building says what is wrong, if anything is
        logger.info("the size of a checkpoint is not known before the model is built: %r", error)
        return {}
    models.freeze(model, args.freeze, quiet=True)
    if args.mlp_tile_tokens:
        models.feed_forwards(model)  # refused before anything is built
    config, name, bf16 = resolved.config, optim.canonical_name(resolved.run.optim or "adamw"), bool(resolved.run.bf16)
    if resume is not None:
        stage = (config.get("zero_optimization") or {}).get("stage", 0)
        fit.refuse_other(resume, model, layout_of(optimizer=name, bf16=bf16, stage=stage, world_size=ranks.world_size()))
    halved = (config.get("bf16") or {}).get("bf16_master_weights_and_grads") is True
    blocks = tuple(sorted({type(block).__name__ for block in models.declared_blocks(model)}))
    sizes = {"checkpoint_bytes": fit.checkpoint_bytes(model, name, bf16, halved), "model_bytes": fit.weight_bytes(model)}
    return {**sizes, "block_classes": blocks}


def resolve(args: TrainArguments, config: dict[str, Any], shape: ModelShape, total_steps: int | None) -> Resolved:
    """The ds_config without "auto". Before the data is read, the number of steps is a stand-in."""
    run = args.run_values(total_steps)
    if run.total_steps is None:
        run = replace(run, **ds.left_open(config, RunValues(total_steps=10**9)).given())  # unless the file has a number
    return ds.resolve(
        config, run=run, model=shape, world_size=ranks.world_size(), device=device_type(), name=_config_name(args)
    )


# ---------------------------------------------------------------- the engine


def engine_arguments(job: Job) -> dict[str, Any]:
    """The Engine's arguments: every number from the resolved config, so that it and the Engine cannot differ."""
    run = job.resolved.run
    return {
        "ds_config": job.resolved,
        "optimizer": run.optim,
        "learning_rate": run.learning_rate,
        "betas": (run.adam_beta1, run.adam_beta2),
        "eps": run.adam_epsilon,
        "weight_decay": run.weight_decay,
        "lr_scheduler": run.lr_scheduler_type,
        "lr_scheduler_kwargs": job.args.scheduler_kwargs,
        "warmup_steps": run.warmup_steps,
        "total_steps": job.steps.steps,
        "max_grad_norm": run.max_grad_norm,
        "micro_batch": run.micro_batch,
        "accumulation": run.accumulation,
        "offload_gradients": job.offload_gradients,
        "seed": job.args.seed,
        "keep_in_fp32": job.args.keep_in_fp32,
        "nonfinite_limit": job.args.nonfinite_limit,
    }


def check_engine(job: Job) -> None:
    """Everything that the Engine would refuse about optimizer, schedule and batch, before the model is built.

    Raises:
        UsageError, ConfigError: as the Engine would.
    """
    args, resolved = job.args, job.resolved
    run = replace(resolved.run, total_steps=job.steps.steps) if job.steps is not None else resolved.run
    settled = settings.settle(
        resolved.engine_config(),
        run,
        world_size=ranks.world_size(),
        scheduler_kwargs=args.scheduler_kwargs,
        offload_gradients=job.offload_gradients,
    )
    settled.schedule()
    ds.refuse_kept(args.keep_in_fp32, settled.stage, settled.bf16)


# ---------------------------------------------------------------- the model


def build(job: Job) -> tuple[torch.nn.Module, data.Isolation]:
    """The model of a job, sharded, with frozen parts, recomputation and isolation as asked. Collective."""
    args, run, config = job.args, job.resolved.run, job.resolved.engine_config()
    model = models.build_model(
        args.model_name_or_path,
        ds_config=config,
        seed=args.seed,
        dtype=torch.bfloat16 if run.bf16 else torch.float32,
        freeze=args.freeze,
        attn_implementation=attention.choose(args, job.model_config),
        resize_vocab_to=job.resize_vocab_to,
        trust_remote_code=args.trust_remote_code,
        keep_in_fp32=args.keep_in_fp32,
        allow_missing=args.allow_missing,
        allow_unexpected=args.allow_unexpected,
        verify_load=args.verify_load,
        **job.config_overrides,
    )
    models.refuse_batchnorm_micro_batch_1(model, job.steps.micro_batch)
    attention.tell(args, model, job.seq_len)
    isolation = data.prepare_isolation(model, args.packing)
    models.disable_cache(model)
    if job.rows is not None:
        also_end_at(model, job.rows.turn_end)
    if fused_kernels(args):
        use_liger(model)
    if args.mlp_tile_tokens:
        models.tile_mlp(model, args.mlp_tile_tokens)
    if run.gradient_checkpointing:
        blocks = models.enable_activation_checkpointing(model, None, args.recomputed_blocks, args.checkpointing_policy)
        logger.info("activation checkpointing, %s: %d blocks are recomputed in backward", args.checkpointing_policy, blocks)
    models.set_moe_leaf_modules(model)
    if args.torch_compile:
        models.compile_blocks(model)
    return model, isolation


def fused_kernels(args: TrainArguments) -> bool:
    """Whether to replace the model's kernels: on a GPU unless told not to."""
    return defaults.fused_kernels(args.use_liger_kernel, torch.cuda.is_available())
