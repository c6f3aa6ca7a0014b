"""Writing a ds_config from a few typed choices. The files in ds_configs/ are made by this module."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

from bigtrain import defaults
from bigtrain.config.batch import ACCUMULATION, GLOBAL, MICRO, BatchError, Given, solve_batch
from bigtrain.config.problems import Problem, raise_if_errors
from bigtrain.config.shape import ModelShape

AUTO = "auto"
NEVER_PRINT = 10**9
"""steps_per_print: DeepSpeed's own progress lines are off; bigtrain prints its own."""

BUCKET = 200_000_000
FALLBACK = defaults.BUCKET_ELEMS
"""For models without a hidden size (transformers issue 21342)."""

Schedule = Literal["linear", "cosine", "constant"]
_SCHEDULE_TYPE = {"linear": "WarmupDecayLR", "cosine": "WarmupCosineLR", "constant": "WarmupLR"}


@dataclass(frozen=True, kw_only=True)
class GenerateOptions:
    """The choices. None leaves the value to the run ("auto").

    Attributes:
        stage: what is sharded: 1 optimizer states, 2 also gradients, 3 also parameters; 0 nothing.
        offload: what lives in host memory: `none`, `optimizer` states, or `all` (parameters too, stage 3 only).
        nvme_path: put the offloaded states on this NVMe folder instead (stage 3 only).
        activation_checkpointing: recompute activations in the backward pass.
        bf16: bfloat16 parameters with fp32 master weights; False trains in fp32.
        optimizer: DeepSpeed's name of the optimizer.
        scheduler: also write a DeepSpeed schedule; None leaves the schedule to the program.
        micro_batch, accumulation, global_batch: rows; any of them.
        world_size: ranks; with it the batch triple is completed.
        learning_rate, adam_beta1, adam_beta2, adam_epsilon, weight_decay: optimizer settings.
        warmup_steps, total_steps: of the schedule, in optimizer steps.
        max_grad_norm: clipping; 0 for none.
        model: its hidden size turns the bucket formulas into numbers.
    """

    stage: int = 3
    offload: Literal["none", "optimizer", "all"] = "none"
    nvme_path: str | None = None
    activation_checkpointing: bool = False
    bf16: bool = True
    optimizer: str = "AdamW"
    scheduler: Schedule | None = None
    micro_batch: int | None = None
    accumulation: int | None = None
    global_batch: int | None = None
    world_size: int | None = None
    learning_rate: float | None = None
    adam_beta1: float | None = None
    adam_beta2: float | None = None
    adam_epsilon: float | None = None
    weight_decay: float | None = None
    warmup_steps: int | None = None
    total_steps: int | None = None
    max_grad_norm: float | None = None
    model: ModelShape | None = None


PRESETS: dict[str, GenerateOptions] = {
    "zero1": GenerateOptions(stage=1),
    "zero2": GenerateOptions(stage=2),
    "zero2_offload": GenerateOptions(stage=2, offload="optimizer"),
    "zero3": GenerateOptions(stage=3),
    "zero3_offload": GenerateOptions(stage=3, offload="optimizer"),
    "zero3_offload_all": GenerateOptions(stage=3, offload="all"),
}
"""The memory regimes, from the fastest to the one that needs least GPU memory."""


