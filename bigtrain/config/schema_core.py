"""Top level, precision, optimizer and scheduler keys of deepspeed 0.19.8.

Sources: runtime/config.py, runtime/constants.py, runtime/precision_config.py, runtime/lr_schedules.py, the optimizers'
own signatures under ops/, runtime/engine.py:_configure_basic_optimizer.
"""

from __future__ import annotations

from bigtrain.config.schema import Key, anything, choice, flag, integer, listing, number, section, text

_REMOVED = "removed from DeepSpeed 0.19, which stops when it sees the key; "
_BF16_NOTE = "fp16 enabled"

BF16 = {
    "enabled": flag(),
    "immediate_grad_update": flag(needs=("bf16 enabled", "stage 1")),
    "check_grad_overflow": flag(True, needs=("bf16 enabled",)),
    "bf16_master_weights_and_grads": flag(needs=("bf16 enabled",)),
    "bf16_optimizer_states": flag(needs=("bf16 enabled",)),
}
FP16 = {
    "enabled": flag(),
    "auto_cast": flag(needs=(_BF16_NOTE,)),
    "loss_scale": number(0, least=0, needs=(_BF16_NOTE,)),
    "initial_scale_power": integer(16, least=0, needs=(_BF16_NOTE,)),
    "loss_scale_window": integer(1000, above=0, needs=(_BF16_NOTE,)),
    "hysteresis": integer(2, least=0, needs=(_BF16_NOTE,)),
    "consecutive_hysteresis": flag(needs=(_BF16_NOTE,)),
    "min_loss_scale": integer(1, above=0, needs=(_BF16_NOTE,)),
    "fp16_master_weights_and_grads": flag(needs=(_BF16_NOTE,)),
}
DTYPES = ("fp32", "fp16", "bf16", "float32", "float16", "bfloat16", "float", "half",
          "torch.float32", "torch.float16", "torch.bfloat16")  # fmt: skip
DATA_TYPES = {
    "grad_accum_dtype": choice(None, *DTYPES, None),
    "param_dtype": choice(None, *DTYPES, None),
    "buffer_dtype": choice(None, *DTYPES, None),
    "keep_in_fp32_modules": anything("auto", auto="native"),
}
AUTOCAST = {
    "enabled": flag(),
    "dtype": choice(None, *DTYPES, None),
    "lower_precision_safe_modules": listing(None),
}

# One row per optimizer argument; which optimizer takes which is OPTIMIZERS below.
_PARAM = {
    "lr": number(1e-3, least=0),
    "betas": Key(kind="betas", default=[0.9, 0.999]),
    "eps": number(1e-8, least=0),
    "weight_decay": number(0.0, least=0),
    "momentum": number(0.95, least=0, below=1),
    "bias_correction": flag(True),
    "amsgrad": flag(),
    "adam_w_mode": flag(True),
    "torch_adam": flag(),
    "foreach": flag(None, needs=("torch_adam",)),
    "fused": flag(None, needs=("torch_adam",)),
    "set_grad_none": flag(True),
    "fp32_optimizer_states": flag(True, needs=("offload_optimizer",)),
    "eps_inside_sqrt": flag(),
    "max_coeff": number(10.0, above=0),
    "min_coeff": number(0.01, above=0),
    "ns_method": text(),
    "muon_lr": number(least=0),
    "adam_lr": number(least=0),
    "lr_decay": number(0, least=0),
    "initial_accumulator_value": number(0, least=0),
    "max_grad_norm": Key(kind="float", refused="DeepSpeed stops on it here; write the number as top-level gradient_clipping"),
}


def _take(*names: str) -> dict[str, Key]:
    return {name: _PARAM[name] for name in (*names, "max_grad_norm")}


_ADAM = _take("lr", "betas", "eps", "weight_decay", "bias_correction", "amsgrad", "adam_w_mode", "torch_adam",
              "foreach", "fused", "set_grad_none", "fp32_optimizer_states")  # fmt: skip
_GENERIC = _take("lr", "betas", "eps", "weight_decay", "momentum")
OPTIMIZERS: dict[str, Key] = {
    "adam": section(_ADAM),
    "adamw": section(_ADAM),
    "adagrad": section(_take("lr", "eps", "weight_decay", "amsgrad", "fp32_optimizer_states", "lr_decay",
                             "initial_accumulator_value")),
    "lamb": section(_take("lr", "betas", "eps", "weight_decay", "bias_correction", "amsgrad", "eps_inside_sqrt",
                          "max_coeff", "min_coeff")),
    "lion": section(_take("lr", "betas", "weight_decay", "set_grad_none", "fp32_optimizer_states")),
    "muon": section(_take("lr", "betas", "eps", "weight_decay", "momentum", "ns_method", "muon_lr", "adam_lr",
                          "adam_w_mode", "torch_adam", "fp32_optimizer_states")),
    "muadam": section(_GENERIC, open=True),
    "muadamw": section(_GENERIC, open=True),
    "musgd": section(_GENERIC, open=True),
}  # fmt: skip
"""DeepSpeed's own optimizers, by lower-case `optimizer.type` (it lowers these names itself)."""

TORCH_OPTIMIZERS = ("ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "LBFGS", "Muon", "NAdam",
                    "RAdam", "RMSprop", "Rprop", "SGD", "SparseAdam")  # fmt: skip
TORCH_OPTIMIZER_PARAMS = section(_GENERIC, open=True)
REMOVED_OPTIMIZERS = ("onebitadam", "zerooneadam", "onebitlamb")

