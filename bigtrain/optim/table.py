"""Which optimizers there are, and what each keeps in memory, as data: read by the planner, the checkpoint and the engine.

A new optimizer is one row here and one builder. Nothing in this file imports torch.
"""

from __future__ import annotations

import copy
import difflib
import logging
import math
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from bigtrain.errors import UsageError

log = logging.getLogger(__name__)
MIN_8BIT_ELEMS = 4096  # a tensor below this keeps fp32 moments (bitsandbytes' rule); ZeRO hands over whole partitions
BLOCK_ELEMS = 256  # one fp32 scale per block of 8-bit state (bitsandbytes' block-wise optimizers)


@dataclass(frozen=True, kw_only=True)
class StateTensor:
    """One state tensor that an optimizer keeps for every flat partition.

    Attributes:
        name: key in `optimizer.state[partition]`.
        dtype: torch's name of the dtype.
        bytes_per_elem: bytes for one stored element.
        elems_per_value: parameter elements covered by one stored element: 1, or `BLOCK_ELEMS` for block scales.
    """

    name: str
    dtype: str
    bytes_per_elem: int
    elems_per_value: int = 1


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """One row of the table.

    Attributes:
        build: dotted path of the builder, `(groups, options) -> torch.optim.Optimizer`.
        state: what is kept for every parameter element; for `muon`, of the matrices (`other_state` for the rest).
        other_state: what is kept for parameters that the optimizer treats differently, if any.
        fp32_below_elems: a partition with fewer elements keeps both moments in fp32 instead (0: never).
        master_bytes: bytes an element that DeepSpeed keeps as a separate master copy (4 for fp32, 0 if none exists).
        own_offload: with `offload_optimizer` it keeps its state in host memory itself, and DeepSpeed is not told: weights and
            gradients stay where they are, no fp32 master or gradient exists on the host.
        stages: ZeRO stages at which it is right.
        config: ds_config keys that DeepSpeed needs to accept and to run it rightly.
        hook: dotted path of a function called with the DeepSpeed engine after `initialize`, or None.
    """

    build: str
    state: tuple[StateTensor, ...]
    other_state: tuple[StateTensor, ...] = ()
    fp32_below_elems: int = 0
    master_bytes: int = 4
    own_offload: bool = False
    stages: tuple[int, ...] = (0, 1, 2, 3)
    config: dict[str, Any] = field(default_factory=dict)
    hook: str | None = None


