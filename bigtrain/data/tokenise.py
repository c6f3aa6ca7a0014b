"""Samples to token ids, once per node: the result is an Arrow file that all ranks map into memory.

Columns of the result: `input_ids` (int32 list) and, where not every token is a target, `labels` (int32 list, -100 = not
in the loss). One output row per sample, in the same order, so that a row's index names the sample in every message.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bigtrain.data.chat import IGNORE, ChatEncoder, Encoded, clean_messages, encode_spans
from bigtrain.data.jsonfile import PLACE, coded_columns, decoded
from bigtrain.data.parquetfile import place_of
from bigtrain.data.source import key_of, refuse_cache, sample_kind
from bigtrain.errors import DataError

if TYPE_CHECKING:
    from datasets import Dataset


_FORMAT = 3  # raise it when the meaning of the cached columns changes, so that older caches are not read
_INT32_MAX = 2**31 - 1
_LOSS_MASKS = ("completion_mask", "assistant_masks", "assistant_mask", "loss_mask", "label_mask", "loss_weights")
_CALL_CHARS = 4_000_000  # characters handed to the tokenizer in one call

Columns = dict[str, list[Any]]
Encoder = Callable[[Columns, list[int]], Columns]


def _end_id(tokenizer: Any) -> int:
    if tokenizer is None or tokenizer.eos_token_id is None:
        raise DataError(
            "the tokenizer has no end token (eos_token), so a model trained on this would never stop: name it "
            "as eos_token in tokenizer_config.json (from Python, build_rows(..., append_eos=False) trains without one on purpose)"
        )
    return tokenizer.eos_token_id


def _portions(texts: list[str]) -> Iterator[list[str]]:
    """Consecutive texts in groups of about `_CALL_CHARS`: a fast tokenizer needs over 100 bytes a token while it runs."""
    group: list[str] = []
    size = 0
    for text in texts:
        if group and size + len(text) > _CALL_CHARS:
            yield group
            group, size = [], 0
        group.append(text)
        size += len(text)
    if group:
        yield group


def _line_parts(text: str) -> list[str]:
    """A very long text in parts of about `_CALL_CHARS`, cut after a line break where one is near."""
    parts, begin = [], 0
    while len(text) - begin > _CALL_CHARS:
        line_end = text.rfind("\n", begin + _CALL_CHARS // 2, begin + _CALL_CHARS)
        end = line_end + 1 if line_end >= 0 else begin + _CALL_CHARS
        parts.append(text[begin:end])
        begin = end
    return [*parts, text[begin:]]


def _encode_long(tokenizer: Any, text: str) -> np.ndarray:
    """One document part by part, with the tokenizer's special tokens at its begin only."""
    first, *rest = _line_parts(text)
    head = tokenizer(first, verbose=False)["input_ids"]
    if head and head[-1] == tokenizer.eos_token_id and not first.endswith(tokenizer.eos_token):
        head.pop()  # a tokenizer that appends the end token itself would put it into the middle
    ids = [np.asarray(head, np.int32)]
    for part in rest:
        ids.append(np.asarray(tokenizer(part, add_special_tokens=False, verbose=False)["input_ids"], np.int32))
    return np.concatenate(ids)


def text_encoder(tokenizer: Any, append_eos: bool, text_column: str) -> Encoder:
    """Plain text: the tokenizer's own special tokens, and the end token after each document.

    Documents above `_CALL_CHARS` are tokenised in parts cut after line breaks, so that a file of gigabytes needs no memory
    of a hundred times its size.
    """
    eos = _end_id(tokenizer) if append_eos else None

    def ended(ids: np.ndarray) -> np.ndarray:
        return ids if eos is None or (len(ids) and ids[-1] == eos) else np.append(ids, np.int32(eos))

    def encode(batch: Columns, samples: list[int]) -> Columns:
        texts = batch[text_column]
        for text, sample in zip(texts, samples):
            if text is None:
                raise DataError(f"sample {sample}: it has no {text_column!r} (no such key, or null): remove it, or give it one")
            if not isinstance(text, str):
                raise DataError(f"sample {sample}: {text_column!r} is {type(text).__name__} ({text!r:.80}), not a string")
        ids: list[np.ndarray] = []
        for group in _portions(texts):
            if len(group[0]) > _CALL_CHARS:  # then it is alone
                ids.append(ended(_encode_long(tokenizer, group[0])))
                continue
            # verbose=False: documents longer than the model are cut into pieces later, which is no reason to warn
            rows = tokenizer(group, return_attention_mask=False, verbose=False)["input_ids"]
            ids += [ended(np.asarray(row, np.int32)) for row in rows]
        return {"input_ids": ids}

    return encode


