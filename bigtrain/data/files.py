"""Which files a path, folder or pattern means, of which kind they are, and which of them belong to a split.

Whatever is there and not taken is said, or refused: a link to nothing, a folder that cannot be read, an archive, files whose
names belong to no split.
"""

from __future__ import annotations

import glob
import logging
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from bigtrain.errors import DataError

logger = logging.getLogger(__name__)

_TEXT = "txt text md rst py pyi c h cc cpp hpp cu cuh java js jsx ts tsx go rs rb sh tex html css sql scala kt swift lua r jl"
# Suffix -> kind of file. A new format is one row here.
BUILDERS: dict[str, str] = {
    **{f".{suffix}": "text" for suffix in _TEXT.split()},
    ".jsonl": "json",
    ".ndjson": "json",
    ".json": "json",
    ".parquet": "parquet",
    ".arrow": "arrow",
}
_COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
_TABLES = (".csv", ".tsv")
# What holds files or pages: read as text it would be its own markup or every member, whatever that is.
_CONTAINERS = (".zip", ".tar", ".tgz", ".7z", ".rar", ".docx", ".xlsx", ".pptx", ".odt", ".epub", ".pdf", ".doc", ".xls")
_ZIP = b"PK\x03\x04"
# File names that hub-style folders give to a split, in the order in which they are taken; only for table formats, since text
# folders may well have a test/.
SPLIT_WORDS: dict[str, tuple[tuple[str, ...], ...]] = {
    "train": (("train", "training"),),
    "validation": (("validation", "valid", "val", "dev", "eval"), ("test",)),
}


def wanted_split(split: str) -> str:
    """ "train" or "validation", for any word that means one of them; other words mean validation."""
    return "train" if any(split in words for words in SPLIT_WORDS["train"]) else "validation"


def _suffix_of(file: Path) -> str:
    """The suffix that tells the kind, below those of compression; empty where there is none."""
    suffixes = [s.lower() for s in file.suffixes]
    while suffixes and suffixes[-1] in _COMPRESSED:
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


def builder_of(file: Path) -> str | None:
    """The kind of a file by its suffix, or None when the suffix is unknown."""
    return BUILDERS.get(_suffix_of(file))


def _below(folder: Path) -> Iterator[Path]:
    """All files below, links to folders followed (each folder once), hidden ones and byte code left out.

    Raises:
        DataError: a folder cannot be read, or a link leads nowhere.
    """

    def unreadable(error: OSError) -> None:
        raise DataError(f"the folder {error.filename} cannot be read: {error.strerror}") from error

    seen = {os.path.realpath(folder)}
    for here, folders, files in os.walk(folder, onerror=unreadable, followlinks=True):
        kept = []
        for name in sorted(folders):
            real = os.path.realpath(os.path.join(here, name))
            if not name.startswith(".") and name != "__pycache__" and real not in seen:
                seen.add(real)
                kept.append(name)
        folders[:] = kept
        for name in files:
            if not name.startswith("."):
                yield _checked(Path(here, name))


def _checked(file: Path) -> Path:
    if not file.is_file():
        kind = "a link to nothing" if file.is_symlink() else "a pipe, socket or device"
        raise DataError(f"{file} is {kind}: remove it from the data, or put a file in its place")
    return file


def expand(path: str) -> list[Path]:
    """The files that one path, folder or glob pattern names, each once and in one order everywhere.

    A pattern that matches a folder means the files in it.

    Raises:
        DataError: nothing is there, or something that is no file.
    """
    here = Path(path).expanduser()
    if here.is_dir():
        files = sorted(_below(here))
    elif here.exists() or here.is_symlink():
        return [_checked(here)]
    else:
        matches = [Path(match) for match in glob.glob(str(here), recursive=True)]
        files = sorted({f for m in matches for f in (_below(m) if m.is_dir() else [_checked(m)])})
    if not files:
        state = "is an empty folder" if here.is_dir() else "does not exist and matches no file as a pattern"
        raise DataError(
            f"data path {path!r} {state}; give a file, a folder of files, a glob pattern in quotes, or a folder written "
            "by datasets' save_to_disk"
        )
    return files


