"""All other sections of deepspeed 0.19.8, and the root that joins the tables.

Most of these are plain dictionary lookups in DeepSpeed, which is why it never complains about a misspelt key there.
"""

from __future__ import annotations

from bigtrain.config.schema import Key, anything, choice, flag, integer, listing, number, section, text, with_needs
from bigtrain.config.schema_core import CORE_KEYS, REMOVED_KEYS
from bigtrain.config.schema_zero import ZERO_SECTION

_BROKEN_WRITER = (
    "files of DeepSpeed's own alternative writers (python, fast, decoupled) cannot be read back by deepspeed 0.19.8; "
    "remove the section: bigtrain writes its own checkpoints"
)
ACTIVATION_CHECKPOINTING = {
    "partition_activations": flag(),
    "number_checkpoints": integer(None, above=0),
    "contiguous_memory_optimization": flag(),
    "synchronize_checkpoint_boundary": flag(),
    "profile": flag(),
    "cpu_checkpointing": flag(),
}
FLOPS_PROFILER = {
    "enabled": flag(),
    **with_needs(
        {
            "recompute_fwd_factor": number(0.0, least=0),
            "profile_step": integer(1, least=0),
            "module_depth": integer(-1, least=-1),
            "top_modules": integer(1, least=0),
            "detailed": flag(True),
            "output_file": text(None),
        },
        "flops_profiler enabled",
    ),
}
COMMS_LOGGER = {
    "enabled": flag(),
    "prof_all": flag(True),
    "prof_ops": listing([]),
    "verbose": flag(),
    "debug": flag(),
}
_JOB = {"enabled": flag(), "output_path": text(""), "job_name": text("DeepSpeedJobName")}
MONITORS = {
    "tensorboard": section(_JOB, strict=True),
    "csv_monitor": section(_JOB, strict=True),
    "wandb": section({"enabled": flag(), "group": text(None), "team": text(None), "project": text("deepspeed")}, strict=True),
    "comet": section(
        {
            "enabled": flag(),
            "samples_log_interval": integer(100, above=0),
            "project": text(None),
            "workspace": text(None),
            "api_key": text(None),
            "experiment_name": text(None),
            "experiment_key": text(None),
            "online": flag(None),
            "mode": choice(None, "get", "create", "get_or_create", None),
        },
        strict=True,
    ),
}
CHECKPOINT = {
    "tag_validation": choice("Warn", "Warn", "Ignore", "Fail", any_case=True),
    "load_universal": flag(),
    "use_node_local_storage": flag(),
    "parallel_write": section({"pipeline_stage": flag()}),
    "checkpoint_serialization": flag(True),
    "writer": Key(kind="any", default=None, nullable=True, refused=_BROKEN_WRITER),
}
AIO = with_needs(
    {
        "block_size": integer(1048576, above=0),
        "queue_depth": integer(8, above=0),
        "intra_op_parallelism": integer(1, above=0),
        "single_submit": flag(),
        "overlap_events": flag(True),
        "use_gds": flag(gpu_only=True, cpu_value=False),
        "thread_count": integer(deprecated="DeepSpeed no longer reads it; write intra_op_parallelism"),
    },
    "offload on nvme",
)
TIMERS = {"throughput": section({"enabled": flag(True), "synchronized": flag(True)}, strict=True)}
COMPILE = {
    "deepcompile": flag(),
    "autoep_non_moe": flag(),
    **with_needs(
        {
            "free_activation": flag(),
            "free_activation_threshold": integer(10 * 1024 * 1024, least=0),
            "offload_activation": flag(),
            "offload_activation_pin_memory": flag(True, gpu_only=True, cpu_value=False),
            "offload_opt_states": flag(),
            "double_buffer": flag(True),
            "symmetric_memory": flag(gpu_only=True, cpu_value=False),
            "debug_log": flag(),
            "offload_parameters": flag(),
            "sync_before_reduce": flag(),
            "sync_after_reduce": flag(),
            "sync_before_allgather": flag(),
            "sync_after_allgather": flag(),
            "keep_int_input_tensors": flag(True),
            "keep_all_input_tensors": flag(),
            "passes": listing(None),
        },
        "deepcompile",
    ),
}
TENSOR_PARALLEL = {
    "dtype": anything(),
    "autotp_size": integer(0, least=0),
    "tp_overlap_comm": flag(),
    "vocab_parallel_lm_head": flag(None),
    "vocab_parallel_ce_backend": choice("torch", "torch", "liger"),
    "tensor_parallel": section(
        {
            "tp_size": integer(1, above=0),
            "tp_grain_size": integer(1, above=0),
            "mpu": anything(),
            "tp_group": anything(),
        },
        also="tp",
        strict=True,
    ),
    "injection_policy_tuple": anything(None),
    "partition_config": anything(None),
    "preset_model": text(None),
    "keep_module_on_host": flag(),
    "replace_with_kernel_inject": flag(also="kernel_inject"),
}
EXPERT_PARALLEL = {
    "enabled": flag(),
    "autoep_size": integer(1, above=0),
    "expert_tensor_parallel_size": integer(1, above=0),
    "validate_folding_routing": flag(),
    "async_split_plan": flag(),
    "preset_model": text(None),
    "moe_layer_pattern": text(None),
    "expert_pattern": text(None),
    "router_pattern": text(None),
    "use_grouped_mm": flag(True),
    "disable_triton_grouped_mm": flag(),
    "route_norm": flag(None),
    "route_scale": number(1.0),
    "score_apply": choice("auto", "auto", "pre", "post", auto="native"),
    "combine_impl": choice("auto", "auto", "weighted_sum", "fused_weighted_sum", "legacy_bmm", auto="native"),
    "row_weighting_impl": choice("auto", "auto", "eager", "fused", auto="native"),
    "gate_up_impl": choice("separate", "separate", "fused"),
    "comm_backend": choice("comm", "comm", "deepep"),
    "comm_num_sm": integer(12, least=0),
    "comm_qp_margin": integer(4, least=0),
    "comm_max_tokens_per_rank": integer(0, least=0),
    "num_expert_groups": integer(None),
    "num_limited_groups": integer(None),
    "score_func": choice("auto", "auto", "softmax", "sigmoid", auto="native"),
    "top_k": anything("auto", auto="native"),
    "load_balance_coeff": anything(None),
    "routed_scaling_factor": anything("auto", auto="native"),
    "expert_w1": text(None),
    "expert_w2": text(None),
    "expert_w3": text(None),
    "num_experts_attr": text(None),
    "top_k_attr": text(None),
    "has_shared_experts": flag(None),
    "shared_experts_pattern": text(None),
    "shared_experts_gate_pattern": text(None),
    "expert_activation": text(None),
}
HYBRID_ENGINE = {
    "enabled": flag(),
    "max_out_tokens": integer(512, above=0),
    "inference_tp_size": integer(1, above=0),
    "release_inference_cache": flag(),
    "pin_parameters": flag(True),
    "tp_gather_partition_size": integer(8, above=0),
    "enable_cuda_graph": flag(gpu_only=True, cpu_value=False),
}
AUTOTUNING = {
    "enabled": flag(),
    "fast": flag(True),
    "results_dir": text("autotuning_results"),
    "exps_dir": text("autotuning_exps"),
    "overwrite": flag(True),
    "start_profile_step": integer(3, least=0),
    "end_profile_step": integer(5, least=0),
    "metric": choice("throughput", "throughput", "latency", "flops", "forward", "backward", "step"),
    "metric_path": text(None),
    "tuner_type": choice("gridsearch", "gridsearch", "random", "model_based"),
    "tuner_early_stopping": integer(5, least=0),
    "tuner_num_trials": integer(50, above=0),
    "arg_mappings": anything(None),
    "model_info": anything(None),
    "model_info_path": text(None),
    "mp_size": integer(1, above=0),
    "max_train_batch_size": integer(None, above=0),
    "min_train_batch_size": integer(1, above=0),
    "max_train_micro_batch_size_per_gpu": integer(1024, above=0),
    "min_train_micro_batch_size_per_gpu": integer(1, above=0),
    "num_tuning_micro_batch_sizes": integer(3, above=0),
}
DATA_EFFICIENCY = {
    "enabled": flag(),
    "seed": integer(1234),
    "data_sampling": section(
        {
            "enabled": flag(),
            "num_epochs": integer(1000, above=0),
            "num_workers": integer(0, least=0),
            "pin_memory": flag(gpu_only=True, cpu_value=False),
            "curriculum_learning": section({}, open=True),
            "dynamic_batching": section({}, open=True),
        }
    ),
    "data_routing": section({"enabled": flag(), "random_ltd": section({}, open=True)}),
}
PIPELINE = {
    "stages": anything("auto", auto="native"),
    "partition": text("best"),
    "seed_layers": flag(),
    "activation_checkpoint_interval": integer(0, least=0),
    "pipe_partitioned": flag(True),
    "grad_partitioned": flag(True),
    "use_reentrant": flag(None),
}
WEIGHT_QUANTIZATION = {
    "enabled": flag(True),
    "num_bits": integer(8, above=0),
    "q_type": choice("symmetric", "symmetric", "asymmetric"),
    "q_groups": integer(1, above=0),
    "quantized_initialization": section({}, open=True),
    "post_init_quant": section({}, open=True),
}

ROOT = section(
    {
        **CORE_KEYS,
        "zero_optimization": ZERO_SECTION,
        "activation_checkpointing": section(ACTIVATION_CHECKPOINTING),
        "flops_profiler": section(FLOPS_PROFILER),
        "comms_logger": section(COMMS_LOGGER, strict=True),
        **MONITORS,
        "checkpoint": section(CHECKPOINT),
        "datastates_ckpt": Key(kind="any", refused=_BROKEN_WRITER),
        "aio": section(AIO),
        "timers": section(TIMERS),
        "compile": section(COMPILE, strict=True),
        "tensor_parallel": section(TENSOR_PARALLEL, strict=True),
        "expert_parallel": section(EXPERT_PARALLEL),
        "hybrid_engine": section(HYBRID_ENGINE, strict=True),
        "autotuning": section(AUTOTUNING),
        "data_efficiency": section(DATA_EFFICIENCY),
        "pipeline": section(PIPELINE),
        "weight_quantization": section(WEIGHT_QUANTIZATION, strict=True),
        **REMOVED_KEYS,
    }
)
"""The whole file."""
