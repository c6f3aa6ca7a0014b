"""From what a user names (folder, hub id, config, preset, callable) to a function that constructs the module."""

from __future__ import annotations

import contextlib
import copy
import difflib
import logging
import os
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bigtrain import ranks, shapes, standins
from bigtrain.errors import ModelError
from bigtrain.models import hub
from bigtrain.models.attention import left_out
from bigtrain.weights.companions import generation_config_of

logger = logging.getLogger(__name__)

_WEIGHT_PATTERNS = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin", "pytorch_model.bin.index.json")
# Tried in this order when a config names no architecture.
_AUTO_CLASSES = (
    "AutoModelForCausalLM",
    "AutoModelForImageTextToText",
    "AutoModelForSeq2SeqLM",
    "AutoModelForSpeechSeq2Seq",
    "AutoModelForMaskedLM",
    "AutoModelForImageClassification",
    "AutoModel",
)


@dataclass(frozen=True)
class Source:
    """How to construct a model.

    Attributes:
        construct: makes the module, drawing its values as the plain class does.
        label: what the user named, for messages.
        config: the Hugging Face config, or None.
        directory: the folder whose weights are to be loaded, or None for values drawn from the seed.
    """

    construct: Callable[[], torch.nn.Module]
    label: str
    config: Any = None
    directory: Path | None = None


def resolve(
    source: Any,
    *,
    attn_implementation: str | None = "sdpa",
    trust_remote_code: bool = False,
    overrides: Mapping[str, Any] | None = None,
) -> Source:
    """Find out what `source` is.

    Raises:
        ModelError: nothing can be built from it; the message says what was looked for.
    """
    overrides = dict(overrides or {})
    if isinstance(source, torch.nn.Module):
        raise ModelError(
            f"build_model got a built {type(source).__name__}: it is whole on this rank. Pass a callable that builds it, "
            f"for example build_model(lambda: {type(source).__name__}(...))."
        )
    if callable(source):
        name = getattr(source, "__qualname__", type(source).__name__)
        return Source(lambda: source(**overrides), label=name)
    config, directory, label = _config_of(source, trust_remote_code)
    _apply_overrides(config, overrides)
    construct = _constructor(config, attn_implementation, trust_remote_code)
    return Source(construct, label=label, config=config, directory=directory)


def _config_of(source: Any, trust_remote_code: bool) -> tuple[Any, Path | None, str]:
    """(a config that is ours to change, the folder with weights or None, a label)."""
    if isinstance(source, Mapping):
        return _config_from_dict(dict(source)), None, f"config of {source.get('model_type')}"
    if shapes.is_preset(source):
        return config_from(source, trust_remote_code), None, source
    if isinstance(source, (str, Path)):
        folder = _folder(Path(source))
        has_weights = any(next(folder.glob(pattern), None) is not None for pattern in _WEIGHT_PATTERNS)
        if not has_weights and ranks.is_main():
            logger.warning(
                "WARNING: %s holds no weight files (%s): every weight is drawn from the seed, so this trains a new model. To fine-tune one, "
                "stop and put its weights there",
                folder,
                ", ".join(_WEIGHT_PATTERNS[::2]),
            )
        config = config_from(folder, trust_remote_code)
        generation_config_of(folder)  # told now, not when all weights are read
        return config, folder if has_weights else None, str(source)
    if hasattr(source, "model_type") and hasattr(source, "to_dict"):
        return copy.deepcopy(source), None, type(source).__name__
    raise ModelError(
        f"cannot build a model from a {type(source).__name__}: give a Hugging Face folder or config, 'preset:NAME', or a "
        "callable that returns an nn.Module."
    )


def _config_from_dict(values: dict[str, Any]) -> Any:
    from transformers import AutoConfig

    model_type = values.pop("model_type", None)
    try:
        return AutoConfig.for_model(model_type, **values)
    except (ValueError, KeyError) as error:
        raise ModelError(f"transformers knows no model_type {model_type!r}: {error}") from error


