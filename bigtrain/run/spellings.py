"""Flags and keys of a run file as words: which setting each names, which name none, which name one twice. Plain Python."""

from __future__ import annotations

import argparse
import difflib
import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from bigtrain.run import foreign

logger = logging.getLogger("bigtrain")


def given(flags: Sequence[str], parser: argparse.ArgumentParser) -> set[str]:
    """Names of the settings that are given, whatever the spelling."""
    known = (parser._option_string_actions.get(flag.split("=", 1)[0]) for flag in flags)
    return {action.dest for action in known if action is not None}


def text(value: Any) -> str:
    """A value of a run file as it would stand on the command line."""
    return str(value).lower() if isinstance(value, bool) else json.dumps(value) if isinstance(value, dict) else str(value)


def tokens(values: Mapping[str, Any]) -> Iterator[str]:
    """A run file as a command line."""
    for key, value in values.items():
        if value is None:
            continue
        if isinstance(value, list):
            nothing = ["none"] if key.replace("-", "_") == "report_to" else []  # an empty list is not the default there
            yield from (f"--{key}", *map(str, value or nothing)) if value or nothing else ()
        else:
            yield f"--{key}={text(value)}"


def unknown(flags: Sequence[str], parser: argparse.ArgumentParser, what: str) -> list[str]:
    """A line for each flag that nobody knows; `what` they are called."""
    names = [token.split("=", 1)[0] for token in flags if token.startswith("--")]
    taken = parser._option_string_actions
    return [f"unknown {what} {name}{_hint(name, list(taken))}" for name in names if name not in taken]


def known(flags: Iterable[str], parser: argparse.ArgumentParser) -> list[str]:
    """A command line without the others, and their values."""
    rest, keeps = [], True
    for token in flags:
        keeps = token.split("=", 1)[0] in parser._option_string_actions if token.startswith("--") else keeps
        rest += [token] if keeps else []
    return rest


def _hint(name: str, known: list[str]) -> str:
    if remedy := foreign.instead(name):
        return f": {remedy}"
    near = difflib.get_close_matches("--" + foreign.plain(name), [k for k in known if "-" not in k[2:]], n=3, cutoff=0.6)
    return f": did you mean {' or '.join(near)}?" if near else ""


def conflicts(flags: Sequence[str], parser: argparse.ArgumentParser) -> Iterator[str]:
    """--seq_len 512 --max_length 1024 is a contradiction; the same flag twice is not: the last one wins, and that is said."""
    seen: dict[str, str] = {}
    for token in flags:
        action = parser._option_string_actions.get(token.split("=", 1)[0])
        if action is None:
            continue
        name = token.split("=", 1)[0].replace("-", "_").replace("__", "--", 1)
        first = seen.get(action.dest)
        if first not in (None, name):
            yield f"{first} and {name} are two names of one setting: give one of them"
        elif first:
            logger.warning("%s is given twice: what stands last is taken, and the rest passed over", name)
        seen[action.dest] = name
