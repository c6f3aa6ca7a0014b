"""Versions of packages, CUDA, driver, nvcc and compiler: against the tested ones, and against each other.

Nothing heavy is imported: versions come from package metadata and from torch's version file.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from bigtrain.diagnostics.doctor.finding import Finding, broken, ok, warning
from bigtrain.plan.machine import run_program

Numbers = tuple[int, ...]


@dataclass(frozen=True)
class Tested:
    """A package and the range of versions that was tested. `exact`: internals are used, another version will not do."""

    package: str
    lowest: str
    highest: str
    required: bool = True
    exact: bool = False


# A test compares this with setup.cfg (lowest) and constraints.txt (highest).
TESTED = (
    Tested("torch", "2.11", "2.13.0"),
    Tested("deepspeed", "0.19.8", "0.19.8", exact=True),
    Tested("transformers", "5.17", "5.24.0"),
    Tested("accelerate", "1.10", "1.15.0"),
    Tested("safetensors", "0.6", "0.8.0"),
    Tested("bitsandbytes", "0.50", "0.50.2", required=False),
)
TESTED_PYTHON = ("3.11", "3.12", "3.13")
TESTED_CUDA = ("13.0",)


@dataclass(frozen=True)
class BadPair:
    """Two parts that fail together: `first` in its range with `second` in its range. Ranges are [from, below)."""

    first: str
    first_from: str
    first_below: str
    second: str
    second_from: str
    second_below: str
    why: str
    remedy: str


_ANY = "99999"
# `cuda` is what torch was built for, `driver` NVIDIA's kernel driver, `nvcc` and `gcc` the compilers on this machine.
# Drivers: CUDA release notes, minor-version compatibility. gcc with nvcc: torch/utils/cpp_extension.py, CUDA_GCC_VERSIONS.
BAD_PAIRS = (
    BadPair("cuda", "13", _ANY, "driver", "0", "580", "CUDA 13 needs a driver of 580 or later",
            "update the NVIDIA driver, or install torch for CUDA 12"),
    BadPair("cuda", "12", "13", "driver", "0", "525", "CUDA 12 needs a driver of 525 or later", "update the NVIDIA driver"),
    BadPair("cuda", "13", _ANY, "nvcc", "0", "13", "torch refuses to build extensions with an nvcc of another major version",
            "install the CUDA 13 toolkit and set CUDA_HOME to it"),
    BadPair("cuda", "12", "13", "nvcc", "13", _ANY, "torch refuses to build extensions with an nvcc of another major version",
            "install the CUDA 12 toolkit and set CUDA_HOME to it"),
    BadPair("nvcc", "12.0", "12.3", "gcc", "13", _ANY, "nvcc 12.0 to 12.2 refuses gcc 13 and later", "export CXX=g++-12"),
    BadPair("nvcc", "12.3", "12.8", "gcc", "14", _ANY, "nvcc 12.3 to 12.7 refuses gcc 14 and later", "export CXX=g++-13"),
    BadPair("nvcc", "12.8", "13", "gcc", "15", _ANY, "nvcc 12.8 and 12.9 refuse gcc 15 and later", "export CXX=g++-14"),
    BadPair("nvcc", "13.0", "13.1", "gcc", "16", _ANY, "nvcc 13.0 refuses gcc 16 and later", "export CXX=g++-15"),
    BadPair("cuda", "13", _ANY, "bitsandbytes", "0", "0.48", "bitsandbytes before 0.48 has no library for CUDA 13",
            "pip install 'bitsandbytes>=0.50'"),
    BadPair("numpy", "2", _ANY, "torch", "0", "2.3", "torch before 2.3 was compiled for numpy 1", "pip install 'torch>=2.11'"),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Versions:
    """Versions by name; None: not there. `unmet`: requirements that installed packages state and that do not hold."""

    found: Mapping[str, str | None]
    unmet: tuple[str, ...] = ()
    gpu_present: bool = False


def numbers(version: str) -> Numbers:
    """`2.13.0+cpu` -> (2, 13, 0); what is not a number ends it."""
    match = re.match(r"\d+(?:\.\d+)*", version.strip())
    return tuple(int(word) for word in match.group().split(".")) if match else ()


def _at_least(version: str, lowest: str) -> bool:
    a, b = numbers(version), numbers(lowest)
    width = max(len(a), len(b))
    return a + (0,) * (width - len(a)) >= b + (0,) * (width - len(b))


# ---------------------------------------------------------------- measuring


def measure_packages(driver: str | None = None) -> Versions:
    """Python packages alone, without starting a process."""
    found: dict[str, str | None] = {t.package: _package(t.package) for t in TESTED}
    found |= {"numpy": _package("numpy"), "python": ".".join(map(str, sys.version_info[:3])), "cuda": torch_cuda()}
    return Versions(found={**found, "driver": driver, "nvcc": None, "gcc": None}, unmet=(), gpu_present=driver is not None)


def measure_versions(env: Mapping[str, str] = os.environ, driver: str | None = None) -> Versions:
    """What is installed. `driver` comes from nvidia-smi (see devices.py)."""
    packages = measure_packages(driver)
    found = {**packages.found, "nvcc": nvcc_version(env), "gcc": gcc_version(env)}
    return replace(packages, found=found, unmet=tuple(_unmet([t.package for t in TESTED])))


def _package(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def torch_cuda() -> str | None:
    """The CUDA version that the installed torch was built for, without importing it; None: a CPU build."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    file = Path(spec.origin).with_name("version.py")
    match = re.search(r"^cuda\b[^=]*= *['\"]([\d.]+)", file.read_text() if file.exists() else "", re.MULTILINE)
    return match.group(1) if match else None


