"""Values of `TrainArguments` that cannot be, each as one line. Plain Python: files are looked at, nothing is loaded."""

from __future__ import annotations

import difflib
import errno
import glob
import importlib.util
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bigtrain import shapes
from bigtrain.config import load, parse
from bigtrain.errors import ConfigError, DataError, UsageError
from bigtrain.guards import listing
from bigtrain.plan.spilled import share_problems
from bigtrain.run import foreign

if TYPE_CHECKING:
    from bigtrain.run.arguments import TrainArguments

# How often torchrun (--max-restarts) or Slurm (--requeue) has started this job before.
RESTART_COUNTS = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
MOST_TOKENS = 2**28  # of one forward: of a model 64 wide each activation would take 32 GiB
TRACKERS = ("tensorboard", "wandb", "mlflow")
# Those of transformers; a kernel of the hub is OWNER/NAME, and a model's own code may bring others.
ATTENTIONS = ("auto", "sdpa", "eager", "flex_attention", "flash_attention_2", "flash_attention_3", "flash_attention_4")
# Files of a model folder that no tokenizer is read from.
_NO_TOKENIZER = ("config.json", "generation_config.json", "*.safetensors", "*.bin", "*.index.json", "*.md", ".*")
PATHS = (
    "ds_config",
    "train_data",
    "eval_data",
    "model_name_or_path",
    "output_dir",
    "resume_from_checkpoint",
    "copy_checkpoints_to",
)


def find_problems(args: TrainArguments) -> Iterator[str]:
    """Every value that cannot be, as one line each. Looks at files for reading; the output folder is rank 0's business."""
    yield from _problems_with_numbers(args)
    yield from _problems_with_recomputing(args)
    yield from _problems_with_files(args)
    if args.attn_implementation not in ATTENTIONS and "/" not in args.attn_implementation and not args.trust_remote_code:
        yield f"--attn_implementation {args.attn_implementation!r}: expected {', '.join(ATTENTIONS)}, or a kernel of the hub, OWNER/NAME"
    if args.torch_compile:
        yield from _problems_with_compiling(args)
    yield from share_problems(args.offload_gradients)
    if args.eval_data and args.eval_fraction is not None:
        yield "--eval_data and --eval_fraction are two ways to say one thing: give one of them"
    yield from _problems_with_strategies(args)
    if (args.eval_steps or args.eval_strategy == "epoch") and not (args.eval_data or args.eval_fraction):
        said = "--eval_steps" if args.eval_steps else "--eval_strategy epoch"
        yield f"{said} without anything to evaluate on: add --eval_data PATH or --eval_fraction 0.05"
    if args.resume_from_checkpoint and args.overwrite_output_dir:
        yield "--resume_from_checkpoint and --overwrite_output_dir contradict each other: go on with that run, or start over"
    yield from _problems_with_saving(args)
    if args.warmup_steps is not None and args.warmup_ratio is not None:
        yield "--warmup_steps and --warmup_ratio are two ways to say one thing: give one of them"
    try:
        if not isinstance(args.scheduler_kwargs, dict):
            raise ValueError("not an object")
    except ValueError as error:
        yield f"--lr_scheduler_kwargs {args.lr_scheduler_kwargs!r} must be a JSON object like '{{\"min_ratio\": 0.1}}': {error}"
    if args.warmup_steps and args.max_steps and args.warmup_steps > args.max_steps > 0:
        yield f"--warmup_steps {args.warmup_steps} is more than --max_steps {args.max_steps}: shorten the warm-up, or write --warmup_ratio 0.1"
    if args.bf16 is False:
        yield "--bf16 false: bigtrain trains in bf16 with fp32 master weights; for fp32 write bf16.enabled false in the ds_config"
    if "none" in args.report_to and len(set(args.report_to)) > 1:
        yield f"--report_to {' '.join(args.report_to)}: none beside others; leave none out, or the others"
    for tracker in args.report_to:
        if tracker not in (*TRACKERS, "all", "none"):
            yield f"--report_to {tracker!r}: expected {', '.join(TRACKERS)}, all or none"
        elif tracker in TRACKERS and importlib.util.find_spec(tracker) is None:
            yield f"--report_to {tracker}: the package is not installed; run: pip install {tracker}"


