"""What compiling DeepSpeed's native parts needs: compiler, ninja, Python headers, a cache folder, a sane architecture list."""

from __future__ import annotations

import contextlib
import os
import shutil
import sysconfig
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from bigtrain.diagnostics.doctor.finding import Finding, broken, ok
from bigtrain.plan.machine import run_program, show_bytes

# A build of CPU Adam leaves about 20 MB of objects and library; fused Adam about 30 MB.
CACHE_BYTES = 200 * 2**20
_PROBE = (
    "#include <omp.h>\n#include <vector>\nint main() { std::vector<int> v(1); return omp_get_max_threads() > 0 ? v[0] : 1; }\n"
)


@dataclass(frozen=True, kw_only=True)
class Tools:
    """What was found.

    Attributes:
        compiler: the command; compiler_path: None if it is not on PATH; compile_error: of a small OpenMP program.
        ninja_error: None if it runs. header: path of Python.h, header_found.
        arch_list: TORCH_CUDA_ARCH_LIST. cache: the folder; cache_error: of a real write; cache_free_bytes; cache_noexec.
        cache_fallback: a folder that can be written instead.
    """

    compiler: str
    compiler_path: str | None
    compile_error: str | None
    ninja_error: str | None
    header: str
    header_found: bool
    arch_list: str | None
    cache: str
    cache_error: str | None
    cache_free_bytes: int
    cache_noexec: bool
    cache_fallback: str


def extensions_folder(env: Mapping[str, str] = os.environ) -> Path:
    """Where torch keeps compiled extensions."""
    if env.get("TORCH_EXTENSIONS_DIR"):
        return Path(env["TORCH_EXTENSIONS_DIR"])
    return Path(env.get("XDG_CACHE_HOME") or Path.home() / ".cache", "torch_extensions")


def measure_tools(env: Mapping[str, str] = os.environ) -> Tools:
    """Look for the tools and try each one."""
    words = env.get("CXX", "c++").split() or ["c++"]
    path = shutil.which(words[0], path=env.get("PATH"))
    cache, header = extensions_folder(env), Path(sysconfig.get_paths()["include"], "Python.h")
    error, free, noexec = try_writing(cache)
    return Tools(
        compiler=words[0],
        compiler_path=path,
        compile_error=_compile([path, *words[1:]], env) if path else None,
        ninja_error=_run(["ninja", "--version"], env),
        header=str(header),
        header_found=header.exists(),
        arch_list=env.get("TORCH_CUDA_ARCH_LIST"),
        cache=str(cache),
        cache_error=error,
        cache_free_bytes=free,
        cache_noexec=noexec,
        cache_fallback=str(Path(tempfile.gettempdir(), f"torch_extensions-{os.getuid()}")),
    )


def _run(command: list[str], env: Mapping[str, str], stdin: str = "") -> str | None:
    """None if the command ends well, else why not."""
    done, why = run_program(command, env, stdin)
    if done is None:
        return why
    text = done.stderr.strip().splitlines()
    return None if done.returncode == 0 else next((line for line in text if "error" in line), text[0] if text else "failed")


def _compile(compiler: list[str], env: Mapping[str, str]) -> str | None:
    with tempfile.TemporaryDirectory() as folder:
        return _run([*compiler, "-std=c++17", "-fopenmp", "-x", "c++", "-", "-o", f"{folder}/a"], env, _PROBE)


def try_writing(folder: Path) -> tuple[str | None, int, bool]:
    """`(error, free bytes, mounted noexec)` of a folder that is made if need be; a small file is written and removed."""
    made: list[Path] = []
    try:
        for step in [*reversed(folder.parents), folder]:
            if not step.exists():
                step.mkdir()
                made.append(step)
        with tempfile.NamedTemporaryFile(dir=folder) as file:
            file.write(b"x" * 4096)
            file.flush()
        status = os.statvfs(folder)
        return None, status.f_bavail * status.f_frsize, bool(status.f_flag & os.ST_NOEXEC)
    except OSError as error:
        return f"{type(error).__name__}: {error.strerror}", 0, False
    finally:
        for step in reversed(made):  # leave no trace of having looked, unless someone else uses the folder by now
            with contextlib.suppress(OSError):
                step.rmdir()


# ---------------------------------------------------------------- judging

_WITHOUT = "DeepSpeed's CPU Adam cannot be compiled; runs with offload_optimizer fall back to a slower one"


