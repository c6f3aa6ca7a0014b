"""The command line of `bigtrain plan`: its flags, and which of them go together."""

from __future__ import annotations

import argparse
from typing import get_args

from bigtrain import defaults
from bigtrain.errors import UsageError
from bigtrain.plan.choose import DEFAULT_OPTIMIZERS
from bigtrain.plan.inputs import Checkpointing
from bigtrain.plan.leaf_choice import LeafBlocks
from bigtrain.plan.spilled import AUTO
from bigtrain.plan.states import LAYOUTS

MAX = "max"


def add_flags(p: argparse.ArgumentParser) -> None:
    """Tell the parser every flag."""
    model = p.add_mutually_exclusive_group(required=True)
    model.add_argument(
        "--model",
        "--model_name_or_path",
        metavar="DIR|preset:NAME",
        help="folder with config.json, that file, or a named shape",
    )
    model.add_argument("--shapes", metavar="FILE", help="JSON [[name, [sizes...]], ...] of any module")
    p.add_argument("--gpus", "--world_size", type=int, default=1, metavar="N", help="ranks in all")
    p.add_argument("--gpus_per_node", type=int, metavar="N", help="ranks of one host (default: all)")
    p.add_argument("--gpu_memory", metavar="SIZE", help="of one card, for example 47.4GiB (default: nvidia-smi)")
    p.add_argument("--host_memory", metavar="SIZE", help="of one host (default: machine or container limit)")
    p.add_argument(
        "--seq_len", "--max_length", "--max_seq_length", "--cutoff_len", type=_length, metavar="N|max",
        help=f"tokens per row; max: as many as fit (default: {defaults.SEQ_LEN}, or the model's limit)",
    )  # fmt: skip
    p.add_argument("--micro_batch", "--per_device_train_batch_size", type=int, metavar="N", help="rows per rank and micro step")
    p.add_argument(
        "--accumulation", "--gradient_accumulation_steps", type=int, metavar="N", help="micro steps per optimizer step"
    )
    p.add_argument("--global_batch", type=int, metavar="N", help="sequences of a step over all ranks")
    _configuration(p)
    p.add_argument("--formulas", action="store_true", help="behind each row, how it is counted and where that was read")
    p.add_argument("--json", action="store_true", help="everything as JSON on standard output")


def _configuration(p: argparse.ArgumentParser) -> None:
    how = p.add_mutually_exclusive_group()
    how.add_argument(
        "--ds_config",
        "--deepspeed",
        "--deepspeed_config",
        metavar="FILE|auto",
        help="plan this DeepSpeed JSON; auto: as --auto",
    )
    how.add_argument("--auto", action="store_true", help="choose the fastest configuration that fits")
    p.add_argument("--stage", type=int, choices=[0, 1, 2, 3], help="ZeRO stage without a file (default 3)")
    p.add_argument("--offload", choices=["none", "optimizer", "all"], help="what lives on the host, without a file")
    p.add_argument(
        "--offload_gradients", default=AUTO, metavar="SHARE|auto", help="leaves the GPU in backward; auto: the least that fits"
    )
    p.add_argument("--optim", "--optimizer", metavar="NAME", help=f"one of {', '.join(LAYOUTS)}")
    p.add_argument("--optimizers", metavar="A,B", help=f"what --auto may choose (default {','.join(DEFAULT_OPTIMIZERS)})")
    p.add_argument(
        "--checkpointing", choices=get_args(Checkpointing),
        help="activation checkpointing in one word: none, or the policy (default: none, or as the ds_config says)",
    )  # fmt: skip
    p.add_argument(
        "--gradient_checkpointing", "--activation_checkpointing", nargs="?", const=True, type=_yes_or_no, metavar="BOOL",
        help="as launch/train.py takes it: recompute activations in backward",
    )  # fmt: skip
    p.add_argument(
        "--checkpointing_policy", choices=get_args(Checkpointing)[1:], help="what of a recomputed block is kept, and where"
    )
    p.add_argument(
        "--checkpoint_blocks", metavar="N|auto", help="recompute only the first N blocks; auto: as few as fit (default: all)"
    )
    p.add_argument(
        "--mlp_tile_tokens", type=int, default=0, metavar="N", help="feed-forward parts over tiles of N tokens (0: as a whole)"
    )
    p.add_argument(
        "--leaf_blocks", choices=get_args(LeafBlocks), default=AUTO,
        help="stage 3: blocks are gathered whole; auto: where the host's hooks take longer than the card's work",
    )  # fmt: skip
    p.add_argument("--freeze", nargs="+", default=(), metavar="NAME", help="modules or parameters that do not train")
    p.add_argument("--kernels", choices=["hf", "liger"], help="transformers' own, or fused ones (default: liger on a GPU)")
    p.add_argument(
        "--use_liger_kernel", nargs="?", const=True, type=_yes_or_no, metavar="BOOL", help="as launch/train.py takes it"
    )
    p.add_argument(
        "--loss", choices=["full", "chunked", "fused"], help="all logits in fp32, a chunk of tokens at a time, or that in place"
    )
    p.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="what the run is on (default: cuda)")
    p.add_argument(
        "--calibration",
        metavar="FILE",
        help="measured rates as JSON (default: what bigtrain doctor stored); none: built-in ones",
    )
    p.add_argument(
        "--measure", type=int, metavar="N", help="with --auto: run the N best for a few steps here, take the fastest"
    )