def _each(encode_one: Callable[[dict[str, Any], int], Encoded]) -> Encoder:
    """Makes a batch encoder of one that takes a sample and its index."""

    def encode(batch: Columns, samples: list[int]) -> Columns:
        pairs = []
        for place, sample in enumerate(samples):
            pairs.append(encode_one({name: values[place] for name, values in batch.items()}, sample))
        return {"input_ids": [ids for ids, _ in pairs], "labels": [labels for _, labels in pairs]}

    return encode


def chat_encoder(tokenizer: Any) -> Encoder:
    """Column `messages`, and `tools` (a list, or JSON text of one) where there is such a column."""
    chat = ChatEncoder(tokenizer)

    def encode_one(row: dict[str, Any], sample: int) -> Encoded:
        tools = row.get("tools")
        try:
            tools = json.loads(tools) if isinstance(tools, str) else tools
        except ValueError as error:
            raise DataError(f"sample {sample}: 'tools' is no JSON: {error}: {tools!r:.80}") from error
        return chat.encode(clean_messages(row["messages"], sample), sample, tools=tools or None)

    return _each(encode_one)


def completion_encoder(tokenizer: Any) -> Encoder:
    """Columns `prompt` and `completion`, both text or both lists of messages; loss on the completion and its end token."""
    eos = _end_id(tokenizer)
    chat: list[ChatEncoder] = []  # built when the first conversation comes: text needs no chat template

    def encode_one(row: dict[str, Any], sample: int) -> Encoded:
        prompt, completion = row["prompt"], row["completion"]
        if isinstance(prompt, str) and isinstance(completion, str):
            text = prompt + completion
            ids, labels = encode_spans(tokenizer, text, [(len(prompt), len(text))], special=True)
            if ids and ids[-1] == eos:  # some tokenizers append it themselves, outside of every span of text
                labels[-1] = eos
                return ids, labels
            return [*ids, eos], [*labels, eos]
        if isinstance(prompt, str) or isinstance(completion, str):
            raise DataError(
                f"sample {sample}: prompt is {prompt!r:.80} and completion {completion!r:.80}; both must be text, or both messages"
            )
        context, answer = clean_messages(prompt, sample), clean_messages(completion, sample)
        if not chat:
            chat.append(ChatEncoder(tokenizer))
        return chat[0].encode(context + answer, sample, first_answer=len(context))

    return _each(encode_one)


def _integers(value: Any, column: str, sample: int) -> list[int]:
    if not isinstance(value, list) or not all(isinstance(x, int) and not isinstance(x, bool) for x in value):
        raise DataError(f"sample {sample}: {column!r} must be a list of integers, got {value!r:.80}")
    for x in value:
        if not (0 <= x <= _INT32_MAX or (column == "labels" and x == IGNORE)):
            raise DataError(f"sample {sample}: {column!r} holds {x}, which is no token id")
    return value


def _refuse_packed(row: dict[str, Any], sample: int) -> None:
    """Positions that begin again tell documents apart in a row that is packed already."""
    positions = row.get("position_ids")
    if isinstance(positions, list) and positions != list(range(len(positions))):
        raise DataError(
            f"sample {sample}: 'position_ids' do not run 0, 1, 2, ...: of a row that is packed already each document must be given as "
            "a sample of its own (they are packed here); where it is not, remove the column"
        )


