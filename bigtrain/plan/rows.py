"""What each row of a plan is: its formula and where the formula was read. One table for GPU and host.

P parameters, N ranks, p = ceil(P / N) elements a rank owns, p' elements of all parameters that its partition touches,
n elements of one parameter, L of the largest one, R bucket, K prefetch bucket, S largest sub-group, t tokens of a micro
step, d, f, V as in `activations`, a bytes of the gradient accumulation type.
"""

from __future__ import annotations

_S2 = "deepspeed 0.19.8 runtime/zero/stage_1_and_2.py"
_S3 = "deepspeed 0.19.8 runtime/zero/stage3.py"
_PP = "deepspeed 0.19.8 runtime/zero/partition_parameters.py"
_HF = "transformers 5.24 modeling_*.py"
_LOSS = "transformers 5.24 loss/loss_utils.py ForCausalLMLoss"

# row -> (formula, source)
ROWS: dict[str, tuple[str, str]] = {
    "weights, bf16": ("2 P (stages 0-2) | 2 p (stage 3)", f"{_S2} bit16_groups_flat; {_S3} lp_param_buffer"),
    "weights before flattening": ("2 P, until the flat copy is made", f"{_S2} flatten_dense_tensors_aligned"),
    "weights, frozen": ("2 n of every frozen n (stages 0-2)", f"{_S2} is_optimized_parameter"),
    "weights, persistent": ("2 n of every n <= persistence threshold, N > 1", f"{_PP} ds_persist"),
    "weights, gathered": ("2 n of what is there: at work, within reuse distance, and ahead up to max_live",
                         "deepspeed 0.19.8 runtime/zero/partitioned_param_coordinator.py, as plan/gathered.py plays it"),
    "weights, one whole parameter": ("2 L while the model is built", f"{_PP} _post_init_method"),
    "weights, copied to the GPU": ("2 n of the modules at work", f"{_PP} ds_tensor.to(device), offload_param"),
    "weights, slice clone": ("2 p, freed once the master exists", f"{_S2} weights_partition ... .detach().clone()"),
    "master": ("remainder bytes x p", f"{_S2} single_partition_of_fp32_groups; {_S3} fp32_partitioned_groups_flat"),
    "master, conversion copy": ("4 S, freed", f"{_S3} converted.clone().detach()"),
    "moments": ("moment bytes x p, from the first step on", "plan/states.py LAYOUTS"),
    "gradient, zeros at start-up": ("4 p | 4 S, freed", f"{_S2} initialize_optimizer_states; {_S3} same name"),
    "gradients, kept": ("2 p' | 4 p (fp32) | a p (stage 3) | 2 P (stages 0, 1)", f"{_S2} grads_in_partition; {_S3} "
                        "grad_partitions_flat_buffer"),
    "gradients, earlier micro steps": ("2 p'", f"{_S2} all_grad_tensors, accumulation > 1"),
    "gradients, fresh from autograd": ("2 n", "torch autograd, until the bucket takes them"),
    "gradients, larger than the bucket": ("2 n of every n > R, until reduced", f"{_S2} extra_large_param_to_reduce"),
    "gradient of the tied matrix": ("2 V d from the head's backward to the embedding's", "torch autograd input buffer"),
    "gradient, fp32 slice": ("4 n of the slice", f"{_S2} async_inplace_copy_grad_to_fp32_buffer_from_gpu"),
    "gradients, flat for the step": ("a chunk of 2^25 elements (2^16 on CPUs); muon: 2 p of one group | a S",
                                     f"optim/pieces.py joined; {_S2} step: flatten(averaged_gradients)"),
    "gradients, fp32 for the step": ("a chunk, as above; muon: 4 p of one group | 4 S", f"optim/chunks.py; {_S2} step: .to(fp32); "
                                     f"{_S3} _prepare_fp32_grad_for_sub_group"),
    "gradient norm in fp64": ("8 x largest piece", f"{_S2} get_grad_norm_direct, get_norm_dtype() = float64"),
    "reduce buckets": ("2 R x (2 with overlap_comm) | 2 R (stage 3)", f"{_S2} setup_buckets; {_S3} "
                       "_setup_for_real_optimizer"),
    "reduce copy": ("2 x filled part of the bucket, N > 1", f"{_S2} allreduce_bucket flatten; "
                    "comm/coalesced_collectives.py torch.cat"),
    "optimizer state, on its way": ("buffers x 128 MiB, from the first update on; then + gradients of one chunk", "optim/stream.py _next_buffer, _update"),
    "gradients, on their way": ("512 MiB or the largest n + 4 chunks", "plan/constants.py GRADIENTS_IN_FLIGHT_BYTES, GRADIENT_AREAS"),
    "gradients, host": ("2 P x offload_gradients, exact", "optim/spill.py SpilledGradients"),
    "optimizer state, host": ("(2 + moment bytes) x p, exact", "memory/pinned.py"),
    "offload buffer on the GPU": ("2 L", f"{_S2} temp_grad_buffer_for_gpu_offload"),
    "checkpoints": ("2 t d per block", f"{_HF} GradientCheckpointingLayer"),
    "checkpoints, host": ("2 t d per block, offloaded", "models/hostinputs.py OnHost"),
    "attention results, host": ("2 t out + 4 t heads per block, offloaded", "models/hostinputs.py OnHost"),
    "activations, kept results": ("2 t out + 4 t heads (attention, offload) | 2 t (q + k + v + out) + 4 t heads + 4 t f (gated) + 4 t d",
                                  "models/recompute.py _KeptResults"),
    "activations, norms": ("8 t d a norm (hf RMSNorm) | 4 t d (fused)", f"{_HF} *RMSNorm.forward"),
    "activations, attention": ("2 t (q + k + v + out) + 4 t heads", f"{_HF} sdpa_attention_forward, flash kernel"),
    "activations, feed-forward": ("8 t f (hf gated) | 6 t f (liger) | 4 t f (plain)", f"{_HF} *MLP.forward"),
    "activations, experts": ("8 t experts + 4 t d x active experts", f"{_HF} *Experts.forward"),
    "activations, in passing": ("max(6 t f + 4 t d, 14 t d)", "plan/activations.py forward_extra"),
    "activations, embedding and final norm": ("2 t d + one norm", f"{_HF} *Model.forward"),
    "backward, feed-forward gradients": ("2 t f + 4 t f", "torch autograd of SwiGLU"),
    "gradients of one tile": ("2 n of the feed-forward part's weights", "models/tiles.py _gradients"),
    "gradients of tiles, fp32 sums": ("4 n of the feed-forward part's weights", "models/tiles.py _add"),
    "backward, attention gradients": ("2 t (q + k + v) + 4 t q + wide k, v", "flash-attn mha_bwd"),
    "backward, norm temporaries": ("14 t d (hf) | 2 t d (fused)", "torch autograd of RMSNorm in fp32"),
    "backward, residual stream": ("2 t d", "torch autograd"),
    "logits, bf16": ("2 t V", f"{_HF} lm_head"),
    "logits, fp32": ("4 t V", f"{_LOSS} logits.float()"),
    "log-probabilities, fp32": ("4 t V, kept for backward", f"{_LOSS} cross_entropy"),
    "logits, soft cap": ("4 t V", f"{_HF} final_logit_softcapping"),
    "loss gradients, fp32": ("4 t V + 4 t V", "torch nll_loss and log_softmax backward"),
    "loss gradient, bf16": ("2 t V", "torch autograd of .float()"),
    "fused loss": ("2 V d + 2 t d + 2 x a chunk of logits (2^28, or V t / 16)", "kernels/cross_entropy.py with Triton"),
    "loss in chunks": ("2 t d + 4 V d + a chunk of logits, then 2 t d + 2 V d", "kernels/cross_entropy.py with torch alone"),
    "gradient of the head": ("2 V d", "torch autograd of lm_head"),
    "cuBLAS workspace": ("32 MiB for each of two threads", "torch aten/src/ATen/cuda/CublasHandlePool.cpp"),
    "rotary tables": ("4 t d_head", f"{_HF} *RotaryEmbedding.forward"),
    "bias of all scores": ("2 t x tokens of a row x heads", "transformers 5.24 modeling_falcon.py causal_mask, with ALiBi"),
    "causal masks": ("2 t x tokens of a row, for each sort of blocks", "transformers 5.24 masking_utils.py eager_mask"),
    "batch": ("3 x 8 t", "input_ids, labels, position_ids in int64"),
    "update in passing": ("8 x a chunk (stage 0: a group); torch's AdamW on CPUs", "torch/optim/adam.py _single_tensor_adam"),
    "muon staging": ("momentum of a group once more", f"{_S2} _muon_staging_momentum"),
    "export, one whole parameter": ("2 L", "one parameter is gathered at a time"),
    "weights, drawn in fp32": ("4 P (stages 0-2) | 512 MiB + 4 p (stage 3), until rounded", "models/build.py, models/window.py"),
    "collective's own copy": ("2 x what is gathered or reduced at once; gloo on CPUs", "torch ProcessGroupGloo.cpp"),
    "heap that malloc keeps": ("most of blocks below 512 KiB so far - those in use; CPU only", "plan/resident.py"),
    "process": ("constant", "plan/constants.py process_bytes"),
    "master, host": ("remainder bytes x p", f"{_S2} pin_memory(weights_partition); {_S3} pageable clone"),
    "moments, host": ("moment bytes x p, pageable", "DeepSpeedCPUAdam: zeros_like at the first step"),
    "gradients, host fp32": ("4 p", f"{_S2} initialize_optimizer_states; {_S3} subgroup_gradient_buffer"),
    "gradients, host flat": ("a p", f"{_S3} grad_partitions_flat_buffer"),
    "gradients, host accumulated": ("2 p', one pinned block a parameter", f"{_S2} accumulated_grads_in_cpu"),
    "weights, host staging": ("2 p", f"{_S2} param_buffer_of_bit16_for_cpu_offload_groups"),
    "weights, host": ("2 p", f"{_S3} param_groups_fp16_flat_cpu_memory"),
    "offload buffer, host": ("2 L", f"{_S2} temp_grad_buffer_for_cpu_offload"),
    "pinned rounding": ("next power of two - bytes, block by block", "torch c10 CachingHostAllocator"),
    "host copies in passing": ("2 p | 4 p | 4 S + 2 S", f"{_S2} and {_S3}: .to(cpu), clone, bf16 cast in step"),
    "read buffer": ("constant", "plan/constants.py READ_BUFFER_BYTES"),
    "save buffer": ("constant", "plan/constants.py SAVE_BUFFER_BYTES"),
}  # fmt: skip


def formula(row: str) -> str:
    """Formula of a row; every row of a tape is in the table (a test says so)."""
    return ROWS[row][0]


def source(row: str) -> str:
    """Where the formula was read."""
    return ROWS[row][1]
