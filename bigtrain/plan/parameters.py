"""One named parameter, and the small builders that the family tables are written with.

Shapes are in PyTorch order (`[out, in]` for a linear layer). The order of a list is the order of `named_parameters()`,
because ZeRO flattens and buckets in that order.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from bigtrain.errors import UsageError

Shape = tuple[int, ...]

# Beyond any model; without a bound a slip of the keyboard would keep the planner busy for hours.
_MOST_LAYERS, _MOST_HEADS, _MOST = 10_000, 2**16, 2**31
_BOUNDS = {
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "num_decoder_layers", "depth"), _MOST_LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads", "num_key_value_heads", "num_kv_heads"), _MOST_HEADS),
}


@dataclass(frozen=True)
class Parameter:
    """A parameter by name and shape; `block` numbers the repeated layer it belongs to (None: outside of all)."""

    name: str
    shape: Shape
    block: int | None = None

    @cached_property
    def elems(self) -> int:
        return math.prod(self.shape)


class Values:
    """A config's values with the family's defaults behind them; a missing one is named in the error."""

    def __init__(self, given: Mapping[str, Any], defaults: Mapping[str, Any]):
        self._given, self._defaults = given, defaults

    def get(self, key: str, default: Any = None) -> Any:
        if key in self._given:
            return self._given[key]
        return self._defaults.get(key, default)

    def __getitem__(self, key: str) -> int:
        value = self.get(key)
        if value is None:
            kind = self._given.get("model_type", "?")
            raise UsageError(f"the model config (model_type '{kind}') has no '{key}': add it, it decides shapes")
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise UsageError(f"the model config has {key} = {value!r}: a positive whole number is needed")
        most = _BOUNDS.get(key, _MOST)
        if value > most:
            raise UsageError(f"the model config has {key} = {value:,}: more than {most:,} is no model; correct it")
        return value

    def without(self, key: str) -> Values:
        """The same values, but for one key."""
        return Values({k: v for k, v in self._given.items() if k != key}, self._defaults)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.get(key, default)
        if value not in (None, 0, 1):
            raise UsageError(f"the model config has {key} = {value!r}: true or false is needed")
        return bool(value)


def linear(name: str, outputs: int, inputs: int, bias: bool = False) -> list[Parameter]:
    """Weight `[outputs, inputs]` and, if asked, bias `[outputs]`."""
    weight = [Parameter(f"{name}.weight", (outputs, inputs))]
    return [*weight, Parameter(f"{name}.bias", (outputs,))] if bias else weight


def norm(name: str, *shape: int, bias: bool = False) -> list[Parameter]:
    """Scale and, for a LayerNorm, bias."""
    scale = [Parameter(f"{name}.weight", shape)]
    return [*scale, Parameter(f"{name}.bias", shape)] if bias else scale


def plain(name: str, *shape: int) -> list[Parameter]:
    """A parameter that carries its own name."""
    return [Parameter(name, shape)]


def under(prefix: str, items: Iterable[Parameter], block: int | None = None) -> list[Parameter]:
    """The same parameters below a module prefix, in a block if given."""
    return [Parameter(f"{prefix}.{p.name}", p.shape, p.block if block is None else block) for p in items]


def head_dim(c: Values) -> int:
    """`head_dim` of the config, else hidden size over heads, as the Hugging Face classes do it."""
    return c["head_dim"] if c.get("head_dim") else c["hidden_size"] // c["num_attention_heads"]


def kv_heads(c: Values) -> int:
    """Number of key/value heads; without the key, as many as query heads."""
    return c["num_key_value_heads"] if c.get("num_key_value_heads") else c["num_attention_heads"]


def not_counted(what: str) -> UsageError:
    """The error for a model that no family table counts, with the way out."""
    return UsageError(
        f"{what} Give a list of shapes instead: --shapes FILE.json with [[name, [sizes...]], ...], as "
        "[[n, list(p.shape)] for n, p in model.named_parameters()] prints it."
    )
