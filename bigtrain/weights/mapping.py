"""Which tensors of a file make which tensors of a model, and back, by transformers' own rules, before any byte moves.

`from_pretrained` of transformers 5 renames and converts tensors on the way in (experts fused into one tensor, prefixes, legacy
names) and `save_pretrained` reverts this on the way out. Here the same rules (`transformers.core_model_loading`,
`transformers.conversion_mapping`) are run on names and shapes alone. The result is a `Part` per tensor to be made.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from bigtrain.errors import WeightsError
from bigtrain.weights.runs import Runs, traced


@dataclass
class Conversion:
    """An operation that shuffles elements: needs all its `sources` whole; `run` gives its targets by name."""

    sources: dict[str, list[str]]
    run: Callable[[Mapping[str, torch.Tensor]], dict[str, torch.Tensor]]
    targets: list[str] = field(default_factory=list)


@dataclass
class Part:
    """How to make one tensor: from `runs` of other tensors, or, where runs cannot say it, by a `conversion`.

    Attributes:
        name: the tensor to be made.
        shape: its shape.
        sources: the tensors it needs.
        runs: its elements as stretches of the sources; None if only `conversion` can make it.
        made: the name that `conversion` gives it.
    """

    name: str
    shape: tuple[int, ...]
    sources: list[str]
    runs: Runs | None
    conversion: Conversion | None = None
    made: str = ""


@dataclass
class Mapped:
    """`parts` by target name, and the source names that no rule brings to a target (with the name the rules gave them)."""

    parts: dict[str, Part]
    unexpected: dict[str, str]


class ShapesOfModel:
    """Stands for the model inside transformers' operations, which ask it only for full shapes and dtypes."""

    def __init__(self, model: torch.nn.Module, state: Mapping[str, torch.Tensor]):
        self._model = model
        self._state = state

    def get_parameter(self, name: str) -> torch.Tensor:
        """A meta tensor of the full shape: at ZeRO-3 the model's own parameter is empty."""
        if name not in self._state:
            raise AttributeError(name)
        return self._state[name]

    get_parameter_or_buffer = get_parameter

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def _is_pretrained(model: Any) -> bool:
    from transformers import PreTrainedModel

    return isinstance(model, PreTrainedModel)


def plain(names: Iterable[str], shapes: Mapping[str, tuple[int, ...]], state: Mapping[str, torch.Tensor]) -> Mapped:
    """For a model that transformers does not know: a tensor goes to the parameter of its name."""
    parts: dict[str, Part] = {}
    unexpected = {}
    for name in names:
        if name in state:
            parts[name] = Part(name, shapes[name], [name], Runs.whole(name, math.prod(shapes[name])))
        else:
            unexpected[name] = name
    return Mapped(parts, unexpected)


def file_to_model(
    model: Any,
    state: Mapping[str, torch.Tensor],
    shapes: Mapping[str, tuple[int, ...]],
) -> Mapped:
    """Plan the way in.

    Args:
        model: the model; if transformers knows it, its conversion rules are used and remembered for the way out.
        state: the model's names -> meta tensors of full shape.
        shapes: the file's names -> shapes.

    Raises:
        WeightsError: a conversion cannot be done with these shapes.
    """
    if not _is_pretrained(model):
        return plain(shapes, shapes, state)
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    rules = get_model_conversion_mapping(model) or []
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    prefix, known = model.base_model_prefix, dict(state)
    parts: dict[str, Part] = {}
    unexpected: dict[str, str] = {}
    jobs: dict[str, tuple[Any, dict[str, list[str]]]] = {}
    for name in sorted(shapes, key=dot_natural_key):
        renamed, pattern = rename_source_key(name, renamings, converters, prefix, known)
        if renamed not in state and name in state:
            renamed, pattern = rename_source_key(name, [], [], base_model_prefix=prefix, meta_state_dict=known)
        if renamed not in state:
            unexpected[name] = renamed
        elif pattern is None:
            _refuse_second_source(renamed, name, parts, jobs)
            parts[renamed] = Part(renamed, shapes[name], [name], Runs.whole(name, math.prod(shapes[name])))
        else:
            rule, sources = jobs.setdefault(renamed, (copy.deepcopy(by_pattern[pattern]), {}))
            sources.setdefault(pattern, []).append(name)
    for first, (rule, sources) in jobs.items():
        parts.update(_converted(first, rule, sources, model, state, shapes))
    model._weight_conversions = [rule for rule in rules if rule.was_used()]
    return Mapped(parts, unexpected)


def _refuse_second_source(target: str, name: str, parts: dict[str, Part], jobs: Mapping[str, Any]) -> None:
    if target in parts:
        raise WeightsError(
            f"tensors {parts[target].sources[0]} and {name} of the file both become {target} of the model: "
            "the file holds the same weight under two names.",
            tensor=name,
        )
    if target in jobs:
        raise WeightsError(f"tensor {target} is in the file both whole and in parts ({name}).", tensor=name)


