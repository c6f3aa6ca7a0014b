"""The command line that trains what was planned."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Container, Sequence
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


def auto_command(args: argparse.Namespace, now: PlanInput, nobody_said: Container[str]) -> str:
    """What looks for a configuration that fits: the same model, memory, rows of a step and what else does not decide where bytes lie.

    Below it, what the user said and the search decides anew.

    Args:
        now: the plan that does not fit. nobody_said: its values that are defaults, of "optimizer", "micro_batch", "accumulation".
    """
    kept = (
        "model",
        "shapes",
        "gpus",
        "gpus_per_node",
        "gpu_memory",
        "host_memory",
        "seq_len",
        "device",
        "mlp_tile_tokens",
        "kernels",
        "calibration",
    )
    values = {name: getattr(args, name) for name in kept}
    values["seq_len"] = None if args.seq_len is None else now.seq_len
    usual = "liger" if defaults.fused_kernels(None, args.device == "cuda") else "hf"
    values["kernels"] = args.kernels if args.kernels != usual else None
    values["optim"] = None if "optimizer" in nobody_said else now.optimizer
    if "micro_batch" not in nobody_said or "accumulation" not in nobody_said:
        values["global_batch"] = now.world_size * now.micro_batch * now.accumulation
    words = [word for name, value in values.items() if value != _UNSAID.get(name) for word in (f"--{name}", str(value))]
    command = shlex.join(["bigtrain", "plan", "--auto", *words, *(["--freeze", *args.freeze] if args.freeze else [])])
    anew = [f"--{name} {value}" for name in _ANEW if (value := getattr(args, name)) not in (None, AUTO)]
    return f"{command}\n  (it chooses anew what you said with {', '.join(anew)})" if anew else command


_UNSAID = {"gpus": 1, "device": "cuda", "mlp_tile_tokens": 0}
_ANEW = (
    "ds_config", "stage", "offload", "offload_gradients", "micro_batch", "accumulation", "checkpointing", "gradient_checkpointing",
    "checkpointing_policy", "checkpoint_blocks", "leaf_blocks", "loss",
)  # fmt: skip


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
