"""The command line that trains what was planned."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path

from bigtrain import defaults, shapes
from bigtrain.plan.inputs import PlanInput
from bigtrain.plan.spilled import AUTO


def command_for(args: argparse.Namespace, best: PlanInput) -> str:
    """What chooses `best` again on the machine that has the cards: with what the choice was bound by.

    What was open in a way that competes for memory (blocks to recompute, gradients that leave, buffers) stays open: a number for one of
    them would change what is left for the others.
    """
    fused, usual = best.kernels == "liger" or best.chunks_loss, defaults.fused_kernels(None, best.device == "cuda")
    path, preset = Path(args.model), shapes.PREFIX + args.model.lower().removeprefix(shapes.PREFIX)
    values = {
        "model_name_or_path": path.parent if path.is_file() else path if path.exists() else preset,
        "seq_len": best.seq_len,
        "optim": best.optimizer,
        "per_device_train_batch_size": best.micro_batch,
        "gradient_accumulation_steps": best.accumulation,
        "gradient_checkpointing": None if args.recompute is None else str(args.recompute).lower(),
        "checkpointing_policy": args.policy if args.policy != defaults.CHECKPOINTING_POLICY else None,
        "checkpoint_blocks": args.blocks,
        "mlp_tile_tokens": args.mlp_tile_tokens or None,
        "offload_gradients": args.offload_gradients if args.offload_gradients != AUTO else None,
        "leaf_blocks": args.leaf_blocks if args.leaf_blocks != AUTO else None,
        "use_liger_kernel": str(fused).lower() if fused != usual else None,
    }
    words = [word for name, value in values.items() if value is not None for word in (f"--{name}", str(value))]
    return train_command(best, ["--ds_config", AUTO, *words, *(["--freeze", *args.freeze] if args.freeze else [])])


def auto_command(args: argparse.Namespace) -> str:
    """What looks for a configuration that fits: the same model and memory, and nothing that the plan was told of ZeRO and offload."""
    kept = ("model", "shapes", "gpus", "gpus_per_node", "gpu_memory", "host_memory", "seq_len", "global_batch", "device")
    values = {name: getattr(args, name) for name in kept}
    told = {name: value for name, value in values.items() if value is not None and value != _UNSAID.get(name)}
    words = [word for name, value in told.items() for word in (f"--{name}", str(value))]
    return shlex.join(["bigtrain", "plan", "--auto", *words, *(["--freeze", *args.freeze] if args.freeze else [])])


_UNSAID = {"gpus": 1, "device": "cuda"}


def train_command(plan: PlanInput, flags: Sequence[str]) -> str:
    """The command that starts launch/train.py on as many ranks, complete but for the words in capitals.

    Args:
        flags: of the run, --model_name_or_path among them; data, output folder and what else the model needs are added.
    """
    hosts = plan.world_size > plan.ranks_per_node
    if plan.device == "cpu":
        start = ["DS_ACCELERATOR=cpu", "deepspeed", "--num_accelerators", str(plan.ranks_per_node)]
    else:
        start = ["deepspeed", "--num_gpus", str(plan.ranks_per_node)]
    start += ["--hostfile", "HOSTFILE"] if hosts else []
    name = flags[flags.index("--model_name_or_path") + 1]
    needed = ["--tokenizer_name_or_path", "TOKENIZER"] if shapes.is_preset(name) else []
    return shlex.join([*start, "launch/train.py", *flags, *needed, "--train_data", "DATA", "--output_dir", "OUT"])
