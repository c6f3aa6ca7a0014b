"""The first half of linting: every key at every depth against the tables. Names, types, ranges, deprecations."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from bigtrain.config.problems import Problem, shorten
from bigtrain.config.schema import Key, walk
from bigtrain.config.schema_core import (
    NEVER_READ,
    OPTIMIZERS,
    SCHEDULERS,
    TORCH_OPTIMIZER_PARAMS,
    TORCH_OPTIMIZERS,
    TORCH_SCHEDULERS,
)
from bigtrain.config.schema_sections import ROOT

RUN_FILLS = {
    "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping",
    "bf16.enabled", "fp16.enabled", "optimizer.params.lr", "optimizer.params.betas", "optimizer.params.eps",
    "optimizer.params.weight_decay", "optimizer.params.muon_lr", "optimizer.params.adam_lr",
    "optimizer.params.momentum", "scheduler.params.warmup_min_lr", "scheduler.params.warmup_max_lr",
    "scheduler.params.warmup_num_steps", "scheduler.params.total_num_steps", "zero_optimization.reduce_bucket_size",
    "zero_optimization.stage3_prefetch_bucket_size", "zero_optimization.stage3_param_persistence_threshold",
    "steps_per_print",
}  # fmt: skip
"""Paths whose "auto" a run fills in (transformers 5.24 integrations/deepspeed.py, plus steps_per_print)."""


def check_structure(config: Mapping[str, Any]) -> Iterator[Problem]:
    """Problems that show in the file alone, key by key."""
    yield from _section(config, ROOT, "")


def params_key(section_name: str, body: Mapping[str, Any]) -> Key:
    """The table of `optimizer.params` or `scheduler.params`, which depends on the type beside it."""
    kind = body.get("type")
    if not isinstance(kind, str):
        return Key(kind="section", open=True)
    if section_name == "optimizer":
        return OPTIMIZERS.get(kind.lower(), TORCH_OPTIMIZER_PARAMS)
    return SCHEDULERS.get(kind, Key(kind="section", open=True))


def _section(body: Mapping[str, Any], table: Key, path: str) -> Iterator[Problem]:
    for name, value in body.items():
        here = f"{path}.{name}" if path else str(name)
        found = table.lookup(name)
        if found is None:
            problem = _unknown(name, value, table, path, here)
            if problem:
                yield problem
            continue
        key = params_key(path, body) if here in ("optimizer.params", "scheduler.params") else found[1]
        yield from _value(value, key, here, f"{path}.{found[0]}" if path else found[0])
        if key.kind == "section" and isinstance(value, Mapping):
            yield from _section(value, key, here)
    for name, key in table.keys.items():
        if key.also and name in body and key.also in body:
            yield Problem(_join(path, key.also), body[key.also], "error",
                          f"the same setting as {name}, which stands beside it", f"keep only {name}")  # fmt: skip


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def is_comment(name: str) -> bool:
    """Keys that people use as comments, JSON having none."""
    return name.startswith(("_", "//", "#")) or name.lower() in ("comment", "comments", "description")


def _unknown(name: str, value: Any, table: Key, path: str, here: str) -> Problem | None:
    if is_comment(name) and not table.strict:
        return Problem(here, value, "note", "taken as a comment", "nothing to do")
    if not path and name in NEVER_READ:
        return Problem(here, value, "note", NEVER_READ[name], "remove it, or move its values there")
    near = nearest(name, [*table.keys, *(k.also for k in table.keys.values() if k.also)])
    elsewhere = [] if near and _very_near(name, near) else [p for p in places().get(name, ()) if p != here]
    if table.open and not (near and _very_near(name, near)):
        return None  # free-form; only a slip of the pen on a known name is worth a word
    effect = "DeepSpeed stops on it" if table.strict else "DeepSpeed ignores it without a word"
    where = f"in {path}" if path else "at top level"
    if elsewhere:
        fix = f"it belongs at {elsewhere[0]}"
    elif near:
        fix = f"write {near}"
    else:
        far = nearest_anywhere(name)
        fix = f"did you mean {far}? otherwise remove it" if far else "remove it"
    return Problem(here, value, "error", f"no such key {where}; {effect}", fix)


def nearest(name: str, candidates: list[str], cutoff: float = 0.65) -> str | None:
    """The candidate most like `name`, upper and lower case alike; None when nothing is near."""
    by_lower = {c.lower(): c for c in candidates}
    matches = difflib.get_close_matches(str(name).lower().replace("-", "_"), by_lower, n=1, cutoff=cutoff)
    return by_lower[matches[0]] if matches else None


def _very_near(name: str, near: str) -> bool:
    return len(name) > 2 and difflib.SequenceMatcher(None, name.lower(), near.lower()).ratio() > 0.8


@cache
def places() -> dict[str, list[str]]:
    """Every key name of the whole schema -> the paths at which it is valid."""
    found: dict[str, list[str]] = {}
    tables = [("", ROOT), *((f"optimizer.params ({n})", k) for n, k in OPTIMIZERS.items())]
    tables += [(f"scheduler.params ({n})", k) for n, k in SCHEDULERS.items()]
    for prefix, table in tables:
        for path, key in walk(table):
            if not key.refused:
                full = f"{prefix.split(' ')[0]}.{path}" if prefix else path
                paths = found.setdefault(path.rsplit(".", 1)[-1], [])
                if full not in paths:
                    paths.append(full)
    return found


def nearest_anywhere(name: str) -> str | None:
    """The full path of the key most like `name` anywhere in the file."""
    near = nearest(name, list(places()), cutoff=0.8)
    return places()[near][0] if near else None


def _value(value: Any, key: Key, here: str, canonical: str) -> Iterator[Problem]:
    if key.refused and not (value is None and key.nullable):
        yield Problem(here, value, "error", "cannot be used", key.refused)
        return
    if key.deprecated:
        yield Problem(here, value, "warning", "deprecated", key.deprecated)
    if value is None:
        if not key.nullable:
            yield Problem(here, "null", "error", "null means nothing here", f"write {_wanted(key)} or remove the key")
        return
    if value == "auto":
        yield from _auto(key, here, canonical)
        return
    if canonical == "zero_optimization" and isinstance(value, bool):
        return  # the oldest form; a rule says what to write
    problem = _wrong_type(value, key) or _out_of_range(value, key)
    if problem:
        severity, why, fix = problem
        yield Problem(here, value, severity, why, fix)  # type: ignore[arg-type]


def _auto(key: Key, here: str, canonical: str) -> Iterator[Problem]:
    if key.auto == "native" or canonical in RUN_FILLS or "auto" in key.values:
        return
    if canonical.startswith("zero_optimization.") and key.kind != "section":
        return  # DeepSpeed drops the word and takes its own default; resolving writes that default down
    yield Problem(here, "auto", "error", 'nothing fills in "auto" here; DeepSpeed would take the word for the value',
                  f"write {_wanted(key)}")  # fmt: skip


def _wanted(key: Key) -> str:
    if key.values:
        return " or ".join(shorten(v) for v in key.values if v is not None)
    names = {"bool": "true or false", "int": "a whole number", "float": "a number", "str": "a string",
             "list": "a list", "section": "an object {...}", "betas": "two numbers such as [0.9, 0.999]",
             "lr": "a number", "any": "a value"}  # fmt: skip
    return names[key.kind] + _range_text(key)


def _range_text(key: Key) -> str:
    parts = [(key.least, "at least"), (key.above, "above"), (key.most, "at most"), (key.below, "below")]
    said = [f"{word} {bound:g}" for bound, word in parts if bound is not None]
    return f" {' and '.join(said)}" if said else ""


def _wrong_type(value: Any, key: Key) -> tuple[str, str, str] | None:
    kind = key.kind
    if kind == "any":
        return None
    if isinstance(value, str) and kind in ("int", "float", "bool", "lr"):
        return _text_for_value(value, key)
    if kind == "bool":
        if isinstance(value, bool):
            return None
        if value in (0, 1):
            return "warning", "a number where true or false is meant", f"write {str(bool(value)).lower()}"
        return "error", f"{_called(value)} where true or false is wanted", "write true or false"
    if kind == "int":
        return _not_whole(value, key)
    if kind == "float" or (kind == "lr" and not isinstance(value, list)):
        return None if _is_number(value) else ("error", f"{_called(value)} where a number is wanted", _write(key))
    if kind == "betas":
        return _not_betas(value)
    python = {"str": str, "list": list, "section": Mapping, "lr": list}[kind]
    return None if isinstance(value, python) else ("error", f"{_called(value)} is the wrong type", _write(key))


def _write(key: Key) -> str:
    return f"write {_wanted(key)}"


def _called(value: Any) -> str:
    if isinstance(value, bool):
        return "true/false"
    if isinstance(value, Mapping):
        return "an object"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return {str: "a string", list: "a list", int: "a number", float: "a number"}.get(type(value), "this")


def _text_for_value(value: str, key: Key) -> tuple[str, str, str]:
    try:
        plain = float(value)
    except ValueError:
        plain = math.nan
    if key.kind != "bool" and math.isfinite(plain):
        return "error", "a number in quotes is a string; DeepSpeed fails later without naming the key", f"write {value}"
    if key.kind == "bool" and value.lower() in ("true", "false"):
        return "error", "a word in quotes is a string, and any string counts as true", f"write {value.lower()}"
    return "error", "a string where a value of another type is wanted", _write(key)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _not_whole(value: Any, key: Key) -> tuple[str, str, str] | None:
    if not _is_number(value):
        return "error", f"{_called(value)} where a whole number is wanted", _write(key)
    if float(value).is_integer():
        return None
    return "error", "not a whole number; DeepSpeed refuses fractional parts", f"write {int(value)}"


def _not_betas(value: Any) -> tuple[str, str, str] | None:
    good = "write two numbers from 0 up to but not including 1, such as [0.9, 0.999]"
    if not isinstance(value, list | tuple) or len(value) != 2 or not all(_is_number(b) for b in value):
        return "error", "betas must be a list of two numbers", good
    if not all(0 <= b < 1 for b in value):
        return "error", "outside [0, 1): the running averages would diverge, and DeepSpeed does not check", good
    return None


def _out_of_range(value: Any, key: Key) -> tuple[str, str, str] | None:
    if key.values and not _among(value, key):
        fix = f"write {_wanted(key)}"
        if isinstance(value, str) and (near := nearest(value, [v for v in key.values if isinstance(v, str)], 0.5)):
            fix = f'write "{near}" (allowed: {_wanted(key)})'
        return "error", "not one of the allowed values", fix
    if key.kind == "lr":
        values = value if isinstance(value, list) else [value]
        if not all(_is_number(v) and v >= 0 for v in values):
            return "error", "a learning rate is a number of at least 0", "write a number such as 1e-4"
    if not _is_number(value):
        return None
    bad = (
        (key.least is not None and value < key.least)
        or (key.above is not None and value <= key.above)
        or (key.most is not None and value > key.most)
        or (key.below is not None and value >= key.below)
    )
    return ("error", "out of range", _write(key)) if bad else None


def _among(value: Any, key: Key) -> bool:
    if key.any_case and isinstance(value, str):
        return value.lower() in {str(v).lower() for v in key.values}
    return any(value == v and isinstance(value, bool) == isinstance(v, bool) for v in key.values)


def type_known(section_name: str, kind: str) -> bool:
    """Whether DeepSpeed can build this optimizer or scheduler type."""
    if section_name == "optimizer":
        return kind.lower() in OPTIMIZERS or kind in TORCH_OPTIMIZERS
    return kind in SCHEDULERS or kind in TORCH_SCHEDULERS


def type_names(section_name: str) -> list[str]:
    """Names to suggest for a misspelt type."""
    if section_name == "optimizer":
        return ["AdamW", "Adam", "Lamb", "Lion", "Muon", "Adagrad", *TORCH_OPTIMIZERS]
    return [*SCHEDULERS, *TORCH_SCHEDULERS]
