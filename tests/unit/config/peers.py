"""Key/value facts of the ds_configs that other projects ship, written down here from reading their files.

CLEAN must lint without an error or a warning. BROKEN are shipped too, but deepspeed 0.19.8 itself refuses them or
ignores what they ask for: there an error is right, and the path of it is given.
"""

from __future__ import annotations

from typing import Any

A = "auto"
BATCH = {"train_batch_size": A, "train_micro_batch_size_per_gpu": A, "gradient_accumulation_steps": A}
CLIP = {"gradient_clipping": A}
ADAMW = {"type": "AdamW", "params": {"lr": A, "betas": A, "eps": A, "weight_decay": A}}
BF16 = {"enabled": A}
CPU = {"device": "cpu", "pin_memory": True}
NONE = {"device": "none", "pin_memory": True}


def fp16(power: int = 16, enabled: Any = A, **more: Any) -> dict[str, Any]:
    return {"enabled": enabled, "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": power,
            "hysteresis": 2, "min_loss_scale": 1, **more}  # fmt: skip


AXOLOTL_FP16 = fp16(32, auto_cast=False)
STAGE3_AUTO = {"reduce_bucket_size": A, "stage3_prefetch_bucket_size": A, "stage3_param_persistence_threshold": A}
STAGE3_1E9 = {"overlap_comm": True, "contiguous_gradients": True, "sub_group_size": 1e9, **STAGE3_AUTO,
              "stage3_max_live_parameters": 1e9, "stage3_max_reuse_distance": 1e9,
              "stage3_gather_16bit_weights_on_model_save": True}  # fmt: skip
SWIFT_TAIL = {**BATCH, **CLIP, "steps_per_print": 2000, "wall_clock_breakdown": False}
SWIFT_STAGE12 = {"allgather_partitions": True, "allgather_bucket_size": 2e8, "overlap_comm": True,
                 "reduce_scatter": True, "reduce_bucket_size": 2e8, "contiguous_gradients": True}  # fmt: skip
SWIFT_COSINE = {"type": "WarmupCosineLR", "params": {"total_num_steps": A, "warmup_num_steps": A}}
WARMUP = {"type": "WarmupLR", "params": {"warmup_min_lr": A, "warmup_max_lr": A, "warmup_num_steps": A}}
DECAY = {"type": "WarmupDecayLR", "params": {**WARMUP["params"], "total_num_steps": A}}  # type: ignore[dict-item]
LF_HEAD = {**BATCH, **CLIP, "zero_allow_untested_optimizer": True, "fp16": fp16(), "bf16": BF16}
LF_12 = {"allgather_partitions": True, "allgather_bucket_size": 5e8, "overlap_comm": False, "reduce_scatter": True,
         "reduce_bucket_size": 5e8, "contiguous_gradients": True, "round_robin_gradients": True}  # fmt: skip
LF_TAIL = {
    "comms_config": {"verbose": False},
    "monitor_config": {"enabled": True, "tag": "DeepSpeedMonitor", "csv_monitor": {"enabled": False}},
}
ACC_ADAM = {"type": "AdamW", "params": {"lr": A, "weight_decay": A, "torch_adam": True, "adam_w_mode": True}}
COSINE_1000 = {"type": "WarmupCosineLR", "params": {"total_num_steps": 1000, "warmup_min_ratio": 0,
               "warmup_num_steps": 100, "cos_min_ratio": 0.001, "warmup_type": "linear"}}  # fmt: skip
ADAMW_1E4 = {"type": "AdamW", "params": {"lr": 1e-4}}

