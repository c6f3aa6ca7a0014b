"""Reading a ds_config: the same dialect that DeepSpeed reads (hjson), with every mistake named."""

from __future__ import annotations

import copy
import difflib
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bigtrain import standins
from bigtrain.errors import ConfigError


def load(source: str | Path | Mapping[str, Any]) -> dict[str, Any]:
    """A ds_config from a file, the bare name of a preset (`zero3_offload`), or a mapping.

    Args:
        source: path, preset name or mapping. hjson is accepted, so comments and trailing commas are fine.

    Returns:
        A copy that the caller may change.

    Raises:
        ConfigError: no such file, a pipe, not an object, not parseable (with line and column), or a key given twice.
    """
    if isinstance(source, Mapping):
        return copy.deepcopy(dict(source))
    path = Path(source)
    if path.is_file():
        try:
            return parse(path.read_text(encoding="utf-8-sig"), str(path))
        except UnicodeDecodeError as error:
            raise ConfigError(f"{path}: not UTF-8 text: {error}") from None
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    from bigtrain.config.generate import PRESETS, generate

    name = path.name.removesuffix(".json")
    if str(source) in PRESETS or (path.parent.name == "ds_configs" and name in PRESETS):
        return generate(PRESETS[name])
    if path.is_fifo() or path.is_char_device() or path.is_socket():
        raise ConfigError(
            f"{str(source)!r} is no file but a pipe or a device, of which each rank would read a part, or nothing: write the ds_config to a "
            'file, or give its text itself: --ds_config "$(COMMAND)"; `bigtrain config` reads - as standard input'
        )
    if path.is_dir():
        raise ConfigError(f"{str(source)!r} is a folder: give one of its files, or a preset: {', '.join(PRESETS)}")
    near = difflib.get_close_matches(name, PRESETS, n=1, cutoff=0.5)
    raise ConfigError(
        f"{source}: no such file, and no preset of that name. "
        + (f"Did you mean {near[0]}? " if near else "")
        + f"Presets: {', '.join(PRESETS)}"
    )


def parse(text: str, name: str = "ds_config") -> dict[str, Any]:
    """A ds_config from text; `name` is what to call it in messages."""
    import hjson

    if not text.strip():  # to hjson that is {}, and would train at stage 0 in fp32
        raise ConfigError(f"{name}: is empty; a ds_config is an object {{...}}")
    try:
        data = hjson.loads(text, object_pairs_hook=_no_duplicates)
    except hjson.HjsonDecodeError as error:
        raise ConfigError(f"{name}: not readable as JSON: {error}") from None
    except _DuplicateKeyError as error:
        raise ConfigError(f"{name}: {error}") from None
    except (OverflowError, RecursionError, ValueError) as error:  # 1e999; brackets without end; a number of 5000 digits
        raise ConfigError(f"{name}: not readable as JSON: {error}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{name}: a ds_config is an object {{...}}, this is {standins.kind(data)}")
    return data


class _DuplicateKeyError(ValueError):
    """hjson calls the hook while parsing, so the path is not known; the neighbours say where it is."""


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    twice = [key for key, n in Counter(key for key, _ in pairs).items() if n > 1]
    if twice:
        values = [value for key, value in pairs if key == twice[0]]
        beside = [key for key, _ in pairs if key not in twice][:4]
        raise _DuplicateKeyError(
            f'key "{twice[0]}" stands twice in one object ({values[0]!r}, {values[1]!r}; beside {", ".join(beside) or "nothing else"}); keep one'
        )
    return dict(pairs)
