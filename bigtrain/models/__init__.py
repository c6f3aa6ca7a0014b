"""Models: built under ZeRO with the right values, frozen in parts, recomputed in backward, checked before training."""

from bigtrain.models.batchnorm import keep_statistics_in_fp32, refuse_batchnorm_micro_batch_1
from bigtrain.models.build import build_model, edit_model
from bigtrain.models.checkpointing import (
    disable_cache,
    enable_activation_checkpointing,
    export_config,
    wants_activation_checkpointing,
)
from bigtrain.models.frozen import freeze_module, frozen_module
from bigtrain.models.info import BuildInfo
from bigtrain.models.moe import set_moe_leaf_modules
from bigtrain.models.placement import rank_device
from bigtrain.models.tables import dtype_table, tied_groups

__all__ = [
    "BuildInfo",
    "build_model",
    "disable_cache",
    "dtype_table",
    "edit_model",
    "enable_activation_checkpointing",
    "export_config",
    "freeze_module",
    "frozen_module",
    "keep_statistics_in_fp32",
    "rank_device",
    "refuse_batchnorm_micro_batch_1",
    "set_moe_leaf_modules",
    "tied_groups",
    "wants_activation_checkpointing",
]
