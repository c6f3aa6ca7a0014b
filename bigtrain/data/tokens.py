"""Random access to tokenised documents in memory-mapped Arrow, and the check of their ids against the model."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from bigtrain.data.chat import IGNORE
from bigtrain.errors import DataError

if TYPE_CHECKING:
    from datasets import Dataset


class _ListColumn:
    """One list column: offsets in memory, values left where Arrow has mapped them."""

    def __init__(self, chunks: list[Any], name: str):
        self.values: list[np.ndarray] = []
        self.offsets: list[np.ndarray] = []
        for chunk in chunks:
            if chunk.null_count or chunk.values.null_count:
                raise DataError(f"column {name!r} holds null values; remove those samples from the data set")
            self.offsets.append(chunk.offsets.to_numpy(zero_copy_only=False).astype(np.int64))
            self.values.append(chunk.values.to_numpy(zero_copy_only=False))
        sizes = [len(offsets) - 1 for offsets in self.offsets]
        self.first = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        lengths = [np.diff(offsets) for offsets in self.offsets]
        self.lengths = np.concatenate(lengths) if lengths else np.zeros(0, np.int64)

    def get(self, document: int, start: int, stop: int) -> np.ndarray:
        chunk = int(np.searchsorted(self.first, document, side="right")) - 1
        offset = self.offsets[chunk][document - self.first[chunk]]
        return self.values[chunk][offset + start : offset + stop]

    def per_document(self, chunk: int) -> tuple[int, np.ndarray, np.ndarray]:
        """(first document, flat values, offsets from 0) of one chunk."""
        offsets = self.offsets[chunk]
        return int(self.first[chunk]), self.values[chunk][offsets[0] : offsets[-1]], offsets - offsets[0]


class TokenStore:
    """The documents of a tokenised data set (columns `input_ids` and perhaps `labels`).

    Attributes:
        lengths: tokens of each document, int64 [documents].
    """

    def __init__(self, dataset: Dataset):
        if dataset._indices is not None:  # a selection: give it a table of its own, so that offsets are those of rows
            dataset = dataset.flatten_indices()
        self._dataset = dataset
        self._open()

    def _open(self) -> None:
        table = self._dataset.data
        self._ids = _ListColumn(table.column("input_ids").chunks, "input_ids")
        self._labels = None
        if "labels" in table.column_names:
            self._labels = _ListColumn(table.column("labels").chunks, "labels")
        self.lengths = self._ids.lengths

    # Workers started by spawn get the data set's file name, not its bytes.
    def __getstate__(self) -> dict[str, Any]:
        return {"dataset": self._dataset}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._dataset = state["dataset"]
        self._open()

    def __len__(self) -> int:
        return len(self.lengths)

    def ids(self, document: int, start: int, stop: int) -> np.ndarray:
        """Token ids [start, stop) of one document."""
        return self._ids.get(document, start, stop)

    def labels(self, document: int, start: int, stop: int) -> np.ndarray:
        """Labels [start, stop) of one document: its own where the data has some, else the ids."""
        return (self._labels or self._ids).get(document, start, stop)

    def target_counts(self, limit: int | None = None) -> np.ndarray:
        """Targets of each document, int64 [documents]: labels that are not -100, the first token never among them.

        Args:
            limit: count within the first `limit` tokens only.
        """
        capped = self.lengths if limit is None else np.minimum(self.lengths, limit)
        if self._labels is None:
            return np.maximum(capped - 1, 0)
        counts = np.zeros(len(self), np.int64)
        for chunk in range(len(self._labels.values)):
            first, values, offsets = self._labels.per_document(chunk)
            running = np.concatenate([[0], np.cumsum(values != IGNORE)])
            begin = np.minimum(offsets[:-1] + 1, offsets[1:])
            end = np.maximum(begin, offsets[:-1] + capped[first : first + len(offsets) - 1])
            counts[first : first + len(offsets) - 1] = running[end] - running[begin]
        return counts

    def labelled(self, documents: np.ndarray, start: np.ndarray, stop: np.ndarray) -> np.ndarray:
        """How many of the labels [start, stop) of each of these pieces are not -100; int64, all of one shape, `documents` ascending."""
        if self._labels is None:
            return np.maximum(stop - start, 0)
        counts = np.zeros(len(documents), np.int64)
        for chunk in range(len(self._labels.values)):
            first, values, offsets = self._labels.per_document(chunk)
            running = np.concatenate([[0], np.cumsum(values != IGNORE)])
            here = slice(*np.searchsorted(documents, (first, first + len(offsets) - 1)))  # chunks are thousands
            at = offsets[documents[here] - first]
            counts[here] = running[at + stop[here]] - running[at + np.minimum(start[here], stop[here])]
        return counts

    def first_targets(self, documents: np.ndarray) -> int:
        """How many of these documents have a label other than -100 at their first token."""
        if self._labels is None:
            return len(documents)
        return sum(int(self._labels.get(int(document), 0, 1)[0] != IGNORE) for document in documents)

    @cached_property
    def content(self) -> str:
        """xxh3_128 of lengths, ids and labels; 32 hexadecimal digits. However Arrow has divided them, it is the same."""
        hashed = xxhash.xxh3_128(self.lengths.astype("<i8").data)
        for column in filter(None, (self._ids, self._labels)):
            for chunk in range(len(column.values)):
                hashed.update(np.ascontiguousarray(column.per_document(chunk)[1], "<i4").data)
        return hashed.hexdigest()

    def check_model(self, vocab_size: int | None, max_positions: int | None, seq_len: int) -> None:
        """Compares ids and lengths with what the model has room for.

        Args:
            vocab_size: rows of the model's embedding; None when unknown.
            max_positions: positions of the model; None when it has no limit.
            seq_len: tokens per row.

        Raises:
            DataError: names the first sample with an id outside the vocabulary, or the longest sample.
        """
        if max_positions is not None and seq_len > max_positions:
            longest = int(np.argmax(self.lengths)) if len(self) else 0
            raise DataError(
                f"seq_len={seq_len} is above the model's max_position_embeddings={max_positions} (the longest sample is "
                f"{longest} with {int(self.lengths[longest]) if len(self) else 0} tokens); use seq_len <= {max_positions}"
            )
        if vocab_size is None:
            return
        for name, column in (("input_ids", self._ids), ("labels", self._labels)):
            for chunk in range(len(column.values) if column is not None else 0):
                assert column is not None
                first, values, offsets = column.per_document(chunk)
                wrong = (values >= vocab_size) | (values < 0)
                if name == "labels":
                    wrong &= values != IGNORE
                if wrong.any():
                    place = int(np.argmax(wrong))
                    sample = first + int(np.searchsorted(offsets, place, side="right")) - 1
                    raise DataError(
                        f"sample {sample}: {name} holds {int(values[place])} at token "
                        f"{place - int(offsets[sample - first])}, but the model's vocab_size is {vocab_size} (ids 0 to "
                        f"{vocab_size - 1}). The tokenizer is not this model's, or its embedding must be resized "
                        "(--resize_vocab; from Python resize_vocab_to)"
                    )


def model_limits(config: Any) -> tuple[int | None, int | None]:
    """(vocab_size, max_position_embeddings) of a transformers config, its text part where it has several; None = unknown."""
    if config is None:
        return None, None
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    positions = getattr(text, "max_position_embeddings", None)
    if not isinstance(positions, int) or positions <= 0:
        positions = None
    return getattr(text, "vocab_size", None), positions
