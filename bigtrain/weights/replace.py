"""What an export may take the place of: nothing, or an earlier one of its own kind. Torch-free.

Each file of weights that bigtrain exports carries a mark in its header. A folder whose weights have none is a model from elsewhere (a
base model, a download): all the files of an export, and often the only copy.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from bigtrain.errors import UsageError, WeightsError
from bigtrain.guards import listing
from bigtrain.weights.header import read_metadata

# transformers refuses a file without a format
METADATA = {"format": "pt", "writer": "bigtrain"}
_WEIGHTS = re.compile(r"model(-\d+-of-\d+)?\.safetensors")
_EXPORTED = re.compile(_WEIGHTS.pattern + r"|.+\.(json|txt|model|spm|bpe|vocab|jinja|tiktoken|py)|additional_chat_templates")
_ADAPTER = re.compile(r"adapter_(config\.json|model\.safetensors)")
_BESIDE_ADAPTER = re.compile(  # peft's model card, and the files of tokenizers and processors
    r"README\.md|additional_chat_templates|.+\.(model|spm|bpe|codes|tiktoken)|"
    r"(.*token.*|.*vocab.*|merges|normalizer|chat_template|.*processor_config)\.(json|txt|jinja)"
)


def refuse_foreign(out_dir: str, instead: str = "Give another folder") -> None:
    """An export of a model replaces an empty folder or an earlier export.

    Args:
        instead: what the caller's user can do, who may not have given `out_dir` itself.

    Raises:
        UsageError: `out_dir` is a file, holds other things, or a model that bigtrain did not write.
    """
    if not os.path.exists(out_dir):
        return
    if not os.path.isdir(out_dir):
        raise UsageError(f"{out_dir} is a file, where a folder is to be made. {instead}.")
    names = sorted(os.listdir(out_dir))
    others = [name for name in names if not _EXPORTED.fullmatch(name)]
    if names and (others or not _is_export(out_dir, names)):
        raise UsageError(
            f"{out_dir} holds {listing(others or names)} and is not an earlier export, which would be replaced. {instead}."
        )
    unmarked = [name for name in names if name.endswith(".safetensors") and not _is_marked(os.path.join(out_dir, name))]
    if unmarked:
        raise UsageError(
            f"{out_dir} holds a model that no export of bigtrain wrote ({listing(unmarked)}: no mark of bigtrain in the header), such as a base model. "
            f"{instead}; if that model may go, remove it yourself first."
        )


def _is_export(folder: str, names: Sequence[str]) -> bool:
    """Weights of one model and nothing that would be missed: no checkpoint, adapter, other weights or sub-folder."""
    weights = [name for name in names if name.endswith((".safetensors", ".bin", ".pt", ".pth"))]
    folders = {name for name in names if os.path.isdir(os.path.join(folder, name))}
    own = bool(weights) and all(_WEIGHTS.fullmatch(name) for name in weights)
    return own and folders <= {"additional_chat_templates"}


def _is_marked(file: str) -> bool:
    try:
        return read_metadata(file).get("writer") == METADATA["writer"]
    except WeightsError:
        return False


def beside_adapter(out_dir: str) -> list[str]:
    """What stands beside an earlier adapter and has to go on standing there: its tokenizer, its model card.

    Raises:
        WeightsError: `out_dir` is a file, or holds more than an adapter: a run's folder has its checkpoints there.
    """
    if os.path.exists(out_dir) and not os.path.isdir(out_dir):
        raise WeightsError(f"{out_dir} is a file: give the name of a folder to make.", out_dir)
    names = sorted(os.listdir(out_dir)) if os.path.isdir(out_dir) else []
    beside = [name for name in names if not _ADAPTER.fullmatch(name)]
    others = [name for name in beside if not _BESIDE_ADAPTER.fullmatch(name)]
    if others or (names and "adapter_config.json" not in names):
        raise WeightsError(
            f"{out_dir} holds {listing(others or names)}, other things than an adapter: give another folder.", out_dir
        )
    return beside
