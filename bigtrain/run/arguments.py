"""What a training run is told: one dataclass, with the names of transformers' TrainingArguments.

    args = parse(["--ds_config", "ds_configs/zero3.json", "--model_name_or_path", "preset:llama-tiny", ...])
    args = parse(["run.yaml"])                              # a YAML or JSON run file as the only argument
    args = parse(["--config", "run.yaml", "--seed", "1"])   # flags win over the file

`None` means "the user did not say": the ds_config, or else the default that `bigtrain.config.resolve` documents, decides.
Parsing needs no torch and raises `UsageError` with every problem found; nothing is built before that.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from bigtrain import defaults
from bigtrain.config.run import DEFAULTS, RunValues
from bigtrain.errors import UsageError
from bigtrain.plan.leaf_choice import LeafBlocks
from bigtrain.run import foreign, spellings
from bigtrain.run.argument_problems import TRACKERS, find_problems, on_disk
from bigtrain.runfile import read_run_file

logger = logging.getLogger("bigtrain")
Packing = Literal["isolated", "concatenate", "none"]
Policy = Literal["full", "attention", "selective", "offload", "offload_inputs"]


def _say(text: str, *aliases: str, **more: Any) -> dict[str, Any]:
    """Metadata of a field: its help and every other spelling of its flag."""
    spellings = [s for a in aliases for s in dict.fromkeys((f"--{a}", f"--{a.replace('_', '-')}"))]
    return {"help": text, "aliases": spellings, **more}


@dataclass(frozen=True, kw_only=True)
class TrainArguments:
    """One training run."""

    # ------------------------------------------------------------ model and data
    model_name_or_path: str = field(metadata=_say("Hugging Face directory or id, or preset:NAME for a named shape"))
    train_data: str = field(metadata=_say("text, JSON Lines, Parquet, Arrow file or folder", "dataset"))
    output_dir: str = field(metadata=_say("folder for metrics, checkpoints, model and report"))
    ds_config: str = field(
        metadata=_say("DeepSpeed JSON file, or auto: the fastest that fits", "deepspeed_config", "deepspeed")
    )
    tokenizer_name_or_path: str | None = field(
        default=None, metadata=_say("tokenizer directory or id (default: the model's)", "tokenizer", "tokenizer_name")
    )
    eval_data: str | None = field(default=None, metadata=_say("like --train_data, for evaluation"))
    eval_fraction: float | None = field(default=None, metadata=_say("share of --train_data held out for evaluation, 0 to 1"))
    seq_len: int | None = field(
        default=None,
        metadata=_say(
            f"tokens per row (default: {defaults.SEQ_LEN}, or the model's limit)", "max_length", "max_seq_length", "cutoff_len"
        ),
    )
    packing: Packing = field(default="isolated", metadata=_say("documents of a row: isolated, concatenate, or none"))
    freeze: list[str] = field(default_factory=list, metadata=_say("name prefixes of parameters that are not trained"))
    resize_vocab: bool = field(default=False, metadata=_say("grow the embedding if the tokenizer has more tokens"))
    allow_missing: list[str] = field(
        default_factory=list, metadata=_say("name patterns of weights that the model's files may lack; drawn from the seed")
    )
    allow_unexpected: list[str] = field(
        default_factory=list, metadata=_say("name patterns in the model's files that are left out")
    )
    verify_load: bool = field(default=False, metadata=_say("after loading, compare a hash of each whole weight with its file"))
    attn_implementation: str = field(
        default="auto",
        metadata=_say(
            "attention of the model; auto: packed rows' own kernels on a GPU, else sdpa; eager where these leave something out"
        ),
    )
    use_liger_kernel: bool | None = field(
        default=None, metadata=_say("fused kernels ([gpu] extra), else a chunked loss (default: true on a GPU, false on a CPU)")
    )
    trust_remote_code: bool = field(default=False, metadata=_say("run Python code that comes with the model"))

    # ------------------------------------------------------------ batch and length
    per_device_train_batch_size: int | None = field(
        default=None, metadata=_say("rows per rank and micro step (default: 1)", "micro_batch")
    )
    per_device_eval_batch_size: int | None = field(
        default=None, metadata=_say("rows per rank in evaluation (default: as in training)")
    )
    gradient_accumulation_steps: int | None = field(default=None, metadata=_say("micro steps per optimizer step (default: 1)"))
    num_train_epochs: float = field(default=3.0, metadata=_say("passes over the data", "num_epochs"))
    max_steps: int | None = field(
        default=None,
        metadata=_say("optimizer steps; wins over --num_train_epochs (default: as many as the epochs have)", "num_steps"),
    )

    # ------------------------------------------------------------ optimizer
    optim: str | None = field(default=None, metadata=_say("adamw, adamw_8bit, muon, ..."))
    learning_rate: float | None = field(default=None, metadata=_say("peak learning rate", "lr"))
    weight_decay: float | None = field(default=None, metadata=_say("decay of matrices; norms and biases get none"))
    adam_beta1: float | None = field(default=None, metadata=_say("decay of the first moment"))
    adam_beta2: float | None = field(default=None, metadata=_say("decay of the second moment"))
    adam_epsilon: float | None = field(default=None, metadata=_say("added to the denominator"))
    max_grad_norm: float | None = field(default=None, metadata=_say("global norm to clip at"))
    lr_scheduler_type: str | None = field(default=None, metadata=_say("linear, cosine, constant, wsd"))
    lr_scheduler_kwargs: str | None = field(
        default=None, metadata=_say("JSON object for the schedule: min_ratio; wsd also decay_steps and decay")
    )
    warmup_steps: int | None = field(
        default=None, metadata=_say("steps until the peak learning rate; below 1: a share of all steps")
    )
    warmup_ratio: float | None = field(default=None, metadata=_say("the same as a share of all steps, 0 to 1"))

    # ------------------------------------------------------------ numbers and memory
    bf16: bool | None = field(
        default=None, metadata=_say("bf16 compute with fp32 master weights (default: as the ds_config says)")
    )
    keep_in_fp32: list[str] = field(default_factory=list, metadata=_say("name patterns of parameters that stay in fp32"))
    gradient_checkpointing: bool | None = field(
        default=None, metadata=_say("recompute activations in backward", "activation_checkpointing")
    )
    checkpoint_blocks: str | None = field(
        default=None,
        metadata=_say(
            "recompute only the first N blocks, the others keep their activations; auto: as few as fit (default: all)"
        ),
    )
    checkpointing_policy: Policy = field(
        default="full",
        metadata=_say(
            "of a recomputed block keep its input (full), results of attention too (attention), of matrix products too (selective), "
            "input and results of attention in host memory, the input alone where the host lacks room (offload), or never more "
            "(offload_inputs)"
        ),
    )
    mlp_tile_tokens: int | None = field(
        default=None,
        metadata=_say("run each block's feed-forward part over tiles of N tokens, for long sequences (default: 0, as a whole)"),
    )
    leaf_blocks: LeafBlocks = field(
        default="auto",
        metadata=_say(
            "stage 3: gather each block's weights at once; auto: where the host's hooks take longer than the card's work"
        ),
    )
    torch_compile: bool = field(
        default=False, metadata=_say("compile each decoder block (stages 0 to 2); measure whether it gains anything")
    )
    offload_gradients: str = field(
        default="auto", metadata=_say("share of the gradients that leaves the GPU in backward; auto: the least that fits")
    )
    nonfinite_limit: int = field(default=5, metadata=_say("non-finite steps in a row after which the run stops"))

    # ------------------------------------------------------------ when to log, evaluate, save
    logging_steps: int = field(default=1, metadata=_say("steps between log lines; metrics.jsonl has every step"))
    eval_steps: int | None = field(default=None, metadata=_say("steps between evaluations (default: only at the end)"))
    save_steps: int | None = field(default=None, metadata=_say("steps between checkpoints (default: none)"))
    logging_strategy: str | None = field(
        default=None, metadata=_say("epoch: a log line at the end of each epoch (default: --logging_steps)")
    )
    eval_strategy: str | None = field(
        default=None, metadata=_say("epoch: evaluate at the end of each epoch (default: --eval_steps)", "evaluation_strategy")
    )
    save_strategy: str | None = field(
        default=None, metadata=_say("epoch: a checkpoint at the end of each epoch (default: --save_steps)")
    )
    save_total_limit: int | None = field(default=None, metadata=_say("newest checkpoints to keep (default: all)"))
    copy_checkpoints_to: str | None = field(
        default=None, metadata=_say("second folder, on another disk: each checkpoint is copied there once it is whole")
    )
    keep_every: int | None = field(default=None, metadata=_say("keep checkpoints whose step is a multiple of this as well"))
    load_best_model_at_end: bool = field(
        default=False, metadata=_say("keep the checkpoint of the lowest evaluation loss as well, and make OUT/model from it")
    )
    save_only_model: bool = field(
        default=False,
        metadata=_say("every --save_steps a model folder OUT/model-<step> instead of a checkpoint; no run goes on from it"),
    )
    resume_from_checkpoint: str | None = field(default=None, metadata=_say("auto, or the path of a checkpoint"))
    overwrite_output_dir: bool = field(default=False, metadata=_say("start over in a folder that holds a run"))
    report_to: list[str] = field(
        default_factory=lambda: ["tensorboard"], metadata=_say("tensorboard, wandb, mlflow, all or none")
    )
    run_name: str | None = field(default=None, metadata=_say("name in wandb and mlflow"))
    disable_tqdm: bool = field(default=False, metadata=_say("log lines instead of a progress bar"))

    # ------------------------------------------------------------ seeds and machinery
    seed: int = field(default=42, metadata=_say("of the weights and of dropout"))
    data_seed: int | None = field(default=None, metadata=_say("of the sample order (default: that of --seed)"))
    dataloader_num_workers: int = field(default=0, metadata=_say("processes per rank that prepare batches"))
    ddp_timeout: int = field(default=1800, metadata=_say("seconds a rank waits for the others"))
    hang_s: float | None = field(
        default=None,
        metadata=_say("seconds without progress after which all ranks end with a report (default: learned; 0: never)"),
    )
    gpu_memory_cap: float | None = field(default=None, metadata=_say("GiB of each GPU that the run may take (default: all)"))
    no_export: bool = field(default=False, metadata=_say("do not write OUT/model at the end"))
    no_preflight: bool = field(default=False, metadata=_say("do not test machine and communication before the run starts"))
    no_plan: bool = field(default=False, metadata=_say("do not check before training that the job fits the memory"))

    @property
    def trackers(self) -> tuple[str, ...]:
        """`report_to` with `all` and `none` resolved: `all` takes what is installed."""
        if "all" in self.report_to:
            return tuple(t for t in TRACKERS if importlib.util.find_spec(t))
        return tuple(t for t in self.report_to if t != "none")

    @property
    def reads(self) -> tuple[str | None, ...]:
        """Files, folders and ids of the hub that the run reads."""
        return self.model_name_or_path, self.tokenizer_name_or_path, self.train_data, self.eval_data

    @property
    def hang_limit(self) -> Any:
        """`hang_s` in the words of `bigtrain.watch`: seconds, "learned", or None for no watch."""
        return "learned" if self.hang_s is None else self.hang_s or None

    @property
    def saves(self) -> bool:
        """True if the run saves on the way, and at its end."""
        return bool(self.save_steps) or self.save_strategy == "epoch"

    @property
    def recomputes(self) -> bool | None:
        """`gradient_checkpointing`, which a number of blocks or a policy implies."""
        return defaults.recomputes(self.gradient_checkpointing, self.checkpointing_policy, self.checkpoint_blocks)

    @property
    def is_selective(self) -> bool:
        """Whether each operator of the recomputed blocks is looked at."""
        return bool(self.recomputes) and self.checkpointing_policy == "selective"

    @property
    def recomputed_blocks(self) -> int | None:
        """`checkpoint_blocks` as a number; None: all blocks, or not decided yet."""
        return None if self.checkpoint_blocks in (None, "auto") else int(str(self.checkpoint_blocks))

    @property
    def scheduler_kwargs(self) -> dict[str, Any]:
        """`lr_scheduler_kwargs` as a mapping."""
        return json.loads(self.lr_scheduler_kwargs or "{}")

    @property
    def order_seed(self) -> int:
        """Seed of the sample order."""
        return self.seed if self.data_seed is None else self.data_seed

    def warmup(self, total_steps: int) -> int | None:
        """Warm-up steps as said; a ratio is rounded up as transformers does. None if the user said neither."""
        if self.warmup_steps is None and self.warmup_ratio is not None:
            return -int(-total_steps * self.warmup_ratio // 1)
        return self.warmup_steps

    def run_values(self, total_steps: int | None = None) -> RunValues:
        """What is said here, in the words of `bigtrain.config`; `total_steps`: of the run, once they are known."""
        named = {"micro_batch": self.per_device_train_batch_size, "accumulation": self.gradient_accumulation_steps}
        steps = {"warmup_steps": self.warmup_steps, "total_steps": self.max_steps}
        if total_steps is not None:
            steps = {"warmup_steps": self.warmup(total_steps), "total_steps": total_steps}
        same = {f.name: getattr(self, f.name) for f in fields(RunValues) if hasattr(self, f.name)}
        return RunValues(**{**same, **named, **steps, "gradient_checkpointing": self.recomputes})


# Of --help: the first setting of each group. They stand there in the order of `TrainArguments`.
GROUPS = {
    "model_name_or_path": "needed by every run",
    "tokenizer_name_or_path": "model and data",
    "per_device_train_batch_size": "batch and length of the run",
    "optim": "optimizer and learning rate",
    "bf16": "memory and speed",
    "logging_steps": "log, evaluate, save, resume",
    "seed": "seeds, limits, checks",
}
_VALUES: dict[Any, str] = {int: "N", float: "X"}

LAUNCHER_FLAGS = ("--local_rank", "--local-rank")


class _Help(argparse.HelpFormatter):
    """Flags in their spellings with underscores alone (hyphens do as well), and the default of each that is not needed."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        names = [name for name in action.option_strings if "-" not in name[2:]]
        kind = "true|false" if action.const is True else _VALUES.get(action.type, "VALUE")
        value = "" if action.nargs == 0 else " " + self._format_args(action, kind)
        return ", ".join(names) + value

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        if action.required or "(default" in text or action.default == argparse.SUPPRESS:
            return text
        default = getattr(DEFAULTS, action.dest, None) if action.default is None else action.default
        words = " ".join(map(str, default)) if isinstance(default, list) else spellings.text(default)
        return f"{text} (default: {'none' if default in (None, []) else words})"