_WARMUP = {
    "warmup_min_lr": Key(kind="lr", default=0.0),
    "warmup_max_lr": Key(kind="lr", default=None, nullable=True),
    "warmup_num_steps": integer(1000, above=0),
    "warmup_type": choice("log", "log", "linear"),
    "last_batch_iteration": integer(-1, least=-1),
}
SCHEDULERS: dict[str, Key] = {
    "WarmupLR": section(_WARMUP),
    "WarmupDecayLR": section({"total_num_steps": integer(above=0), **_WARMUP}),
    "WarmupCosineLR": section({
        "total_num_steps": integer(above=0),
        "warmup_min_ratio": number(0.0, least=0),
        "warmup_num_steps": integer(1000, above=0),
        "cos_min_ratio": number(0.0001, least=0),
        "warmup_type": choice("log", "log", "linear"),
        "last_batch_iteration": integer(-1, least=-1),
    }),
    "OneCycle": section({
        "cycle_min_lr": Key(kind="lr"),
        "cycle_max_lr": Key(kind="lr"),
        "decay_lr_rate": number(0.0),
        "cycle_first_step_size": integer(2000, above=0),
        "cycle_second_step_size": integer(None, least=0),
        "cycle_first_stair_count": integer(0, least=0),
        "cycle_second_stair_count": integer(None, least=0),
        "decay_step_size": integer(0, least=0),
        "cycle_momentum": flag(True),
        "cycle_min_mom": number(0.8, least=0, below=1),
        "cycle_max_mom": number(0.9, least=0, below=1),
        "decay_mom_rate": number(0.0),
        "last_batch_iteration": integer(-1, least=-1),
    }),
    "LRRangeTest": section({
        "lr_range_test_min_lr": Key(kind="lr", default=1e-3),
        "lr_range_test_step_size": integer(2000, above=0),
        "lr_range_test_step_rate": number(1.0),
        "lr_range_test_staircase": flag(),
        "last_batch_iteration": integer(-1, least=-1),
    }),
}  # fmt: skip
REQUIRED_PARAMS = {"WarmupDecayLR": ("total_num_steps",), "WarmupCosineLR": ("total_num_steps",),
                   "OneCycle": ("cycle_min_lr", "cycle_max_lr")}  # fmt: skip
TORCH_SCHEDULERS = ("ConstantLR", "CosineAnnealingLR", "CosineAnnealingWarmRestarts", "CyclicLR", "ExponentialLR",
                    "LambdaLR", "LinearLR", "MultiStepLR", "MultiplicativeLR", "OneCycleLR", "PolynomialLR",
                    "ReduceLROnPlateau", "StepLR")  # fmt: skip

_COMM = choice(None, "fp16", "bf16", "fp32", None, any_case=True)
OPTIMIZER = {
    "type": text(auto=""),
    "params": section({}, open=True),
    "legacy_fusion": flag(),
}
SCHEDULER = {"type": text(auto=""), "params": section({}, open=True)}

CORE_KEYS: dict[str, Key] = {
    "train_batch_size": integer(None, above=0),
    "train_micro_batch_size_per_gpu": integer(None, above=0),
    "gradient_accumulation_steps": integer(None, above=0),
    "managed_gradient_accumulation": flag(True),
    "gradient_clipping": number(1.0, least=0),
    "steps_per_print": integer(None, above=0),
    "dump_state": flag(),
    "disable_python_gc": flag(),
    "disable_allgather": flag(),
    "communication_data_type": _COMM,
    "seq_parallel_communication_data_type": _COMM,
    "prescale_gradients": flag(),
    "gradient_predivide_factor": number(1.0, above=0),
    "gradient_allreduce_op": choice("mean", "mean", "sum", any_case=True),
    "bf16": section(BF16, strict=True),
    "bfloat16": section(BF16, strict=True, deprecated="write bf16"),
    "fp16": section(FP16, strict=True),
    "torch_autocast": section(AUTOCAST),
    "data_types": section(DATA_TYPES),
    "optimizer": section(OPTIMIZER),
    "scheduler": section(SCHEDULER),
    "zero_allow_untested_optimizer": flag(),
    "zero_force_ds_cpu_optimizer": flag(True),
    "wall_clock_breakdown": flag(),
    "memory_breakdown": flag(),
    "dataloader_drop_last": flag(),
    "log_level": choice(None, "debug", "info", "warning", "error", "critical", None),
    "vocabulary_size": integer(None, above=0),
    "use_data_before_expert_parallelism": flag(),
    "sequence_parallel_size": integer(1, above=0),
    "data_parallel_size": integer(above=0),
    "allgather_size": integer(
        5 * 10**8, least=0, deprecated='belongs to `"zero_optimization": true`; write allgather_bucket_size there'
    ),
}
REMOVED_KEYS: dict[str, Key] = {
    name: Key(kind="any", refused=_REMOVED + then)
    for name, then in {
        "nebula": "remove it",
        "compression_training": "remove it; the model would train uncompressed",
        "amp": "write bf16.enabled true",
        "quantize_training": "remove it",
        "sparse_gradients": "remove it; sparse embedding gradients are detected without a flag",
        "eigenvalue": "remove it",
        "sparse_attention": "remove it",
        "elasticity": "remove it and set the batch numbers directly",
        "graph_harvesting": "remove it",
        "curriculum_learning": "write data_efficiency.data_sampling.curriculum_learning",
        "progressive_layer_drop": "remove it",
    }.items()
}
NEVER_READ: dict[str, str] = {
    "comms_config": "DeepSpeed reads comms_logger, not this",
    "monitor_config": "DeepSpeed reads tensorboard, wandb, csv_monitor and comet at top level, not this",
}
"""Keys that other projects ship although DeepSpeed has never read them: harmless, so a note and not an error."""
