"""Documents into fixed rows of `seq_len` tokens.

| packing | a row holds | attention across documents | long documents |
|---|---|---|---|
| isolated (default) | pieces of documents, best fit | none: `position_ids` restart at 0 (see `isolation`) | cut in pieces |
| concatenate | a window of all documents run together | yes, as the name says | run on in the next row |
| none | one document, padded on the right | none | truncated to `seq_len`, counted |

Rules that hold for all three:

* `labels` are in the transformers convention: the model shifts them, nothing here does. -100 is not in the loss.
* The first token of a row, and of each document in an isolated row, has label -100: there is nothing to predict it from.
  So `(labels != -100).sum()` is the exact number of targets of any batch.
* Neighbouring pieces (or windows) share one token: last of the one as target, first of the next as context. Cutting
  therefore loses no target: an isolated data set has sum(length - 1) targets at every `seq_len`.
* Every row has a target: a piece or window without one (of a prompt longer than `seq_len`) would train nothing, and a step of
  such rows alone could not be made.
* Padding is known by its place, never by its id, so a pad id equal to the end id keeps every real end token in the loss.
  It stands on the right with label -100, where causal attention cannot see it, and its positions run on, so that no
  attention mask is needed and a row with one document keeps the fast causal kernels.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import torch

from bigtrain.data.chat import IGNORE
from bigtrain.data.tokenise import placed, tokenise, turn_end
from bigtrain.data.tokens import TokenStore, model_limits
from bigtrain.errors import DataError

if TYPE_CHECKING:
    from datasets import Dataset

logger = logging.getLogger(__name__)

Packing = Literal["isolated", "concatenate", "none"]


@dataclass(frozen=True, kw_only=True)
class PackStats:
    """What became of the documents; every token is accounted for."""

    documents: int
    documents_without_targets: int  # left out: nothing in them could be learned (empty, or chat without an answer)
    documents_cut: int  # went into more than one row
    pieces_left_out: int  # of documents that are cut (concatenate: windows): nothing in them is a target
    answers_cut_off: (
        int  # documents whose answers lie beyond seq_len (none), or are learned without the start of their prompt (isolated)
    )
    documents_truncated: int
    tokens: int
    tokens_left_out: int  # in documents without targets
    tokens_truncated: int
    target_tokens: int
    rows: int
    padding_tokens: int

    def describe(self, packing: str, seq_len: int) -> str:
        """One line for the log."""
        fill = 1.0 - self.padding_tokens / max(1, self.rows * seq_len)
        text = (
            f"packing {packing}: {self.documents} documents, {self.tokens} tokens -> {self.rows} rows of {seq_len} "
            f"({fill:.1%} full), {self.target_tokens} tokens in the loss, {self.documents_cut} documents cut in pieces"
        )
        if self.documents_without_targets:
            where = f" within their first {seq_len} tokens" if packing == "none" else ""
            text += (
                f", {self.documents_without_targets} documents left out ({self.tokens_left_out} tokens): nothing in them is "
                f"a target{where}"
            )
        if self.pieces_left_out:
            text += f", {self.pieces_left_out} {'windows' if packing == 'concatenate' else 'pieces'} without a target left out"
        if self.documents_truncated:
            text += f", {self.documents_truncated} documents truncated ({self.tokens_truncated} tokens dropped)"
        return text


@dataclass(frozen=True)
class Pieces:
    """Pieces of documents, grouped by row: row i holds the pieces row_start[i] ... row_start[i+1] - 1, in that order.

    All arrays are int64; `start` and `length` are in tokens of the document. `left_out`: pieces without a target, or windows.
    `beheaded`: documents of which such a piece stands before one that is kept.
    """

    document: np.ndarray
    start: np.ndarray
    length: np.ndarray
    row_start: np.ndarray
    left_out: int = 0
    beheaded: int = 0


def cut(lengths: np.ndarray, documents: np.ndarray, seq_len: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(document, start, length) of pieces of at most `seq_len` tokens; neighbours share one token."""
    step = seq_len - 1
    own = lengths[documents]
    pieces = np.maximum(1, -(-(own - 1) // step))
    document = np.repeat(documents, pieces)
    nth = np.arange(len(document)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    start = nth * step
    return document, start, np.minimum(seq_len, lengths[document] - start)


def best_fit(lengths: np.ndarray, seq_len: int) -> list[list[int]]:
    """Bins of capacity `seq_len` by best fit, longest first (ties by index): indices into `lengths` per bin.

    Free capacities are the bits of one integer: the smallest that is large enough is found by a shift, so a piece costs
    about a microsecond whatever the number of open bins.
    """
    bins: list[list[int]] = []
    open_by_space: dict[int, list[int]] = {}
    spaces = 0
    for index in np.lexsort((np.arange(len(lengths)), -lengths)).tolist():
        length = int(lengths[index])
        fitting = spaces >> length
        if fitting:
            space = length + (fitting & -fitting).bit_length() - 1
            bin_index = open_by_space[space].pop()
            if not open_by_space[space]:
                spaces &= ~(1 << space)
        else:
            space, bin_index = seq_len, len(bins)
            bins.append([])
        bins[bin_index].append(index)
        left = space - length
        if left >= 2:  # one token alone has no target
            open_by_space.setdefault(left, []).append(bin_index)
            spaces |= 1 << left
    return bins


def _pack_isolated(store: TokenStore, documents: np.ndarray, seq_len: int) -> Pieces:
    document, start, length = cut(store.lengths, documents, seq_len)
    useful = store.labelled(document, start + 1, start + length) > 0
    last = np.full(len(store.lengths), -1)
    np.maximum.at(last, document[useful], start[useful])
    beheaded = len(np.unique(document[~useful & (start < last[document])]))
    document, start, length = document[useful], start[useful], length[useful]
    bins = best_fit(length, seq_len)
    order = np.fromiter((index for one in bins for index in one), np.int64, len(document))
    row_start = np.concatenate([[0], np.cumsum([len(one) for one in bins])]).astype(np.int64)
    return Pieces(document[order], start[order], length[order], row_start, int((~useful).sum()), beheaded)


def _pack_none(store: TokenStore, documents: np.ndarray, seq_len: int) -> Pieces:
    length = np.minimum(store.lengths[documents], seq_len)
    return Pieces(documents, np.zeros_like(length), length, np.arange(len(documents) + 1))


def _pack_concatenate(store: TokenStore, documents: np.ndarray, seq_len: int) -> Pieces:
    lengths = store.lengths[documents]
    ends = np.cumsum(lengths)
    total, step = int(ends[-1]), seq_len - 1
    window_start = np.arange(max(1, -(-(total - 1) // step))) * step
    window_end = np.minimum(window_start + seq_len, total)
    # A window [a, b) touches the documents from the one that holds a to the one that holds b - 1.
    first = np.searchsorted(ends, window_start, side="right")
    last = np.searchsorted(ends, window_end - 1, side="right")
    row_start = np.concatenate([[0], np.cumsum(last - first + 1)]).astype(np.int64)
    row = np.repeat(np.arange(len(window_start)), last - first + 1)
    nth = np.arange(row_start[-1]) - row_start[row]
    place = nth + first[row]
    begin_of = ends - lengths
    start = np.maximum(window_start[row] - begin_of[place], 0)
    stop = np.minimum(window_end[row], ends[place]) - begin_of[place]
    targets = np.add.reduceat(store.labelled(documents[place], start + (nth == 0), stop), row_start[:-1])
    kept = targets[row] > 0
    row_start = np.concatenate([[0], np.cumsum((last - first + 1)[targets > 0])]).astype(np.int64)
    left_out = int((targets == 0).sum())
    return Pieces(documents[place][kept], start[kept], (stop - start)[kept], row_start, left_out)


# Packing -> how rows are made, and whether each piece is a document of its own (positions and first label restart).
PACKINGS: dict[str, tuple[Callable[[TokenStore, np.ndarray, int], Pieces], bool]] = {
    "isolated": (_pack_isolated, True),
    "concatenate": (_pack_concatenate, False),
    "none": (_pack_none, True),
}


class Rows:
    """The packed training set: `len(rows)`, `rows[i]` -> {"input_ids", "labels", "position_ids"}, int64 [seq_len] each.

    Attributes:
        seq_len: tokens per row.
        packing: "isolated", "concatenate" or "none".
        stats: what became of the documents.
        turn_end: id of the token that ends an answer, where the samples are conversations (`build_rows` sets it).
    """

    turn_end: int | None = None

    def __init__(self, store: TokenStore, seq_len: int, packing: Packing, pad_token_id: int):
        if packing not in PACKINGS:
            raise DataError(f"packing={packing!r} is unknown; choose one of {list(get_args(Packing))}")
        if isinstance(seq_len, bool) or not isinstance(seq_len, int) or seq_len < 2:
            raise DataError(f"seq_len={seq_len!r} must be an integer of at least 2: one token has nothing to predict")
        self.seq_len, self.packing, self.pad_token_id = seq_len, packing, pad_token_id
        self._store = store
        pack, self._restarts = PACKINGS[packing]
        targets = store.target_counts(seq_len if packing == "none" else None)
        useful = np.flatnonzero(targets > 0) if self._restarts else np.flatnonzero(store.lengths > 0)
        if not targets.sum() and packing == "none" and store.target_counts().any():
            raise DataError(
                f"none of the {len(store)} samples has a token to learn from within its first seq_len={seq_len} tokens, at which "
                "packing none cuts: raise seq_len, or use packing isolated, which cuts in pieces"
            )
        if not len(useful) or not targets.sum():
            raise DataError(
                f"none of the {len(store)} samples has a token to learn from: they are empty, one token long, have no "
                "answer (role 'assistant') in them, or labels that are all -100"
            )
        self._pieces = pack(store, useful, seq_len)
        self.stats = self._count(targets, useful)

    @property
    def content(self) -> str:
        """A hash of every token and label in the order of the samples, for comparison between ranks and runs."""
        return self._store.content

    def _count(self, targets: np.ndarray, useful: np.ndarray) -> PackStats:
        pieces, lengths = self._pieces, self._store.lengths
        rows = len(pieces.row_start) - 1
        per_document = np.bincount(pieces.document, minlength=len(lengths))
        over = np.maximum(lengths[useful] - self.seq_len, 0) if self.packing == "none" else np.zeros(1, np.int64)
        return PackStats(
            documents=len(lengths),
            documents_without_targets=len(lengths) - len(useful),
            documents_cut=int((per_document > 1).sum()),
            pieces_left_out=pieces.left_out,
            answers_cut_off=pieces.beheaded or int((self._store.target_counts()[targets == 0] > 0).sum()),
            documents_truncated=int((over > 0).sum()),
            tokens=int(lengths.sum()),
            tokens_left_out=int(lengths.sum() - lengths[useful].sum()),
            tokens_truncated=int(over.sum()),
            target_tokens=int(targets[useful].sum()) if self._restarts else self._stream_targets(useful),
            rows=rows,
            padding_tokens=int(rows * self.seq_len - pieces.length.sum()),
        )

    def _stream_targets(self, useful: np.ndarray) -> int:
        """Targets of the concatenated stream: a document's first token counts too, but for the first of all."""
        return int(self._store.target_counts()[useful].sum()) + self._store.first_targets(useful[1:])

    def __len__(self) -> int:
        return len(self._pieces.row_start) - 1

    def documents_of(self, row: int) -> list[int]:
        """Indices of the samples in a row, for messages."""
        first, last = self._pieces.row_start[row : row + 2]
        return list(dict.fromkeys(self._pieces.document[first:last].tolist()))

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        ids = np.full(self.seq_len, self.pad_token_id, np.int64)
        labels = np.full(self.seq_len, IGNORE, np.int64)
        positions = np.arange(self.seq_len)
        at = 0
        for piece in range(*self._pieces.row_start[row : row + 2].tolist()):
            document, start = int(self._pieces.document[piece]), int(self._pieces.start[piece])
            stop = start + int(self._pieces.length[piece])
            end = at + stop - start
            ids[at:end] = self._store.ids(document, start, stop)
            labels[at:end] = self._store.labels(document, start, stop)
            if self._restarts:
                labels[at] = IGNORE
                positions[at:] -= positions[at]  # to the end of the row: padding runs on from the last document
            at = end
        labels[0] = IGNORE
        arrays = {"input_ids": ids, "labels": labels, "position_ids": positions}
        return {name: torch.from_numpy(array) for name, array in arrays.items()}


def _pad_id(tokenizer: Any, pad_token_id: int | None) -> int:
    """Any id in the vocabulary will do: padding is never attended to by a real token and never in the loss."""
    for candidate in (
        pad_token_id,
        getattr(tokenizer, "pad_token_id", None),
        getattr(tokenizer, "eos_token_id", None),
    ):
        if candidate is not None:
            return int(candidate)
    return 0


def build_rows(
    source: Dataset,
    tokenizer: Any,
    seq_len: int,
    packing: Packing = "isolated",
    *,
    model_config: Any = None,
    pad_token_id: int | None = None,
    append_eos: bool = True,
    text_column: str = "text",
    num_proc: int | None = None,
    cache_dir: str | Path | None = None,
    main_first: AbstractContextManager[Any] | None = None,
) -> Rows:
    """Tokenises (cached), checks against the model, and packs.

    Args:
        source: from `load_source`.
        tokenizer: transformers tokenizer; None for pre-tokenised data.
        seq_len: tokens per row.
        packing: see the table above.
        model_config: transformers config of the model to train; ids and lengths are checked against it. None: no check.
        pad_token_id: what padding places hold; the tokenizer's pad, else end token when None.
        append_eos, text_column, num_proc, cache_dir, main_first: see `tokenise`.

    Raises:
        DataError: samples that cannot be encoded, ids outside the vocabulary, rows longer than the model, or nothing to
            learn from.
    """
    vocab_size, max_positions = model_limits(model_config)
    if len(source) == 0:
        raise DataError("the data set holds 0 samples")
    tokens = tokenise(
        source,
        tokenizer,
        append_eos=append_eos,
        text_column=text_column,
        num_proc=num_proc,
        cache_dir=cache_dir,
        main_first=main_first,
    )
    store = TokenStore(tokens)
    with placed(source):
        store.check_model(vocab_size, max_positions, seq_len)
    rows = Rows(store, seq_len, packing, _pad_id(tokenizer, pad_token_id))
    rows.turn_end = turn_end(source, tokenizer, text_column)
    if vocab_size is not None and rows.pad_token_id >= vocab_size:
        raise DataError(f"pad_token_id={rows.pad_token_id} is outside the model's vocabulary of {vocab_size}")
    level = logging.WARNING if rows.stats.documents_truncated or rows.stats.documents_without_targets else logging.INFO
    logger.log(level, "%s", rows.stats.describe(packing, seq_len))
    if cut_off := rows.stats.answers_cut_off:
        lost = (
            f"have no token of an answer within their first {seq_len} and train nothing: raise --seq_len, or take --packing isolated"
            if packing == "none"
            else f"have a prompt that fills a row of {seq_len} tokens: the answer is learned without that part of it. Raise --seq_len, or "
            "shorten these prompts"
        )
        logger.warning("%d of %d documents %s", cut_off, rows.stats.documents, lost)
    elif packing == "concatenate" and rows.stats.pieces_left_out:
        logger.warning(
            "%d windows of %d tokens lie within prompts and train nothing: raise --seq_len", rows.stats.pieces_left_out, seq_len
        )
    if rows.stats.target_tokens <= rows.stats.documents - rows.stats.documents_without_targets:
        logger.warning("no more than one token of a document is in the loss, as where all answers are empty: is that meant?")
    return rows


def stats_dict(rows: Rows) -> dict[str, int]:
    """The counts as plain numbers, for run.json."""
    return asdict(rows.stats)