USAGE = "launch/train.py --ds_config FILE|auto --model_name_or_path DIR|ID|preset:NAME --train_data PATH --output_dir OUT [--FLAG VALUE ...]"


def make_parser() -> argparse.ArgumentParser:
    """The parser behind `parse`: HfArgumentParser over `TrainArguments`, without abbreviations."""
    from transformers import HfArgumentParser

    class Parser(HfArgumentParser):
        def error(self, message: str) -> Any:  # argparse would print and exit on every rank
            if message.startswith("unrecognized arguments: "):  # an unquoted pattern, or a list in a run file
                words = message.split()
                message = " ".join(words[:5]) + (f" and {len(words) - 5} more" if words[5:] else "")
                message += ": a flag takes one value; write a pattern in quotes ('data/*.jsonl'), or name the folder"
            if re.search(r"steps: invalid int value: '0?\.\d+'", message):
                message += ": a share of all steps is not taken; write a number of steps"
            raise UsageError(re.sub(r"/--[\w-]+", "", message))  # of each flag the first spelling

    parser = Parser(
        TrainArguments,  # type: ignore[arg-type]
        prog="launch/train.py",
        usage=USAGE,
        formatter_class=_Help,
        allow_abbrev=False,
        description="Train a model with DeepSpeed. A YAML or JSON run file may be the only argument, or --config FILE. "
        "What the ds_config says holds before a default.",
    )
    for action in parser._actions:  # HfArgumentParser gives `bool | None` no bare form, but people write `--bf16`
        if action.dest in ("bf16", "gradient_checkpointing", "use_liger_kernel"):
            action.nargs, action.const = "?", True
        if action.dest == "leaf_blocks":  # YAML reads on and off as true and false
            action.type = lambda text: {"true": "on", "false": "off"}.get(text, text)
        if action.dest == "warmup_steps":
            action.type = _steps_or_share
    _group(parser)
    return parser


