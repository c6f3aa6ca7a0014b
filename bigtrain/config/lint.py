"""Linting a whole ds_config: every problem at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from bigtrain.config import rules, rules_run, rules_training, rules_zero
from bigtrain.config.problems import Problem, ordered, raise_if_errors
from bigtrain.config.rules import Context
from bigtrain.config.run import RunValues
from bigtrain.config.shape import ModelShape
from bigtrain.config.structure import check_structure

Rule = Callable[[Context], Iterator[Problem]]
RULES: tuple[Rule, ...] = (
    *rules_zero.RULES,
    *rules_training.RULES,
    *rules_run.RULES,
    rules.idle_keys,
    rules.gpu_only,
)


def lint(
    config: Mapping[str, Any],
    *,
    world_size: int | None = None,
    model: ModelShape | None = None,
    run: RunValues | None = None,
    device: str = "cuda",
) -> list[Problem]:
    """Everything that is wrong, questionable or without effect in a ds_config.

    Args:
        config: the file's content, as `load` returns it.
        world_size: number of ranks, when known; the batch numbers and group sizes are then checked against it.
        model: what is known about the model.
        run: what the command line says; differences to the file are errors.
        device: `cuda` or `cpu`.

    Returns:
        Problems without repeats, errors first. An error means: do not start.
    """
    if not isinstance(config, Mapping):
        return [Problem("", config, "error", "a ds_config is a JSON object", "write {...}")]
    ctx = Context(config, world_size, model, run, device)
    found = list(check_structure(config))
    for rule in RULES:
        found.extend(rule(ctx))
    return _without_echoes(ordered(found))


def _without_echoes(problems: list[Problem]) -> list[Problem]:
    """Drop notes on a path that already has an error: the error says what to do."""
    wrong = {p.path for p in problems if p.severity == "error"}
    return [p for p in problems if p.severity == "error" or p.path not in wrong]


def check(config: Mapping[str, Any], *, name: str = "ds_config", also: Iterable[Problem] = (), **known: Any) -> list[Problem]:
    """`lint`, raising ConfigError with the whole report when there is any error.

    Args:
        config: the file's content.
        name: what to call the file in the report.
        also: what else was found, for the same report.
        known: the keyword arguments of `lint`.

    Returns:
        The warnings and notes.

    Raises:
        ConfigError: at least one error; `problems` carries all of them.
    """
    problems = ordered([*lint(config, **known), *also])
    raise_if_errors(problems, name)
    return problems
