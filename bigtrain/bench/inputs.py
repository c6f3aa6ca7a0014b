"""What the cells of a sweep train on, made once: random tokens in rows of exactly seq_len, a tokenizer that is not used.

bigtrain reads them as pre-tokenised samples through its own data path, the peers read the same rows as an array.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

LEAST_ROWS = 256


def make_rows(folder: Path, *, vocab: int, seq_len: int, at_least: int) -> Path:
    """Random token ids: FOLDER/rows.parquet (column `input_ids`) and rows.npy (int32 [rows, seq_len]); returns the folder.

    Args:
        vocab: ids are below it. at_least: rows of one global batch; the number is rounded up, so that cells share files.
    """
    rows = LEAST_ROWS
    while rows < at_least:
        rows *= 2
    place = folder / f"v{vocab}-s{seq_len}-r{rows}"
    if (place / "rows.parquet").exists():
        return place
    import numpy as np
    import pyarrow as pa
    from pyarrow import parquet

    place.mkdir(parents=True, exist_ok=True)
    ids = np.random.default_rng(0).integers(0, vocab, (rows, seq_len), dtype=np.int32)
    np.save(place / "rows.npy", ids)
    column = pa.ListArray.from_arrays(pa.array(np.arange(rows + 1, dtype=np.int32) * seq_len), pa.array(ids.reshape(-1)))
    draft = place / "draft"
    parquet.write_table(pa.table({"input_ids": column}), draft)
    os.replace(draft, place / "rows.parquet")  # last: its presence says that all is there
    return place


def make_tokenizer(folder: Path) -> Path:
    """A tokenizer of three special tokens and one word: launch/train.py wants one, pre-tokenised data does not use it."""
    place = folder / "tokenizer"
    words = {"<s>": 0, "</s>": 1, "<unk>": 2, "word": 3}
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None, "normalizer": None, "post_processor": None, "decoder": None,
        "pre_tokenizer": {"type": "Whitespace"},
        "added_tokens": [
            {"id": i, "content": w, "special": True, **dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)}
            for w, i in list(words.items())[:3]
        ],
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "<unk>"},
    }  # fmt: skip
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>",
             "pad_token": "</s>"}  # fmt: skip
    place.mkdir(parents=True, exist_ok=True)
    (place / "tokenizer.json").write_text(json.dumps(tokenizer))
    (place / "tokenizer_config.json").write_text(json.dumps(about))
    return place


def vocabulary(model_config: dict[str, Any]) -> int:
    """Number of token ids of a model, also where the text model is a part of it."""
    text = model_config.get("text_config") or {}
    return int(model_config.get("vocab_size") or text.get("vocab_size") or 32000)
