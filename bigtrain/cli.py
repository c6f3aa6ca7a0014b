"""The `bigtrain` command: verbs that plan, check and inspect. None of them trains; start-up needs no torch.

A verb lives in the `cli` module of the part that it belongs to; only that module is imported. It offers
`add_parsers(subparsers)`, whose parsers set `run`, a function of the parsed arguments that returns the exit code.
"""

from __future__ import annotations

import argparse
import importlib
import re
import sys
from collections.abc import Sequence
from typing import Any

from bigtrain import __version__, shapes
from bigtrain.errors import UsageError
from bigtrain.stopping import exit_code

# verb: (module with add_parsers, what it is for)
VERBS: dict[str, tuple[str, str]] = {
    "config": ("bigtrain.config.cli", "generate, lint and resolve a ds_config"),
    "plan": ("bigtrain.plan.cli", "memory and speed of a job before it is launched"),
    "bench": ("bigtrain.bench.cli", "run a grid of trainings: speed and memory, predicted beside measured"),
    "inspect": ("bigtrain.checkpoint.cli", "what is in a checkpoint, or in a folder of weights and who would read which bytes"),
    "verify": ("bigtrain.checkpoint.cli", "check every byte of a checkpoint against its hash"),
    "export": ("bigtrain.checkpoint.cli", "the weights of a checkpoint as a Hugging Face folder"),
    "doctor": ("bigtrain.diagnostics.doctor.cli", "test this machine, and say what to mend"),
}
TRAIN_HINT = (
    "To train: deepspeed launch/train.py --ds_config FILE ... (or, without a clone: deepspeed --module bigtrain.train ...)"
)


def make_parser(verb: str | None = None) -> argparse.ArgumentParser:
    """The parser for one verb, or the top-level one that only lists verbs."""
    width = max(map(len, VERBS))
    listing = "\n".join(f"  {name:<{width}}  {purpose}" for name, (_, purpose) in VERBS.items())
    parser = argparse.ArgumentParser(
        prog="bigtrain",
        usage="bigtrain VERB ...",
        description=f"Train models larger than your GPU with DeepSpeed.\n\nverbs:\n{listing}",
        epilog=TRAIN_HINT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"bigtrain {__version__}")
    if verb is not None:
        parser.usage = None
        verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
        importlib.import_module(VERBS[verb][0]).add_parsers(verbs)
        _describe(verbs)
    return parser


def _unknown(verb: str, words: list[str], parser: argparse.ArgumentParser) -> str:
    """What cannot be read of a verb's arguments, with the nearest flags."""
    import difflib

    def flags(of: argparse.ArgumentParser) -> list[str]:
        inner = [p for a in of._actions if isinstance(a, argparse._SubParsersAction) for p in a.choices.values()]
        return [*of._option_string_actions, *(flag for one in inner for flag in flags(one))]

    near = (
        difflib.get_close_matches(words[0].split("=")[0], sorted(set(flags(parser))), n=1) if words[0].startswith("-") else []
    )
    hint = f": did you mean {near[0]}?" if near else ""
    return f"bigtrain {verb} does not know {' '.join(words)}{hint}\nRun bigtrain {verb} --help for the list."


def _describe(verbs: Any) -> None:
    """Let the help of a verb begin with what its parent's list says of it."""
    for choice in verbs._choices_actions:
        parser = verbs.choices[choice.dest]
        parser.description = parser.description or choice.help[0].upper() + choice.help[1:] + "."
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                _describe(action)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb and return its exit code; errors of bigtrain's own print without a traceback."""
    words = list(sys.argv[1:] if argv is None else argv)
    return exit_code(lambda: _run(words))


def _resolved_config(args: argparse.Namespace, model_config: dict[str, Any] | None) -> Any:
    """The ds_config to plan, resolved as training does, with every fault that it would refuse; without bf16 it means fp32."""
    from dataclasses import replace

    from bigtrain import config as ds

    config = ds.load(args.ds_config)
    said = {
        name: value for name in ("micro_batch", "accumulation", "global_batch") if (value := getattr(args, name)) and value > 0
    }
    run = ds.RunValues(**said, optim=args.optim, gradient_checkpointing=args.recompute)
    run = replace(run, **ds.left_open(config, ds.RunValues(total_steps=10**9)).given())  # a plan has no number of steps
    model = ds.ModelShape.from_config(model_config) if model_config else None
    return ds.resolve(config, run=run, model=model, world_size=max(1, args.gpus), device=args.device, name=args.ds_config)


def _refuse_unknown_names(args: argparse.Namespace) -> None:
    from bigtrain import optim

    if getattr(args, "optim", None):
        optim.canonical_name(args.optim)
    if getattr(args, "lr_scheduler_type", None):
        optim.schedule(args.lr_scheduler_type, total_steps=1)


def _run(words: list[str]) -> int:
    if not words or words[0].startswith("-"):
        parser = make_parser()
        parser.parse_args(words)
        parser.print_help()
        return 0 if words else 2
    if (empty := next((at for at, word in enumerate(words) if not word or re.fullmatch(r"--\w+=", word)), None)) is not None:
        where = words[empty].rstrip("=") or words[empty - 1]
        raise UsageError(f"the value after {where} is empty (a shell variable that is not set?)")
    if words[0] not in VERBS:
        import difflib

        near = difflib.get_close_matches(words[0], VERBS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known verbs: {', '.join(VERBS)}"
        raise UsageError(f"unknown verb {words[0]!r}: {hint}\n{TRAIN_HINT}")
    parser = make_parser(words[0])
    args, unknown = parser.parse_known_args(words)
    if unknown:
        raise UsageError(_unknown(words[0], unknown, parser))
    if args.verb == "config":  # it does not know which optimizers and schedules there are
        _refuse_unknown_names(args)
        if args.action == "lint" and args.model:  # nor a model's blocks
            args.blocks = importlib.import_module("bigtrain.plan.leafs").blocks_told(shapes.read_config(args.model))
    if getattr(args, "measure", None):  # the planner itself runs nothing: what does is handed to it
        args.measurer = importlib.import_module("bigtrain.bench.measure").measure
    if args.verb == "plan":  # nor does it know what a ds_config may say
        args.reader = _resolved_config
    return int(args.run(args) or 0)


if __name__ == "__main__":  # it was silent, and ended well
    from bigtrain.stopping import end_process

    end_process(main())