def on_disk(args: TrainArguments) -> Iterator[str]:
    """What a look at the data's first rows and at the output folder tells, which the run itself would refuse once torch is loaded."""
    if not args.output_dir.strip() or any(_impossible(getattr(args, name)) for name in PATHS):
        return  # told already
    for name, split in (("train_data", "train"), ("eval_data", "validation")):
        value = getattr(args, name)
        if value and Path(value).is_file() and (why := _not_rows(Path(value), split)):
            yield f"--{name}: {why}"
    # A job that its launcher may have started again goes on in the folder, whatever the flags say (restart.py).
    if any(os.environ.get(count, "0") != "0" for count in ("TORCHELASTIC_MAX_RESTARTS", *RESTART_COUNTS)):
        return
    from bigtrain.run.runfolder import ASIDE, RunFolder

    folder = RunFolder(args.output_dir)
    if (folder.root / ASIDE).exists():
        return  # looking would bring it back, which is rank 0's business
    try:
        folder.check(resume=args.resume_from_checkpoint, overwrite=args.overwrite_output_dir, reads=args.reads)
    except UsageError as error:
        yield str(error)


def _not_rows(file: Path, split: str) -> str | None:
    """Why a file gives no samples, as far as its name and its first rows tell; None where only reading it all would."""
    from bigtrain.data import files, jsonfile, source

    if not os.access(file, os.R_OK):
        return f"{file} cannot be read: no permission"
    said, files.logger.disabled = files.logger.disabled, True  # what it warns of is said when the data is read
    try:
        files.choose([str(file)], split)
        first = jsonfile.first_rows(file, 100) if file.suffix in (".jsonl", ".ndjson") else []
        if first:
            source.sample_kind(list(dict.fromkeys(name for row in first for name in row)))
    except DataError as error:
        return str(error)
    finally:
        files.logger.disabled = said
    return None


def all_of(*checks: Callable[[], Any]) -> list[Any]:
    """What each returns.

    Raises:
        UsageError: what they refuse, all of it.
    """
    found, refused = [], []
    for check in checks:
        try:
            found.append(check())
        except UsageError as error:
            refused.append(error)
    if len(refused) > 1:
        raise UsageError("\n".join([f"{len(refused)} problems:", *(f"  - {error}" for error in refused)]))
    if refused:
        raise refused[0]
    return found


_AT_LEAST_ONE = (
    "per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps", "max_steps",
    "logging_steps", "eval_steps", "save_steps", "save_total_limit", "keep_every", "nonfinite_limit", "ddp_timeout",
)  # fmt: skip
_NOT_NEGATIVE = (
    "hang_s",
    "warmup_steps",
    "weight_decay",
    "learning_rate",
    "max_grad_norm",
    "dataloader_num_workers",
    "seed",
    "mlp_tile_tokens",
)
_FRACTIONS = ("eval_fraction", "warmup_ratio", "adam_beta1", "adam_beta2")


def _problems_with_numbers(args: TrainArguments) -> Iterator[str]:
    for name in _AT_LEAST_ONE:
        value = getattr(args, name)
        if value is not None and value < 1:
            never = "; leave it out for none" if name in ("eval_steps", "save_steps", "save_total_limit") else ""
            yield f"--{name} must be at least 1, got {value}{never}"
    if args.seq_len is not None and args.seq_len < 2:
        yield f"--seq_len must be at least 2, got {args.seq_len}: one token has nothing to predict"
    for name in ("per_device_train_batch_size", "per_device_eval_batch_size"):
        if (rows := getattr(args, name)) and (tokens := rows * (args.seq_len or 1)) > MOST_TOKENS:
            yield (
                f"--{name} {rows} makes {tokens:,} tokens a rank and forward, which no device has room for: at most "
                f"{MOST_TOKENS // (args.seq_len or 1):,} rows here, or accumulate (--gradient_accumulation_steps)"
            )
    for name in _NOT_NEGATIVE:
        value = getattr(args, name)
        if value is not None and not value >= 0:  # also catches nan
            yield f"--{name} must not be negative, got {value}"
    for name in ("learning_rate", "weight_decay", "adam_epsilon"):
        if getattr(args, name) == float("inf"):
            yield f"--{name} must be a finite number, got inf"
    if args.seed >= 2**64:  # what torch's generators take
        yield f"--seed must be below 2**64, got {args.seed}"
    for name in _FRACTIONS:
        value = getattr(args, name)
        if value is not None and not 0 <= value < 1:
            yield f"--{name} must be from 0 up to (not including) 1, got {value}"
    if args.gpu_memory_cap is not None and not 0 < args.gpu_memory_cap < float("inf"):
        yield f"--gpu_memory_cap must be a positive number of GiB, got {args.gpu_memory_cap}"
    if not 0 < args.num_train_epochs < float("inf"):
        yield f"--num_train_epochs must be positive, got {args.num_train_epochs}"


