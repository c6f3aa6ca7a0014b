"""Leaf modules of ZeRO-3, whose weights DeepSpeed gathers together: which parameters lie in one, by what a ds_config names.

Follows deepspeed 0.19.8 utils/z3_leaf_module.py: a class by its name, with or without its module's; a module by its whole name or by the
end of it. In a leaf module no other counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from bigtrain.errors import UsageError
from bigtrain.plan.families import ModelParameters, model_parameters
from bigtrain.plan.inputs import PlanInput
from bigtrain.plan.parts import feed_forward
from bigtrain.plan.zero_settings import ZeroSettings

# Blocks of transformers 5.24 whose class is named after its family.
_CLASSES = [
    "ArceeDecoderLayer",
    "BertLayer",
    "BloomBlock",
    "CamembertLayer",
    "Cohere2DecoderLayer",
    "CohereDecoderLayer",
    "DeepseekV2DecoderLayer",
    "DeepseekV3DecoderLayer",
    "Dots1DecoderLayer",
    "Ernie4_5DecoderLayer",
    "Exaone4DecoderLayer",
    "FalconDecoderLayer",
    "FlexOlmoDecoderLayer",
    "GPT2Block",
    "GPTJBlock",
    "GPTNeoXLayer",
    "Gemma2DecoderLayer",
    "Gemma3DecoderLayer",
    "GemmaDecoderLayer",
    "Glm4DecoderLayer",
    "GlmDecoderLayer",
    "GptOssDecoderLayer",
    "GraniteDecoderLayer",
    "GraniteMoeDecoderLayer",
    "LlamaDecoderLayer",
    "MT5Block",
    "MinistralDecoderLayer",
    "MistralDecoderLayer",
    "MixtralDecoderLayer",
    "NemotronDecoderLayer",
    "OPTDecoderLayer",
    "Olmo2DecoderLayer",
    "Olmo3DecoderLayer",
    "OlmoDecoderLayer",
    "OlmoeDecoderLayer",
    "Phi3DecoderLayer",
    "PhiDecoderLayer",
    "Qwen2DecoderLayer",
    "Qwen2MoeDecoderLayer",
    "Qwen2VLDecoderLayer",
    "Qwen2_5_VLDecoderLayer",
    "Qwen3DecoderLayer",
    "Qwen3MoeDecoderLayer",
    "RobertaLayer",
    "SeedOssDecoderLayer",
    "SmolLM3DecoderLayer",
    "StableLmDecoderLayer",
    "Starcoder2DecoderLayer",
    "T5Block",
    "UMT5Block",
    "ViTLayer",
    "XLMRobertaLayer",
]
_BY_FAMILY = {
    name.lower().replace("_", "").removesuffix("block").removesuffix("layer").removesuffix("decoder"): name for name in _CLASSES
}


class Leafs(NamedTuple):
    """Of a model.

    Attributes:
        path: the leaf module of each parameter that lies in one.
        unknown: classes that the planner does not know, and names of modules that it cannot count, as written.
    """

    path: dict[int, str]
    unknown: tuple[str, ...]


def block_class(kind: str) -> str | None:
    """Class of the blocks of a family, by its `model_type`; None: not known."""
    if kind == "hunyuan_v1_dense":
        return "HunYuanDenseV1DecoderLayer"
    return _BY_FAMILY.get(kind.removesuffix("_text").replace("_", "").replace("-", ""))


def blocks_told(config: Mapping[str, Any]) -> dict[str, Any]:
    """Of the model of a Hugging Face config, the fields of `config.ModelShape` that tell of its blocks; empty where they are not known."""
    own = block_class(str(config.get("model_type")))
    try:
        parameters = model_parameters(config)
    except UsageError:
        return {}
    sizes = [sum(parameters.items[i].elems for i in members) for members in parameters.blocks.values()]
    if own is None or not sizes:
        return {}
    return {"block_class": own, "block_elems": max(sizes), "other_blocks": frozenset(_CLASSES) - {own}}


def is_block_class(name: str, kind: str) -> bool:
    """Whether a name in leaf_module.classes is the class of the blocks of this family."""
    own, module = block_class(kind), kind.removesuffix("_text").replace("-", "_")
    return own is not None and name in (own, f"transformers.models.{module}.modeling_{module}.{own}")


def leafs_of(parameters: ModelParameters, zero: ZeroSettings) -> Leafs:
    """What the settings name."""
    key = "leafs", zero.leaf_classes, zero.leaf_names, zero.leaf_suffixes
    return parameters.fact(key, lambda: _found(parameters, zero))


def leafs_of_plan(plan: PlanInput) -> Mapping[int, str]:
    """Leaf module of each parameter of a plan at stage 3: also the feed-forward parts, where these run in tiles."""
    named = leafs_of(plan.parameters, plan.settings).path
    feeds = feed_forward(plan.parameters) if plan.mlp_tile_tokens else []
    return {i: path for feed in feeds for i, path in _together(plan.parameters, feed).items()} | named


def _together(parameters: ModelParameters, feed: list[int]) -> dict[int, str]:
    """The module that holds all of them."""
    paths = [parameters.items[i].name.split(".")[:-1] for i in feed]
    common = [part for part, *others in zip(*paths) if all(part == other for other in others)]
    return dict.fromkeys(feed, ".".join(common))


def _found(parameters: ModelParameters, zero: ZeroSettings) -> Leafs:
    blocks = any(is_block_class(name, parameters.kind) for name in zero.leaf_classes)
    unknown = [name for name in zero.leaf_classes if not is_block_class(name, parameters.kind)]
    found: dict[int, str] = {}
    counted: set[str] = set()
    for i, p in enumerate(parameters.items):
        modules = list(_modules(p.name))
        block = next((m for m in modules if m.rpartition(".")[2].isdigit()), None) if p.block is not None else None
        for module in modules:
            by = {n for n in zero.leaf_names if n == module} | {s for s in zero.leaf_suffixes if module.endswith(s)}
            if block is None or len(module) < len(block):
                continue  # outside of blocks, or around several of them
            counted |= by
            if i not in found and (by or (blocks and module == block)):
                found[i] = module
    left = (name for name in (*zero.leaf_names, *zero.leaf_suffixes) if name not in counted)
    return Leafs(found, tuple(dict.fromkeys((*unknown, *left))))


def _modules(parameter: str) -> Iterable[str]:
    """Names of the modules that a parameter lies in, outermost first."""
    parts = parameter.split(".")[:-1]
    return (".".join(parts[:end]) for end in range(1, len(parts) + 1))


def leaf_notes(plan: PlanInput) -> list[str]:
    """What a plan does not know of leaf modules, in words."""
    zero, found = plan.settings, []
    leafs = leafs_of(plan.parameters, zero)
    if leafs.unknown:
        found.append(
            f"leaf_module: {', '.join(leafs.unknown)} is not counted: the planner knows the class of a family's blocks "
            f"({block_class(plan.parameters.kind) or 'none for this model'}), and names of modules in blocks"
        )
    if zero.leaf_threshold:
        found.append(
            f"stage3_module_granularity_threshold {zero.leaf_threshold:,} is not counted: the leaf modules that it makes hold their "
            "weights and gradients together, name them in leaf_module to see them here"
        )
    return found
