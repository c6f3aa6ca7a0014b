"""Everything that is checked, and decided, before a byte of a tensor is read."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import torch

from bigtrain.errors import WeightsError, WrongWeightsError
from bigtrain.guards import listing
from bigtrain.weights import mapping
from bigtrain.weights.dtypes import FLOATS, NAMES
from bigtrain.weights.folder import Folder
from bigtrain.weights.mapping import Part
from bigtrain.weights.slots import Slot, meta_state

LIST_AT_MOST = 12  # names in a message


@dataclass
class LoadPlan:
    """What a load will do.

    Attributes:
        filled: each slot that the file fills, with how.
        twins: further parts that must hold the same values as the slot they are tied to.
        missing: names (first name of the slot) that the file does not fill; allowed ones only.
        unexpected: names in the file that the model does not have; allowed ones only.
        ignored: names in the file that the model's class declares harmless.
    """

    filled: list[tuple[Slot, Part]] = field(default_factory=list)
    twins: list[tuple[Slot, Part]] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)


def plan_load(
    model: torch.nn.Module,
    slots: Sequence[Slot],
    folder: Folder,
    allow_missing: Sequence[str] = (),
    allow_unexpected: Sequence[str] = (),
    allow_mixed_half: bool = False,
    skip_mismatched: bool = False,
) -> LoadPlan:
    """Match the tensors of a folder with the tensors of a model.

    Args:
        allow_missing: patterns (fnmatch) of the model's names that the file may lack.
        allow_unexpected: patterns of the file's names that the model may lack.
        allow_mixed_half: accept a folder that holds both float16 and bfloat16 tensors.
        skip_mismatched: leave out tensors of other shapes than the model's instead of refusing them.

    Raises:
        WeightsError: quantised, mismatched, missing or unexpected tensors, all of one kind in one message.
    """
    refuse_quantised(folder)
    if not allow_mixed_half:
        _refuse_mixed_half(folder)
    state = meta_state(list(slots))
    mapped = mapping.file_to_model(model, state, {name: info.shape for name, info in folder.tensors.items()})
    plan = LoadPlan()
    ignore_missing, ignore_unexpected = mapping.ignored_on_load(model)
    for name, renamed in mapped.unexpected.items():
        harmless = ignore_unexpected is not None and (ignore_unexpected.search(renamed) or ignore_unexpected.search(name))
        (plan.ignored if harmless else plan.unexpected).append(name)
    tied = _declared_ties(model)
    for slot in slots:
        names = slot.names + [other for name in slot.names for other in tied.get(name, ()) if other not in slot.names]
        parts = [mapped.parts[name] for name in names if name in mapped.parts]
        if parts:
            plan.filled.append((slot, parts[0]))
            plan.twins += [(slot, part) for part in parts[1:] if part.name in slot.names]
        elif not (ignore_missing is not None and any(ignore_missing.search(name) for name in slot.names)):
            plan.missing.append(slot.name)
    if skip_mismatched:
        plan.filled = [(slot, part) for slot, part in plan.filled if tuple(part.shape) == tuple(slot.shape)]
        plan.twins = [(slot, part) for slot, part in plan.twins if tuple(part.shape) == tuple(slot.shape)]
    _refuse_mismatched(plan, folder)
    _refuse_unmatched(plan, slots, folder, allow_missing, allow_unexpected)
    return plan


def _declared_ties(model: torch.nn.Module) -> dict[str, list[str]]:
    """name -> names that the model's class ties it to, for models whose ties are declared but not made yet."""
    tied: dict[str, list[str]] = {}
    for target, source in (getattr(model, "all_tied_weights_keys", None) or {}).items():
        tied.setdefault(target, []).append(source)
        tied.setdefault(source, []).append(target)
    return tied


def refuse_quantised(folder: Folder) -> None:
    """A quantised checkpoint cannot be trained as it is.

    Raises:
        WrongWeightsError: names the method.
    """
    configs = [c for c in (folder.config, folder.config.get("text_config")) if isinstance(c, dict)]
    quantisation = next((c["quantization_config"] for c in configs if c.get("quantization_config")), None)
    if quantisation:
        method = quantisation.get("quant_method", "unknown") if isinstance(quantisation, dict) else str(quantisation)
        raise WrongWeightsError(
            f"{folder.path}: the weights are quantised ({method}, config.json: quantization_config). Full training needs "
            "unquantised weights: use the original bf16 checkpoint, or dequantise this one with transformers first.",
            file=os.path.join(folder.path, "config.json"),
        )


