"""The AdamW updates of `arithmetic` compiled for this host's CPU: each value is read and written once (`adamw_split.cpp`).

Compiled on first use by torch's own mechanism, into its cache (TORCH_EXTENSIONS_DIR), under a name that holds the kind of CPU, so
that hosts which share a home folder do not run each other's instructions. What was compiled is used only if it gives the bits
of the torch path here.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import platform
from pathlib import Path
from typing import Any

import torch

from bigtrain import ranks
from bigtrain.builds import first_cause, telling_of_compilers, wait_for_build, why_no_tools
from bigtrain.optim import arithmetic
from bigtrain.optim.arithmetic import Scalars, code_tables

log = logging.getLogger(__name__)
SOURCE = Path(__file__).with_name("adamw_split.cpp")
# No contraction: fused multiply-adds stand in the source. Vectors of 512 bits: 15 % faster than the 256 that GCC prefers.
_WIDE = ["-mprefer-vector-width=512"] if platform.machine() == "x86_64" else []
FLAGS = [*_WIDE, "-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fopenmp"]


def ready() -> bool:
    """True if the kernel can be used on every rank; compiles it if need be, once a host. All ranks call it.

    Where some rank has no kernel, all ranks take the torch path, and each says why: same bits, several times slower.
    """
    with ranks.main_first("compiling the AdamW kernel"):
        why = why_not()
    reasons = {r: w for r, w in enumerate(ranks.all_gather_object(why)) if w}
    if reasons:
        first = min(reasons)
        log.warning(
            "rank %d: the compiled AdamW cannot be used (rank %d: %s). The update runs through torch: the same bits, several "
            "times slower a step.",
            ranks.rank(),
            first,
            reasons[first],
        )
    return not reasons


@functools.cache
def why_not() -> str | None:
    """Why the kernel cannot be used in this process, the first cause first; None if it can. Compiles it if needed."""
    if why := why_no_tools():
        return why
    name = f"bigtrain_adamw_split_{_cpu_kind()}"
    wait_for_build(name)
    try:
        from torch.utils.cpp_extension import load

        with telling_of_compilers(name):
            load(name, [str(SOURCE)], extra_cflags=FLAGS, extra_ldflags=["-fopenmp"], is_python_module=False)
        return _differs()
    except Exception as error:
        return first_cause(error)


def _cpu_kind() -> str:
    """Eight hex digits for the instructions that this CPU knows."""
    text = platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        text += next((line for line in info.read_text().splitlines() if line.startswith(("flags", "Features"))), "")
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _differs() -> str | None:
    """Compare one update of a few thousand random numbers with the torch path."""
    generator = torch.Generator().manual_seed(0)
    n = 3 * 8192 + 77
    master = torch.randn(n, generator=generator) * torch.exp2(torch.randint(-12, 4, (n,), generator=generator).float())
    grad, m = torch.randn(n, generator=generator), torch.randn(n, generator=generator) * 0.1
    v = m.square()
    high, low, tie = arithmetic.split_master(master)
    s = Scalars.of(7, 1e-3, (0.9, 0.999), 1e-8, 0.1)
    parts = {"low": low, "exp_avg": m.clone(), "exp_avg_sq": torch.where(tie, v.neg(), v)}
    weight = high.clone()
    update(weight, grad, parts, s, 0.37, start=0, salt=0, exact_root=False)
    arithmetic.adamw_(master, grad * 0.37, m, v, s)
    v_now = parts["exp_avg_sq"]
    ours = (arithmetic.join_master(weight, parts["low"], torch.signbit(v_now)), parts["exp_avg"], v_now.abs())
    wrong = sum(int((a.view(torch.int32) != b.view(torch.int32)).sum()) for a, b in zip(ours, (master, m, v)))
    return f"compiled here it differs from torch's AdamW in {wrong} of {3 * n} numbers" if wrong else None


def update(
    weight: torch.Tensor,
    grad: torch.Tensor,
    parts: dict[str, torch.Tensor],
    s: Scalars,
    factor: torch.Tensor | float | None,
    *,
    start: int,
    salt: int,
    exact_root: bool,
) -> None:
    """Update one flat chunk in place.

    Args:
        weight: bf16 [n], or fp32 [n] with 8-bit moments; contiguous, on the CPU.
        grad: bf16 or fp32 [n].
        parts: the state's tensors for this chunk, as `AdamWSplit` keeps them; an fp32 weight has no `low`.
        s: the update's scalars.
        factor: what the gradient is multiplied by first, rounded to fp32; None for nothing.
        start: where the chunk begins in its partition; with `salt`, what the rounding of bf16 moments is drawn from.
        salt: `arithmetic.salt_of` the update's number.
        exact_root: correctly rounded square root instead of torch's.
    """
    none = weight.new_empty(0, dtype=torch.float32)
    names = ("state1", "state2", "absmax1", "absmax2") if "state1" in parts else ("exp_avg", "exp_avg_sq")
    m, v, *scales = (parts[name] for name in names)
    scalars = [s.decay, s.weight1, s.beta2, s.weight2, s.root2, s.eps, s.step_size]
    torch.ops.bigtrain.adamw_split(
        weight, parts.get("low", none), m, v, *(scales or (none, none)), grad.contiguous(), 1.0 if factor is None else float(factor),
        scalars, start, salt, exact_root, _tables() if scales else [],
    )  # fmt: skip


@functools.cache
def _tables() -> list[Any]:
    cpu = torch.device("cpu")
    return [table for signed in (True, False) for table in code_tables(signed, cpu)[::2]]