def _refuse_masks(columns: list[str]) -> None:
    """What says in other trainers which tokens are learned would be passed over here.

    Raises:
        DataError: names the column.
    """
    found = [name for name in columns if name in _LOSS_MASKS]
    if found and "labels" not in columns:
        raise DataError(
            f"the samples have {found} beside 'input_ids', which is not read: give 'labels', with {IGNORE} where a token is not "
            "to be learned, or remove the column to learn every token"
        )


def ids_encoder(has_labels: bool) -> Encoder:
    """Column `input_ids` as it is, with `labels` and `attention_mask` where given.

    Padding is recognised by `attention_mask` only, never by its id: where pad and end token are the same id, masking by id
    would take the end token out of the loss as well.
    """

    def encode_one(row: dict[str, Any], sample: int) -> Encoded:
        ids = _integers(row["input_ids"], "input_ids", sample)
        _refuse_packed(row, sample)
        labels = _integers(row["labels"], "labels", sample) if has_labels else ids
        mask = row.get("attention_mask")
        for column, value in (("labels", labels), ("attention_mask", mask)):
            if value is not None and len(value) != len(ids):
                raise DataError(f"sample {sample}: {len(ids)} input_ids but {len(value)} {column}; they must be as many")
        if mask is None:
            return ids, labels
        if other := [value for value in mask if value not in (0, 1)]:
            raise DataError(
                f"sample {sample}: 'attention_mask' holds {other[0]!r}; it must be 1 for a token and 0 for padding. A row of several "
                "documents, numbered there, must be given as one sample a document (they are packed here)"
            )
        real = [i for i, keep in enumerate(mask) if keep]
        return [ids[i] for i in real], [labels[i] for i in real]

    encode_both = _each(encode_one)

    def encode(batch: Columns, samples: list[int]) -> Columns:
        out = encode_both(batch, samples)
        return out if has_labels else {"input_ids": out["input_ids"]}

    return encode


def make_encoder(columns: list[str], tokenizer: Any, *, append_eos: bool, text_column: str) -> tuple[Encoder, bool]:
    """The encoder for these columns, and whether it yields labels of its own."""
    kind = sample_kind(columns, text_column)
    if kind == "input_ids":
        _refuse_masks(columns)
        return ids_encoder("labels" in columns), "labels" in columns
    if tokenizer is None:
        raise DataError(f"the samples are {kind!r}, which needs a tokenizer; only 'input_ids' can do without")
    if kind == "messages":
        return chat_encoder(tokenizer), True
    if kind == "prompt":
        return completion_encoder(tokenizer), True
    return text_encoder(tokenizer, append_eos, text_column), False


def turn_end(source: Dataset, tokenizer: Any, text_column: str) -> int | None:
    """Id of the token that ends an answer, where the samples are conversations; None for other samples, and for none at all."""
    kind = sample_kind([name for name in source.column_names if name != PLACE], text_column)
    if kind not in ("messages", "prompt"):
        return None
    first = next(iter(decoded(source[:1], coded_columns(source)).get(kind, ())), "")
    return None if isinstance(first, str) else ChatEncoder(tokenizer).turn_end


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """A hash of all that decides which ids come out; equal for equal tokenizers in different processes.

    Not the library's pickle hash: that one changes after the first call, since fast tokenizers keep the last call's
    padding and truncation in their state, and every second start would tokenise anew.
    """
    if tokenizer is None:
        return "none"
    if getattr(tokenizer, "is_fast", False):
        state = json.loads(tokenizer.backend_tokenizer.to_str())
        state.pop("padding", None)
        state.pop("truncation", None)
    else:
        state = {"vocab": sorted(tokenizer.get_vocab().items()), "init": repr(sorted(tokenizer.init_kwargs.items()))}
    extra = [type(tokenizer).__name__, repr(tokenizer.chat_template), repr(tokenizer.special_tokens_map)]
    return hashlib.sha256(json.dumps([state, extra], sort_keys=True).encode()).hexdigest()


