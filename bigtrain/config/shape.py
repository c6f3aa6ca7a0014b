"""What a configuration needs to know about a model: a few numbers, read from its Hugging Face config without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bigtrain.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The few properties of a model that decide configuration values.

    Attributes:
        hidden_size: width of the residual stream; None for models that have no such number.
        largest_parameter_elems: elements of the largest single parameter; None when unknown.
        model_type: the config's `model_type`, for messages.
        block_class, block_elems: class of the repeated block, and elements of the largest; empty and 0 when unknown.
        other_blocks: classes of blocks of other families.
    """

    hidden_size: int | None = None
    largest_parameter_elems: int | None = None
    model_type: str = ""
    block_class: str = ""
    block_elems: int = 0
    other_blocks: frozenset[str] = frozenset()

    @classmethod
    def from_config(cls, config: Any) -> ModelShape:
        """From a Hugging Face config: a dict, a config object, a folder or config.json, or `preset:NAME`.

        Follows transformers 5.24 (integrations/deepspeed.py:trainer_config_finalize): `hidden_size`, else the
        largest of `hidden_sizes`, else the same two of `text_config`.

        Raises:
            UsageError: the folder has no config.json, or the preset is unknown.
        """
        data = _as_dict(config)
        text = _sub_config(data)
        hidden = _hidden_size(data) or _hidden_size(text)
        return cls(
            hidden_size=hidden,
            largest_parameter_elems=_largest_parameter(data, text, hidden),
            model_type=str(data.get("model_type") or ""),
        )


def _as_dict(config: Any) -> Mapping[str, Any]:
    if isinstance(config, Mapping):
        return config
    if isinstance(config, str | Path):
        from bigtrain.shapes import read_config

        return read_config(config)
    if hasattr(config, "to_dict"):
        return config.to_dict()
    if not hasattr(config, "__dict__"):
        raise UsageError(f"a model config is an object, {{...}}, not {config!r:.80}")
    return vars(config)


def _sub_config(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's part of a composite config (vision-language, audio)."""
    for name in ("text_config", "llm_config", "language_config", "thinker_config"):
        part = data.get(name)
        if part is not None:
            part = _as_dict(part)
            return _sub_config(part) or part
    return {}


def _hidden_size(data: Mapping[str, Any]) -> int | None:
    size = data.get("hidden_size")
    if isinstance(size, int) and not isinstance(size, bool) and size > 0:
        return size
    name, sizes = ("hidden_size", size) if size is not None else ("hidden_sizes", data.get("hidden_sizes"))
    if sizes is None or sizes == [] or sizes == ():
        return None
    if not isinstance(sizes, list | tuple) or not all(isinstance(one, int) and one > 0 for one in sizes):
        raise UsageError(f"the model config has {name} = {sizes!r}: a positive whole number is needed")
    return max(sizes)


def _count(data: Mapping[str, Any], name: str) -> int:
    value = data.get(name)
    if isinstance(value, list | tuple):  # some families give one number per layer
        value = max(value, default=0)
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def _largest_parameter(data: Mapping[str, Any], text: Mapping[str, Any], hidden: int | None) -> int | None:
    """The embedding or the MLP matrix, whichever is larger: a lower bound that is exact for Llama-like models."""
    if hidden is None:
        return None
    widest = 0
    for name in ("vocab_size", "intermediate_size", "moe_intermediate_size"):
        widest = max(widest, _count(data, name), _count(text, name))
    return widest * hidden or None
