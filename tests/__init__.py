"""Tests; what processes that a test starts have in common."""

import gc
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def python_path() -> str:
    """This checkout first, then what PYTHONPATH held: dependencies may be reachable by it alone."""
    return os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))


def torchrun(ranks: int) -> list[str]:
    """The command that starts so many ranks on this host; a script or `-m` and a module follow."""
    return [sys.executable, *f"-m torch.distributed.run --standalone --nproc_per_node {ranks}".split()]


def keep_imports(known: int) -> int:
    """Once many modules were imported: let the garbage collector leave them alone. Each model or engine that is built collects.

    Args:
        known: what the last call returned, at first 0.

    Returns:
        The number of modules at the last time.
    """
    if len(sys.modules) > known + 100:
        gc.collect()
        gc.freeze()
        return len(sys.modules)
    return known
