"""Models: built under ZeRO with the right values, frozen in parts, recomputed in backward, checked before training."""

from bigtrain.models.batchnorm import refuse_batchnorm_micro_batch_1
from bigtrain.models.build import build_model, edit_model
from bigtrain.models.checkpointing import declared_blocks, disable_cache, enable_activation_checkpointing
from bigtrain.models.compiled import compile_blocks
from bigtrain.models.feedforward import feed_forwards, tile_mlp
from bigtrain.models.frozen import freeze, frozen_module
from bigtrain.models.info import BuildInfo, tied_groups
from bigtrain.models.moe import set_moe_leaf_modules
from bigtrain.models.skeleton import skeleton

__all__ = [
    "BuildInfo",
    "build_model",
    "compile_blocks",
    "disable_cache",
    "edit_model",
    "declared_blocks",
    "enable_activation_checkpointing",
    "feed_forwards",
    "freeze",
    "frozen_module",
    "refuse_batchnorm_micro_batch_1",
    "set_moe_leaf_modules",
    "skeleton",
    "tied_groups",
    "tile_mlp",
]
