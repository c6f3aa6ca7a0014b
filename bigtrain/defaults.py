"""What holds where nobody says anything: one table for launch/train.py, sweeps and the planner.

Numbers of the optimizer and the schedule are in config/run.py, which resolves them.
"""

from __future__ import annotations

from typing import Final

SEQ_LEN = 1024
"""Tokens per row, unless the model has positions for fewer."""
OPTIM = "adamw"
GRADIENT_CHECKPOINTING = False
CHECKPOINTING_POLICY: Final = "full"
"""Of blocks that are recomputed."""


def seq_len(asked: int | None, limit: int | None) -> int:
    """Tokens per row: as asked, else `SEQ_LEN` or the model's `limit` if that is lower; None: not said, not known."""
    return min(SEQ_LEN, limit or SEQ_LEN) if asked is None else asked


def fused_kernels(asked: bool | None, has_gpu: bool) -> bool:
    """Whether to replace the model's kernels: on a GPU, unless told otherwise."""
    return has_gpu if asked is None else asked


def recomputes(asked: bool | None, policy: str, blocks: object) -> bool | None:
    """Whether activations are recomputed, which a policy or a number of blocks implies; None: not said."""
    return True if asked is None and (blocks is not None or policy != CHECKPOINTING_POLICY) else asked


BUCKET_ELEMS = {
    "reduce_bucket_size": 500_000_000,
    "stage3_prefetch_bucket_size": 50_000_000,
    "stage3_param_persistence_threshold": 100_000,
}
"""ZeRO's bucket sizes where a ds_config has none, in elements: those of DeepSpeed 0.19.8 (runtime/zero/config.py)."""


def bucket_elems(hidden: int) -> dict[str, int]:
    """What "auto" of them stands for with a hidden size: the formulas of transformers 5.24 (integrations/deepspeed.py)."""
    return {
        "reduce_bucket_size": hidden * hidden,
        "stage3_prefetch_bucket_size": int(0.9 * hidden * hidden),
        "stage3_param_persistence_threshold": 10 * hidden,
    }