def _group(parser: argparse.ArgumentParser) -> None:
    """Let --help list the flags by what they are for."""
    group = parser._optionals
    for action in list(group._group_actions):
        if action.dest in GROUPS:
            group = parser.add_argument_group(GROUPS[action.dest])
        if group is not parser._optionals:
            parser._optionals._group_actions.remove(action)
            group._group_actions.append(action)


def _steps_or_share(text: str) -> int | float:
    """Steps, or as transformers 5 has it a share of all steps below 1."""
    try:
        return float(text) if 0 < float(text) < 1 else int(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number of steps nor a share below 1") from error


def parse(argv: Sequence[str]) -> TrainArguments:
    """Arguments from the command line, a run file, or both (flags win).

    Raises:
        UsageError: unknown flag or key (with the nearest known one), wrong type, or values that cannot be.
    """
    parser = make_parser()
    flags, run_file = _split_run_file(_without_local_rank(argv))
    values = read_run_file(run_file) if run_file else {}
    given = spellings.given([*flags, *(f"--{key}" for key, value in values.items() if value is not None)], parser)
    flags, left_out = foreign.sort_out(flags, given)
    same = {key: value for key, value in values.items() if foreign.changes_nothing(key, spellings.text(value), given)}
    if left_out := left_out + [f"{key}: {spellings.text(value)}" for key, value in same.items()]:
        logger.info("left out, because a run does so anyway: %s", ", ".join(left_out))
    values = {key: value for key, value in values.items() if key not in same}
    if not argv:
        raise UsageError(f"nothing to train was given. usage: {USAGE}\nRun launch/train.py --help for every flag.")
    keys = [f"--{key}" for key in values]
    unknown = [*spellings.unknown(keys, parser, f"key in {run_file}"), *spellings.unknown(flags, parser, "flag")]
    in_file, flags = (spellings.known(words, parser) for words in (spellings.tokens(values), flags))
    problems = [*unknown, *spellings.conflicts(keys, parser), *spellings.conflicts(flags, parser)]
    try:
        args = _made(parser.parse_args(in_file + flags))
        problems += [*find_problems(args), *on_disk(args)]
    except UsageError as error:
        if not problems:
            raise
        if not (unknown and "are required" in str(error)):  # one of the unknown may be what is missing
            problems.append(str(error))
    if not problems:
        return args
    lines = problems
    if len(problems) > len(unknown):
        lines = [f"{len(problems)} problem(s) in the arguments:", *(f"  - {p}" for p in problems)]
    raise UsageError("\n".join([*lines, *(["Run launch/train.py --help for the list of flags."] if unknown else [])]))


def _made(namespace: argparse.Namespace) -> TrainArguments:
    values = {f.name: getattr(namespace, f.name) for f in fields(TrainArguments)}
    if isinstance(values["warmup_steps"], float) and values["warmup_ratio"] is None:
        values["warmup_steps"], values["warmup_ratio"] = None, values["warmup_steps"]
    values["max_steps"] = None if values["max_steps"] == -1 else values["max_steps"]  # transformers' "as many as there are"
    for name in ("ds_config", "model_name_or_path", "tokenizer_name_or_path", "train_data", "eval_data", "copy_checkpoints_to"):
        values[name] = values[name] and os.path.expanduser(values[name])  # run files and --flag=~/x: no shell did it
    return TrainArguments(**values)


def _without_local_rank(argv: Sequence[str]) -> list[str]:
    """Drop the launcher's --local_rank; LOCAL_RANK in the environment is what counts, and is set from it if missing."""
    rest: list[str] = []
    tokens = iter(argv)
    for token in tokens:
        name, _, value = token.partition("=")
        if name not in LAUNCHER_FLAGS:
            rest.append(token)
            continue
        value = value or next(tokens, "")
        if not value.lstrip("-").isdigit():
            raise UsageError(f"{name} needs a number, got {value!r}")
        if int(value) >= 0:
            os.environ.setdefault("LOCAL_RANK", value)
    return rest


def _split_run_file(argv: list[str]) -> tuple[list[str], str | None]:
    if len(argv) == 1 and not argv[0].startswith("-"):
        return [], argv[0]
    for place, token in enumerate(argv):
        name, _, value = token.partition("=")
        if name == "--config":
            taken = 1 if value else 2
            value = value or (argv[place + 1] if place + 1 < len(argv) else "")
            if not value:
                raise UsageError("--config needs the path of a YAML or JSON run file")
            return argv[:place] + argv[place + taken :], value
    return argv, None
