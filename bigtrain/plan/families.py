"""From a Hugging Face config dictionary, or a file of shapes, to every named parameter of the model, in model order."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

from bigtrain.errors import UsageError
from bigtrain.plan.family_decoders import DECODERS, decoder_model
from bigtrain.plan.family_defaults import DEFAULTS, OTHER_NAMES
from bigtrain.plan.family_others import (
    HEADS,
    MODELS,
    ROBERTA,
    T5,
    VISION_LANGUAGE,
    text_is_tied,
    text_values,
    values,
    vision_language,
)
from bigtrain.plan.impossible import refuse_wrong_types
from bigtrain.plan.parameters import Parameter, Values, not_counted

T = TypeVar("T")
_TIED_BY_DEFAULT = {"gemma3": True}
# How the class ends that is counted; for all others ForCausalLM.
_COUNTED = {
    "gpt2": ("LMHeadModel",),
    "bert": ("ForMaskedLM", "LMHeadModel"),
    "vit": ("ForImageClassification",),
    **dict.fromkeys(ROBERTA, ("ForMaskedLM", "ForCausalLM")),
    **dict.fromkeys((*T5, *VISION_LANGUAGE), ("ForConditionalGeneration",)),
}


@dataclass(frozen=True)
class ModelParameters:
    """Every distinct parameter of a model.

    Attributes:
        items: in the order of `named_parameters()`; a tied matrix appears once, under its first name.
        tied: (second name, first name) of matrices shared inside the model.
        kind: `model_type`, or "shapes" for a plain list.
    """

    items: tuple[Parameter, ...]
    tied: tuple[tuple[str, str], ...]
    kind: str

    @cached_property
    def _hash(self) -> int:
        return hash((self.items, self.tied, self.kind))

    def __hash__(self) -> int:
        """Once: plans are looked up by it."""
        return self._hash

    @cached_property
    def elems(self) -> int:
        return sum(p.elems for p in self.items)

    @cached_property
    def largest_elems(self) -> int:
        return max(p.elems for p in self.items)

    @cached_property
    def blocks(self) -> dict[int, list[int]]:
        """Indices of the parameters of each repeated block, in model order."""
        found: dict[int, list[int]] = {}
        for i, p in enumerate(self.items):
            if p.block is not None:
                found.setdefault(p.block, []).append(i)
        return found

    @cached_property
    def _facts(self) -> dict[Hashable, Any]:
        return {}

    def fact(self, key: Hashable, find: Callable[[], T]) -> T:
        """What `find` finds out about this model, once for each key: a search makes hundreds of plans of one model."""
        if key not in self._facts:
            self._facts[key] = find()
        return self._facts[key]


def supported() -> tuple[str, ...]:
    """All values of `model_type` that can be planned without building the model."""
    return tuple(sorted({*DECODERS, *MODELS, *VISION_LANGUAGE}))


def is_tied(config: Mapping[str, Any]) -> bool:
    """Whether input embedding and output head are one matrix, with the family's default if the config is silent."""
    kind = str(config.get("model_type"))
    if kind in T5:  # the classes tie whatever the config says; T5Config reads the key as "scale the decoder's output"
        return True
    default = _TIED_BY_DEFAULT.get(kind, DEFAULTS.get(kind, {}).get("tie_word_embeddings", False))
    return Values(config, {}).flag("tie_word_embeddings", default) or (kind in VISION_LANGUAGE and text_is_tied(config))


def contradictions(config: Mapping[str, Any]) -> list[str]:
    """What a config says under two names with two values, each in a sentence that tells which one transformers takes."""
    kind = str(config.get("model_type"))
    both = [
        (other, own) for other, own in OTHER_NAMES.get(kind, {}).items() if None not in (config.get(other), config.get(own))
    ]
    found = [
        f"the model config has {other} = {config[other]!r} and {own} = {config[own]!r}, two names of one size for '{kind}': {other} counts, as in "
        "transformers; remove the wrong one"
        for other, own in both
        if config[other] != config[own]
    ]
    made, gated = config.get("feed_forward_proj"), config.get("is_gated_act")
    if kind in T5 and None not in (made, gated) and str(made).startswith("gated") != gated:
        found.append(
            f"the model config has feed_forward_proj = {made!r} and is_gated_act = {gated!r}, which contradict "
            "each other: is_gated_act counts, as in transformers; remove the wrong one"
        )
    return found


