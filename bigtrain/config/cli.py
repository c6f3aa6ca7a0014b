"""`bigtrain config generate | lint | resolve`.

Results go to standard output as JSON, everything for the eye to standard error, so that `> x.json` is always right.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import fields, replace
from typing import Any

from bigtrain.config.generate import PRESETS, GenerateOptions, dump, generate
from bigtrain.config.lint import lint
from bigtrain.config.load import load, parse
from bigtrain.config.problems import report
from bigtrain.config.resolve import resolve, table
from bigtrain.config.run import RunValues
from bigtrain.config.shape import ModelShape
from bigtrain.errors import UsageError


def add_parsers(subparsers: Any) -> None:
    """Register the verb `config` with its three actions. Each parser sets `run`, a function from args to exit code."""
    parser = subparsers.add_parser("config", help="generate, lint and resolve ds_configs")
    actions = parser.add_subparsers(dest="action", required=True)
    _generate_parser(actions)
    _lint_parser(actions)
    _resolve_parser(actions)


def _generate_parser(actions: Any) -> None:
    p = actions.add_parser(
        "generate", help="write a ds_config from a few choices", usage="bigtrain config generate [--FLAG VALUE ...]"
    )
    p.add_argument("--preset", choices=[*PRESETS], help="start from a preset; other flags change it")
    p.add_argument("--stage", type=int, choices=[0, 1, 2, 3], help="ZeRO stage")
    p.add_argument("--offload", choices=["none", "optimizer", "all"], help="what leaves the GPU; all: parameters too")
    p.add_argument("--nvme_path", metavar="DIR", help="offload to files there instead of host memory")
    _switch(p, "--activation_checkpointing", "recompute activations in backward")
    _switch(p, "--bf16", "bf16 compute with fp32 master weights")
    p.add_argument("--optimizer", metavar="NAME", help="DeepSpeed's name, for example AdamW")
    p.add_argument("--scheduler", choices=["linear", "cosine", "constant"], help="schedule that DeepSpeed builds")
    p.add_argument("--world_size", type=int, metavar="N", help="ranks; completes the batch numbers")
    p.add_argument("--model", metavar="DIR|preset:NAME", help="turns the bucket formulas into numbers")
    _run_flags(p)
    p.set_defaults(run=_generate)


def _lint_parser(actions: Any) -> None:
    p = actions.add_parser("lint", help="every problem of a ds_config in one report; exit 2 when there is an error")
    p.add_argument("file", metavar="FILE", help="a file, the name of a preset, or - for standard input")
    _known(p)
    p.add_argument("--json", action="store_true", help="the problems as JSON on standard output")
    p.set_defaults(run=_lint)


def _resolve_parser(actions: Any) -> None:
    p = actions.add_parser("resolve", help="decide every auto; prints the file that plain DeepSpeed can run")
    p.add_argument("file", metavar="FILE", help="a file, the name of a preset, or - for standard input")
    _known(p)
    _run_flags(p)
    p.add_argument("--optim", metavar="NAME", help="adamw, adamw_8bit, muon, ...")
    p.add_argument("--lr_scheduler_type", metavar="NAME", help="linear, cosine, constant, wsd")
    _switch(p, "--bf16", "bf16 compute with fp32 master weights")
    _switch(p, "--gradient_checkpointing", "recompute activations in backward")
    p.set_defaults(run=_resolve)


def _known(p: argparse.ArgumentParser) -> None:
    p.add_argument("--world_size", type=int, metavar="N", help="number of ranks")
    p.add_argument(
        "--model", metavar="DIR|preset:NAME", help="a Hugging Face folder, config.json or named shape: buckets fit its sizes"
    )
    p.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="what the run is on (default: cuda)")


def _switch(p: argparse.ArgumentParser, flag: str, help: str) -> None:
    """`--x`, `--x true` and `--x false`, as HfArgumentParser has it."""
    p.add_argument(flag, type=_truth, nargs="?", const=True, metavar="true|false", help=help)


def _truth(word: str) -> bool:
    if word.lower() in ("true", "1", "yes"):
        return True
    if word.lower() in ("false", "0", "no"):
        return False
    raise argparse.ArgumentTypeError(f"{word}: write true or false")


_FLAGS: tuple[tuple[str, str, type, str], ...] = (
    ("micro_batch", "--per_device_train_batch_size", int, "rows per rank and micro step"),
    ("accumulation", "--gradient_accumulation_steps", int, "micro steps per optimizer step"),
    ("global_batch", "--global_batch", int, "rows per optimizer step over all ranks"),
    ("learning_rate", "--learning_rate", float, "peak learning rate"),
    ("adam_beta1", "--adam_beta1", float, "decay of the first moment"),
    ("adam_beta2", "--adam_beta2", float, "decay of the second moment"),
    ("adam_epsilon", "--adam_epsilon", float, "added to the denominator"),
    ("weight_decay", "--weight_decay", float, "decay of matrices"),
    ("warmup_steps", "--warmup_steps", int, "steps until the peak learning rate"),
    ("total_steps", "--max_steps", int, "optimizer steps of the run"),
    ("max_grad_norm", "--max_grad_norm", float, "global norm to clip at; 0: never"),
)
_ALIASES = {"--per_device_train_batch_size": ["--micro_batch"], "--gradient_accumulation_steps": ["--accumulation"],
            "--max_steps": ["--num_steps", "--total_steps"]}  # fmt: skip


def _run_flags(p: argparse.ArgumentParser) -> None:
    for dest, flag, kind, text in _FLAGS:
        p.add_argument(flag, *_ALIASES.get(flag, []), dest=dest, type=kind, metavar="N" if kind is int else "X", help=text)


def _said(args: argparse.Namespace, cls: type) -> dict[str, Any]:
    """The attributes of `cls` that the command line gave."""
    names = {f.name for f in fields(cls)} - {"model"}
    return {n: v for n, v in vars(args).items() if n in names and v is not None}


def _model(args: argparse.Namespace) -> ModelShape | None:
    return ModelShape.from_config(args.model) if args.model else None


def _read(name: str) -> dict[str, Any]:
    return parse(sys.stdin.read(), "standard input") if name == "-" else load(name)


def _positive_world(args: argparse.Namespace) -> None:
    if args.world_size is not None and args.world_size < 1:
        raise UsageError(f"--world_size {args.world_size}: there is at least one rank; write 1 or more")


def _generate(args: argparse.Namespace) -> int:
    _positive_world(args)
    start = PRESETS[args.preset] if args.preset else GenerateOptions()
    options = replace(start, **_said(args, GenerateOptions), model=_model(args))
    sys.stdout.write(dump(generate(options)))
    return 0


def _lint(args: argparse.Namespace) -> int:
    _positive_world(args)
    model = _model(args)
    if model is not None:
        model = replace(model, **getattr(args, "blocks", {}))
    problems = lint(_read(args.file), world_size=args.world_size, model=model, device=args.device)
    if args.json:
        sys.stdout.write(json.dumps([p.to_dict() for p in problems], indent=2) + "\n")
    else:
        sys.stdout.write(report(problems, args.file) + "\n")
    return UsageError.exit_code if any(p.severity == "error" for p in problems) else 0


def _resolve(args: argparse.Namespace) -> int:
    _positive_world(args)
    done = resolve(
        _read(args.file),
        run=RunValues(**_said(args, RunValues)),
        model=_model(args),
        world_size=args.world_size or 1,
        device=args.device,
        name=args.file,
    )
    sys.stderr.write(table(done.decisions) + "\n")
    if done.problems:
        sys.stderr.write(report(done.problems, args.file) + "\n")
    sys.stdout.write(dump(done.config))
    return 0