def first_line(command: list[str], pattern: str, env: Mapping[str, str]) -> str | None:
    """The first group of `pattern` in what a command prints; None if it cannot be run or does not say."""
    done, _ = run_program(command, env)
    match = re.search(pattern, done.stdout) if done else None
    return match.group(1) if match else None


def nvcc_version(env: Mapping[str, str]) -> str | None:
    """Of the nvcc that torch would use: CUDA_HOME's, else the one on PATH."""
    home = env.get("CUDA_HOME") or env.get("CUDA_PATH")
    return first_line([str(Path(home, "bin", "nvcc")) if home else "nvcc", "--version"], r"release ([\d.]+)", env)


def gcc_version(env: Mapping[str, str]) -> str | None:
    """Of the compiler that torch would use, if it is gcc."""
    compiler = env.get("CXX", "c++").split() or ["c++"]
    kind = first_line([*compiler, "--version"], r"(Free Software Foundation)", env)
    return first_line([*compiler, "-dumpfullversion"], r"([\d.]+)", env) if kind else None


def _unmet(packages: list[str]) -> list[str]:
    from packaging.requirements import Requirement

    out = []
    for package in packages:
        if _package(package) is None:
            continue
        for text in importlib.metadata.requires(package) or ():
            need = Requirement(text)
            if need.marker is not None and not need.marker.evaluate({"extra": ""}):
                continue
            have = _package(need.name)
            if have is None or not need.specifier.contains(have, prereleases=True):
                out.append(f"{package} {_package(package)} needs {need.name}{need.specifier}, found {have or 'nothing'}")
    return out


# ---------------------------------------------------------------- judging


def check_package(tested: Tested, version: str | None) -> Finding:
    """One package against the tested range."""
    name = f"version of {tested.package}"
    needed = tested.highest if tested.exact else f"{tested.lowest} to {tested.highest}"
    fix = f"pip install '{tested.package}=={tested.highest}'"
    if version is None:
        say = broken if tested.required else warning
        return say(name, f"{tested.package} is not installed", "none", needed, fix)
    if tested.exact and numbers(version) != numbers(tested.highest):
        return broken(name, "bigtrain uses internals of exactly one version", version, needed, fix)
    if not _at_least(version, tested.lowest):
        return broken(name, f"{tested.package} is too old", version, needed, fix)
    if not _at_least(tested.highest, version):
        return warning(name, f"this version of {tested.package} is newer than the tested ones", version, needed, fix)
    return ok(name, "tested", version, needed)