def _problems_with_strategies(args: TrainArguments) -> Iterator[str]:
    for what, every in (("eval", args.eval_steps), ("save", args.save_steps), ("logging", None)):
        name = f"{what}_strategy"
        value = getattr(args, name)
        if value is not None and value != "epoch":
            yield f"--{name} {value}: {foreign.instead(name)}"
        elif value and every:
            yield f"--{name} epoch and --{what}_steps {every} are two ways to say one thing: give one of them"


def _problems_with_saving(args: TrainArguments) -> Iterator[str]:
    for name in ("save_total_limit", "save_only_model", "load_best_model_at_end", "copy_checkpoints_to"):
        if getattr(args, name) and not args.saves:
            yield f"--{name} without --save_steps: nothing would be saved; add --save_steps N or --save_strategy epoch"
    if args.keep_every and args.save_strategy == "epoch":
        yield "--keep_every counts steps, and with --save_strategy epoch few steps that are saved are a multiple: leave one of them out"
    if args.keep_every and not args.save_total_limit:
        yield "--keep_every without --save_total_limit: all checkpoints are kept; add --save_total_limit K, or leave it out"
    second = args.copy_checkpoints_to and Path(args.copy_checkpoints_to).expanduser().resolve()
    if second and second.is_relative_to(Path(args.output_dir).expanduser().resolve()):
        yield f"--copy_checkpoints_to {args.copy_checkpoints_to} lies in --output_dir: name a folder on another disk"
    if second and args.save_only_model:
        yield "--copy_checkpoints_to copies checkpoints, and --save_only_model writes none: leave one of them out"
    if not args.load_best_model_at_end:
        return
    if args.save_only_model:
        yield "--load_best_model_at_end loads a checkpoint, and --save_only_model writes none: leave one of them out"
    if not (args.eval_data or args.eval_fraction):
        yield "--load_best_model_at_end without anything to evaluate on: add --eval_data PATH or --eval_fraction 0.05"
    elif args.save_strategy == "epoch" or (args.save_steps and args.eval_strategy == "epoch"):
        if args.save_strategy != args.eval_strategy:
            yield "--load_best_model_at_end needs an evaluation where it saves: give --eval_strategy and --save_strategy the same value"
    elif args.save_steps and (not args.eval_steps or args.save_steps % args.eval_steps):
        yield (
            f"--load_best_model_at_end needs an evaluation where it saves: --save_steps ({args.save_steps}) must be a multiple of "
            f"--eval_steps ({args.eval_steps}); write for example --eval_steps {args.save_steps}"
        )


def _problems_with_recomputing(args: TrainArguments) -> Iterator[str]:
    blocks = args.checkpoint_blocks
    if blocks is not None and blocks != "auto" and not (blocks.isdecimal() and int(blocks) > 0):
        yield f"--checkpoint_blocks must be a whole number of at least 1, or auto, got {blocks!r}"
    if args.gradient_checkpointing is False:
        for name, said in (
            ("checkpoint_blocks", blocks is not None),
            ("checkpointing_policy", args.checkpointing_policy != "full"),
        ):
            if said:
                yield f"--{name} {getattr(args, name)} goes with --gradient_checkpointing, which is false: leave one of them out"


def _problems_with_compiling(args: TrainArguments) -> Iterator[str]:
    """What cannot stand beside torch_compile, and why; what else is found goes into this table."""
    apart = (
        (
            args.ds_config == "auto",
            "--ds_config auto",
            "its search knows no compiled blocks: name a ds_config of stage 0, 1 or 2",
        ),
        (_stage(args.ds_config) == 3, "ZeRO stage 3", "weights are gathered by hooks inside of a block: use stage 0, 1 or 2"),
        (
            args.checkpointing_policy in ("attention", "selective"),
            f"--checkpointing_policy {args.checkpointing_policy}",
            "it looks at single operators: take full",
        ),
        (
            args.checkpointing_policy in ("offload", "offload_inputs"),
            f"--checkpointing_policy {args.checkpointing_policy}",
            "it has not been shown right: take full",
        ),
        (
            bool(args.mlp_tile_tokens),
            "--mlp_tile_tokens",
            "a compiled block would take a part in tiles apart again: give one of them",
        ),
    )
    for found, what, why in apart:
        if found:
            yield f"--torch_compile does not go with {what}: {why}, or leave --torch_compile out"