def config_from(name: str | Path, trust_remote_code: bool) -> Any:
    """The Hugging Face config of a preset, a folder or a hub id.

    Raises:
        ModelError: it cannot be used.
    """
    from transformers import AutoConfig

    if shapes.is_preset(name):
        return _config_from_dict(shapes.config_dict(str(name)))
    try:
        return AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
    except Exception as error:
        if not is_about_files(error) and not isinstance(error, KeyError | AttributeError | TypeError):
            raise  # those three: a value of another kind than the library computes with, which it does not look at
        if "trust_remote_code" in str(error):
            raise ModelError(
                f"{name} brings its own Python code, which would run here. Read it, then pass trust_remote_code=True (--trust_remote_code)."
            ) from error
        why = standins.instead(Path(name) / "config.json") if Path(name).is_dir() else ""
        told = f"its config.json is {why}" if why else str(error)
        raise ModelError(f"the config of {name} cannot be used: {told}") from error


def is_about_files(error: Exception) -> bool:
    """True for what a file holds; huggingface_hub's own class, for values of a config.json that cannot be, is none of Python's."""
    return isinstance(error, OSError | ValueError | ImportError) or type(error).__name__.startswith("StrictDataclass")


def _folder(path: Path) -> Path:
    if not path.is_dir():
        raise ModelError(
            f"there is no folder {path}. Give a Hugging Face model folder, 'preset:NAME', or a hub id 'owner/name'."
        )
    if os.path.lexists(config := path / "config.json") and not config.is_file():
        raise ModelError(f"{config} is {standins.instead(config)}.")
    if not config.is_file():
        raise ModelError(f"{path} has no config.json, so it is not a Hugging Face model folder.")
    return path


def fetched(source: Any) -> Any:
    """A hub id becomes the folder of its snapshot; everything else comes back as it is. Collective for hub ids.

    Raises:
        ModelError: on all ranks, if the hub does not give it.
    """
    if not hub.may_be_id(source) or not all(ranks.all_gather_object(not Path(source).is_dir())):
        return source
    hub.look_for(source)
    from huggingface_hub import snapshot_download

    try:
        with ranks.together(f"fetching {source}"), ranks.main_first(f"fetching {source}"):
            snapshot = Path(snapshot_download(source))
    except Exception as error:
        raise ModelError(f"{source} is no folder here, and the hub does not give it: {error}") from error
    ranks.agree(snapshot.name, f"the revision of {source} in the hosts' caches")
    return snapshot


def _apply_overrides(config: Any, overrides: dict[str, Any]) -> None:
    known = set(config.to_dict()) | set(getattr(config, "attribute_map", {}))
    for name, value in overrides.items():
        if name not in known and not hasattr(config, name):
            near = difflib.get_close_matches(name, sorted(known), 3)
            raise ModelError(f"{type(config).__name__} has no setting {name!r}; nearest: {', '.join(near) or 'none'}.", [name])
        current = getattr(config, name, None)
        if isinstance(value, Mapping) and hasattr(current, "to_dict"):
            _apply_overrides(current, dict(value))
        else:
            setattr(config, name, value)


def _constructor(config: Any, attn_implementation: str | None, trust_remote_code: bool) -> Callable[[], torch.nn.Module]:
    cls = _class_for(config, trust_remote_code)
    config = _part_for(cls, config)
    attention = _attention(cls, config, attn_implementation)

    def construct() -> torch.nn.Module:
        with ignoring_hf_deepspeed():
            # Drawn in torch's default dtype whatever the config says; the builder rounds once, at the end.
            try:
                return cls._from_config(config, dtype=torch.get_default_dtype(), attn_implementation=attention)
            except KeyError as error:  # of a table of implementations, as by rope_type
                raise ModelError(
                    f"{cls.__name__} cannot be built from this config: {error} is none of the values that transformers knows; looked up by "
                    f"{_last_line(error)}"
                ) from error
            except (AttributeError, TypeError, AssertionError, ArithmeticError, IndexError) as error:
                # A setting that is missing, None where the class computes with it, or beyond the others (pad_token_id above vocab_size).
                raise ModelError(f"{cls.__name__} cannot be built from this config: {error}; at {_last_line(error)}") from error
            except RuntimeError as error:
                if "negative dimension" not in str(error):
                    raise
                raise ModelError(f"{cls.__name__} cannot be built from this config: {error}") from error
            except (ValueError, ImportError) as error:
                asked = isinstance(error, ImportError) and attention not in (None, "sdpa", "eager")
                instead = f" Install it, or leave attn_implementation {attention} out." if asked else ""
                raise ModelError(f"{cls.__name__} cannot be built from this config: {error}{instead}") from error

    return construct


