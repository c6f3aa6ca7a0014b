"""What a script gives a checkpoint to keep: JSON, and the same on every rank, since rank 0 writes it for all."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import xxhash

from bigtrain import ranks
from bigtrain.errors import UsageError

_SHOWN = 60  # characters of a value; of a longer one its hash


def agreed(state: dict[str, Any], data_position: Any) -> dict[str, Any]:
    """`state` as a load will return it; all ranks call it.

    Raises:
        UsageError: JSON cannot say something in `state` or `data_position`; it is named.
        RanksDisagreeError: ranks hold different ones; on every rank, with the values, or their hashes where they are long.
    """
    with ranks.together("reading the state to save"):
        if not isinstance(state, dict):
            raise UsageError(f"state is a {type(state).__name__}: a checkpoint keeps a dict of values that JSON can say")
        said = {"data_position": _text("data_position", data_position)}
        for name, value in state.items():
            where = f"state[{name!r}]"
            said[where] = _text(where, value)
        kept: dict[str, Any] = json.loads(_text("state", state))
    ranks.agree({name: _short(text) for name, text in said.items()}, "what save_checkpoint() was given to keep")
    return kept


def _text(name: str, value: Any) -> str:
    try:
        return json.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        found = next(_unsayable(name, value), None) if isinstance(error, TypeError) else None
        where, what = found or (name, str(error))
        raise UsageError(
            f"{where} cannot be kept in a checkpoint, which holds JSON: {what}. Give numbers, text, lists and dicts of them (tensor.item(), "
            "tensor.tolist()); tensors belong into a file of your own, or into a buffer of the model."
        ) from error


def _unsayable(name: str, value: Any) -> Iterator[tuple[str, str]]:
    """Where values are that JSON has no word for, and what they are."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if not isinstance(key, str | int | float | None):
                yield name, f"its key {key!r} is a {type(key).__name__}"
            yield from _unsayable(f"{name}[{key!r}]", inner)
    elif isinstance(value, list | tuple):
        for at, inner in enumerate(value):
            yield from _unsayable(f"{name}[{at}]", inner)
    elif not isinstance(value, str | int | float | None):
        yield name, f"it is a {type(value).__module__}.{type(value).__qualname__}"


def _short(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{len(text)} characters, hash {xxhash.xxh64_hexdigest(text.encode())}"