def position_limit(config: Mapping[str, Any]) -> int | None:
    """Tokens that the model has positions for; None where there is no limit or only the config's class would tell."""
    kind = str(config.get("model_type"))
    text = text_values(config) if kind in VISION_LANGUAGE else values(config)
    found = text.get(OTHER_NAMES.get(kind, {}).get("max_position_embeddings", "max_position_embeddings"))
    return found if isinstance(found, int) and found > 0 else None


def model_parameters(config: Mapping[str, Any]) -> ModelParameters:
    """Names and shapes of all parameters, from the config alone.

    Raises:
        UsageError: unknown `model_type` (with the nearest known ones and the way out) or class, quantised weights, or a size is
            missing or wrong.
    """
    kind = str(config.get("model_type"))
    _refuse_quantised(config)
    if kind in supported():
        _refuse_wrong_types(config)
        _refuse_other_classes(kind, config)
    if kind in DECODERS:
        items = decoder_model(DECODERS[kind], values(config))
    elif kind in VISION_LANGUAGE:
        items = vision_language(config)
    elif kind in MODELS:
        items = MODELS[kind](values(config))
    else:
        near = difflib.get_close_matches(kind, supported(), n=3, cutoff=0.5)
        raise not_counted(
            f"model_type '{kind}' is not known to the planner{'; the nearest are ' + ', '.join(near) if near else ''}."
        )
    return _tie(items, kind, is_tied(config))


def _refuse_wrong_types(config: Mapping[str, Any]) -> None:
    refuse_wrong_types(config)
    for part in ("text_config", "vision_config"):
        refuse_wrong_types(config.get(part) or {})


def _refuse_quantised(config: Mapping[str, Any]) -> None:
    parts = (config, *(value for key, value in config.items() if key.endswith("_config") and isinstance(value, Mapping)))
    found = next((part["quantization_config"] for part in parts if part.get("quantization_config")), None)
    if found:
        method = (found.get("quant_method") if isinstance(found, Mapping) else None) or "unknown method"
        raise UsageError(
            f"the model config has quantization_config ({method}): quantised weights cannot be trained in full, so that there is nothing to "
            "plan. Take the unquantised checkpoint of this model, or remove the section to plan as if it were one."
        )


def _refuse_other_classes(kind: str, config: Mapping[str, Any]) -> None:
    """models/source.py builds the class that `architectures` names: with another head, or without one, the count would be wrong."""
    name = next(iter(config.get("architectures") or ()), None)
    ends = _COUNTED.get(kind, ("ForCausalLM",))
    if config.get("add_cross_attention"):
        raise not_counted(f"add_cross_attention is true: the planner counts '{kind}' without it.")
    if isinstance(name, str) and not name.endswith(ends):
        raise not_counted(f"architectures names {name}, but of '{kind}' the planner counts ...{ends[0]}.")


def _tie(items: list[Parameter], kind: str, tied: bool) -> ModelParameters:
    head = HEADS.get(kind, "lm_head.weight")
    names = {p.name for p in items}
    if not tied or head not in names:
        return ModelParameters(tuple(items), (), kind)
    first = next(
        p.name
        for p in items
        if p.name.endswith(("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight", "shared.weight"))
    )
    kept, other = (p.name for p in items if p.name in (head, first))
    return ModelParameters(tuple(p for p in items if p.name != other), ((other, kept),), kind)


def parameters_from_shapes(pairs: Any) -> ModelParameters:
    """From `[[name, [sizes...]], ...]`: any module at all.

    A path component that is a number is taken as the index of a repeated block (`encoder.3.fc.weight` -> block 3).

    Raises:
        UsageError: the list is not of that form, or a name comes twice.
    """
    if isinstance(pairs, Mapping):
        pairs = list(pairs.items())
    items, seen = [], set()
    for pair in pairs if isinstance(pairs, list) and pairs else [None]:
        if not (isinstance(pair, list | tuple) and len(pair) == 2 and isinstance(pair[0], str) and _is_shape(pair[1])):
            raise UsageError(f"shapes must be a list of [name, [sizes...]] with whole sizes >= 1, not {pair!r}")
        if pair[0] in seen:
            raise UsageError(f"the list of shapes names '{pair[0]}' twice")
        seen.add(pair[0])
        numbers = [int(part) for part in pair[0].split(".") if part.isdecimal()]
        items.append(Parameter(pair[0], tuple(pair[1]), numbers[0] if numbers else None))
    return ModelParameters(tuple(items), (), "shapes")


def _is_shape(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(n, int) and n >= 1 for n in value)
