"""Whether launch/train.py would take the arguments of a cell: their types, and its own check of what they say together."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal, get_args, get_origin, get_type_hints

from bigtrain.run.argument_problems import find_problems
from bigtrain.run.arguments import TrainArguments

_KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a text", list: "a list of texts"}
_TAKEN: dict[type, Any] = {int: int, float: (int, float), str: (str, int, float)}  # YAML takes some texts for numbers
# What the sweep gives where the grid does not: it has no problem of its own.
_GIVEN: dict[str, Any] = {"train_data": ".", "output_dir": ".", "tokenizer_name_or_path": "of the sweep", "report_to": ["none"],
                          "packing": "none"}  # fmt: skip


def problems(arguments: Mapping[str, Any], ds_config: Any) -> list[str]:
    """Everything that the program would refuse of a cell before it builds a model; each names the argument.

    Args:
        arguments: by the names of `TrainArguments`. ds_config: content, or "auto".
    """
    return list(_wrong_types(arguments)) or [as_keys(line) for line in find_problems(as_told(arguments, ds_config))]


def as_told(arguments: Mapping[str, Any], ds_config: Any) -> TrainArguments:
    """What the program is told of a cell: `problems` has found none in the types."""
    told = {name: str(value) if _kinds()[name][0] is str else value for name, value in arguments.items()}
    if isinstance(told.get("warmup_steps"), float):
        told["warmup_ratio"] = told.pop("warmup_steps")
    text = ds_config if isinstance(ds_config, str) else json.dumps(ds_config, default=str)
    return TrainArguments(**{**_GIVEN, **told, "ds_config": text})


def as_keys(text: str) -> str:
    """A message of the program in the words of a grid: keys, not flags."""
    return re.sub(rf"--(?=({'|'.join(_kinds())})\b)", "", text)


def _wrong_types(arguments: Mapping[str, Any]) -> Iterator[str]:
    for name, value in arguments.items():
        kind, choices = _kinds()[name]
        if choices and value not in choices:
            yield f"{name} is {value!r}; it must be one of {', '.join(choices)}"
        elif not _is(value, kind) and not (name == "warmup_steps" and _is(value, float) and 0 < value < 1):
            nested = "; a list in a list is no axis" if isinstance(value, list) else ""
            yield f"{name} is {value!r}; it must be {_KINDS[kind]}{nested}"


def _is(value: Any, kind: type) -> bool:
    if kind is list:
        return isinstance(value, str) or (isinstance(value, list) and all(_is(one, str) for one in value))
    if kind is bool or isinstance(value, bool):
        return kind is bool and isinstance(value, bool)
    return isinstance(value, _TAKEN[kind])


@functools.cache
def _kinds() -> dict[str, tuple[type, tuple[str, ...]]]:
    """Of each argument: bool, int, float, str or list (of texts), and the texts that it may be, if they are few."""
    found = {}
    for name, hint in get_type_hints(TrainArguments).items():
        (hint,) = [one for one in get_args(hint) if one is not type(None)] if type(None) in get_args(hint) else [hint]
        choices = get_args(hint) if get_origin(hint) is Literal else ()
        found[name] = (str if choices else get_origin(hint) or hint), choices
    return found