def _takes(cls: Any, config: Any) -> bool:
    wanted = getattr(cls, "config_class", None)
    return not isinstance(wanted, type) or isinstance(_part_for(cls, config), wanted)


def _part_for(cls: Any, config: Any) -> Any:
    """A language model's class takes its own part of a config of several, as transformers' Auto classes do."""
    wanted = getattr(cls, "config_class", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return text if wanted is not None and not isinstance(config, wanted) and isinstance(text, wanted) else config


def _last_line(error: BaseException) -> str:
    """The line of code that failed."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{frame.line} ({Path(frame.filename).name}:{frame.lineno})"


def _attention(cls: Any, config: Any, wanted: str | None) -> str | None:
    if wanted != "sdpa":
        return wanted
    if beyond := left_out(cls, config):
        logger.info("sdpa would leave out a part of %s's attention, %s: eager is taken.", cls.__name__, beyond)
        return "eager"
    if not getattr(cls, "_supports_sdpa", False):
        logger.info("%s has no sdpa attention; using its default.", cls.__name__)
    return None  # transformers' own choice: sdpa in each part that has it. By name, a part without it (a detector's backbone) is an error.


def _class_for(config: Any, trust_remote_code: bool) -> Any:
    """The class that `architectures` names, else the first Auto class that knows the config; as there, none of another model_type."""
    import transformers

    auto_map = getattr(config, "auto_map", None) or {}
    named = getattr(config, "architectures", None) or ()
    for name in [named] if isinstance(named, str) else named:
        if not isinstance(name, str):
            raise ModelError(f"the config has architectures = {named!r}: names of classes are needed, or leave it out")
        cls = getattr(transformers, name, None)
        if isinstance(cls, type) and issubclass(cls, transformers.PreTrainedModel) and _takes(cls, config):
            return cls
    remote = [name for name in _AUTO_CLASSES if name in auto_map]
    if remote and trust_remote_code:
        from transformers.dynamic_module_utils import get_class_from_dynamic_module

        return get_class_from_dynamic_module(auto_map[remote[0]], config._name_or_path)
    for name in _AUTO_CLASSES:
        auto = getattr(transformers, name, None)
        if auto is not None and type(config) in auto._model_mapping:
            return auto._model_mapping[type(config)]
    raise ModelError(
        f"no model class for {type(config).__name__} (architectures: {getattr(config, 'architectures', None)})."
        + (" It brings its own code: read it, then pass trust_remote_code=True." if remote else "")
    )


@contextlib.contextmanager
def ignoring_hf_deepspeed() -> Iterator[None]:
    """A live HfDeepSpeedConfig would make transformers enter zero.Init itself, and broadcast every parameter."""
    from transformers.integrations import deepspeed as hf

    saved = hf._hf_deepspeed_config_weak_ref
    hf._hf_deepspeed_config_weak_ref = None
    try:
        yield
    finally:
        hf._hf_deepspeed_config_weak_ref = saved


def set_config_dtype(config: Any, dtype: torch.dtype) -> None:
    """Say in the config, and in those nested in it, what the weights are."""
    config.dtype = dtype
    for name in getattr(config, "sub_configs", {}):
        if (nested := getattr(config, name, None)) is not None:
            set_config_dtype(nested, dtype)
