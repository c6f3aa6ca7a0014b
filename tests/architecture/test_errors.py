"""The exception tree: drawn as it is, raised by tests, with the promised exit codes."""

import ast
import functools
import inspect
from pathlib import Path

import pytest

from bigtrain import errors
from tests import ROOT

CLASSES = [c for _, c in inspect.getmembers(errors, inspect.isclass) if c.__module__ == errors.__name__]


def test_exit_codes():
    expected = {
        "UsageError": 2,
        "ConfigError": 2,
        "DataError": 2,
        "ModelError": 2,
        "WrongWeightsError": 2,
        "DoesNotFitError": 3,
        "StoppedError": 75,
    }
    assert {c.__name__: c.exit_code for c in CLASSES if c.exit_code != 1} == expected


def test_the_tree_in_the_docstring_has_every_class():
    assert [c.__name__ for c in CLASSES if c.__name__ not in (errors.__doc__ or "")] == []


@functools.cache
def raised_in(folder: Path) -> set[str]:
    """Names of classes that appear in `raise X(...)` below a folder."""
    names = set()
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                names.add(ast.unparse(node.exc.func).split(".")[-1])
    return names


@functools.cache
def expected_in_tests() -> set[str]:
    """Names of classes that a test waits for: in `pytest.raises(...)`, `except ...`, or by name in a comparison."""
    names = set()
    for path in (ROOT / "tests").rglob("*.py"):
        if path.parent.name == "architecture":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Name):
                names.add(node.id)
            elif isinstance(node, ast.Attribute):
                names.add(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                names |= {c.__name__ for c in CLASSES if c.__name__ in node.value}
    return names


@pytest.mark.parametrize("name", [c.__name__ for c in CLASSES if c is not errors.BigtrainError])
def test_every_class_is_used_and_awaited_by_a_test(name):
    assert name in raised_in(ROOT / "bigtrain"), f"{name} is never raised: remove it"
    assert name in expected_in_tests(), f"no test waits for {name}"
