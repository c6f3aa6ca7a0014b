"""safetensors' names of element types and torch's, and which conversions are allowed on the way in."""

from __future__ import annotations

import re

import torch

TORCH = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64,
    "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64, "F16": torch.float16, "BF16": torch.bfloat16,
    "F32": torch.float32, "F64": torch.float64, "C64": torch.complex64, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in TORCH.items()}
FLOATS = ("BF16", "F16", "F32", "F64")  # convert freely into any float parameter


def as_dtype(value: torch.dtype | str) -> torch.dtype:
    """torch.bfloat16 from torch.bfloat16, "bfloat16", "torch.bfloat16" or "BF16".

    Raises:
        ValueError: not a float type that weights are stored in.
    """
    dtype = value if isinstance(value, torch.dtype) else TORCH.get(value) or getattr(torch, value.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype) or NAMES.get(dtype) not in FLOATS:
        raise ValueError(f"dtype {value!r}: expected one of bfloat16, float16, float32, float64")
    return dtype


def loses_bits(stored: str, wanted: torch.dtype) -> bool:
    """True if a float type of a file has values that the model's type does not (fp16 in bf16 as well: its mantissa is longer)."""
    return stored in FLOATS and wanted.is_floating_point and torch.promote_types(TORCH[stored], wanted) != wanted


def kept_in_fp32(model: torch.nn.Module, dtype: torch.dtype) -> re.Pattern[str] | None:
    """Names of the tensors that `from_pretrained(dtype=dtype)` keeps in fp32 because the model's class wants so.

    Source: `PreTrainedModel._get_dtype_plan` and `build_glob_alternation`, transformers 5.24.
    """
    strict, for_fp16 = "_keep_in_fp32_modules_strict", "_keep_in_fp32_modules"
    attributes = {torch.bfloat16: [strict], torch.float16: [strict, for_fp16]}.get(dtype, [])
    globs = {glob for name in attributes for glob in getattr(model, name, None) or ()}
    return re.compile("|".join(glob.replace("*", ".*") for glob in sorted(globs))) if globs else None