_ADAM_FP32 = (
    StateTensor(name="exp_avg", dtype="float32", bytes_per_elem=4),
    StateTensor(name="exp_avg_sq", dtype="float32", bytes_per_elem=4),
)
_ADAM_BF16 = (
    StateTensor(name="exp_avg", dtype="bfloat16", bytes_per_elem=2),
    StateTensor(name="exp_avg_sq", dtype="bfloat16", bytes_per_elem=2),
)
_ADAM_8BIT = (
    StateTensor(name="state1", dtype="uint8", bytes_per_elem=1),
    StateTensor(name="state2", dtype="uint8", bytes_per_elem=1),
    StateTensor(name="absmax1", dtype="float32", bytes_per_elem=4, elems_per_value=BLOCK_ELEMS),
    StateTensor(name="absmax2", dtype="float32", bytes_per_elem=4, elems_per_value=BLOCK_ELEMS),
)
_LOW = StateTensor(name="low", dtype="int16", bytes_per_elem=2)
# DeepSpeed refuses an optimizer class it does not list, and under offload any that is not its own CPU Adam (DeepSpeed#6666).
_CLIENT = {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
_BF16_MASTER = {
    "zero_allow_untested_optimizer": True,
    "bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True},
}
_split = partial(
    Optimizer, master_bytes=0, own_offload=True, stages=(1, 2, 3), config=_BF16_MASTER, hook="bigtrain.optim.split.attach"
)

OPTIMIZERS: dict[str, Optimizer] = {
    # AdamW: torch's fused kernel on a GPU, DeepSpeed's CPU Adam when offloaded, plain torch elsewhere
    "adamw": Optimizer(
        build="bigtrain.optim.build.adamw",
        state=_ADAM_FP32,
        config={"zero_force_ds_cpu_optimizer": False},
        hook="bigtrain.optim.chunks.attach",
    ),
    # torch.optim.AdamW without fused kernels, also when offloaded: the reference, slow on a CPU
    "adamw_torch": Optimizer(
        build="bigtrain.optim.build.adamw_torch",
        state=_ADAM_FP32,
        config={"zero_force_ds_cpu_optimizer": False},
        hook="bigtrain.optim.chunks.attach",
    ),
    # bitsandbytes AdamW with block-wise 8-bit moments; DeepSpeed's fp32 master stays
    "adamw_8bit": Optimizer(
        build="bigtrain.optim.build.adamw_8bit",
        state=_ADAM_8BIT,
        fp32_below_elems=MIN_8BIT_ELEMS,
        config=_CLIENT,
        hook="bigtrain.optim.chunks.attach",
    ),
    # AdamW with the fp32 master kept as bf16 weight + 16 bits: equals adamw bit for bit, 4 bytes a parameter less
    "adamw_split": _split(build="bigtrain.optim.build.adamw_split", state=(_LOW, *_ADAM_FP32)),
    # adamw_split with bf16 moments, rounded by chance so that small changes are not lost
    "adamw_split_bf16": _split(build="bigtrain.optim.build.adamw_split_bf16", state=(_LOW, *_ADAM_BF16)),
    # adamw_split with block-wise 8-bit moments: 8 bytes a parameter with weight and gradient
    "adamw_split_8bit": _split(build="bigtrain.optim.build.adamw_split_8bit", state=(_LOW, *_ADAM_8BIT)),
    # Muon for hidden matrices, AdamW for embeddings, the head, biases and norms
    "muon": Optimizer(
        build="bigtrain.optim.build.muon",
        state=(StateTensor(name="momentum_buffer", dtype="float32", bytes_per_elem=4),),
        other_state=_ADAM_FP32,
        config=_CLIENT,
        hook="bigtrain.optim.orthogonal.attach",
    ),
}

# Names that the Hugging Face Trainer uses for the same thing.
ALIASES: dict[str, str] = {
    "adamw_torch_fused": "adamw",
    "adamw_hf": "adamw",
    "adamw_bnb_8bit": "adamw_8bit",
}


def canonical_name(name: str) -> str:
    """The table's own name for `name`, which may be an alias.

    Raises:
        UsageError: if there is no such optimizer; names the nearest ones.
    """
    wanted = str(name).strip().lower()
    wanted = ALIASES.get(wanted, wanted)
    if wanted in OPTIMIZERS:
        return wanted
    known = [*OPTIMIZERS, *ALIASES]
    near = difflib.get_close_matches(wanted, known, n=3, cutoff=0.5)
    hint = f"; did you mean {' or '.join(near)}?" if near else "."
    raise UsageError(f"unknown optimizer {name!r}{hint} Known: {', '.join(OPTIMIZERS)} (also {', '.join(ALIASES)}).")


def engine_config_patch(
    name: str, *, stage: int | None = None, offload: bool = False, grad_accum_dtype: str | None = None, bf16: bool = True
) -> dict[str, Any]:
    """The ds_config keys that optimizer `name` needs, as a nested dict to merge over the run's config.

    Args:
        name: optimizer name or alias.
        stage: ZeRO stage, checked against the row when given.
        offload: True if the config offloads the optimizer.
        grad_accum_dtype: `data_types.grad_accum_dtype` of the config, if it has one.
        bf16: False if the config trains in fp32.

    Raises:
        UsageError: if the optimizer would be wrong at this stage or in fp32.
    """
    row = OPTIMIZERS[canonical_name(name)]
    if stage is not None and stage not in row.stages:
        listed = ", ".join(map(str, row.stages))
        raise UsageError(f"optimizer {name!r} works at ZeRO stages {listed}, not {stage}: choose one of them or adamw.")
    if not bf16 and row.master_bytes == 0:
        raise UsageError(
            f"optimizer {name!r} keeps 16 bits beside each bf16 weight in the place of an fp32 master, and bf16.enabled is not true in "
            "the ds_config: write bf16.enabled true, or take adamw, which trains in fp32 as well."
        )
    patch = copy.deepcopy(row.config)
    zero = patch["zero_optimization"] = {"offload_optimizer": {"device": "none"}} if offload and row.own_offload else {}
    if row.master_bytes == 0 and stage == 1 and grad_accum_dtype in ("fp32", "float32"):
        # DeepSpeed runs stage 1 with fp32 accumulation in a class that has an fp32 master in any case (engine.py,
        # _do_optimizer_sanity_check). Stage 2 gives the same update with less memory.
        log.info("%s: ZeRO stage 1 with fp32 gradient accumulation is run as stage 2, which keeps no fp32 master", name)
        zero["stage"] = 2
    return patch


def state_bytes(name: str, elems: int, *, other_elems: int = 0) -> int:
    """Bytes of optimizer state for one flat partition of `elems` elements, without DeepSpeed's master copy.

    Args:
        name: optimizer name or alias.
        elems: elements under the row's `state`.
        other_elems: elements under the row's `other_state` (Muon's embeddings, norms, ...).
    """
    row = OPTIMIZERS[canonical_name(name)]
    if elems < row.fp32_below_elems:
        return sum(t.bytes_per_elem for t in _ADAM_FP32) * elems
    pairs = [(row.state, elems), (row.other_state or row.state, other_elems)]
    return sum(t.bytes_per_elem * math.ceil(n / t.elems_per_value) for tensors, n in pairs for t in tensors)