def _stage(ds_config: str) -> int:
    try:
        config = parse(ds_config) if ds_config.lstrip().startswith("{") else load(ds_config)
        return int((config.get("zero_optimization") or {}).get("stage", 0))
    except (ConfigError, TypeError, ValueError, AttributeError):
        return 0  # told elsewhere


def _is_there(path: str) -> bool:
    """True if `path` is a file, a folder, or a pattern that matches something."""
    full = str(Path(path).expanduser())
    return Path(full).exists() or bool(glob.glob(full, recursive=True))


def _instead_of_data(value: str) -> str:
    """What to write where data that is not there looks like something else."""
    if "://" in value:
        return ": data is read from disk; download it first"
    if any(_is_there(part.strip()) for part in value.split(",")[1:]) or any(_is_there(part) for part in value.split()[1:]):
        return ": it is one path; for several files give their folder, or a pattern in quotes"
    folder = next((parent for parent in Path(value).expanduser().parents if parent.is_dir()), Path())
    near = difflib.get_close_matches(Path(value).name, sorted(p.name for p in folder.iterdir()), n=3)
    if not near and not Path(value).suffix and value.count("/") <= 1 and not value.startswith((".", "/", "~")):
        save = f"from datasets import load_dataset; load_dataset('{value}', split='train').to_json('train.jsonl')"
        return f': data is read from disk; save one of the hub first: python -c "{save}"'
    return f"; did you mean {', '.join(str(folder / name) for name in near)}?" if near else ""


def _impossible(path: str | None) -> str | None:
    """Why no file can ever have this name."""
    try:
        os.stat(Path(path or ".").expanduser())
    except (OSError, ValueError) as error:
        too_long = isinstance(error, OSError) and error.errno in (errno.ENAMETOOLONG, errno.ELOOP)
        if (too_long or isinstance(error, ValueError)) and not str(path).lstrip().startswith("{"):  # a ds_config as text
            return f"{str(path)[:100]!r}... cannot be a path: {getattr(error, 'strerror', error)}"
    return None


def _problems_with_files(args: TrainArguments) -> Iterator[str]:
    for name, value in asdict(args).items():
        if isinstance(value, str) and not value.strip() and name != "run_name":
            yield f"--{name} is empty: give a value or leave it out (a shell variable that is not set?)"
    if impossible := [f"--{name}: {why}" for name in PATHS if (why := _impossible(getattr(args, name)))]:
        yield from impossible
        return
    if args.ds_config.strip() and args.ds_config != "auto" and not args.ds_config.lstrip().startswith("{"):
        try:
            load(args.ds_config)
        except ConfigError as error:
            yield f"--ds_config: {error}"
    for name in ("train_data", "eval_data"):
        value = getattr(args, name)
        if value and not _is_there(value):
            yield f"--{name}: {value} does not exist{_instead_of_data(value)}"
    model = args.model_name_or_path
    if shapes.is_preset(model):
        if model.removeprefix(shapes.PREFIX) not in shapes.names():
            near = difflib.get_close_matches(model.removeprefix(shapes.PREFIX), shapes.names(), n=3)
            yield f"--model_name_or_path: unknown {model}; " + (
                f"did you mean {', '.join(near)}?" if near else f"known: {', '.join(shapes.names())}"
            )
        if not args.tokenizer_name_or_path:
            yield "--tokenizer_name_or_path is needed: a preset has no tokenizer of its own; any folder or hub id with one, as out/stdlib/tokenizer after `make train`"
    elif why := _no_such_folder(model):
        yield f"--model_name_or_path: {why}"
    elif why := _no_model(Path(model).expanduser()):
        yield f"--model_name_or_path: {model} {why}"
    elif not args.tokenizer_name_or_path and (why := _no_tokenizer(Path(model).expanduser())):
        yield f"--model_name_or_path: {model} {why}, or name another folder's by --tokenizer_name_or_path"
    own = args.tokenizer_name_or_path
    if own and (why := _no_such_folder(own)):
        yield f"--tokenizer_name_or_path: {why}"
    elif own and (why := _no_tokenizer(Path(own).expanduser())):
        yield f"--tokenizer_name_or_path: {own} {why}"
    if why := _too_small(args):
        yield why
    resume = args.resume_from_checkpoint
    if resume and resume != "auto" and not Path(resume).expanduser().is_dir():
        yield f"--resume_from_checkpoint: {resume} is no directory; write auto, or the path of a checkpoint-<step> folder"