CLEAN: dict[str, dict[str, Any]] = {
    # axolotl, deepspeed_configs/
    "axolotl zero1": {"zero_optimization": {"stage": 1, "overlap_comm": True}, "bf16": BF16, "fp16": AXOLOTL_FP16,
                      "optimizer": ADAMW, **BATCH, "wall_clock_breakdown": False},
    "axolotl zero2": {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"},
                      "contiguous_gradients": True, "overlap_comm": True}, "bf16": BF16, "fp16": AXOLOTL_FP16,
                      **BATCH, **CLIP, "wall_clock_breakdown": False},
    "axolotl zero3": {"zero_optimization": {"stage": 3, **STAGE3_1E9, "sub_group_size": 0,
                      "stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0}, "bf16": BF16,
                      "fp16": AXOLOTL_FP16, **BATCH, **CLIP, "wall_clock_breakdown": False},
    "axolotl zero3_bf16_cpuoffload_all": {
        "zero_force_ds_cpu_optimizer": False, "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": 3, "offload_optimizer": CPU, "offload_param": CPU, "overlap_comm": True,
                              "contiguous_gradients": True, "sub_group_size": 0, **STAGE3_AUTO,
                              "max_live_parameters": 0, "max_reuse_distance": 0,
                              "gather_16bit_weights_on_model_save": True},
        "bf16": {"enabled": True}, **BATCH, **CLIP, "wall_clock_breakdown": False},
    "axolotl zero3_bf16_cpuoffload_params": {
        "zero_optimization": {"stage": 3, "offload_param": CPU, **STAGE3_1E9, "sub_group_size": 0},
        "bf16": {"enabled": True}, **BATCH, **CLIP, "wall_clock_breakdown": False},
    # LLaMA-Factory, examples/deepspeed/
    "llamafactory ds_z0": {**LF_HEAD, "zero_optimization": {"stage": 0, **LF_12}, **LF_TAIL},
    "llamafactory ds_z2": {**LF_HEAD, "zero_optimization": {"stage": 2, **LF_12}, **LF_TAIL},
    "llamafactory ds_z2_offload": {**LF_HEAD, "zero_optimization": {"stage": 2, "offload_optimizer": CPU, **LF_12},
                                   **LF_TAIL},
    "llamafactory ds_z2_autotp": {"_comment": "supported models: see the tutorial", **LF_HEAD,
                                  "zero_optimization": {"stage": 2, **LF_12}, "tensor_parallel": {"autotp_size": 2}},
    "llamafactory ds_z3": {**LF_HEAD, "zero_optimization": {"stage": 3, **STAGE3_1E9, "overlap_comm": False}},
    "llamafactory ds_z3_offload": {**LF_HEAD, "zero_optimization": {"stage": 3, "offload_optimizer": CPU,
                                   "offload_param": CPU, **STAGE3_1E9, "overlap_comm": False}, **LF_TAIL},
    "llamafactory ds_z3_partial_offload": {**LF_HEAD, "zero_force_ds_cpu_optimizer": True,
                                           "zero_optimization": {"stage": 3, **STAGE3_1E9, "offload_optimizer":
                                           {"device": "cpu", "pin_memory": False}}},
    "llamafactory user act_ckpt": {
        **BATCH, **CLIP, "zero_allow_untested_optimizer": True, "fp16": {"enabled": False}, "bf16": {"enabled": True},
        "activation_checkpointing": {"partition_activations": True, "contiguous_memory_optimization": True,
                                     "synchronize_checkpoint_boundary": False},
        "zero_optimization": {"stage": 3, "overlap_comm": True, "reduce_scatter": True, "allgather_partitions": True,
                              "allgather_bucket_size": 200000000, "reduce_bucket_size": 200000000,
                              "stage3_param_persistence_threshold": 500000,
                              "stage3_module_granularity_threshold": 16}},
    # ms-swift, swift/llm/ds_config/
    "swift zero0_autotp": {"fp16": fp16(), "bf16": BF16, "zero_optimization": {"stage": 0, **SWIFT_STAGE12,
                           "overlap_comm": False}, "tensor_parallel": {"autotp_size": 1}, **SWIFT_TAIL},
    "swift zero1": {"fp16": fp16(), "bf16": BF16, "zero_optimization": {"stage": 1, "offload_optimizer": NONE,
                    **SWIFT_STAGE12}, **SWIFT_TAIL},
    "swift zero2": {"fp16": fp16(), "bf16": BF16, "optimizer": ADAMW, "scheduler": SWIFT_COSINE,
                    "zero_optimization": {"stage": 2, "offload_optimizer": NONE, **SWIFT_STAGE12}, **SWIFT_TAIL},
    "swift zero2_offload": {"fp16": fp16(), "bf16": BF16, "optimizer": ADAMW, "scheduler": SWIFT_COSINE,
                            "zero_optimization": {"stage": 2, "offload_optimizer": CPU, **SWIFT_STAGE12},
                            **SWIFT_TAIL},
    "swift zero3": {"fp16": fp16(), "bf16": BF16, "zero_optimization": {"stage": 3, "offload_optimizer": NONE,
                    "offload_param": NONE, **STAGE3_1E9, "zero_quantized_weights": False,
                    "zero_quantized_gradients": False}, **SWIFT_TAIL},
    "swift zero3_offload": {"fp16": fp16(), "bf16": BF16, "optimizer": ADAMW, "scheduler": SWIFT_COSINE,
                            "zero_optimization": {"stage": 3, "offload_optimizer": NONE, "offload_param": CPU,
                                                  **STAGE3_1E9}, **SWIFT_TAIL},
    # transformers, tests/deepspeed/ and docs
    "transformers ds_config_zero2": {"fp16": fp16(), "bf16": BF16, "optimizer": ADAMW, "scheduler": WARMUP,
                                     "zero_optimization": {"stage": 2, "offload_optimizer": CPU, **SWIFT_STAGE12},
                                     **SWIFT_TAIL},
    "transformers ds_config_zero3": {"fp16": fp16(), "bf16": BF16, "optimizer": ADAMW, "scheduler": WARMUP,
                                     "zero_optimization": {"stage": 3, "offload_optimizer": CPU, "offload_param": CPU,
                                                           **STAGE3_1E9}, **SWIFT_TAIL},
    "transformers docs stage 1": {"zero_optimization": {"stage": 1}},
    "transformers docs nvme (aio at top level)": {
        "bf16": BF16, "optimizer": ADAMW, "scheduler": WARMUP,
        "zero_optimization": {"stage": 3,
                              "offload_optimizer": {"device": "nvme", "nvme_path": "/local_nvme", "pin_memory": True,
                                                    "buffer_count": 4, "fast_init": False},
                              "offload_param": {"device": "nvme", "nvme_path": "/local_nvme", "pin_memory": True,
                                                "buffer_count": 5, "buffer_size": 1e8, "max_in_cpu": 1e9},
                              **STAGE3_1E9},
        "aio": {"block_size": 262144, "queue_depth": 32, "single_submit": False, "overlap_events": True},
        **SWIFT_TAIL},
    # accelerate, examples/deepspeed_config_templates/ and tests/deepspeed/
    "accelerate zero_stage1": {"fp16": fp16(enabled=True), "optimizer": ACC_ADAM, "scheduler": DECAY,
                               "zero_optimization": {"stage": 1, **SWIFT_STAGE12, "reduce_bucket_size": A},
                               **SWIFT_TAIL, "gradient_accumulation_steps": 1},
    "accelerate zero_stage2_offload": {"fp16": fp16(enabled=True), "optimizer": ACC_ADAM, "scheduler": DECAY,
                                       "zero_optimization": {"stage": 2, "offload_optimizer": CPU, **SWIFT_STAGE12,
                                                             "reduce_bucket_size": A},
                                       **SWIFT_TAIL, "gradient_accumulation_steps": 1},
    "accelerate zero_stage3_offload": {
        "fp16": fp16(enabled=True), "optimizer": {"type": "AdamW", "params": {"lr": A, "weight_decay": A}},
        "scheduler": DECAY, "zero_optimization": {"stage": 3, "offload_optimizer": CPU, "offload_param": CPU,
        **STAGE3_1E9, "stage3_gather_16bit_weights_on_model_save": A}, **SWIFT_TAIL, "gradient_accumulation_steps": 1},
    "accelerate tests zero2": {"fp16": fp16(), "bf16": BF16, "optimizer": ACC_ADAM, "scheduler": WARMUP,
                               "zero_optimization": {"stage": 2, "offload_optimizer": CPU, **SWIFT_STAGE12},
                               **SWIFT_TAIL, "gradient_accumulation_steps": 1},
    "accelerate tests zero3_model_only": {
        "fp16": fp16(), "bf16": BF16, "zero_optimization": {"stage": 3, "offload_optimizer": CPU, "offload_param": CPU,
        **STAGE3_1E9, "stage3_gather_16bit_weights_on_model_save": A}, "train_batch_size": 1},
    # DeepSpeedExamples, training/
    "examples zenflow": {
        "train_batch_size": 32, "bf16": {"enabled": True},
        "zero_optimization": {"stage": 2, "offload_optimizer": CPU, "zenflow": {"topk_ratio": 0.1,
                              "update_interval": 4, "full_warm_up_rounds": 0, "overlap_step": True}},
        "optimizer": {"type": "AdamW", "params": {"lr": 2e-5, "betas": [0.9, 0.999], "eps": 1e-8,
                                                  "weight_decay": 0.01}},
        "gradient_accumulation_steps": 1, "gradient_clipping": 1.0, "zero_allow_untested_optimizer": True},
    "examples autoep": {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1},
                        "expert_parallel": {"enabled": True, "autoep_size": 8, "preset_model": "qwen3_5_moe",
                                            "load_balance_coeff": None},
                        "optimizer": ADAMW_1E4, "scheduler": COSINE_1000, "train_micro_batch_size_per_gpu": 2,
                        "gradient_accumulation_steps": 1, "steps_per_print": 10},
    "examples leaf modules": {
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 1e5, "leaf_module": {"classes":
            ["transformers.models.qwen3_5_moe.modeling_qwen3_5_moe.Qwen3_5MoeSparseMoeBlock"]}},
        "optimizer": ADAMW_1E4, "scheduler": COSINE_1000, "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 1, "steps_per_print": 10},
    "examples tensor parallel": {"bf16": BF16, "optimizer": ADAMW, "scheduler": DECAY,
                                 "zero_optimization": {"stage": 2, "gather_16bit_weights_on_model_save": True},
                                 "tensor_parallel": {"autotp_size": 4}, **SWIFT_TAIL, "steps_per_print": 1},
    "examples autotuning": {"train_micro_batch_size_per_gpu": A, "fp16": {"enabled": True},
                            "autotuning": {"enabled": True, "overwrite": False, "fast": True, "arg_mappings":
                                {"train_micro_batch_size_per_gpu": "--per_device_train_batch_size"}}},
    "examples onecycle": {
        "train_batch_size": 512, "train_micro_batch_size_per_gpu": 32, "steps_per_print": 10,
        "optimizer": {"type": "Adam", "params": {"lr": 0.001, "betas": [0.8, 0.999], "eps": 1e-8,
                                                 "weight_decay": 3e-7}},
        "scheduler": {"type": "OneCycle", "params": {
            "cycle_min_lr": 0.004, "cycle_max_lr": 0.015, "cycle_first_step_size": 1000,
            "cycle_second_step_size": 100, "cycle_first_stair_count": 100, "cycle_second_stair_count": 100,
            "decay_step_size": 1000, "decay_lr_rate": 0.01}}},
}  # fmt: skip

BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "axolotl zero1_torch_compile (CompileConfig has no such keys)": (
        {"zero_optimization": {"stage": 1}, "bf16": BF16, "compile": {"disable": False, "backend": "inductor"},
         **BATCH, **CLIP}, "compile.backend"),
    "transformers docs nvme (aio inside zero_optimization)": (
        {"zero_optimization": {"stage": 3, "aio": {"block_size": 262144}}, "bf16": {"enabled": True}},
        "zero_optimization.aio"),
    "llamafactory alst (loss scale inside bf16)": (
        {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True, "loss_scale": 0}}, "bf16.loss_scale"),
    "llamafactory alst (a section DeepSpeed does not have)": (
        {"zero_optimization": {"stage": 3}, "sequence_parallel": {"enabled": True, "size": 4}}, "sequence_parallel"),
    "transformers tests, 2021 (reduce_bucket_size 0)": (
        {"zero_optimization": {"stage": 3, "reduce_bucket_size": 0}}, "zero_optimization.reduce_bucket_size"),
    "Megatron example (misspelt threshold)": (
        {"zero_optimization": {"stage": 3, "stage3_param_persitance_threshold": 1e5}},
        "zero_optimization.stage3_param_persitance_threshold"),
    "BingBertSquad (max_grad_norm among optimizer params)": (
        {"optimizer": {"type": "Adam", "params": {"lr": 3e-5, "max_grad_norm": 1.0}}},
        "optimizer.params.max_grad_norm"),
}  # fmt: skip
