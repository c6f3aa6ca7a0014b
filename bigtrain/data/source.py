"""From a path to a `datasets.Dataset`: text, JSON Lines, Parquet, Arrow; and the split into training and validation."""

from __future__ import annotations

import glob
import json
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from bigtrain.errors import DataError
from bigtrain.runfile import once

if TYPE_CHECKING:
    from datasets import Dataset

logger = logging.getLogger(__name__)

TextUnit = Literal["document", "paragraph", "line"]

_TEXT = "txt text md rst py pyi c h cc cpp hpp cu cuh java js jsx ts tsx go rs rb sh tex html css sql scala kt swift lua r jl"
# Suffix -> builder of the `datasets` library. A new format is one row here.
BUILDERS: dict[str, str] = {
    **{f".{suffix}": "text" for suffix in _TEXT.split()},
    ".jsonl": "json",
    ".ndjson": "json",
    ".json": "json",
    ".parquet": "parquet",
    ".arrow": "arrow",
}
_COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
# File names that hub-style folders give to a split; only for table formats, since text folders may well have a test/.
_SPLIT_WORDS = {"train": ("train", "training"), "validation": ("validation", "valid", "val", "dev", "eval", "test")}


def builder_of(file: Path) -> str | None:
    """Name of the `datasets` builder for a file by its suffix, or None when the suffix is unknown."""
    suffixes = [s.lower() for s in file.suffixes]
    while suffixes and suffixes[-1] in _COMPRESSED:
        suffixes.pop()
    return BUILDERS.get(suffixes[-1]) if suffixes else None


def _is_saved_dataset(path: Path) -> bool:
    return (path / "dataset_dict.json").is_file() or (path / "state.json").is_file()


def _files_below(folder: Path) -> list[Path]:
    """All files below, hidden ones and byte code left out, in one order everywhere."""
    found = []
    for file in sorted(folder.rglob("*")):
        parts = file.relative_to(folder).parts
        if file.is_file() and not any(part.startswith(".") or part == "__pycache__" for part in parts):
            found.append(file)
    return found


def _expand(path: str) -> list[Path]:
    """The files that one path, folder or glob pattern names.

    Raises:
        DataError: nothing is there.
    """
    here = Path(path).expanduser()
    if here.is_file():
        return [here]
    if here.is_dir():
        files = _files_below(here)
    else:
        files = sorted(Path(p) for p in glob.glob(str(here), recursive=True) if Path(p).is_file())
    if not files:
        state = "is an empty folder" if here.is_dir() else "does not exist and matches no file as a pattern"
        raise DataError(
            f"data path {path!r} {state}; give a file, a folder of files, a glob pattern in quotes, or a folder written "
            "by datasets' save_to_disk"
        )
    return files


def _split_named_by(name: Path) -> str | None:
    """The split that a file's own name, else the folder just above it, tells; None when neither does."""
    for part in reversed(name.parts[-2:]):
        word = part.lower().replace("-", ".").replace("_", ".").split(".")[0]
        for split, words in _SPLIT_WORDS.items():
            if word in words:
                return split
    return None


def _of_split(files: list[Path], paths: Sequence[str], split: str) -> list[Path]:
    """Keeps the files of one split where names below the given folders tell them apart, else all.

    Raises:
        DataError: names tell splits apart, and none is the wanted one.
    """
    roots = [Path(path).expanduser() for path in paths]
    below = {f: next((f.relative_to(root) for root in roots if root in f.parents), Path(f.name)) for f in files}
    named = {file: _split_named_by(below[file]) for file in files}
    if not any(named.values()):
        return files
    wanted = "train" if split in _SPLIT_WORDS["train"] else "validation"
    chosen = [file for file in files if named[file] == wanted]
    if not chosen:
        raise DataError(f"no file for split {split!r} among {[f.name for f in files][:10]}; name the files themselves")
    return chosen


