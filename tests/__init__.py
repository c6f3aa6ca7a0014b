"""Tests; `python_path` is what a process that a test starts finds packages by."""

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def python_path() -> str:
    """This checkout first, then what PYTHONPATH held: dependencies may be reachable by it alone."""
    return os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
