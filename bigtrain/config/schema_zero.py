"""`zero_optimization` in deepspeed 0.19.8 (runtime/zero/config.py, offload_config.py, zenflow_config.py)."""

from __future__ import annotations

import sys

from bigtrain.config.schema import Key, choice, flag, integer, number, section, text

DEVICES = ("none", "cpu", "nvme")
STAGE_3 = "stage 3"
STAGE_1_2 = "stage 1 or 2"
ZERO = "stage 1, 2 or 3"

OFFLOAD_PARAM = {
    "device": choice("none", *DEVICES),
    "nvme_path": text(None, needs=("offload_param on nvme",)),
    "buffer_count": integer(5, least=0, needs=("offload_param on nvme",)),
    "buffer_size": integer(10**8, least=0, needs=("offload_param on nvme",)),
    "max_in_cpu": integer(10**9, least=0, needs=("offload_param on nvme",)),
    "pin_memory": flag(True, needs=("offload_param",), gpu_only=True, cpu_value=False),
}
OFFLOAD_OPTIMIZER = {
    "device": choice("none", *DEVICES),
    "nvme_path": text(None, needs=("offload_optimizer on nvme",)),
    "buffer_count": integer(4, least=0),  # on NVMe, and of the optimizers that stream their state
    "pin_memory": flag(True, needs=("offload_optimizer",), gpu_only=True, cpu_value=False),
    "pipeline_read": flag(needs=("offload_optimizer on nvme",)),
    "pipeline_write": flag(needs=("offload_optimizer on nvme",)),
    "fast_init": flag(needs=("offload_optimizer on nvme",)),
    "ratio": number(1.0, least=0, most=1, needs=("offload_optimizer",)),  # which stages: rules_zero._partial
    "super_offload": flag(needs=("offload_optimizer", STAGE_3), gpu_only=True, cpu_value=False),
    "cpuadam_cores_perc": number(0.8, least=0, most=1, needs=("super_offload",)),
}
ZENFLOW = {
    "topk_ratio": number(0.1, above=0, below=1),
    "select_strategy": choice("auto", "auto", "step", "epoch", auto="native"),
    "select_interval": integer("auto", least=0, auto="native"),
    "update_interval": integer("auto", least=1, auto="native"),
    "overlap_step": flag(),
    "offload": flag(),
    "auto_ratio": number(0.99, least=0, most=1),
    "full_warm_up_rounds": integer(0, least=0),
    "pt_reserved_cores_perc": number(0.5, least=0, most=1),
    "steps_per_epoch": integer(None, deprecated="DeepSpeed sets it itself while running; remove it"),
}
# Each may also be one string, which DeepSpeed turns into a list.
LEAF_MODULE = {name: Key(kind="names") for name in ("classes", "names", "name_suffixes")}