def _yes_or_no(text: str) -> bool:
    known = {**dict.fromkeys(("true", "yes", "1"), True), **dict.fromkeys(("false", "no", "0"), False)}
    if text.lower() not in known:
        raise argparse.ArgumentTypeError(f"true or false is needed, not {text!r}")
    return known[text.lower()]


def _length(text: str) -> int | str:
    if text != MAX and not text.isdecimal():
        raise argparse.ArgumentTypeError(f"a number of tokens, or {MAX}, is needed, not {text!r}")
    return text if text == MAX else int(text)


def settle_words(args: argparse.Namespace) -> None:
    """Several spellings of one thing become one: `auto`, `recompute` (None: nobody said), `policy`, `blocks`, `kernels`.

    Raises:
        UsageError: two contradict each other, or one would not count.
    """
    if args.ds_config == AUTO:
        args.auto, args.ds_config = True, None
    if args.checkpointing is not None and (args.gradient_checkpointing is not None or args.checkpointing_policy):
        raise UsageError(
            "--checkpointing says what --gradient_checkpointing and --checkpointing_policy say: give one or the others"
        )
    if args.kernels is not None and args.use_liger_kernel is not None:
        raise UsageError("--kernels and --use_liger_kernel say one thing: give one of them")
    args.blocks = args.checkpoint_blocks
    if args.blocks not in (None, AUTO):
        if not args.blocks.isdecimal() or not int(args.blocks):
            raise UsageError(f"--checkpoint_blocks is {args.blocks!r}: a whole number of at least 1, or auto, is needed")
        args.blocks = int(args.blocks)
    said = args.gradient_checkpointing if args.checkpointing is None else args.checkpointing != "none"
    if said is False and (args.blocks or args.checkpointing_policy):
        name = "checkpoint_blocks" if args.blocks else "checkpointing_policy"
        how = "gradient_checkpointing false" if args.checkpointing is None else "checkpointing none"
        raise UsageError(f"--{name} {getattr(args, name)} contradicts --{how}: leave one of them out")
    args.policy = args.checkpointing_policy or (args.checkpointing if said else None) or defaults.CHECKPOINTING_POLICY
    args.recompute = defaults.recomputes(said, args.policy, args.blocks)
    args.kernels = args.kernels or ("liger" if defaults.fused_kernels(args.use_liger_kernel, args.device == "cuda") else "hf")
    _refuse_what_would_not_count(args)


def _refuse_what_would_not_count(args: argparse.Namespace) -> None:
    if args.measure is not None and not args.auto:
        raise UsageError("--measure goes with --auto: it runs the best that --auto found")
    if args.measure is not None and (not args.model or args.measure < 1):
        raise UsageError(f"--measure {args.measure} runs candidates: give a --model, and a number of at least 1")
    if args.global_batch is not None and args.global_batch < 1:
        raise UsageError(f"--global_batch is {args.global_batch}: a whole number of at least 1 is needed")
    if args.seq_len == MAX and args.auto:
        raise UsageError(f"--seq_len {MAX} asks how long a sequence one configuration can take: give it instead of --auto")
    if "" in (args.optim, args.optimizers):
        raise UsageError(f"an optimizer is '': name one of {', '.join(LAYOUTS)}, or leave the flag out")
    if args.optimizers and (args.optim or not args.auto):
        raise UsageError("--optimizers says what --auto may choose; --optim names the one to plan: give one of them")
    if args.auto and args.loss is not None:
        raise UsageError(
            f"--loss {args.loss}: --auto ends in a command, and launch/train.py has no such flag: its loss goes with --use_liger_kernel. Give "
            "--kernels hf for full, liger for fused, or plan one configuration"
        )
    for name in ("stage", "offload"):
        if getattr(args, name) is not None and (args.auto or args.ds_config is not None):
            decides = "--auto" if args.auto else "--ds_config"
            raise UsageError(f"--{name} {getattr(args, name)}: {decides} decides that; leave one of them out")
    least = {"optimizer": 1, "all": 3}.get(args.offload or "", 0)
    if args.stage is not None and args.stage < least:
        able = "3" if least == 3 else "1, 2 or 3"
        raise UsageError(f"--offload {args.offload} needs --stage {able}, not {args.stage}: change one of the two")
    if args.auto and args.global_batch and (args.micro_batch or args.accumulation):
        raise UsageError(
            "--auto --global_batch chooses micro batch and accumulation: leave --micro_batch and --accumulation out"
        )
