"""The vocabulary in which the tables of DeepSpeed's keys are written.

The tables (`schema_core`, `schema_zero`, `schema_sections`) are data: one row per key that deepspeed 0.19.8 reads.
They are written down here, not derived by importing DeepSpeed, because linting must work in a fraction of a second on a
machine without a GPU. A test compares every row with DeepSpeed's own classes and constants, so that they cannot drift.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

MISSING: Any = type("Missing", (), {"__repr__": lambda self: "MISSING"})()
"""Default of a key that has none."""


@dataclass(frozen=True, kw_only=True)
class Key:
    """What may stand at one key.

    Attributes:
        kind: bool, int, float, lr (a rate or a list of them), betas, str, strings (a list of them), names (one or a
            list of them), list, any, or section
            (then `keys` describes the inside).
        default: what DeepSpeed uses when the key is absent.
        least, above, most, below: bounds; `least` and `most` belong to the allowed range, `above` and `below` do not.
        values: the allowed values, compared without regard to case when `any_case`.
        nullable: JSON null is allowed.
        auto: "auto" is a value that a run fills in (Hugging Face's convention), "native" when DeepSpeed itself
            understands the word, "" when it is a mistake.
        deprecated: why it should not be used, with the replacement; "" when it is current.
        refused: DeepSpeed, or bigtrain, stops on this key; why.
        needs: names of the conditions (`rules.CONDITIONS`) that must all hold, or the key does nothing.
        gpu_only: meaningless on a machine without an accelerator; value to write there (`cpu_value`).
        also: other spelling of the same key that DeepSpeed accepts.
        strict: unknown keys inside this section make DeepSpeed itself stop.
        open: the inside of this section is free-form.
    """

    kind: str
    default: Any = MISSING
    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None
    values: tuple[Any, ...] = ()
    any_case: bool = False
    nullable: bool = False
    auto: str = "run"
    deprecated: str = ""
    refused: str = ""
    needs: tuple[str, ...] = ()
    gpu_only: bool = False
    cpu_value: Any = MISSING
    also: str = ""
    strict: bool = False
    open: bool = False
    keys: Mapping[str, Key] = field(default_factory=dict)

    def lookup(self, name: str) -> tuple[str, Key] | None:
        """Canonical name and row of `name`, by either spelling; None when unknown."""
        if name in self.keys:
            return name, self.keys[name]
        for canonical, key in self.keys.items():
            if key.also and key.also == name:
                return canonical, key
        return None


def flag(default: Any = False, **kw: Any) -> Key:
    """true or false."""
    return Key(kind="bool", default=default, nullable=default is None, **kw)


def integer(default: Any = MISSING, **kw: Any) -> Key:
    """A whole number; 5e8 is one, 1.5 is not."""
    return Key(kind="int", default=default, nullable=default is None, **kw)


def number(default: Any = MISSING, **kw: Any) -> Key:
    """Any finite number."""
    return Key(kind="float", default=default, nullable=default is None, **kw)


def text(default: Any = MISSING, **kw: Any) -> Key:
    """A string."""
    return Key(kind="str", default=default, nullable=default is None, **kw)


def choice(default: Any, *values: Any, **kw: Any) -> Key:
    """One of `values`."""
    return Key(kind="any" if any(not isinstance(v, str) for v in values) else "str", default=default,
               values=values, nullable=default is None or None in values, **kw)  # fmt: skip


def listing(default: Any = MISSING, **kw: Any) -> Key:
    """A JSON list."""
    return Key(kind="list", default=default, nullable=default is None, **kw)


def anything(default: Any = MISSING, **kw: Any) -> Key:
    """Whatever: DeepSpeed hands it on."""
    return Key(kind="any", default=default, nullable=True, **kw)


def section(keys: Mapping[str, Key], **kw: Any) -> Key:
    """A nested object."""
    return Key(kind="section", keys=keys, **kw)


def with_needs(keys: Mapping[str, Key], *needs: str) -> dict[str, Key]:
    """The same rows, each needing `needs` as well."""
    return {name: replace(key, needs=needs + key.needs) for name, key in keys.items()}


def walk(key: Key, path: str = "") -> Iterator[tuple[str, Key]]:
    """Every (path, row) below `key`, depth first."""
    for name, child in key.keys.items():
        here = f"{path}.{name}" if path else name
        yield here, child
        yield from walk(child, here)
