"""From a path to a `datasets.Dataset`: text, JSON Lines, Parquet, Arrow; and the split into training and validation."""

from __future__ import annotations

import errno
import glob
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from bigtrain.data import jsonfile, parquetfile
from bigtrain.data.files import SPLIT_WORDS, choose, refuse_containers, wanted_split
from bigtrain.errors import DataError

if TYPE_CHECKING:
    from datasets import Dataset


TextUnit = Literal["document", "paragraph", "line"]
_FORMAT = 1  # raise it when the same files are to give another data set, so that older copies are not read


_NOT_WRITABLE = (
    errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENOTDIR, errno.EEXIST,
)  # fmt: skip


def _is_saved_dataset(path: Path) -> bool:
    return (path / "dataset_dict.json").is_file() or (path / "state.json").is_file()


def _load_saved(path: Path, split: str) -> Dataset:
    from datasets import DatasetDict, load_from_disk

    try:
        loaded = load_from_disk(str(path))
    except Exception as error:
        raise DataError(f"cannot read the saved data set {path}: {_root_cause(error)}; save it anew") from error
    if isinstance(loaded, DatasetDict):
        words = dict.fromkeys((split, *(word for words in SPLIT_WORDS[wanted_split(split)] for word in words)))
        name = next((word for word in words if word in loaded), None)
        if name is None:
            raise DataError(f"{path} has the splits {sorted(loaded)} but not {split!r}; point to one of its sub-folders")
        path, loaded = path / name, loaded[name]
    plain = loaded.with_format(None)  # one saved for torch would give tensors
    # What `datasets` takes for the identity of the data is written in a file beside it, which a replaced part does not change.
    plain._fingerprint = key_of([loaded._fingerprint, _states(sorted(path.iterdir()))])
    return plain


def load_source(
    path: str | Path | Sequence[str | Path] | Dataset,
    split: str = "train",
    *,
    text_unit: TextUnit = "document",
    cache_dir: str | Path | None = None,
) -> Dataset:
    """Opens training or evaluation data.

    Args:
        path: a file, a folder, a glob pattern, a list of those, a folder written by `save_to_disk`, or a Dataset
            (returned as it is). Kinds by suffix: text and source code, .jsonl / .json, .parquet, .arrow, each also
            compressed. Columns of JSON files that hold other than strings are JSON text (`jsonfile`).
        split: used where a folder or a saved DatasetDict has several; "train" or "validation".
        text_unit: what one sample of a plain text file is: the whole file, a paragraph (blank lines between) or a line.
        cache_dir: where `datasets` keeps its Arrow copy; its own default when None.

    Returns:
        A `datasets.Dataset` with at least one sample.

    Raises:
        DataError: nothing there, mixed kinds, unreadable files, or no samples.
    """
    from datasets import Dataset

    if isinstance(path, Dataset):
        dataset = path
    elif isinstance(path, str | Path) and _is_saved_dataset(Path(path)):
        dataset = _load_saved(Path(path), split)
    else:
        paths = [str(path)] if isinstance(path, str | Path) else [str(p) for p in path]
        dataset = _load_files(*choose(paths, split), paths, text_unit, cache_dir)
    if len(dataset) == 0:
        raise DataError(f"{path!r} holds 0 samples")
    return dataset


def _load_files(
    kind: str, files: list[Path], paths: Sequence[str], text_unit: TextUnit, cache_dir: str | Path | None
) -> Dataset:
    """Through a copy in the cache, which is known by the state of the files: see `_states`."""
    import datasets

    if not any(file.stat().st_size for file in files):
        raise DataError(f"all {len(files)} files of {paths} are empty (0 bytes)")
    before = _states(files)
    key = key_of([_FORMAT, kind, text_unit if kind == "text" else None, before])
    cache = Path(cache_dir or datasets.config.HF_DATASETS_CACHE) / "bigtrain"
    try:
        if kind == "json":
            dataset = jsonfile.read(files, cache / f"json-{key}.arrow", key)
        else:
            dataset = _load_by_library(kind, files, text_unit, cache / f"files-{key}")
            dataset._fingerprint = key
    except Exception as error:
        refuse_cache(error, cache)
        why = str(error) if isinstance(error, DataError) else _root_cause(error)
        if "corresponds to no data" in why or why.endswith("holds 0 samples"):  # of files of blank lines alone
            raise DataError(f"{paths} holds 0 samples") from error
        if "UnicodeDecodeError" in why:
            which = jsonfile.first_not_utf8(files) if kind == "text" else None
            why += f"{f' in {which}' if which else ''}. Text is read as UTF-8: convert it, for example with iconv -f latin1 -t utf-8 (or -f utf-16)"
        elif kind == "parquet" and not isinstance(error, DataError):
            why = parquetfile.why_not(files, why)
        raise DataError(f"cannot read {paths} as {kind} ({len(files)} files): {why}") from error
    if changed := [name for (name, *_), then, now in zip(before, before, _states(files)) if then != now]:
        raise DataError(f"{changed[:10]} changed while being read: start again when what writes there is done")
    return dataset


def _load_by_library(kind: str, files: list[Path], text_unit: TextUnit, cache: Path) -> Dataset:
    from datasets import load_dataset

    # A byte order mark is no text; without one this is plain UTF-8.
    options: dict[str, Any] = {"sample_by": text_unit, "encoding": "utf-8-sig"} if kind == "text" else {}
    if kind == "text":
        refuse_containers(files)  # `datasets` would unpack zip files, whatever their name
    if kind == "parquet":
        files, options = parquetfile.with_rows(files)
    names = [glob.escape(str(file.resolve())) for file in files]  # `datasets` takes every name as a pattern
    dataset = load_dataset(kind, data_files={"train": names}, split="train", cache_dir=str(cache), **options)
    if kind == "parquet":
        parquetfile.note_places(dataset, files)
    return dataset