def choose(paths: Sequence[str], split: str) -> tuple[str, list[Path]]:
    """(kind, files) of the data that paths, folders or patterns name.

    Raises:
        DataError: no usable file, archives, or files of several kinds.
    """
    files = [file for path in paths for file in expand(path)]
    _tell_doubles(files)
    by_name = {Path(path).expanduser() for path in paths}
    # A file that was named itself and has an unknown suffix is read as text; one found in a folder is not.
    strange = sorted(file for file in by_name.intersection(files) if builder_of(file) is None)
    _refuse_tables(strange)
    refuse_containers(strange)
    if strange:
        logger.warning("data %s: of unknown suffix, read as plain text, one document a file", [str(file) for file in strange])
    kinds = {file: builder_of(file) or ("text" if file in by_name else None) for file in files}
    unread = [file for file, kind in kinds.items() if kind is None]
    unknown = Counter(_suffix_of(file) or file.suffix or "(none)" for file in unread)
    by_kind = Counter(kind for kind in kinds.values() if kind is not None)
    if not by_kind:
        _refuse_tables(unread)
        refuse_containers(unread)
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


def shared(train_data: str, eval_data: str) -> list[str]:
    """Names of at most 10 files that both paths mean."""
    try:
        trained = {os.path.realpath(file) for file in choose([train_data], "train")[1]}
        return [str(file) for file in choose([eval_data], "validation")[1] if os.path.realpath(file) in trained][:10]
    except DataError:  # a saved data set: no files of a known kind
        return []


def _tell_doubles(files: Sequence[Path]) -> None:
    """Warn of one file that is reached by two names, and of one that lies beside its compressed copy: its samples are there twice."""
    names: dict[str, Path] = {}
    plain: dict[Path, Path] = {}
    for file in files:
        first = names.setdefault(os.path.realpath(file), file)
        if first is not file:
            logger.warning("data: %s and %s are one file, whose samples are therefore there twice", first, file)
        unpacked = file.with_suffix("") if file.suffix.lower() in _COMPRESSED else file
        if (other := plain.setdefault(unpacked, file)) is not file and other != file:
            logger.warning(
                "data: %s and %s are both read: if one is the other compressed, all its samples are there twice", other, file
            )


def _refuse_tables(files: Iterable[Path]) -> None:
    if tables := [str(file) for file in files if _suffix_of(file) in _TABLES]:
        tabs = ", sep='\\t'" if ".tsv" in tables[0] else ""
        raise DataError(
            f"{_some(tables)} would be read as one text each: write tables as JSON Lines or Parquet, for example "
            f"python -c \"import pandas; pandas.read_csv('{tables[0]}'{tabs}, dtype=str, keep_default_na=False).to_json("
            "'train.jsonl', orient='records', lines=True)\""
        )


def refuse_containers(files: Iterable[Path]) -> None:
    """Archives and office documents, by suffix, and zip files of any name.

    Raises:
        DataError: names them.
    """
    if found := [str(file) for file in files if _suffix_of(file) in _CONTAINERS or _begins(file, _ZIP)]:
        raise DataError(f"{_some(found)}: archives and office documents are not read; unpack them, or save them as plain text")


def _begins(file: Path, magic: bytes) -> bool:
    with file.open("rb") as stream:
        return stream.read(len(magic)) == magic


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")


def _split_named_by(name: Path) -> tuple[str, int] | None:
    """(split, place of its word) that a file's own name, else the folder just above it, tells; None when neither does."""
    for part in reversed(name.parts[-2:]):
        word = part.lower().replace("-", ".").replace("_", ".").split(".")[0]
        for split, groups in SPLIT_WORDS.items():
            for place, words in enumerate(groups):
                if word in words:
                    return split, place
    return None


def _of_split(files: list[Path], paths: Sequence[str], split: str) -> list[Path]:
    """Keeps the files of one split where names below the given folders tell them apart, else all; says what is left out.

    Raises:
        DataError: names tell splits apart, and none is the wanted one.
    """
    roots = [Path(path).expanduser() for path in paths]
    below = {f: next((f.relative_to(root) for root in roots if root in f.parents), Path(f.name)) for f in files}
    named = {file: _split_named_by(below[file]) for file in files}
    if not any(named.values()):
        return files
    wanted = wanted_split(split)
    places = sorted({told[1] for told in named.values() if told and told[0] == wanted})
    if not places:
        raise DataError(f"no file for split {split!r} among {[f.name for f in files][:10]}; name the files themselves")
    chosen = [file for file in files if named[file] == (wanted, places[0])]
    nameless = [str(file) for file in files if named[file] is None]
    if nameless:
        logger.warning(
            "data %s: the names of %s say that they are of the split %s; not read, because their names say no split: %s",
            list(paths), _some([f.name for f in chosen]), wanted, _some(nameless),
        )  # fmt: skip
    others = [f.name for f in files if named[f] not in (None, (wanted, places[0]))]
    if others:
        logger.info("data %s: for %s, not read: %s", list(paths), wanted, _some(others))
    return chosen