def _choose(paths: Sequence[str], split: str) -> tuple[str, list[Path]]:
    """(builder, files); mixed kinds are refused, unknown suffixes in a folder are told.

    Raises:
        DataError: no usable file, or files of several kinds.
    """
    files = [file for path in paths for file in _expand(path)]
    by_name = {Path(path).expanduser() for path in paths}
    # A file that was named itself and has an unknown suffix is read as text; one found in a folder is not.
    strange = sorted(file for file in by_name.intersection(files) if builder_of(file) is None)
    if tables := [str(file) for file in strange if file.suffix.lower() in (".csv", ".tsv")]:
        raise DataError(
            f"{tables} would be read as one text each: write tables as JSON Lines or Parquet, for example with pandas"
        )
    if strange:
        logger.warning("data %s: of unknown suffix, read as plain text, one document a file", [str(file) for file in strange])
    kinds = {file: builder_of(file) or ("text" if file in by_name else None) for file in files}
    unknown = Counter(file.suffix or "(none)" for file, kind in kinds.items() if kind is None)
    by_kind = Counter(kind for kind in kinds.values() if kind is not None)
    if not by_kind:
        raise DataError(f"no file in {list(paths)} has a known suffix; found {dict(unknown)}, known {sorted(BUILDERS)}")
    if len(by_kind) > 1:
        raise DataError(
            f"{list(paths)} mixes kinds of files: {dict(by_kind)}. Name the files of one kind, for example with a pattern "
            "such as 'folder/**/*.jsonl'"
        )
    if unknown:
        logger.warning("data %s: files with unknown suffixes are not read: %s", list(paths), dict(unknown))
    kind = next(iter(by_kind))
    chosen = [file for file in files if kinds[file] == kind]
    if kind != "text" and not by_name.issuperset(files):
        chosen = _of_split(chosen, paths, split)
    return kind, chosen


def _load_saved(path: Path, split: str) -> Dataset:
    from datasets import DatasetDict, load_from_disk

    loaded = load_from_disk(str(path))
    if not isinstance(loaded, DatasetDict):
        return loaded
    words = _SPLIT_WORDS["train"] if split in _SPLIT_WORDS["train"] else (split, *_SPLIT_WORDS["validation"])
    for name in words:
        if name in loaded:
            return loaded[name]
    raise DataError(f"{path} has the splits {sorted(loaded)} but not {split!r}; point to one of its sub-folders")


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
            compressed.
        split: used where a folder or a saved DatasetDict has several; "train" or "validation".
        text_unit: what one sample of a plain text file is: the whole file, a paragraph (blank lines between) or a line.
        cache_dir: where `datasets` keeps its Arrow copy; its own default when None.

    Returns:
        A `datasets.Dataset` with at least one sample.

    Raises:
        DataError: nothing there, mixed kinds, unreadable files, or no samples.
    """
    from datasets import Dataset, load_dataset

    if isinstance(path, Dataset):
        dataset = path
    elif isinstance(path, str | Path) and _is_saved_dataset(Path(path)):
        dataset = _load_saved(Path(path), split)
    else:
        paths = [str(path)] if isinstance(path, str | Path) else [str(p) for p in path]
        kind, files = _choose(paths, split)
        if not any(file.stat().st_size for file in files):
            raise DataError(f"all {len(files)} files of {paths} are empty (0 bytes)")
        # A byte order mark is no text; without one this is plain UTF-8.
        options: dict[str, Any] = {"sample_by": text_unit, "encoding": "utf-8-sig"} if kind == "text" else {}
        names = [glob.escape(str(file.resolve())) for file in files]  # `datasets` takes every name as a pattern
        try:
            dataset = load_dataset(
                kind, data_files={"train": names}, split="train", cache_dir=cache_dir and str(cache_dir), **options
            )
        except Exception as error:
            why = (kind == "json" and _bad_line(files)) or _root_cause(error)
            if "corresponds to no data" in why:  # of `datasets`, for files of blank lines alone
                raise DataError(f"{paths} holds 0 samples") from error
            raise DataError(f"cannot read {paths} as {kind} ({len(files)} files): {why}") from error
    if len(dataset) == 0:
        raise DataError(f"{path!r} holds 0 samples")
    return dataset


def _bad_line(files: Sequence[Path]) -> str | None:
    """The first line of JSON Lines files that is no JSON object; None where every line is one."""
    for file in files:
        if file.suffix not in (".jsonl", ".ndjson"):
            continue
        with file.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                try:
                    value = json.loads(line.decode("utf-8-sig"), object_pairs_hook=once) if line.strip() else {}
                    json.dumps(value, ensure_ascii=False).encode()  # half of a surrogate pair is no character
                    problem = None if isinstance(value, dict) else f"a {type(value).__name__}, not an object"
                except (ValueError, RecursionError) as error:
                    problem = f"{type(error).__name__}: {error}"
                if problem:
                    return f"{file} line {number}: {problem}: {line[:80]!r}"
    return None


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
        "'prompt' and 'completion', 'input_ids' (pre-tokenised). Rename the column (from Python: text_column=)"
    )
