"""Measured rows of raw DeepSpeed + transformers on real cards: the inputs and what was read, each with its card.

Llama shapes, random weights, bf16, sequences of 4,096, sdpa, AdamW, one parameter group, overlap_comm on, everything
else at DeepSpeed 0.19.8's defaults, transformers 5.17, torch 2.11+cu130 with the allocator as it is by default. GPU numbers are
1e9 bytes as the run printed them. Host numbers were printed as ru_maxrss / 1e6, which are units of 1,024,000 bytes, rounded to
one of them.
"""

from bigtrain import shapes
from bigtrain.plan import PlanInput, ZeroSettings, plan_input

HOST_UNIT = 1_024_000_000


def row(name: str, stage: int, *, offload: bool = False, ranks: int = 1, micro: int, checkpointing: str = "full") -> PlanInput:
    """The plan's input of one measured run."""
    return plan_input(
        shapes.config_dict(name),
        settings=ZeroSettings(stage=stage, offload_optimizer=offload, overlap_comm=True),
        world_size=ranks,
        micro_batch=micro,
        checkpointing=checkpointing,
        decay_groups=False,
        expandable=False,
    )


# name: (input, allocated GB, device-used GB, host units of one rank)
MEASURED = {
    "H100 3B ZeRO-2 offload mb 4": (row("llama-3b", 2, offload=True, micro=4), 35.7, 53.6, 70),
    "H100 3B ZeRO-3 offload mb 4": (row("llama-3b", 3, offload=True, micro=4), 35.9, 47.7, 64),
    "H200 3B ZeRO-2 mb 4": (row("llama-3b", 2, micro=4), 73.5, 95.4, 2),
    "H200x2 1B ZeRO-2 mb 4 no checkpointing": (
        row("llama-1b", 2, ranks=2, micro=4, checkpointing="none"), 63.9, 77.5, 2,
    ),
    "H200x2 8B ZeRO-2 offload mb 1": (row("llama-8b", 2, offload=True, ranks=2, micro=1), 32.1, 47.4, 76),
}  # fmt: skip

# tokens/s of one GPU in the same runs
SPEED = {
    "H100 3B ZeRO-2 offload mb 4": 6591,
    "H100 3B ZeRO-3 offload mb 4": 4324,
    "H200 3B ZeRO-2 mb 4": 14817,
    "H200x2 1B ZeRO-2 mb 4 no checkpointing": 42502,
    "H200x2 8B ZeRO-2 offload mb 1": 1046,
}
