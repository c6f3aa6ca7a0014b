"""Flags of transformers and of other trainers that people paste: which say what a run does anyway, and what to write for the others.

A value that changes nothing here is left out of the command, with a word about it; any other is refused with `instead`.
Plain Python.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

ANY = "*"
TRUE, FALSE = ("true", "1", "yes"), ("false", "0", "no")


@dataclass(frozen=True)
class Foreign:
    """One such flag.

    Attributes:
        instead: what to write for it.
        same: values (in lower case; ANY for all) that a run acts like anyway.
        with_, without: of some of these values: only beside one of these flags of bigtrain's, only beside none of them.
    """

    instead: str
    same: tuple[str, ...] = ()
    with_: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    without: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def changes_nothing(self, value: str, given: Collection[str]) -> bool:
        """True if the run is the same without this flag; `given`: the flags of bigtrain's that are given."""
        value = value.lower().replace(" ", "")
        if ANY not in self.same and value not in self.same:
            return False
        needs, shuns = self.with_.get(value), self.without.get(value, ())
        return (needs is None or any(n in given for n in needs)) and not any(n in given for n in shuns)


_EVAL = ("eval_data", "eval_fraction")
_EVALUATION = Foreign(
    "evaluation comes with --eval_data PATH or --eval_fraction 0.05: every --eval_steps N steps or after each epoch (--eval_strategy epoch), and at the end",
    ("no", "steps"),
    with_={"steps": ("eval_steps",)},
    without={"no": (*_EVAL, "eval_steps")},
)
_ROWS_ARE_PACKED = "rows are packed (--packing isolated), so that next to nothing is padding: leave it out"
_DTYPE = Foreign("weights are bf16 with fp32 masters; name exceptions with --keep_in_fp32", ("bfloat16", "auto"))
_LORA = Foreign(
    "launch/train.py trains all weights (--freeze takes parts out); LoRA with peft is a loop of your own: see "
    "launch/examples/lora.py",
    FALSE,
)
_STAGE = "the ZeRO stage and offloading come from --ds_config, such as ds_configs/zero3_offload.json; bigtrain config generate writes others"
_LENGTH, _SMALLER = (
    "use --seq_len N",
    "use a smaller --per_device_train_batch_size, or --ds_config auto, which chooses what fits",
)
_SPEED = "it changes the speed of loading alone: leave it out; --dataloader_num_workers N is there"
_LAUNCHER = "it belongs to the launcher: "


def _all(names: str, what: Foreign) -> dict[str, Foreign]:
    return dict.fromkeys(names.split(), what)


