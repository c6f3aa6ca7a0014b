"""What a build did: `model.bigtrain_info`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch


@dataclass
class BuildInfo:
    """Facts about a built model.

    Attributes:
        source: what the caller named.
        dtype: of the parameters; buffers have the one that their class gives them (`models.buffers`).
        stage: ZeRO stage the model was built for (3: every parameter is partitioned).
        seed: of the values drawn.
        frozen: names of parameters that do not train.
        tied: groups of names that share one parameter.
        initialised: names that the weight files lack and that were drawn from the seed instead.
        finer_files: folder whose weights have more bits than the parameters: fp32 masters are to be filled from it.
        fp32_wanted: patterns of modules that the model's class wants in fp32 under bf16 training.
        use_cache: the config's `use_cache` before training switched it off; None without one.
        checkpointed_blocks: blocks recomputed in backward.
        peak_whole_bytes: most bytes of whole parameters held at once during the build at stage 3.
        ds_config: the placement part of the ds_config, for later changes of the model.
    """

    source: str
    dtype: torch.dtype
    stage: int
    seed: int
    frozen: tuple[str, ...] = ()
    tied: tuple[tuple[str, ...], ...] = ()
    initialised: tuple[str, ...] = ()
    finer_files: Path | None = None
    fp32_wanted: tuple[str, ...] = ()
    use_cache: bool | None = None
    checkpointed_blocks: int = 0
    peak_whole_bytes: int = 0
    ds_config: dict[str, Any] = field(default_factory=dict, repr=False)
    keep_in_fp32: tuple[str, ...] = ()


def tied_groups(model: torch.nn.Module) -> tuple[tuple[str, ...], ...]:
    """Names that share one parameter, group by group."""
    by_id: dict[int, list[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        by_id.setdefault(id(p), []).append(name)
    return tuple(tuple(names) for names in by_id.values() if len(names) > 1)
