"""From the weights in a checkpoint, DeepSpeed's or another, to a Hugging Face folder, streamed, on any number of ranks."""

from __future__ import annotations

import logging
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import torch

from bigtrain import ranks, standins
from bigtrain.errors import UsageError, WeightsError
from bigtrain.weights import partial
from bigtrain.weights.companions import generation_config_of
from bigtrain.weights.deepspeed_folder import open_deepspeed
from bigtrain.weights.dtypes import as_dtype
from bigtrain.weights.export import ExportReport, finish, prepare, range_ops, wait_for_all
from bigtrain.weights.layout import Layout, plan_layout
from bigtrain.weights.slots import Piece, Slot, without_wrappers
from bigtrain.weights.write import WriteOp, Writer

logger = logging.getLogger(__name__)


class WeightSource(Protocol):
    """Weights that lie in files as flat pieces; `DeepSpeedFolder` describes the attributes."""

    path: str
    shapes: dict[str, tuple[int, ...]]
    tied: dict[str, str]
    pieces: dict[str, list[Piece]]


def export_deepspeed(
    checkpoint: str | Path,
    out_dir: str | Path,
    *,
    dtype: torch.dtype | str,
    model_dir: str | Path | None = None,
    tag: str | None = None,
    max_shard_bytes: int = 5_000_000_000,
) -> ExportReport:
    """Write the fp32 master weights of a DeepSpeed checkpoint (ZeRO 1-3) as a Hugging Face folder in `dtype`.

    Args:
        checkpoint: what `engine.save_checkpoint` wrote: the folder with `latest`, or one of its tags.
        out_dir: folder to make.
        dtype: of every float tensor.
        model_dir: folder with the model's config.json (and tokenizer), which also says how names map to files. Without it
            the names stay as in the checkpoint and only the weights are written.
        tag: which checkpoint.

    Raises:
        WeightsError: files are missing or damaged, or do not match the model of `model_dir`; before anything is written.
        UsageError: `out_dir` holds other things, or is `model_dir`.
    """
    with ranks.together(f"reading the checkpoint {checkpoint}"):
        as_dtype(dtype)
        folder = open_deepspeed(checkpoint, tag)
    return export_weights(folder, out_dir, dtype=dtype, model_dir=model_dir, max_shard_bytes=max_shard_bytes)


def export_weights(
    folder: WeightSource,
    out_dir: str | Path,
    *,
    dtype: torch.dtype | str,
    model_dir: str | Path | None,
    max_shard_bytes: int,
) -> ExportReport:
    """Write the weights of an opened checkpoint; arguments and errors as in `export_deepspeed`. All ranks call it."""
    begin = time.monotonic()
    with ranks.together(f"planning the export of {folder.path}"):
        wanted = as_dtype(dtype)
        if model_dir and os.path.isdir(out_dir) and os.path.samefile(model_dir, out_dir):
            raise UsageError(f"{out_dir} is the model folder itself, whose weights would be replaced. Give another folder.")
        model, tokenizer = _model_of(model_dir)
        slots, held = _slots(folder, model)
        layout = plan_layout(model, slots, wanted, max_shard_bytes)
    temporary = ranks.main_decides(lambda: prepare(model, slots, layout, str(out_dir), wanted, tokenizer), "export")
    with partial.dropped_on_failure(temporary):
        with ThreadPoolExecutor(1, "write") as behind:
            writing = behind.submit(_write, layout, temporary, folder, held)
            wait_for_all(writing)
        written = writing.result()
        finish(layout, temporary, str(out_dir))
    names = [shard.name for shard in layout.shards]
    seconds = time.monotonic() - begin
    return ExportReport(str(out_dir), names, len(layout.dtypes), layout.total_bytes, written, seconds, folder.path)


def _model_of(model_dir: str | Path | None) -> tuple[torch.nn.Module, Any]:
    """The model's class on the meta device, and the tokenizer if the folder has one."""
    if model_dir is None:
        return torch.nn.Module(), None
    import transformers

    try:
        config = transformers.AutoConfig.from_pretrained(model_dir)
    except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
        why = standins.instead(file := os.path.join(model_dir, "config.json")) if os.path.isdir(model_dir) else ""
        raise UsageError(f"{file} is {why}." if why else f"the config of {model_dir} cannot be read: {error}") from error
    names = getattr(config, "architectures", None) or [""]
    cls = getattr(transformers, str(names[0]), None) if names[0] else None
    from transformers.initialization import no_init_weights

    try:
        with torch.device("meta"), no_init_weights():
            model = cls(config) if cls is not None else transformers.AutoModelForCausalLM.from_config(config)
        model.tie_weights()  # not done on the meta device
    except Exception as error:  # whatever a class runs into with values that it cannot compute with
        raise UsageError(
            f"no {names[0] or 'model'} can be built from the config of {model_dir}: {type(error).__name__}: {error}"
        ) from error
    if (generation := generation_config_of(model_dir)) is not None:
        model.generation_config = generation
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(model_dir)
    except Exception as error:  # mostly there is none in the folder: the export then has none either
        tokenizer = None
        if any(Path(model_dir).glob("*token*")):
            why = standins.why_no_tokenizer(model_dir, error)
            logger.warning("the export has no tokenizer, as that of %s cannot be loaded: %s", model_dir, why)
    return model, tokenizer