def generate(options: GenerateOptions) -> dict[str, Any]:
    """A ds_config for these choices: plain DeepSpeed JSON, also for the Hugging Face Trainer.

    Raises:
        ConfigError: the choices contradict each other (all contradictions in one report).
    """
    raise_if_errors(_contradictions(options), "generate")
    config: dict[str, Any] = {"bf16": {"enabled": options.bf16}}
    # Stage 2 with offload is left to the run: fp32 sums cost GPU memory there (resolve_training.accumulation_dtype).
    if options.bf16 and options.stage > 0 and (options.stage, options.offload) != (2, "optimizer"):
        config["data_types"] = {"grad_accum_dtype": "fp32"}
        if options.stage == 1:  # reduced once a step; in bf16 the fp32 sum would be rounded on the way
            config["communication_data_type"] = "fp32"
    config["zero_optimization"] = _zero(options)
    if options.activation_checkpointing:
        config["activation_checkpointing"] = {"partition_activations": False, "cpu_checkpointing": False}
    config["optimizer"] = _optimizer(options)
    if options.scheduler:
        config["scheduler"] = _scheduler(options)
    config |= _batch(options)
    config["gradient_clipping"] = AUTO if options.max_grad_norm is None else float(options.max_grad_norm)
    config["zero_allow_untested_optimizer"] = True
    config["steps_per_print"] = NEVER_PRINT
    config["wall_clock_breakdown"] = False
    from bigtrain.config.lint import check

    check(config, name="generate", world_size=options.world_size, model=options.model)
    return config


def dump(config: dict[str, Any]) -> str:
    """The text of a ds_config file."""
    return json.dumps(config, indent=2) + "\n"


def _contradictions(o: GenerateOptions) -> list[Problem]:
    def no(path: str, value: Any, why: str, fix: str) -> Problem:
        return Problem(path, value, "error", why, fix)

    found = []
    if o.stage not in (0, 1, 2, 3):
        found.append(no("stage", o.stage, "there are ZeRO stages 0 to 3", "choose 0, 1, 2 or 3"))
    for name, least in (("warmup_steps", 0), ("total_steps", 1)):
        value = getattr(o, name)
        if value is not None and value < least:
            found.append(no(name, value, f"must be a whole number of at least {least}", f"choose {least} or more"))
    if o.warmup_steps is not None and o.total_steps is not None and o.warmup_steps > o.total_steps:
        found.append(no("warmup_steps", o.warmup_steps, f"more than the run's {o.total_steps} steps", "shorten the warm-up"))
    if o.offload not in ("none", "optimizer", "all"):
        found.append(no("offload", o.offload, "unknown choice", "choose none, optimizer or all"))
    if o.offload != "none" and o.stage == 0:
        found.append(no("offload", o.offload, "nothing can be offloaded at stage 0", "choose stage 1, 2 or 3"))
    if o.offload == "all" and o.stage in (1, 2):
        found.append(no("offload", "all", "parameters are offloaded at stage 3 only", "choose stage 3, or optimizer"))
    if o.nvme_path is not None and (o.offload == "none" or o.stage != 3):
        found.append(no("nvme_path", o.nvme_path, "needs stage 3 and offload optimizer or all", "choose them"))
    if o.scheduler not in (None, *_SCHEDULE_TYPE):
        found.append(no("scheduler", o.scheduler, "unknown choice", f"choose {', '.join(_SCHEDULE_TYPE)}"))
    for name in ("micro_batch", "accumulation", "global_batch", "world_size"):
        value = getattr(o, name)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            found.append(no(name, value, "must be a whole number of at least 1", "choose 1 or more"))
    return found or _batch_contradiction(o)


def _batch_contradiction(o: GenerateOptions) -> list[Problem]:
    given = _given(o)
    try:
        if o.world_size:
            solve_batch(*given, o.world_size, "world_size")
        elif o.global_batch and o.global_batch % ((o.micro_batch or 1) * (o.accumulation or 1)):
            raise BatchError(
                f"{GLOBAL} {o.global_batch} is no multiple of {MICRO} {o.micro_batch or 1} x {ACCUMULATION} "
                f"{o.accumulation or 1}, so no number of ranks fits"
            )
    except BatchError as error:
        return [Problem(GLOBAL, o.global_batch, "error", str(error), "change one of the numbers named")]
    return []


def _given(o: GenerateOptions) -> tuple[Given | None, Given | None, Given | None]:
    micro, accumulation, total = (Given(v, "option") if v else None for v in
                                  (o.micro_batch, o.accumulation, o.global_batch))  # fmt: skip
    return micro, accumulation, total