FOREIGN: dict[str, Foreign] = {
    # ------------------------------------------------------------ when to evaluate, save and log
    "do_eval": Foreign(_EVALUATION.instead, (*TRUE, *FALSE), dict.fromkeys(TRUE, _EVAL), dict.fromkeys(FALSE, _EVAL)),
    "eval_on_start": Foreign("evaluation is after steps, and at the end: leave it out", FALSE),
    "eval_accumulation_steps": Foreign("only the loss is kept of an evaluation: leave it out", (ANY,)),
    "prediction_loss_only": Foreign("evaluation is the loss alone: leave it out", TRUE),
    "metric_for_best_model": Foreign("--load_best_model_at_end takes the lowest evaluation loss: leave it out", ("loss", "eval_loss")),
    "greater_is_better": Foreign("--load_best_model_at_end takes the lowest evaluation loss: leave it out", FALSE),
    "save_safetensors": Foreign("weights are always written as safetensors: leave it out", TRUE),
    "logging_first_step": Foreign("metrics.jsonl has every step: leave it out", (ANY,)),
    "logging_dir": Foreign("TensorBoard's files are in OUT/runs: leave it out"),
    "include_num_input_tokens_seen": Foreign("metrics.jsonl has the tokens of every step: leave it out", (ANY,)),
    **_all("include_tokens_per_second skip_memory_metrics", Foreign("metrics.jsonl has speed and memory of every step: leave it out", (ANY,))),
    **_all("log_level log_level_replica", Foreign("--logging_steps N says how often: leave it out", ("passive", "info"))),
    "eval_delay": Foreign("evaluation begins with the first --eval_steps N: leave it out", ("0", "0.0")),
    "past_index": Foreign("no state goes from batch to batch: leave it out", ("-1",)),
    **_all("jit_mode_eval batch_eval_metrics", Foreign("evaluation is the loss alone: leave it out", FALSE)),
    **_all("push_to_hub hub_model_id hub_token hub_strategy hub_private_repo", Foreign("upload the folder afterwards: hf upload OWNER/NAME OUT/model", FALSE)),
    # ------------------------------------------------------------ numbers and speed
    "fp16": Foreign("bigtrain trains in bf16: leave the flag out", FALSE),
    "bf16_full_eval": Foreign("evaluation runs in what training runs in: leave it out", TRUE),
    "tf32": Foreign("matrix products are bf16: leave it out", (ANY,)),
    "half_precision_backend": Foreign("bf16 needs none: leave it out", ("auto", "cuda_amp")),
    **_all("torch_dtype dtype", _DTYPE),
    **_all("torch_compile_backend torch_compile_mode", Foreign("--torch_compile compiles each block with torch's defaults: leave it out")),
    "gradient_checkpointing_kwargs": Foreign(
        "what is recomputed is chosen with --checkpointing_policy and --checkpoint_blocks, always without reentrance",
        ('{"use_reentrant":false}', "{}"),
    ),
    **_all("flash_attn use_flash_attention_2", Foreign("use --attn_implementation flash_attention_2, or leave it to auto", ("auto",))),
    "average_tokens_across_devices": Foreign("the loss is always per target token of the global batch: leave it out", TRUE),
    "label_smoothing_factor": Foreign("the loss is the plain cross-entropy: leave it out", ("0", "0.0")),
    "neftune_noise_alpha": Foreign("embeddings get no noise: leave it out"),
    "full_determinism": Foreign("no switch makes every GPU kernel repeat its bits; --seed and --data_seed repeat all else: leave it out", FALSE),
    "adafactor": Foreign("use --optim adamw_8bit, or adamw_split_8bit, for a small state", FALSE),
    "optim_args": Foreign("use --adam_beta1, --adam_beta2, --adam_epsilon and --weight_decay"),
    "auto_find_batch_size": Foreign(_SMALLER, FALSE),
    **_all("gradient_clipping clip_grad", Foreign("use --max_grad_norm X")),
    **_all("load_in_4bit load_in_8bit", Foreign("weights stay bf16; --optim adamw_8bit or adamw_split_8bit make the state small", FALSE)),
    **_all("lora_r lora_rank lora_alpha lora_dropout lora_target lora_target_modules use_lora use_peft", _LORA),
    "finetuning_type": Foreign(_LORA.instead, ("full",)),
    # ------------------------------------------------------------ data
    "do_train": Foreign("launch/train.py always trains; evaluation alone is bigtrain.engine.Engine.evaluate in a loop of your own", TRUE),
    "model_revision": Foreign("download that revision (hf download), and name its folder", ("main",)),
    "do_predict": Foreign("nothing is predicted after training: leave it out", FALSE),
    "group_by_length": Foreign(_ROWS_ARE_PACKED, FALSE),
    "length_column_name": Foreign(_ROWS_ARE_PACKED, (ANY,)),
    "remove_unused_columns": Foreign("columns that are not needed are never loaded: leave it out", (ANY,)),
    "overwrite_cache": Foreign("leave it out", (ANY,)),
    "use_fast_tokenizer": Foreign("the tokenizer is the fast one where there is one: leave it out", TRUE),
    "low_cpu_mem_usage": Foreign("no rank ever holds the whole model: leave it out", TRUE),
    "dataset_text_field": Foreign("rename the column to text (or messages, prompt and completion, input_ids)", ("text",)),
    **_all("text_column text_field", Foreign("rename the column to text (or messages, prompt and completion, input_ids)", ("text",))),
    "streaming": Foreign("data is kept tokenised on disk and mapped from there: leave it out", FALSE),
    **_all("cache_dir dataset_cache_dir", Foreign("set the environment variable HF_DATASETS_CACHE")),
    **_all("assistant_only_loss completion_only_loss", Foreign("chat and prompt with completion are learned by their answers alone, text by every token: leave it out")),
    **_all("max_train_samples max_samples", Foreign("use --max_steps N, or a smaller file")),
    **_all("preprocessing_num_workers dataset_num_proc", Foreign("data is tokenised once and kept: leave it out", (ANY,))),
    "ignore_data_skip": Foreign("a resumed run goes on at its row: leave it out", FALSE),
    "dataloader_drop_last": Foreign("the rows of a step are always complete: leave it out", TRUE),
    **_all("dataloader_pin_memory dataloader_persistent_workers dataloader_prefetch_factor", Foreign(_SPEED, (ANY,))),
    "ddp_find_unused_parameters": Foreign("a parameter unused on one rank counts as zero: leave it out", (ANY,)),
    **_all("model_max_length block_size max_seq_len", Foreign(_LENGTH)),
    **_all("train_file dataset_name dataset_path", Foreign("use --train_data PATH")),
    "validation_file": Foreign("use --eval_data PATH"),
    # ------------------------------------------------------------ other names of the same, and the launcher's
    **_all("batch_size train_batch_size per_gpu_train_batch_size", Foreign("use --per_device_train_batch_size N (rows per rank and micro step)")),
    **_all("eval_batch_size per_gpu_eval_batch_size", Foreign("use --per_device_eval_batch_size N")),
    **_all("max_train_steps total_steps", Foreign("use --max_steps N")),
    **_all("epochs epoch", Foreign("use --num_train_epochs X")),
    **_all("optimizer optimizer_type", Foreign("use --optim NAME")),
    **_all("scheduler lr_scheduler", Foreign("use --lr_scheduler_type NAME")),
    **_all("model model_name model_path", Foreign("use --model_name_or_path DIR|ID|preset:NAME")),
    **_all("output output_path save_path", Foreign("use --output_dir OUT")),
    "fsdp": Foreign("sharding comes from --ds_config", ("", *FALSE)),
    **_all("zero_stage offload offload_optimizer offload_param preset", Foreign(_STAGE, FALSE)),
    "stage": Foreign(_STAGE, ("sft", "pt")),
    **_all("use_cpu no_cuda", Foreign("write CUDA_VISIBLE_DEVICES= DS_ACCELERATOR=cpu before the command", FALSE)),
    "num_gpus": Foreign(_LAUNCHER + "deepspeed --num_gpus N launch/train.py ..."),
    "num_accelerators": Foreign(_LAUNCHER + "deepspeed --num_accelerators N launch/train.py ..."),
    "nproc_per_node": Foreign(_LAUNCHER + "torchrun --nproc_per_node N launch/train.py ..."),
    "master_port": Foreign(_LAUNCHER + "deepspeed --master_port P launch/train.py ..."),
}  # fmt: skip
# Flags of ours ("epoch") that take other values in transformers.
STRATEGIES: dict[str, Foreign] = {
    **_all("eval_strategy evaluation_strategy", _EVALUATION),
    "save_strategy": Foreign(
        "checkpoints come with --save_steps N or --save_strategy epoch, and without them there are none (the best of them: "
        "--load_best_model_at_end); the model is written at the end in any case "
        "(--no_export: not)",
        ("steps", "no"),
        with_={"steps": ("save_steps",)},
        without={"no": ("save_steps",)},
    ),
    "logging_strategy": Foreign("use --logging_steps N or --logging_strategy epoch; metrics.jsonl has every step", ("steps",)),
}
_KNOWN = {**FOREIGN, **STRATEGIES}


def plain(name: str) -> str:
    """A flag or key as the name of a setting."""
    return name.lstrip("-").replace("-", "_")


def instead(name: str) -> str:
    """What to write for a flag of another program; empty if it is not known."""
    return _KNOWN[plain(name)].instead if plain(name) in _KNOWN else ""


def changes_nothing(name: str, value: Any, given: Collection[str]) -> bool:
    """True if `name` is a flag of another program that asks for what a run does anyway."""
    return plain(name) in _KNOWN and _KNOWN[plain(name)].changes_nothing(str(value), given)


def sort_out(flags: Iterable[str], given: Collection[str]) -> tuple[list[str], list[str]]:
    """A command line without the flags that change nothing, and those, each with its value."""
    groups: list[list[str]] = []
    for token in flags:
        if token.startswith("--") or not groups:
            groups.append([])
        groups[-1].append(token)
    kept: list[str] = []
    left_out: list[str] = []
    for head, *values in groups:
        name, _, value = head.partition("=")
        if len(values) <= 1 and changes_nothing(name, value or (values[0] if values else "true"), given):
            left_out.append(" ".join([head, *values]))
        else:
            kept += [head, *values]
    return kept, left_out