def _without_nulls(value: Any) -> Any:
    """A value of a typed table without the keys that Arrow has added, with null, to make all rows alike: a tool call has the
    arguments of all tool calls there. JSON has no such keys, and what is null there is meant."""
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


@contextmanager
def placed(source: Dataset) -> Iterator[None]:
    """A DataError that names a sample by its number gets the place in the files where it stands, as far as that is known."""
    try:
        yield
    except DataError as error:
        named = re.match(r"sample (\d+): ", str(error))
        at = int(named[1]) if named else 0
        place = (source[at].get(PLACE) or place_of(source, at)) if named else None
        if place is None:
            raise
        raise DataError(f"{place}: {error}") from error


@contextmanager
def _as_data_error(cache: Path) -> Iterator[None]:
    """What Arrow and tokenizers raise about values, in the words of this package: bytes that are no UTF-8, for one."""
    try:
        yield
    except (ValueError, TypeError, KeyError) as error:
        raise DataError(f"the samples cannot be tokenised: {type(error).__name__}: {error}") from error
    except OSError as error:
        refuse_cache(error, cache)
        raise


@contextmanager
def _same_environ() -> Iterator[None]:
    """datasets leaves a copy in the place of `os.environ` where it starts processes: what holds the old one would see no change after."""
    kept, name = os.environ, "TOKENIZERS_PARALLELISM"
    before = kept.get(name)
    try:
        yield
    finally:
        os.environ = kept  # noqa: B003  # the object that was there, not a copy
        kept.pop(name, None) if before is None else kept.update({name: before})


def tokenise(
    source: Dataset,
    tokenizer: Any,
    *,
    append_eos: bool = True,
    text_column: str = "text",
    num_proc: int | None = None,
    cache_dir: str | Path | None = None,
    main_first: AbstractContextManager[Any] | None = None,
) -> Dataset:
    """Tokenises every sample, or opens the cached result of an equal call.

    Args:
        source: data set with one of the known columns (see `sample_kind`).
        tokenizer: transformers tokenizer; None is enough for pre-tokenised data.
        append_eos: put the end token after each plain-text document (chat and completions always end with one).
        text_column: the column of plain text.
        num_proc: processes to tokenise with.
        cache_dir: folder of the cached results; a folder in `datasets`' own cache when None.
        main_first: context in which the first rank of a node runs before the others, so that one process tokenises and
            the others find the file.

    Raises:
        DataError: unknown columns or a sample that cannot be encoded, named by its index.
    """
    import datasets

    columns = [name for name in source.column_names if name != PLACE]
    encode, has_labels = make_encoder(columns, tokenizer, append_eos=append_eos, text_column=text_column)
    coded = coded_columns(source)
    typed = [
        n
        for n in ("messages", "tools", "prompt", "completion")
        if n in columns and n not in coded and "Json" not in repr(source.features[n])
    ]

    def encoder(batch: Columns, samples: list[int]) -> Columns:
        filled = {name: [_without_nulls(value) for value in batch[name]] for name in typed}
        return encode(decoded(batch | filled, coded), samples)

    key = [_FORMAT, source._fingerprint, tokenizer_fingerprint(tokenizer), append_eos, text_column, source.column_names]
    fingerprint = key_of(key)
    folder = Path(cache_dir) if cache_dir is not None else Path(datasets.config.HF_DATASETS_CACHE) / "bigtrain"
    integers = datasets.Sequence(datasets.Value("int32"))
    features = {"input_ids": integers} | ({"labels": integers} if has_labels else {})
    with main_first or nullcontext(), placed(source), _as_data_error(folder), _same_environ():
        folder.mkdir(parents=True, exist_ok=True)
        return source.map(
            encoder,
            with_indices=True,
            batched=True,
            batch_size=256,
            remove_columns=source.column_names,
            features=datasets.Features(features),
            num_proc=num_proc,
            cache_file_name=str(folder / f"tokens-{fingerprint}.arrow"),
            new_fingerprint=fingerprint,
            load_from_cache_file=True,
            desc="tokenise",
        )