def _batch(o: GenerateOptions) -> dict[str, Any]:
    """Numbers where they are known, else "auto": never a triple that some world size contradicts."""
    known = sum(v is not None for v in (o.micro_batch, o.accumulation, o.global_batch))
    if o.world_size and known:
        batch = solve_batch(*_given(o), o.world_size, "world_size")
        return {GLOBAL: batch.total, MICRO: batch.micro, ACCUMULATION: batch.accumulation}
    return {GLOBAL: o.global_batch or AUTO, MICRO: o.micro_batch or AUTO, ACCUMULATION: o.accumulation or AUTO}


def bucket_sizes(model: ModelShape | None) -> dict[str, int]:
    """Hugging Face's formulas, or DeepSpeed's defaults without a hidden size."""
    hidden = model.hidden_size if model else None
    return defaults.bucket_elems(hidden) if hidden else dict(FALLBACK)


def _zero(o: GenerateOptions) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": o.stage}
    if o.stage == 0:
        return zero
    if o.offload != "none":
        zero["offload_optimizer"] = _offload(o.nvme_path)
    if o.offload == "all":
        zero["offload_param"] = _offload(o.nvme_path)
    zero |= {"overlap_comm": True, "contiguous_gradients": True, "reduce_scatter": True}
    if o.optimizer.lower() == "muon" and o.stage == 3:
        zero["reduce_scatter"] = False
    if o.stage < 3:
        return zero | {"reduce_bucket_size": BUCKET, "allgather_bucket_size": BUCKET, "allgather_partitions": True}
    sizes: dict[str, Any] = dict(bucket_sizes(o.model)) if o.model else dict.fromkeys(FALLBACK, AUTO)
    return zero | sizes | {
        "stage3_max_live_parameters": 10**9,
        "stage3_max_reuse_distance": 10**9,
        "sub_group_size": 10**9,
        "stage3_gather_16bit_weights_on_model_save": True,
    }  # fmt: skip


def _offload(nvme_path: str | None) -> dict[str, Any]:
    where = {"device": "nvme", "nvme_path": nvme_path} if nvme_path else {"device": "cpu"}
    return where | {"pin_memory": True}


def _optimizer(o: GenerateOptions) -> dict[str, Any]:
    betas = AUTO if o.adam_beta1 is None and o.adam_beta2 is None else [
        0.9 if o.adam_beta1 is None else o.adam_beta1, 0.999 if o.adam_beta2 is None else o.adam_beta2]  # fmt: skip
    params = {"lr": _or_auto(o.learning_rate), "betas": betas, "eps": _or_auto(o.adam_epsilon),
              "weight_decay": _or_auto(o.weight_decay)}  # fmt: skip
    if o.optimizer.lower() == "lion":
        params.pop("eps")
    return {"type": o.optimizer, "params": params}


def _or_auto(value: float | None) -> Any:
    return AUTO if value is None else value


def _scheduler(o: GenerateOptions) -> dict[str, Any]:
    """Always with its peak rate and its length: DeepSpeed's defaults are 0.001 and an error (DeepSpeed#7303)."""
    warmup = AUTO if o.warmup_steps is None else max(1, o.warmup_steps)
    total = AUTO if o.total_steps is None else o.total_steps
    kind = _SCHEDULE_TYPE[o.scheduler]  # type: ignore[index]
    if kind == "WarmupCosineLR":
        params: dict[str, Any] = {"warmup_min_ratio": 0.0, "cos_min_ratio": 0.0}
    else:
        params = {"warmup_min_lr": 0.0, "warmup_max_lr": _or_auto(o.learning_rate)}
    params |= {"warmup_num_steps": warmup, "warmup_type": "linear"}
    if kind != "WarmupLR":
        params["total_num_steps"] = total
    return {"type": kind, "params": params}
