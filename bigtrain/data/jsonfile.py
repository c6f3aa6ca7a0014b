"""JSON Lines and JSON files as they stand: no value changes its type on the way.

The reader of `datasets` guesses types from the values: a text that looks like a date becomes one, "1.50" beside numbers a
number, a key that only some rows have is refused in a second file and filled with null elsewhere, of a key that stands twice
in a list of objects the last value counts. Here every line is read by itself, and named when something is wrong with it.

The result is an Arrow file in the cache: columns whose values are all strings are strings; all others hold JSON text, and
their feature says so (`CODED`). `decoded` gives back what stood in the file.
"""

from __future__ import annotations

import bz2
import codecs
import contextlib
import gzip
import io
import itertools
import json
import lzma
import os
import shlex
from collections.abc import Generator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from bigtrain.errors import DataError
from bigtrain.runfile import once

if TYPE_CHECKING:
    from datasets import Dataset

CODED = "bigtrain: JSON text"  # the `id` of the feature of such a column
PLACE = "_place"  # column: file and line of each sample, for messages
# Columns that mean something here: never left out, wherever they first appear.
KNOWN = ("text", "messages", "tools", "prompt", "completion", "input_ids", "labels", "attention_mask")
BATCH_BYTES = 16 << 20
# Made once: a decoder with a hook and an encoder that leaves characters as they are would be made anew for each row.
_DECODE = json.JSONDecoder(object_pairs_hook=once).decode
_ENCODE = json.JSONEncoder(ensure_ascii=False).encode
_MAGIC: dict[bytes, Any] = {b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ\x00": lzma.open}
_ZSTD = b"\x28\xb5\x2f\xfd"

Row = tuple[str, int, dict[str, Any]]  # place, bytes, values


class _OtherColumns(Exception):
    """A batch does not fit the columns that the first one had: (columns, those of them that hold JSON text)."""


def read(files: Sequence[Path], path: Path, fingerprint: str) -> Dataset:
    """The rows of JSON files, through an Arrow file at `path` that is made if it is not there.

    Args:
        files: JSON Lines, or files with one list of objects or strings, or with one object; compressed or not.
        path: of the Arrow file; whoever calls with the same path must mean the same content.
        fingerprint: of the data set that is returned.

    Raises:
        DataError: file and line of what cannot be read.
        OSError: the cache cannot be written.
    """
    from datasets import Dataset
    from filelock import FileLock

    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{path}.lock"):  # the ranks of a host come at the same time, and so may another run
        if not path.exists():
            _convert(files, path)
    dataset = Dataset.from_file(str(path))
    dataset._fingerprint = fingerprint
    return dataset


def coded_columns(dataset: Dataset) -> list[str]:
    """Columns that hold JSON text in place of values."""
    return [name for name, feature in dataset.features.items() if getattr(feature, "id", None) == CODED]


def decoded(batch: dict[str, list[Any]], coded: Iterable[str]) -> dict[str, list[Any]]:
    """A batch with the values of its `coded` columns."""
    return batch | {name: [None if v is None else json.loads(v) for v in batch[name]] for name in coded if name in batch}


def _convert(files: Sequence[Path], path: Path) -> None:
    """Writes the Arrow file under another name first: what has this name is whole. Called with the lock of `path`."""
    for left in path.parent.glob(f".{path.name}-*"):  # of a run that was killed while it wrote
        left.unlink(missing_ok=True)
    name = str(path.with_name(f".{path.name}-{os.getpid()}"))  # with the rights that the user's files have: caches are shared
    try:
        columns: tuple[str, ...] = ()
        coded: frozenset[str] = frozenset()
        while True:  # again from the start when a later row has more columns, or other types, than those before
            try:
                _write(files, name, columns, coded)
                break
            except _OtherColumns as other:
                columns, coded = other.args
        os.replace(name, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)


def _write(files: Sequence[Path], name: str, columns: tuple[str, ...], coded: frozenset[str]) -> None:
    import pyarrow as pa
    from datasets import Features, Value

    writer = None
    try:
        for batch in _batches(row for file in files for row in _rows(file)):
            fitting = _columns_of(batch, columns, coded)
            if writer is None:
                columns, coded = fitting
                types = {c: Value("string", id=CODED if c in coded else None) for c in (*columns, PLACE)}
                schema = Features(types).arrow_schema
                writer = pa.ipc.new_stream(name, schema)
            elif fitting != (columns, coded):
                raise _OtherColumns(*fitting)
            writer.write_batch(pa.record_batch(_arrays(batch, columns, coded), schema=schema))
    finally:
        if writer is not None:
            writer.close()
    if writer is None:
        raise DataError(f"{[str(file) for file in files[:5]]} holds 0 samples")


def _columns_of(batch: list[Row], columns: tuple[str, ...], coded: frozenset[str]) -> tuple[tuple[str, ...], frozenset[str]]:
    """Columns and coded ones that a batch needs. The first batch decides; what comes later and means nothing here is left out."""
    wanted = dict.fromkeys(columns)
    for _, _, values in batch:
        wanted |= dict.fromkeys(values if not columns else (key for key in values if key in KNOWN))
    wanted.pop(PLACE, None)  # of a file that was written from here
    plain = [c for c in wanted if c not in coded]
    more = {c for c in plain if any(not isinstance(values.get(c), str | None) for _, _, values in batch)}
    return tuple(wanted), coded | more


def _arrays(batch: list[Row], columns: Sequence[str], coded: frozenset[str]) -> list[Any]:
    import pyarrow as pa

    def column(rows: list[Row], name: str) -> Any:
        values = [values.get(name) for _, _, values in rows]
        if name in coded:
            values = [None if v is None else _ENCODE(v) for v in values]
        return pa.array(values, pa.string())

    try:
        return [*(column(batch, name) for name in columns), pa.array([place for place, _, _ in batch], pa.string())]
    except UnicodeEncodeError:  # half of a surrogate pair is no character
        for row in batch:
            try:
                [column([row], name) for name in columns]
            except UnicodeEncodeError as error:
                raise DataError(f"{row[0]}: UnicodeEncodeError: {error}") from error
        raise


def _batches(rows: Iterator[Row]) -> Iterator[list[Row]]:
    batch: list[Row] = []
    size = 0
    for row in rows:
        batch.append(row)
        size += row[1]
        if size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


# ---------------------------------------------------------------- one file


def _rows(file: Path) -> Generator[Row, None, None]:
    """Every row of one file.

    Raises:
        DataError: names the line, or what is wrong with the file as a whole.
    """
    try:
        with _opened(file) as stream:
            whole = _is_whole(stream)
        with _opened(file) as stream:  # anew: not every kind of compression can go back
            yield from _of_whole(file, stream) if whole else _of_lines(file, stream)
    except (OSError, EOFError, lzma.LZMAError) as error:
        cut_off = (
            ". It is cut off or damaged: get or pack it anew" if not isinstance(error, OSError) or error.errno is None else ""
        )
        raise DataError(f"{file}: {type(error).__name__}: {error}{cut_off}") from error


def first_rows(file: Path, most: int) -> list[dict[str, Any]]:
    """The first rows of a JSON Lines file, `most` at most.

    Raises:
        DataError: as for reading all.
    """
    with contextlib.closing(_rows(file)) as rows:
        return [values for _, _, values in itertools.islice(rows, most)]


@contextlib.contextmanager
def _opened(file: Path) -> Iterator[BinaryIO]:
    """The file's bytes; compression is told by its first bytes, whatever its name."""
    with file.open("rb") as raw:
        head = raw.read(6)
        raw.seek(0)
        if head.startswith(_ZSTD):
            with _zstandard(file).ZstdDecompressor().stream_reader(raw, read_across_frames=True) as inner:
                yield io.BufferedReader(inner)
            return
        open_it = next((opener for magic, opener in _MAGIC.items() if head.startswith(magic)), None)
        if open_it is None:
            yield raw
        else:
            with open_it(raw, "rb") as inner:
                yield inner


def first_not_utf8(files: Iterable[Path]) -> Path | None:
    """The first of these files that holds bytes that are no UTF-8."""
    for file in files:
        decoder = codecs.getincrementaldecoder("utf-8")()
        with _opened(file) as stream:
            try:
                while part := stream.read(1 << 20):
                    decoder.decode(part)
                decoder.decode(b"", final=True)
            except UnicodeDecodeError:
                return file
    return None


def _zstandard(file: Path) -> Any:
    try:
        import zstandard
    except ImportError as error:
        raise DataError(f"{file} is compressed with zstd: run pip install zstandard, or unpack it (zstd -d)") from error
    return zstandard


def _is_whole(stream: BinaryIO) -> bool:
    """True where the file is one JSON value, not one a line: a list, or an object that goes on behind the first line."""
    begin = _first_line(stream)
    if begin.startswith(b"{"):
        try:
            json.loads(begin)
        except (ValueError, RecursionError):
            return begin.rstrip().endswith((b",", b"[", b":", b"{"))
        return False
    return begin.startswith(b"[")


def _first_line(stream: BinaryIO) -> bytes:
    """The first line that is not blank, without a byte order mark and leading space."""
    for line in stream:
        if text := line.removeprefix(b"\xef\xbb\xbf").lstrip():
            return text
    return b""


def _of_lines(file: Path, stream: BinaryIO) -> Iterator[Row]:
    rows: list[Any] = []  # the first two
    for number, line in enumerate(stream, 1):
        if number == 1:
            line = line.removeprefix(b"\xef\xbb\xbf")
        if not line.strip():
            continue
        try:
            value = _DECODE(line.decode())
            problem = None if isinstance(value, dict) else f"a {type(value).__name__}, not an object"
        except (ValueError, RecursionError) as error:
            problem = f"{type(error).__name__}: {error}"
            if isinstance(error, UnicodeDecodeError) and error.end == len(line):
                problem = "it ends within a character"
        if problem:
            raise DataError(f"{file} line {number}: {problem}: {line[:80]!r}{_cut_off(file, number, line)}")
        rows += [value] * (len(rows) < 2)
        yield f"{file} line {number}", len(line), value
    if len(rows) == 1:  # of several, each is a sample: its list stands beside a text of any name
        _refuse_wrapped(file, rows[0])


def _cut_off(file: Path, number: int, line: bytes) -> str:
    """What to do about a line that is no object: the last one may be half of one."""
    if line.endswith(b"\n"):
        return ". Each line must be a whole JSON object: mend or remove it"
    how = (
        f" (head -n {number - 1} {shlex.quote(str(file))} > whole.jsonl)"
        if file.suffix in (".jsonl", ".ndjson", ".json")
        else ""
    )
    kept = f", or keep the {number - 1} before it{how}" if number > 1 else ""
    return f". No line break ends this last line: it is cut off, as where its writer was stopped. Write it anew{kept}"


def _of_whole(file: Path, stream: BinaryIO) -> Iterator[Row]:
    """One list of objects or strings, or one object, which is one row."""
    text = stream.read()
    try:
        value = _DECODE(text.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        lines = f"; its first line is {_first_of(text)!r:.80}: where each line is to be a row, each must be a whole object"
        raise DataError(f"{file}: {type(error).__name__}: {error}{lines}") from error
    _refuse_wrapped(file, value)
    items = value if isinstance(value, list) else [value]
    size = len(text) // max(1, len(items))
    kinds = {type(item) for item in items}
    if kinds == {str}:
        items = [{"text": item} for item in items]
    for place, item in enumerate(items):
        if not isinstance(item, dict):
            raise DataError(f"{file}: element {place} of its list is a {type(item).__name__}, not an object: {item!r:.80}")
        yield f"{file} element {place}", size, item


def _refuse_wrapped(file: Path, value: Any) -> None:
    """All samples in a list under one key would be one sample, whose column nobody knows."""
    if not isinstance(value, dict) or not value.keys().isdisjoint(KNOWN):
        return
    for key, inner in value.items():
        if isinstance(inner, list) and inner and isinstance(inner[0], dict) and not inner[0].keys().isdisjoint(KNOWN):
            raise DataError(f"{file}: the samples stand in a list under {key!r}: give that list alone, or one sample a line")


def _first_of(text: bytes) -> bytes:
    return text.lstrip().split(b"\n", 1)[0][:80]