def check_compiler(tools: Tools) -> Finding:
    """A C++ compiler that works."""
    name, needed = "compiler", "a C++17 compiler with OpenMP"
    fix = "apt-get install g++   (or: conda install gxx_linux-64; or export CXX=/path/to/g++)"
    if tools.compiler_path is None:
        return broken(name, f"no C++ compiler: {_WITHOUT}", f"'{tools.compiler}' is not on PATH", needed, fix)
    if tools.compile_error:
        return broken(name, f"the C++ compiler does not work: {_WITHOUT}", tools.compile_error, needed, fix)
    return ok(name, "compiles an OpenMP program", tools.compiler_path, needed)


def check_ninja(tools: Tools) -> Finding:
    """ninja, which torch builds extensions with; it is asked even when the extension is already built."""
    if tools.ninja_error:
        return broken("ninja", f"no ninja: {_WITHOUT}", tools.ninja_error, "ninja on PATH", "pip install ninja, or apt-get "
                      "install ninja-build; in a virtual environment, put its bin folder on PATH")  # fmt: skip
    return ok("ninja", "runs", "found", "ninja on PATH")


def check_headers(tools: Tools) -> Finding:
    """Python.h, which Debian packages apart."""
    if not tools.header_found:
        return broken("python headers", _WITHOUT, f"{tools.header} is missing", "Python.h", "apt-get install python3-dev")
    return ok("python headers", "found", tools.header)


def bad_architectures(arch_list: str) -> list[str]:
    """Entries that DeepSpeed's builder cannot read: it wants MAJOR.MINOR[+PTX] (op_builder/builder.py of 0.19.8)."""
    entries = [e for e in arch_list.replace(" ", ";").split(";") if e.strip()]
    return [e for e in entries if not all(w.isdigit() for w in e.removesuffix("+PTX").split(".")) or e.count(".") != 1]


def check_arch_list(tools: Tools, capabilities: tuple[str, ...] = ()) -> Finding:
    """TORCH_CUDA_ARCH_LIST; `capabilities` are those of the GPUs here, for the remedy."""
    name, needed = "TORCH_CUDA_ARCH_LIST", "unset, or entries such as 9.0 or 10.0+PTX"
    if not (tools.arch_list or "").strip():
        return ok(name, "unset: builds are for the GPUs that are there", "unset", needed)
    bad = bad_architectures(str(tools.arch_list))
    entries = str(tools.arch_list).replace(" ", ";").split(";")
    good = ";".join(capabilities or [e for e in entries if e not in bad])
    remedy = f"export TORCH_CUDA_ARCH_LIST='{good}'" if good else "unset TORCH_CUDA_ARCH_LIST"
    if bad:
        what = f"DeepSpeed's builder cannot read {', '.join(bad)}: every CUDA part fails to compile with a ValueError"
        return broken(name, what, tools.arch_list, needed, remedy)
    missing = [c for c in capabilities if not any(e.removesuffix("+PTX") == c or "+PTX" in e for e in entries)]
    if missing:
        return broken(
            name, f"no code would be compiled for the GPU here ({', '.join(missing)})", tools.arch_list, needed, remedy
        )
    return ok(name, "readable", tools.arch_list, needed)


def check_cache(tools: Tools) -> Finding:
    """The folder of compiled extensions can be written and its libraries loaded."""
    name, needed = "extension cache", f"a folder to write in, {show_bytes(CACHE_BYTES)} free"
    remedy = f"export TORCH_EXTENSIONS_DIR={tools.cache_fallback}   (any folder on a local disk that you can write to)"
    if tools.cache_error:
        return broken(name, f"cannot be written: {_WITHOUT}", f"{tools.cache}: {tools.cache_error}", needed, remedy)
    if tools.cache_noexec:
        return broken(name, "mounted noexec: libraries there cannot be loaded", tools.cache, needed, remedy)
    measured = f"{tools.cache}: {show_bytes(tools.cache_free_bytes)} free"
    if tools.cache_free_bytes < CACHE_BYTES:
        return broken(name, "too little space to compile", measured, needed, remedy)
    return ok(name, "can be written", measured, needed)


def check_tools(tools: Tools, capabilities: tuple[str, ...] = ()) -> list[Finding]:
    """Everything about compiling."""
    plain = (check_compiler(tools), check_ninja(tools), check_headers(tools))
    return [*plain, check_arch_list(tools, capabilities), check_cache(tools)]
