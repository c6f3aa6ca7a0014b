"""Plans and choices as text for the eye."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bigtrain.plan.choose import Choice
from bigtrain.plan.constants import GPU_MARGIN, HOST_MARGIN
from bigtrain.plan.hardware import Hardware
from bigtrain.plan.inputs import PlanInput
from bigtrain.plan.judge import Candidate, time_on
from bigtrain.plan.machine import show_bytes
from bigtrain.plan.predict import Plan, Tree
from bigtrain.plan.roofline import Rates

_LADDER_LINES = 12
_ALIKE = 1.01  # seconds of two configurations that the plan does not tell apart


def heading(plan: PlanInput) -> str:
    """Model and run in two lines."""
    zero = plan.settings
    offload = "all" if zero.offload_param else "optimizer" if zero.offload_optimizer else "none"
    offload += f" and {zero.offload_gradients:.0%} of the gradients" if plan.leaving else ""
    ranks = f"{plan.world_size} rank{'s' if plan.world_size > 1 else ''}"
    tensors = f"{plan.parameters.elems / 1e9:.3f} B parameters in {len(plan.parameters.items)} tensors"
    tiles = f"feed-forward in tiles of {plan.mlp_tile_tokens} tokens, " if plan.tile_tokens else ""
    leafs = "leaf blocks, " if zero.leaf_classes else ""
    work = f"micro batch {plan.micro_batch} x {plan.seq_len} tokens, accumulation {plan.accumulation}"
    return (
        f"{plan.parameters.kind}, {tensors}; {ranks}\n"
        f"ZeRO-{zero.stage}, offload {offload}, {plan.optimizer}, checkpointing {recomputing(plan)}, "
        f"{leafs}{tiles}{plan.kernels} kernels, {plan.loss_kind} loss, {work}"
    )


def recomputing(plan: PlanInput) -> str:
    """What is recomputed, in words: "full", "full 12 of 28 blocks"."""
    some = f" {plan.recomputed_blocks} of {plan.block_count} blocks" if plan.checkpoint_blocks is not None else ""
    return plan.checkpointing + some


def tree_text(tree: Tree, formulas: bool = False) -> str:
    """One tree: total, rows that sum to it, with `formulas` how each is counted and where that was read, peaks of the phases."""
    lines = [f"{tree.name}: {show_bytes(tree.bytes)} ({tree.bytes} B) at the peak, in phase '{tree.phase}'"]
    width = max((len(row.name) for row in tree.rows), default=0)
    for row in tree.rows:
        how = f"   {row.formula}   [{row.source}]" if formulas else ""
        lines.append(f"  {row.name:<{width}}  {show_bytes(row.bytes):>11}{how}")
    phases = ", ".join(f"{name} {show_bytes(size)}" for name, size in tree.by_phase.items())
    return "\n".join([*lines, f"  most in each phase: {phases}"])


def _verdict(name: str, need: int, have: int | None, margin: float, fits: bool) -> str:
    if have is None:
        flag = f"--{name.lower()}_memory SIZE"
        return f"{name}: needs {show_bytes(need)} with a margin of {100 * margin:g}%; this machine has none to compare with: give {flag}"
    if fits:
        word, need = "fits", min(need, have)
    else:
        word = f"DOES NOT FIT, short by {show_bytes(need - have)}" if need > have else "DOES NOT FIT: memory would fragment"
    return f"{name}: needs {show_bytes(need)} of {show_bytes(have)} with a margin of {100 * margin:g}%: {word}"


def plan_text(plan: Plan, hardware: Hardware, formulas: bool = False) -> str:
    """The whole plan: heading, trees, what the driver will show, verdicts, speed."""
    gpu, host = hardware.gpu_bytes, hardware.host_bytes
    lines = [heading(plan.input), ""]
    if plan.input.device == "cuda":
        lines += [
            tree_text(plan.gpu, formulas),
            f"  allocated {show_bytes(plan.gpu.bytes)}, reserved {show_bytes(plan.gpu_reserved_bytes)} (on a full card "
            f"{show_bytes(min(plan.gpu_floor_bytes, plan.gpu_reserved_bytes))}), device-used {show_bytes(plan.gpu_used_bytes)} (with CUDA context and NCCL)",
            "",
        ]
    lines += [
        tree_text(plan.host, formulas),
        f"  one host: {plan.ranks_per_node} x {show_bytes(plan.host.bytes)} = {show_bytes(plan.host_node_bytes)}",
        "",
    ]
    lines += [f"note: {note}" for note in plan.notes]
    if plan.input.device == "cuda":
        lines.append(_verdict("GPU", plan.gpu_need_bytes(), gpu, GPU_MARGIN, plan.fits(gpu, None)))
    lines.append(_verdict("host", plan.host_need_bytes(), host, HOST_MARGIN, plan.fits(None, host)))
    lines.append(_speed(plan, hardware))
    return "\n".join(lines)


def _speed(plan: Plan, hardware: Hardware) -> str:
    if plan.input.device != "cuda":
        return "speed: not planned for CPUs; `bigtrain bench` measures it"
    time, returns = time_on(plan, hardware), plan.returns(hardware.gpu_bytes) if plan.input.world_size > 1 else 0
    card = (
        "with rates measured (bigtrain doctor, or --calibration)"
        if hardware.rates != Rates()
        else "on an H100 or H200, which the rates are of"
    )
    return (
        f"speed (roofline): {time.total_s:.2f} s a step, {time.tokens_per_s:,.0f} tokens/s, MFU {time.mfu:.1%} "
        f"(the card {time.compute_s:.2f} and beside it the host {time.host_s:.2f}, communication {time.communication_s:.2f}, "
        f"fetch {time.fetch_s:.2f}; optimizer {time.optimizer_s:.2f}{f'; allocator at its limit {returns} times' if returns else ''}), {card}"
    )


def assumed_text(assumed: Mapping[str, tuple[Any, str]], taken: Mapping[str, int]) -> str:
    """What nobody said, with the flags that change it: a line of settings, and one of this machine's memory; empty if everything was said.

    Args:
        assumed: name to (value, flag). taken: flag to bytes that were found here.
    """
    said = ", ".join(f"{name} {value} ({flag})" for name, (value, flag) in assumed.items())
    here = ", ".join(f"{flag} {show_bytes(size)}" for flag, size in taken.items())
    lines = [f"assumed, as launch/train.py does: {said}"] if said else []
    lines += [f"this machine's memory, for want of a flag: {here}"] if here else []
    return "\n".join([*lines, "", ""]) if lines else ""


def choice_text(choice: Choice) -> str:
    """The ladder: what fits, fastest first; what was rejected and why; the chosen plan or what would help."""
    lines = [f"global batch {choice.global_batch} sequences; the {len(choice.fitting)} fastest that fit; {len(choice.rejected)} that "
             f"might be faster do not; {choice.slower} are slower"]  # fmt: skip
    if choice.best is None:
        lines = [f"global batch {choice.global_batch} sequences; none of {len(choice.rejected)} configurations fits"]
    elif choice.best.input.device != "cuda":
        lines.append("  (in the order of a card's speed: how fast these are on CPUs is not planned)")
    for candidate in choice.fitting[:_LADDER_LINES]:
        need = f"GPU {show_bytes(candidate.plan.gpu_need_bytes())}, " if candidate.plan and _on_cards(candidate) else ""
        host = f"host {show_bytes(candidate.plan.host_need_bytes())}" if candidate.plan else ""
        lines.append(f"  fits      {_rate(candidate)}{candidate.describe()}  ({need}{host})")
    lines += _alike_text(choice)
    for candidate in choice.rejected[:_LADDER_LINES]:
        lines.append(f"  rejected  {_rate(candidate)}{candidate.describe()}: {candidate.why}")
    hidden = max(0, len(choice.fitting) - _LADDER_LINES) + max(0, len(choice.rejected) - _LADDER_LINES)
    if hidden:
        lines.append(f"  ... and {hidden} more (--json lists all)")
    if choice.best is None:
        lines += ["", "NOTHING FITS. What would:", *(f"  {line}" for line in choice.advice)]
    return "\n".join(lines)


def _alike_text(choice: Choice) -> list[str]:
    """How many of the fastest are as fast as the first, and why that one comes first; nothing where it stands alone."""
    if choice.best is None or not _on_cards(choice.best):
        return []
    alike = sum(c.time.total_s <= _ALIKE * choice.best.time.total_s for c in choice.fitting)
    if alike < 2:
        return []
    return [
        f"  the first {alike} are within 1% of each other, which is less than a plan can tell: `bigtrain plan --auto --measure {alike}` "
        "runs them on the cards. Of equals, what leaves the host alone stands first, then the better known optimizer"
    ]


def _on_cards(candidate: Candidate) -> bool:
    return candidate.input.device == "cuda"


def _rate(candidate: Candidate) -> str:
    return f"{candidate.time.tokens_per_s:>9,.0f} tokens/s  " if _on_cards(candidate) else ""


def measured_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """What --measure found, fastest first, and how to train with it; empty without rows."""
    lines = []
    for row in rows:
        seen = f"{row['tokens_per_s']:>9,.0f} tokens/s" if row["tokens_per_s"] else f"{row['status']:>18}"
        lines.append(f"  measured  {seen}  {_planned(row)}{row['what']}{row['error']}")
    if rows and rows[0]["tokens_per_s"]:
        lines += ["", f"to train with it: {rows[0]['command']}"]
    return "\n".join([*lines, ""]) if lines else ""


def _planned(row: Mapping[str, Any]) -> str:
    rate = row["planned_tokens_per_s"]
    return "" if rate is None else f"(planned {rate:,.0f})  "
