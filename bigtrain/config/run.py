"""What the command line says about a run, as far as the ds_config is concerned."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from bigtrain import defaults


@dataclass(frozen=True, kw_only=True)
class RunValues:
    """Values that a run decides. None means "the user did not say", so the file or a default decides.

    Attributes:
        micro_batch: rows a rank sends through the model at once.
        accumulation: micro batches per optimizer step.
        global_batch: rows per optimizer step over all ranks.
        learning_rate, adam_beta1, adam_beta2, adam_epsilon, weight_decay: optimizer settings.
        optim: `adamw`, `adamw_8bit`, `muon`, or another row of `bigtrain.optim.OPTIMIZERS`.
        lr_scheduler_type: `linear`, `cosine`, `constant`, `wsd`.
        warmup_steps, total_steps: optimizer steps.
        max_grad_norm: gradients are scaled down to this global norm; 0 switches clipping off.
        bf16: train in bfloat16 with fp32 master weights.
        gradient_checkpointing: recompute activations in the backward pass.
        seed: random seed.
        seq_len: tokens in a row.
    """

    micro_batch: int | None = None
    accumulation: int | None = None
    global_batch: int | None = None
    learning_rate: float | None = None
    adam_beta1: float | None = None
    adam_beta2: float | None = None
    adam_epsilon: float | None = None
    weight_decay: float | None = None
    optim: str | None = None
    lr_scheduler_type: str | None = None
    warmup_steps: int | None = None
    total_steps: int | None = None
    max_grad_norm: float | None = None
    bf16: bool | None = None
    gradient_checkpointing: bool | None = None
    seed: int | None = None
    seq_len: int | None = None

    def given(self) -> dict[str, Any]:
        """Only what the user said."""
        return {f.name: v for f in fields(self) if (v := getattr(self, f.name)) is not None}


DEFAULTS = RunValues(
    learning_rate=5e-5,
    adam_beta1=0.9,
    adam_beta2=0.999,
    adam_epsilon=1e-8,
    weight_decay=0.0,
    optim=defaults.OPTIM,
    lr_scheduler_type="linear",
    warmup_steps=0,
    max_grad_norm=1.0,
    gradient_checkpointing=defaults.GRADIENT_CHECKPOINTING,
)
"""What holds when neither the file nor the user says anything (the values of transformers' TrainingArguments)."""

FLAGS = {
    "micro_batch": "--per_device_train_batch_size",
    "accumulation": "--gradient_accumulation_steps",
    "global_batch": "global batch",
    "learning_rate": "--learning_rate",
    "adam_beta1": "--adam_beta1",
    "adam_beta2": "--adam_beta2",
    "adam_epsilon": "--adam_epsilon",
    "weight_decay": "--weight_decay",
    "optim": "--optim",
    "lr_scheduler_type": "--lr_scheduler_type",
    "warmup_steps": "--warmup_steps",
    "total_steps": "--max_steps or --num_train_epochs",
    "max_grad_norm": "--max_grad_norm",
    "bf16": "--bf16",
    "gradient_checkpointing": "--gradient_checkpointing",
}
"""How a value is called on the command line of launch/train.py, for messages."""
