"""The small files of a Hugging Face folder: config, generation config, tokenizer; and the check against a fresh model."""

from __future__ import annotations

import copy
import json
import logging
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from bigtrain import standins
from bigtrain.errors import WeightsError

logger = logging.getLogger(__name__)


def exported_config(model: Any, dtype: torch.dtype) -> Any:
    """The config to write: a copy with the exported dtype, the class, and the cache setting that training turned off.

    None for a model without a config.
    """
    config = copy.deepcopy(getattr(model, "config", None))
    if config is None:
        return None
    name = str(dtype).removeprefix("torch.")
    for part in _with_nested(config):
        if part is config or getattr(part, "dtype", None) is not None:
            part.dtype = name
    config.architectures = [type(model).__name__]
    use_cache = getattr(getattr(model, "bigtrain_info", None), "use_cache", None)
    if use_cache is not None:
        for part in configs_with_cache(config):
            part.use_cache = use_cache
    return config


def _with_nested(config: Any) -> Iterator[Any]:
    """A config and those inside it, at any depth (T5Gemma 2 has a text config in its encoder's)."""
    yield config
    for part in vars(config).values():
        if hasattr(part, "model_type") and hasattr(part, "to_dict"):
            yield from _with_nested(part)


def configs_with_cache(config: Any) -> list[Any]:
    """A config and that of the text model inside it, where they say whether to keep a cache."""
    nested = config.get_text_config() if hasattr(config, "get_text_config") else None
    return [c for c in (config, nested) if c is not None and getattr(c, "use_cache", None) is not None]


def generation_config_of(folder: str | Path) -> Any:
    """The generation config that a model folder holds; None if it has none.

    Raises:
        WeightsError: there is one, and it cannot be read.
    """
    file = os.path.join(folder, "generation_config.json")
    if not os.path.lexists(file):
        return None
    from transformers import GenerationConfig

    why = standins.instead(file)
    try:
        if not why:
            return GenerationConfig.from_pretrained(folder)
    except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
        why = f"not usable: {error}"
    raise WeightsError(f"{file} is {why}. Copy it again, or remove it: only generation uses it.", file=file)


def also_end_at(model: Any, token: int | None) -> None:
    """Let generation end at this token too: `generation_config.eos_token_id`, which exports and checkpoints write. No id is removed.

    A model that was trained on chats ends an answer with its template's end of turn. Where the config that came with it does not have that
    token (a base model's has the end of a text alone), generation would run on, into a next turn.

    Args:
        token: id; None, or a model without a generation config: nothing is done.
    """
    generation = getattr(model, "generation_config", None)
    if generation is None or token is None:
        return
    now = generation.eos_token_id
    ends = [] if now is None else list(now) if isinstance(now, list | tuple) else [now]
    if token not in ends:
        generation.eos_token_id = [*ends, token] if ends else token
        logger.info(
            "generation_config: eos_token_id is %s, with the token that ends a turn of the chat template",
            generation.eos_token_id,
        )


def write_companions(model: Any, config: Any, tokenizer: Any, folder: str) -> None:
    """Write everything of the folder but the weights."""
    if config is not None and hasattr(config, "save_pretrained"):
        if getattr(model, "is_remote_code", lambda: False)():
            from transformers.dynamic_module_utils import custom_object_save

            custom_object_save(model, folder, config=config)
        config.save_pretrained(folder)
    elif isinstance(config, Mapping):
        with open(os.path.join(folder, "config.json"), "w", encoding="utf-8") as file:
            json.dump(dict(config), file, indent=2, sort_keys=True)
    generation = getattr(model, "generation_config", None)
    if generation is not None and getattr(model, "can_generate", lambda: False)():
        # not save_pretrained: that refuses to write a config whose sampling values are at odds, and would fail the export
        generation.to_json_file(os.path.join(folder, "generation_config.json"))
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


def companion_files(model: Any, dtype: torch.dtype, tokenizer: Any) -> dict[str, bytes]:
    """The content of everything in a Hugging Face folder but the weights, by file name."""
    with tempfile.TemporaryDirectory() as folder:
        write_companions(model, exported_config(model, dtype), tokenizer, folder)
        return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(Path(folder).rglob("*")) if p.is_file()}


def refuse_unloadable(model: Any, config: Any, state: Mapping[str, tuple[int, ...]]) -> None:
    """Build the model anew on the meta device from the config that will be written and compare names and shapes.

    Args:
        state: every name of the model's state dict -> full shape.

    Raises:
        WeightsError: a plain `from_pretrained` of the export would miss a tensor, or find one of another shape.
    """
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel) or config is None:
        return
    from transformers.initialization import no_init_weights

    try:
        with torch.device("meta"), no_init_weights():
            fresh = type(model)(copy.deepcopy(config))
    except Exception as error:  # custom classes may need more than a config; the weights are right all the same
        logger.warning("no fresh %s to compare the export with: %s: %s", type(model).__name__, type(error).__name__, error)
        return
    expected = {name: tuple(tensor.shape) for name, tensor in fresh.state_dict().items()}
    lines = [f"  {name}: missing from the model" for name in expected if name not in state]
    lines += [f"  {name}: not in a model built from this config" for name in state if name not in expected]
    lines += [
        f"  {name}: the model has {list(state[name])}, its config says {list(shape)}"
        for name, shape in expected.items()
        if name in state and state[name] != shape
    ]
    if lines:
        raise WeightsError(
            f"the export could not be loaded again: {len(lines)} tensors differ from a fresh {type(model).__name__} built from "
            "its config:\n" + "\n".join(lines[:12]) + "\nChange the config together with the model (vocab_size after a resize)."
        )
