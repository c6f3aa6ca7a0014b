"""Versions of what decides a run's results, for its record and to compare hosts."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import subprocess
import sys
from pathlib import Path

from bigtrain.errors import BigtrainError

PACKAGES = (
    "torch",
    "deepspeed",
    "transformers",
    "bitsandbytes",
    "safetensors",
    "datasets",
    "accelerate",
    "liger-kernel",
    "numpy",
)


def versions() -> dict[str, str]:
    """Versions of what decides results: Python, packages, CUDA, this project and its commit."""
    from bigtrain import __version__

    found = {"bigtrain": __version__, "python": platform.python_version(), "platform": platform.platform()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    torch = sys.modules.get("torch")
    if torch is not None and torch.version.cuda:
        found["cuda"] = torch.version.cuda
    if known := _commit():
        found["commit"] = known
    return found


def missing_package(error: BaseException) -> BigtrainError | None:
    """What to do about an import of a package that is not there; None for any other error."""
    package = (getattr(error, "name", None) or "").split(".")[0]
    if not isinstance(error, ModuleNotFoundError) or not package or package == "bigtrain" or importlib.util.find_spec(package):
        return None
    return BigtrainError(
        f"the package {package} is not installed; run: pip install {package} (bigtrain's own: pip install -c constraints.txt -e .)"
    )


def _commit() -> str | None:
    """Commit of the clone that this package runs from, with a mark if files differ from it; None outside a clone."""
    clone = Path(__file__).resolve().parents[1]
    if not (clone / ".git").exists():
        return None
    try:
        git = ["git", "-C", str(clone)]
        commit = subprocess.run(
            [*git, "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10, check=True
        ).stdout.strip()
        dirty = subprocess.run([*git, "diff", "--quiet", "HEAD"], capture_output=True, timeout=10, check=False).returncode
    except (OSError, subprocess.SubprocessError):
        return None
    return commit + (" (with local changes)" if dirty else "")
