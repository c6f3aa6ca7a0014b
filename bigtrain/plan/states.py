"""Bytes per parameter that each optimizer keeps, as data.

`remainder`: what completes the bf16 weight to the number the optimizer updates: a whole fp32 master copy (4 B), or only
the 16 bits that bf16 lacks (2 B, `adamw_split`: the arithmetic is the same, the weight is stored once).
"""

from __future__ import annotations

from dataclasses import dataclass

from bigtrain.errors import UsageError

# bitsandbytes keeps two int8 moments and, per 256 elements, two fp32 scales: 2 + 2 * 4 / 256 bytes
# (bitsandbytes/optim/optimizer.py, Optimizer2State.init_state, block size 256).
EIGHT_BIT_MOMENTS = 2 + 2 * 4 / 256


@dataclass(frozen=True)
class StateLayout:
    """Bytes per parameter on the rank that owns it.

    Attributes:
        remainder: beside the bf16 weight.
        moments: of a parameter under Adam; `matrix_moments` of a matrix under Muon (one momentum).
        step_grad: of the gradient handed to the update (4: cast to fp32 first; 2: as it comes).
        source: where the numbers come from.
        stages: ZeRO stages at which it is right.
        flat_step: DeepSpeed lays the gradients of a group out flat for the step; otherwise they are taken as they are, a chunk at a
            time (bigtrain/zero/flat.py hand_over_gradients).
        own_offload: with offload_optimizer it keeps its state in host memory itself and streams it through the GPU; DeepSpeed is not told, so
             that weights and gradients are placed as without offload (bigtrain/optim/stream.py).
    """

    remainder: float
    moments: float
    matrix_moments: float
    step_grad: float
    source: str
    stages: tuple[int, ...] = (0, 1, 2, 3)
    flat_step: bool = True
    own_offload: bool = False

    @property
    def parts(self) -> tuple[float, ...]:
        """Bytes of a parameter in each tensor of the state under Adam: remainder, two moments, scales if they have some."""
        half = self.moments / 2
        scales = (half - int(half),) * 2 if half % 1 else ()
        return (self.remainder, half - half % 1, half - half % 1, *scales)


LAYOUTS: dict[str, StateLayout] = {
    "adamw": StateLayout(
        4, 8, 8, 4, "DeepSpeed stage_1_and_2.py single_partition_of_fp32_groups; Adam m, v in fp32", flat_step=False
    ),
    "adamw_8bit": StateLayout(
        4, EIGHT_BIT_MOMENTS, EIGHT_BIT_MOMENTS, 4, "fp32 master; bitsandbytes 8-bit m, v", flat_step=False
    ),
    "muon": StateLayout(4, 8, 4, 4, "fp32 master; momentum for matrices of blocks, Adam for the rest"),
    "adamw_split": StateLayout(2, 8, 8, 2, "bf16 weight + 16 missing bits; fp32 m, v", (1, 2, 3), False, True),
    "adamw_split_bf16": StateLayout(2, 4, 4, 2, "bf16 weight + 16 missing bits; bf16 m, v", (1, 2, 3), False, True),
    "adamw_split_8bit": StateLayout(
        2, EIGHT_BIT_MOMENTS, EIGHT_BIT_MOMENTS, 2, "bf16 weight + 16 missing bits; 8-bit m, v", (1, 2, 3), False, True
    ),
    "adamw_bf16": StateLayout(2, 4, 4, 2, "DeepSpeed bf16_master_weights_and_grads + bf16_optimizer_states"),
    "sgd": StateLayout(4, 0, 0, 4, "fp32 master only"),
}

# Names that users write (transformers' --optim, DeepSpeed's optimizer.type), lower case.
ALIASES = {
    "adam": "adamw",
    "adamw_torch": "adamw",
    "adamw_hf": "adamw",
    "adamw_torch_fused": "adamw",
    "fusedadam": "adamw",
    "deepspeedcpuadam": "adamw",
    "adamw_bnb_8bit": "adamw_8bit",
    "adamw8bit": "adamw_8bit",
    "paged_adamw_8bit": "adamw_8bit",
}


def layout_name(name: str) -> str:
    """The layout behind an optimizer's name.

    Raises:
        UsageError: no such optimizer.
    """
    key = name.strip().lower()
    key = ALIASES.get(key, key)
    if key not in LAYOUTS:
        raise UsageError(f"the planner knows no optimizer '{name}': use one of {', '.join(LAYOUTS)}")
    return key