_CPU_OFFLOAD = 'write "%s": {"device": "cpu"}'
ZERO_KEYS: dict[str, Key] = {
    "stage": choice(0, 0, 1, 2, 3),
    "contiguous_gradients": flag(True, needs=(ZERO,)),
    "reduce_scatter": flag(True, needs=(ZERO,)),
    "reduce_bucket_size": integer(5 * 10**8, above=0, needs=(ZERO,)),
    "use_multi_rank_bucket_allreduce": flag(True, needs=(STAGE_1_2,)),
    "allgather_partitions": flag(True, needs=(STAGE_1_2,)),
    "allgather_bucket_size": integer(5 * 10**8, least=0, needs=(STAGE_1_2,)),
    "overlap_comm": flag(None, needs=(ZERO,), gpu_only=True, cpu_value=False),
    "compute_grad_norm": flag(True),
    "load_from_fp32_weights": flag(True, needs=(ZERO,)),
    "elastic_checkpoint": flag(needs=(STAGE_1_2,)),
    "offload_param": section(OFFLOAD_PARAM, default=None, nullable=True, strict=True),
    "offload_optimizer": section(OFFLOAD_OPTIMIZER, default=None, nullable=True, strict=True),
    "zenflow": section(ZENFLOW, default=None, nullable=True, strict=True, needs=(ZERO, "offload_optimizer")),
    "sub_group_size": integer(10**9, least=0, needs=(STAGE_3,)),
    "cpu_offload_param": flag(None, deprecated=_CPU_OFFLOAD % "offload_param"),
    "cpu_offload_use_pin_memory": flag(
        None, deprecated='DeepSpeed ignores it; write "pin_memory" inside offload_param or offload_optimizer'
    ),
    "cpu_offload": flag(None, deprecated=_CPU_OFFLOAD % "offload_optimizer"),
    "stage3_prefetch_bucket_size": integer(5 * 10**7, least=0, also="prefetch_bucket_size", needs=(STAGE_3,)),
    "stage3_param_persistence_threshold": integer(10**5, least=0, also="param_persistence_threshold", needs=(STAGE_3,)),
    "stage3_model_persistence_threshold": integer(sys.maxsize, least=0, also="model_persistence_threshold", needs=(STAGE_3,)),
    "stage3_max_live_parameters": integer(10**9, least=0, also="max_live_parameters", needs=(STAGE_3,)),
    "stage3_max_reuse_distance": integer(10**9, least=0, also="max_reuse_distance", needs=(STAGE_3,)),
    "stage3_gather_16bit_weights_on_model_save": flag(also="gather_16bit_weights_on_model_save", needs=(STAGE_3,)),
    "stage3_module_granularity_threshold": integer(0, also="module_granularity_threshold", needs=(STAGE_3,)),
    "stage3_use_all_reduce_for_fetch_params": flag(also="use_all_reduce_for_fetch_params", needs=(STAGE_3,)),
    "stage3_allgather_sequential": flag(also="allgather_sequential", needs=(STAGE_3,)),
    "stage3_gather_fp16_weights_on_model_save": flag(
        deprecated="write stage3_gather_16bit_weights_on_model_save", needs=(STAGE_3,)
    ),
    "ignore_unused_parameters": flag(True, needs=("stage 2",)),
    "legacy_stage1": flag(),
    "round_robin_gradients": flag(needs=(STAGE_1_2,)),
    "parameter_alignment": flag(needs=(STAGE_1_2,)),
    "zero_hpz_partition_size": integer(1, least=0, needs=(STAGE_3,)),
    "zero_quantized_weights": flag(needs=(STAGE_3,), gpu_only=True, cpu_value=False),
    "zero_quantized_nontrainable_weights": flag(needs=(STAGE_3,), gpu_only=True, cpu_value=False),
    "zero_quantized_gradients": flag(needs=(STAGE_3,), gpu_only=True, cpu_value=False),
    "memory_efficient_linear": flag(True, needs=(STAGE_3,)),
    "pipeline_loading_checkpoint": flag(needs=(STAGE_3,)),
    "override_module_apply": flag(True, needs=(STAGE_3,)),
    "log_trace_cache_warnings": flag(needs=(STAGE_3,)),
    "enable_sanity_checks": flag(needs=(STAGE_3,)),
    "save_muon_momentum_buffer_in_memory": flag(needs=(STAGE_3, "offload_optimizer on nvme", "muon")),
    "leaf_module": section(LEAF_MODULE, strict=True, needs=(STAGE_3,)),
    # Removed from DeepSpeed (issue 8489); 0.19.8 stops when it sees them.
    "mics_shard_size": integer(refused="MiCS was removed from DeepSpeed 0.19; remove the key"),
    "mics_hierarchical_params_gather": flag(refused="MiCS was removed from DeepSpeed 0.19; remove the key"),
    "zeropp_loco_param": Key(
        kind="any", refused="LoCo-ZeRO++ was removed from DeepSpeed 0.19; remove the key to use plain ZeRO++"
    ),
}
ZERO_SECTION = section(ZERO_KEYS, strict=True)