def model_to_file(model: torch.nn.Module, state: Mapping[str, torch.Tensor], names: Iterable[str]) -> Mapped:
    """Plan the way out: the tensors of a file that plain `from_pretrained` loads, made from the model's tensors `names`.

    The same rules, reversed, as `save_pretrained` applies in `revert_weight_conversion`.
    """
    shapes = {name: tuple(state[name].shape) for name in names}
    everything = {name: Part(name, shape, [name], Runs.whole(name, math.prod(shape))) for name, shape in shapes.items()}
    if not _is_pretrained(model):
        return Mapped(everything, {})
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key

    rules = [rule.reverse_transform() for rule in _rules_for_saving(model)[::-1]]
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    parts: dict[str, Part] = {}
    jobs: dict[str, tuple[Any, dict[str, list[str]]]] = {}
    for name in sorted(shapes, key=dot_natural_key):
        renamed, pattern = _first_converter(name, converters)
        if pattern is None:
            renamed = _renamed(name, renamings)
            if renamed in parts:
                raise WeightsError(f"{parts[renamed].sources[0]} and {name} would both be written as {renamed}.", tensor=name)
            parts[renamed] = Part(renamed, shapes[name], [name], everything[name].runs)
        else:
            rule, sources = jobs.setdefault(renamed, (copy.deepcopy(by_pattern[pattern]), {}))
            sources.setdefault(pattern, []).append(name)
    for first, (rule, sources) in jobs.items():
        made = _converted(first, rule, sources, model, state, shapes)
        for target, part in made.items():
            part.name = _renamed(target, renamings)
            parts[part.name] = part
    return Mapped(parts, {})


def _renamed(name: str, renamings: Iterable[Any]) -> str:
    """Every renaming in turn. Written here because transformers has it as a function of its own only since 5.2x."""
    for rule in renamings:
        name, _ = rule.rename_source_key(name)
    return name


def _first_converter(name: str, converters: Iterable[Any]) -> tuple[str, str | None]:
    """The name that the first converter that matches gives, and its pattern; (name, None) if none matches."""
    for rule in converters:
        renamed, pattern = rule.rename_source_key(name)
        if pattern is not None:
            return renamed, pattern
    return name, None


def _rules_for_saving(model: Any) -> list[Any]:
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange

    rules = getattr(model, "_weight_conversions", None)
    if rules is None:  # built from scratch: no prefix was ever removed, so none is put back (as in transformers)
        rules = [rule for rule in get_model_conversion_mapping(model, add_legacy=False) if not isinstance(rule, PrefixChange)]
    return list(rules)


def _converted(
    first: str,
    rule: Any,
    sources: dict[str, list[str]],
    model: torch.nn.Module,
    state: Mapping[str, torch.Tensor],
    shapes: Mapping[str, tuple[int, ...]],
) -> dict[str, Part]:
    """The parts that one converter makes, found by running it on tensors without data."""
    facade = ShapesOfModel(model, state)
    config = getattr(model, "config", None)

    def run(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        mine = copy.deepcopy(rule)
        for pattern, names in sources.items():
            for name in names:
                mine.add_tensor(first, name, pattern, tensors[name])
        made = mine.convert(first, model=facade, config=config)
        return {target: value[0] if isinstance(value, list) else value for target, value in made.items()}

    names = [name for group in sources.values() for name in group]
    conversion = Conversion(sources, run)
    # fp32 stand-ins: the element type plays no role in where elements go
    stand_ins = {name: traced(name, shapes[name], torch.float32) for name in names}
    try:
        made = run(stand_ins)
    except Exception as error:
        listing = ", ".join(f"{name} {list(shapes[name])}" for name in names[:6]) + (" ..." if len(names) > 6 else "")
        raise WeightsError(
            f"{first}: transformers' conversion {rule} cannot be applied to {listing}: {type(error).__name__}: {error}. "
            "Some of these tensors are missing from the file, or have other shapes than the model's.",
            tensor=names[0],
        ) from error
    conversion.targets = list(made)
    return {
        target: Part(target, tuple(tensor.shape), names, getattr(tensor, "runs", None), conversion, target)
        for target, tensor in made.items()
    }


def ignored_on_load(model: torch.nn.Module) -> tuple[re.Pattern[str] | None, re.Pattern[str] | None]:
    """Patterns of names whose absence, and of names whose presence, the model's class declares harmless.

    Source: `PreTrainedModel._adjust_missing_and_unexpected_keys`, transformers 5.24.
    """
    missing = set(getattr(model, "_keys_to_ignore_on_load_missing", None) or ())
    unexpected = set(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())
    buffers = [name for name, _ in model.named_buffers()]
    if any(name.endswith("rotary_emb.inv_freq") for name in buffers):
        unexpected.add(r"rotary_emb\.inv_freq")
    if any(name.endswith("position_ids") for name in buffers):
        unexpected.add(r"(^|\.)position_ids$")
    return _union(missing), _union(unexpected)


def _union(patterns: set[str]) -> re.Pattern[str] | None:
    return re.compile("|".join(f"({pattern})" for pattern in sorted(patterns))) if patterns else None
