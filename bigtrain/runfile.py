"""A run file or grid: a YAML or JSON mapping in which no key stands twice."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from bigtrain import standins
from bigtrain.errors import UsageError


def read_run_file(path: str) -> dict[str, Any]:
    """A YAML or JSON run file as a mapping from argument name to value.

    Raises:
        UsageError: the file is missing, cannot be parsed, is no mapping, or has a key twice.
    """
    file = Path(path)
    if file.suffix not in (".yaml", ".yml", ".json"):
        raise UsageError(f"run file {path}: expected a name that ends in .yaml, .yml or .json")
    try:
        text = file.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UsageError(f"run file {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"run file {path} is no UTF-8 text: {error}") from error
    try:
        values = json.loads(text, object_pairs_hook=once) if file.suffix == ".json" else _yaml(text)
    except Exception as error:
        raise UsageError(f"run file {path} cannot be parsed: {error}") from error
    if not isinstance(values, dict):
        raise UsageError(f"run file {path} must be a mapping of argument names to values, got {standins.kind(values)}")
    return values


def once(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    """A mapping of pairs, as the hook of JSON parsers.

    Raises:
        ValueError: a key stands twice.
    """
    values = dict(pairs)
    if len(values) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"key {twice!r} stands twice; keep one")
    return values


class _Exponent(float):
    """A number that YAML 1.1 takes for text, since it has no point (1e-3); it prints as written: a name may be meant (run 12e4)."""

    written: str

    def __new__(cls, written: str) -> _Exponent:
        made = super().__new__(cls, written)
        made.written = written
        return made

    def __str__(self) -> str:
        return self.written


def _yaml(text: str) -> Any:
    import yaml

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            if not any(key.tag == "tag:yaml.org,2002:merge" for key, _ in node.value):  # what is merged may be overridden
                once([(self.construct_object(key, deep=True), None) for key, _ in node.value])
            return super().construct_mapping(node, deep)

    number = re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$")
    Loader.add_implicit_resolver("!exponent", number, list("-+0123456789"))
    Loader.add_constructor("!exponent", lambda _, node: _Exponent(node.value))
    values = yaml.load(text, Loader)
    try:
        json.dumps(values, default=str, skipkeys=True)
    except ValueError as error:
        raise ValueError("an alias (*name) stands inside of what it names") from error
    return values