def check_python(version: str) -> Finding:
    """Python itself."""
    needed = " or ".join(TESTED_PYTHON)
    remedy = f"make an environment with python {needed}"
    if version.rpartition(".")[0] in TESTED_PYTHON:
        return ok("version of python", "tested", version, needed)
    if not _at_least(version, TESTED_PYTHON[0]):
        return broken("version of python", "too old", version, needed, remedy)
    return warning("version of python", "not tested", version, needed, remedy)


def check_pairs(versions: Versions) -> list[Finding]:
    """A finding for each pair that is known to fail; one if there is none."""

    def inside(name: str, start: str, below: str) -> bool:
        version = versions.found.get(name)
        return bool(version) and _at_least(str(version), start) and not _at_least(str(version), below)

    hits = [
        p for p in BAD_PAIRS
        if inside(p.first, p.first_from, p.first_below) and inside(p.second, p.second_from, p.second_below)
    ]  # fmt: skip
    if not hits:
        return [ok("version pairs", "no pair that is known to fail", f"{len(BAD_PAIRS)} known pairs compared")]
    say = lambda p: f"{p.first} {versions.found[p.first]} with {p.second} {versions.found[p.second]}"  # noqa: E731
    return [broken("version pairs", p.why, say(p), "another version of one of them", p.remedy) for p in hits]


def check_requirements(versions: Versions) -> Finding:
    """What the packages themselves ask of each other."""
    name = "version requirements"
    if not versions.unmet:
        return ok(name, "packages have what they ask for", "all met")
    remedy = "pip install -c constraints.txt -e .   (or: pip check)"
    return broken(name, "installed packages do not fit each other", "; ".join(versions.unmet), "all met", remedy)


def check_cuda(versions: Versions) -> Finding:
    """Torch's CUDA build, and whether an nvcc is there to compile for it."""
    if versions.found.get("torch") is None:
        return ok("cuda", "not judged: torch is not installed", f"nvcc {versions.found.get('nvcc') or 'none'}")
    cuda, nvcc, driver = (versions.found.get(k) for k in ("cuda", "nvcc", "driver"))
    measured = f"torch for CUDA {cuda or 'none'}, driver {driver or 'none'}, nvcc {nvcc or 'none'}"
    if cuda is None and versions.gpu_present:
        remedy = "install torch for CUDA: pip install torch (not from the cpu index)"
        return broken("cuda", "there is a GPU, but torch is a CPU build", measured, "torch for CUDA", remedy)
    if cuda is None:
        return ok("cuda", "CPU build of torch, no GPU", measured)
    if nvcc is None:
        remedy = f"install the CUDA {cuda} toolkit and export CUDA_HOME=/usr/local/cuda"
        return warning("cuda", "without nvcc DeepSpeed cannot compile its native parts", measured, f"nvcc {cuda}", remedy)
    if cuda not in TESTED_CUDA:
        return ok("cuda", "not among the tested ones, no fault known", measured, f"tested: {', '.join(TESTED_CUDA)}")
    return ok("cuda", "tested", measured, f"tested: {', '.join(TESTED_CUDA)}")


def check_installed(versions: Versions) -> list[Finding]:
    """What is there, against the tested ranges and each other; what is not there is not judged."""
    out = [check_python(str(versions.found["python"]))]
    out += [check_package(t, version) for t in TESTED if (version := versions.found.get(t.package))]
    return [*out, *check_pairs(versions)]


def check_versions(versions: Versions) -> list[Finding]:
    """Everything about versions."""
    out = [check_python(str(versions.found["python"]))]
    out += [check_package(t, versions.found.get(t.package)) for t in TESTED]
    return [*out, check_cuda(versions), check_requirements(versions), *check_pairs(versions)]