def too_long(seq_len: int | None, limit: int | None, model: str) -> str | None:
    """What to say of rows that the model has no positions for; None: it has, or nobody knows."""
    if not limit or (seq_len or 0) <= limit:
        return None
    return f"--seq_len {seq_len} is above the max_position_embeddings {limit} of {model}: write --seq_len {limit}, or less"


def too_many_tokens(needed: int, size: int) -> str:
    """What to say of a tokenizer with more tokens than the model's embedding has rows."""
    return (
        f"the tokenizer has {needed} tokens, the model's embedding {size}: pass --resize_vocab to grow the embedding, "
        "or use the model's own tokenizer"
    )


def _too_small(args: TrainArguments) -> str | None:
    """Why the model cannot know every token, as far as two files on disk tell; `model_files.vocabulary` asks the tokenizer itself."""
    model = args.model_name_or_path
    file = Path(args.tokenizer_name_or_path or model).expanduser() / "tokenizer.json"
    if args.resize_vocab or not file.is_file():
        return None
    try:
        preset = shapes.is_preset(model)
        config = shapes.config_dict(model) if preset else json.loads((Path(model).expanduser() / "config.json").read_text())
        size = int((config.get("text_config") or config).get("vocab_size") or config["vocab_size"])
        told = json.loads(file.read_text(encoding="utf-8"))
        tokens = {entry if isinstance(entry, str) else entry[0] for entry in told["model"]["vocab"]}
        needed = len(tokens.union(token["content"] for token in told.get("added_tokens") or ()))
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError, UsageError):
        return None  # what is wrong with these files is told where they are loaded
    return too_many_tokens(needed, size) if needed > size else None


def _no_model(folder: Path) -> str:
    """Why a folder or file is none of a Hugging Face model; empty if it is one, or not there."""
    if folder.is_file() and folder.name != "config.json":
        return "is a file: name the folder of the model, with its config.json"
    if not folder.is_dir():
        return ""
    if (folder / "config.json").exists():
        try:
            shapes.read_config(folder)
        except UsageError as error:
            return f"cannot be used: {error}"
        return ""
    if (folder / "COMMIT").is_file():
        return (
            f"is a checkpoint: go on with --resume_from_checkpoint, or make a model of it: bigtrain export {folder} MODEL_DIR"
        )
    if (folder / "model" / "config.json").is_file():
        return f"is the folder of a run: did you mean {folder / 'model'}?"
    return f"holds no config.json: a Hugging Face model folder is needed; {_holds(folder)}"


def _no_tokenizer(folder: Path) -> str:
    """Why no tokenizer can be in a folder; empty if one may be, or it is no folder. Transformers would ask for sentencepiece."""
    if not folder.is_dir() or not all(any(path.match(kind) for kind in _NO_TOKENIZER) for path in folder.iterdir()):
        return ""
    return f"holds no tokenizer (such as tokenizer.json); {_holds(folder)}. Copy the files of the model's tokenizer there"


def _holds(folder: Path) -> str:
    names = sorted(path.name for path in folder.iterdir())
    return f"it holds {listing(names)}" if names else "it is empty"


def _no_such_folder(name: str) -> str:
    """Why a name that cannot be meant for the hub is none of a folder; empty if it is, or may be OWNER/NAME there."""
    path = Path(name).expanduser()
    local = name.startswith((".", "/", "~")) or name.count("/") > 1 or ("/" in name and Path(path.parts[0]).is_dir())
    if not local or path.exists():
        return ""
    beside = sorted(p.name for p in path.parent.iterdir()) if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, beside, n=3)
    return f"there is no folder {name}" + (f"; did you mean {', '.join(str(path.parent / n) for n in near)}?" if near else "")