def _states(files: Sequence[Path]) -> list[tuple[str, int, int, int]]:
    """Name, size and times of each file. The time of change, unlike that of writing, is set by nobody: a file that was replaced
    by one of the same age, as from an archive, is seen."""
    told = [(file.resolve(), file.stat()) for file in files]
    return [(str(name), s.st_size, s.st_mtime_ns, s.st_ctime_ns) for name, s in told]


def key_of(value: Any) -> str:
    """32 hexadecimal digits that stand for a value in names of cached files."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:32]


def refuse_cache(error: BaseException, cache: Path) -> None:
    """Raises a DataError that names the cache where an error, or what led to it, is about writing there."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, DataError):
        about = getattr(cause, "filename", None)
        told = (
            isinstance(cause, OSError)
            and cause.errno in (_NOT_WRITABLE if about is None else (*_NOT_WRITABLE, errno.ENOENT))
            and (about is None or str(about).startswith(str(cache)))
        )
        if told or "Not enough disk space" in str(cause):
            raise DataError(
                f"the cache of data {cache} cannot be written: {cause}. Set HF_DATASETS_CACHE (or HF_HOME) to a folder with room that may be written"
            ) from error
        cause = cause.__cause__ or cause.__context__


def _root_cause(error: BaseException) -> str:
    """The first error of a chain: `datasets` wraps the telling one in a general one."""
    while (deeper := error.__cause__ or error.__context__) is not None:
        error = deeper
    return f"{type(error).__name__}: {error}"


def split_validation(dataset: Dataset, fraction: float, seed: int = 42) -> tuple[Dataset, Dataset]:
    """Splits by sample: (training, validation), a pure function of (number of samples, fraction, seed).

    Raises:
        DataError: the fraction is outside (0, 1) or leaves one side empty.
    """
    from bigtrain.data.order import SampleOrder

    n = len(dataset)
    if not 0.0 < fraction < 1.0:
        raise DataError(f"validation fraction {fraction!r} must lie between 0 and 1, both excluded")
    n_validation = max(1, round(n * fraction))
    if n_validation >= n:
        raise DataError(f"{n} samples cannot be split with validation fraction {fraction}: nothing is left to train on")
    order = SampleOrder(n, seed)
    held_out = sorted(order.row(position) for position in range(n_validation))
    kept = sorted(set(range(n)).difference(held_out))
    return dataset.select(kept), dataset.select(held_out)


def sample_kind(columns: Sequence[str] | Mapping[str, Any], text_column: str = "text") -> str:
    """What the samples are: "input_ids", "messages", "prompt" or "text".

    Where there are `input_ids` they were made from the other columns, and count.

    Raises:
        DataError: none of the columns is known, or they hold two kinds of samples, which have different losses.
    """
    needed = {"messages": ("messages",), "prompt": ("prompt", "completion"), "text": (text_column,)}
    if "input_ids" in columns:
        return "input_ids"
    kinds = [kind for kind, names in needed.items() if all(name in columns for name in names)]
    if len(kinds) == 1:
        return kinds[0]
    if kinds:
        both = " and ".join(" with ".join(map(repr, needed[kind])) for kind in kinds)
        raise DataError(
            f"the samples have the columns {both}: text trains on every token, the others on the answers alone. Keep the one that "
            "is meant and remove or rename the other in the data"
        )
    raise DataError(
        f"the samples have the columns {list(columns)}; needed is one of: {text_column!r} (plain text), 'messages' (chat), "
        f"'prompt' and 'completion', 'input_ids' (pre-tokenised). {_renaming(columns)}"
    )


# What other formats call these columns.
_PROMPTS = ("prompt", "question", "instruction", "input", "query", "context", "user")
_ANSWERS = (
    "response",
    "answer",
    "output",
    "target",
    "reply",
    "assistant",
    "responses",
    "answers",
    "label",
    "summary",
    "chosen",
)
_TEXTS = ("content", "body", "document", "article", "sentence", "code", "raw_content", "passage")


def _renaming(columns: Sequence[str] | Mapping[str, Any]) -> str:
    """What to do with columns that are those of another format."""
    if "chosen" in columns and "rejected" in columns:
        return (
            "Pairs of answers are for DPO or a reward model, which bigtrain does not train; to learn the chosen answers, drop "
            "'rejected' and rename 'chosen' to 'completion' (text, beside 'prompt') or 'messages' (a chat)"
        )
    if "conversations" in columns:
        return "Rename 'conversations' to 'messages', and in it 'from' to 'role' (human: user, gpt: assistant) and 'value' to 'content'"
    if "instruction" in columns and "output" in columns:
        return "Write 'instruction' and 'input' as one 'prompt', and rename 'output' to 'completion'"
    prompts, answers = ([c for c in columns if str(c).lower() in words] for words in (_PROMPTS, _ANSWERS))
    if answers:
        renames = [(prompts[0], "prompt")] if prompts and prompts[0] != "prompt" else []
        said = " and ".join(f"{old!r} to {new!r}" for old, new in (*renames, (answers[0], "completion")))
        alone = "" if prompts else ", beside a column 'prompt' (empty text where there is none)"
        how = f"dataset.rename_columns({dict((*renames, (answers[0], 'completion')))})"
        return f"Rename {said}{alone}; with datasets: {how}. The answer is then learned, the prompt is not"
    likely = next((c for c in columns if str(c).lower() in _TEXTS), columns and next(iter(columns)))
    return f"Rename the column with the text, such as {likely!r}, to {'text'!r} in the data (in a loop of your own: build_rows(text_column=...))"