def _refuse_mixed_half(folder: Folder) -> None:
    by_dtype = {key: [name for name, info in folder.tensors.items() if info.dtype == key] for key in ("BF16", "F16")}
    few, many = sorted(by_dtype, key=lambda key: len(by_dtype[key]))
    if by_dtype[few]:
        name = by_dtype[few][0]
        raise WeightsError(
            f"{folder.path}: {len(by_dtype[many])} tensors are {many} and {len(by_dtype[few])} are {few}, first {name}. One "
            "read as the other is garbage, so this is taken for a damaged header. If the checkpoint is meant to mix them, save it again "
            "in one type, or load it with bigtrain.weights.load_into(..., allow_mixed_half=True).",
            file=folder.tensors[name].file,
            tensor=name,
        )


def _refuse_mismatched(plan: LoadPlan, folder: Folder) -> None:
    lines = []
    first = None
    for slot, part in [*plan.filled, *plan.twins]:
        infos = [folder.tensors[name] for name in part.sources]
        why = None
        if tuple(part.shape) != tuple(slot.shape):
            why = f"expected shape {list(slot.shape)}, the file gives {list(part.shape)}"
        else:
            bad = next((info for info in infos if not _convertible(info.dtype, slot.dtype)), None)
            if bad is not None:
                why = f"is {bad.dtype} in the file, the model wants {NAMES.get(slot.dtype, slot.dtype)}" + (
                    ": quantised or damaged" if slot.dtype.is_floating_point else ""
                )
        if why:
            first = first or infos[0]
            lines.append(f"  {part.name}: {why} ({os.path.basename(infos[0].file)}: {listing(part.sources, 3)})")
    if first is not None:
        raise WrongWeightsError(
            f"{folder.path}: {len(lines)} tensors do not fit the model:\n{_lines(lines)}\n"
            "The folder belongs to another model, or config.json was changed (vocab_size, hidden_size, ...): put the config.json that came "
            "with these weights beside them, or name another folder.",
            file=first.file,
            tensor=first.name,
        )


def _convertible(stored: str, wanted: torch.dtype) -> bool:
    return stored in FLOATS if wanted.is_floating_point else stored == NAMES.get(wanted)


def _refuse_unmatched(
    plan: LoadPlan, slots: Sequence[Slot], folder: Folder, allow_missing: Sequence[str], allow_unexpected: Sequence[str]
) -> None:
    names_of = {slot.name: slot.names for slot in slots}
    absent = [name for name in plan.missing if not any(_matches(other, allow_missing) for other in names_of[name])]
    extra = [name for name in plan.unexpected if not _matches(name, allow_unexpected)]
    if not absent and not extra:
        return
    text = [f"{folder.path}: the weights do not match the model."]
    if absent:
        text.append(f"missing, {len(absent)} tensors the model has and the folder does not:\n{_lines(absent)}")
    if extra:
        text.append(f"unexpected, {len(extra)} tensors the folder has and the model does not:\n{_lines(extra)}")
    text.append(
        "If that is meant, allow it by pattern: "
        + ", ".join(
            f"{option}=({pattern!r},) or --{option} {pattern!r}"
            for option, names in (("allow_missing", absent), ("allow_unexpected", extra))
            if names
            for pattern in [_common_pattern(names)]
        )
        + ". Otherwise it is another model, a changed prefix, or an incomplete folder."
    )
    name = (absent or extra)[0]
    info = folder.tensors.get(name)
    raise WrongWeightsError("\n".join(text), file=info.file if info else folder.path, tensor=name)


def _matches(name: str, patterns: str | Iterable[str]) -> bool:
    # one pattern given as text is not a sequence of its letters, of which "*" would allow everything
    return any(fnmatchcase(name, pattern) for pattern in ([patterns] if isinstance(patterns, str) else patterns))


def _common_pattern(names: Sequence[str]) -> str:
    prefix = os.path.commonprefix(list(names))  # noqa: RUF071  (a common beginning of text is what is wanted)
    return names[0] if len(names) == 1 else f"{prefix}*"


def _lines(lines: Sequence[str]) -> str:
    shown = [line if line.startswith("  ") else f"  {line}" for line in lines[:LIST_AT_MOST]]
    return "\n".join(shown + ([f"  ... and {len(lines) - LIST_AT_MOST} more"] if len(lines) > LIST_AT_MOST else []))


def fingerprint(folder: Folder) -> str:
    """A short text that is equal on two ranks only if they see the same layout of files."""
    digest = hashlib.sha256()
    for name, info in sorted(folder.tensors.items()):
        digest.update(f"{name}|{os.path.basename(info.file)}|{info.dtype}|{info.shape}|{info.begin}\n".encode())
    return f"{len(folder.tensors)} tensors, {math.fsum([folder.total_bytes]):.0f} bytes, layout {digest.hexdigest()[:12]}"