def _slots(folder: WeightSource, model: torch.nn.Module) -> tuple[list[Slot], dict[str, str]]:
    """Slots for the checkpoint's weights, and which name of the checkpoint holds the values of each name of the model."""
    held = {without_wrappers(name): name for name in folder.shapes}
    held |= {without_wrappers(new): old for new, old in folder.tied.items()}
    state = model.state_dict(keep_vars=True)
    if not state:
        state = {name: torch.empty(folder.shapes[source], device="meta") for name, source in held.items()}
        for new, old in folder.tied.items():
            state[without_wrappers(new)] = state[without_wrappers(old)]
    groups: dict[int, list[str]] = {}
    for name, tensor in state.items():
        groups.setdefault(id(tensor), []).append(name)
    slots, absent = [], []
    for names in groups.values():
        source = next((held[name] for name in names if name in held), None)
        if source is None:
            absent.append(names[0])
            continue
        _refuse_lost_tie(folder, names, list(dict.fromkeys(held[name] for name in names if name in held)))
        held |= {name: source for name in names}
        shape, wanted = folder.shapes[source], tuple(state[names[0]].shape)
        if shape != wanted:
            raise WeightsError(
                f"{folder.path}: {source} is {list(shape)}, the model wants {list(wanted)}.", folder.path, source
            )
        slots.append(Slot(names, state[names[0]], shape, folder.pieces[source][0].flat.dtype))
    extra = [name for name in held if name not in state]
    if absent or extra:
        adapters = any(".lora_" in name for name in extra)
        advice = (
            "It is of a model with adapters: load it in your script (Engine.load_checkpoint), and write them with "
            "bigtrain.weights.export_adapter."
            if adapters
            else "Give the config of the model that was trained."
        )
        raise WeightsError(
            f"{folder.path}: does not match the model: {len(absent)} tensors are missing ({', '.join(absent[:5])}), "
            f"{len(extra)} are unexpected ({', '.join(extra[:5])}). {advice}",
            file=folder.path,
        )
    return slots, held


def _refuse_lost_tie(folder: WeightSource, names: list[str], sources: list[str]) -> None:
    """Of names that are one tensor in the model one is written: those of the checkpoint must hold the same."""
    for other in sources[1:]:
        same = folder.shapes[other] == folder.shapes[sources[0]] and torch.equal(
            _whole(folder, sources[0]), _whole(folder, other)
        )
        if not same:
            raise WeightsError(
                f"{folder.path}: {' and '.join(names)} are tied in the model but differ in the checkpoint, of a model that was "
                "not tied. Set tie_word_embeddings=false in a copy of its config.json to keep both.",
                folder.path,
                other,
            )


def _write(layout: Layout, temporary: str, folder: WeightSource, held: dict[str, str]) -> int:
    place = {name: number for number, name in enumerate(held)}

    def mine(name: str) -> list[Piece]:
        pieces = enumerate(folder.pieces[held[name]], place[name])
        return [piece for number, piece in pieces if number % ranks.world_size() == ranks.rank()]

    writer = Writer()
    written = writer.run(range_ops(layout, temporary, mine))
    shuffled = [
        (shard, part, begin) for shard in layout.shards for part, begin in zip(shard.parts, shard.begins) if part.runs is None
    ]
    for number, (shard, part, begin) in enumerate(shuffled):
        if number % ranks.world_size() == ranks.rank() and part.conversion is not None:
            dtype = layout.dtypes[part.name]
            made = part.conversion.run({name: _whole(folder, held[name]).to(dtype) for name in part.sources})
            written += writer.run([WriteOp(f"{temporary}/{shard.name}", begin, made[part.made].reshape(-1), dtype)])
    writer.close()
    return written


def _whole(folder: WeightSource, name: str) -> torch.Tensor:
    """All values of one weight in the type in which they are stored."""
    pieces = folder.pieces[name]
    flat = torch.cat([piece.flat for piece in pieces]) if len(pieces) > 1 else pieces[0].flat
    return flat.view(folder.shapes[name])
