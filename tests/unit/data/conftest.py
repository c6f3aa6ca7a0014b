"""Small real tokenizers, and a private `datasets` cache so that tests neither read nor leave anything in the user's."""

from __future__ import annotations

import json

import pytest

CHATML_WITHOUT_MARKS = (
    "{% for m in messages %}{{ '<|turn|>' + m['role'] + '\n' + m['content'] + '<|turn_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|turn|>assistant\n' }}{% endif %}"
)


@pytest.fixture(autouse=True)
def private_cache(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / ".hf-cache")
    datasets.disable_progress_bars()


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory):
    """A byte-level BPE of 400 ids trained on a few lines."""
    from bigtrain.data.demo import train_tokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    lines = ["def add(a, b): return a + b", "the user asks and the assistant answers", "one two three four five"] * 20
    (folder / "c.jsonl").write_text("\n".join(json.dumps({"text": line}) for line in lines))
    train_tokenizer(folder / "c.jsonl", folder, 400)
    return folder


@pytest.fixture
def tokenizer(tokenizer_dir):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(tokenizer_dir))


@pytest.fixture
def plain_chat_tokenizer(tokenizer):
    """The same with a template that does not mark answers."""
    tokenizer.chat_template = CHATML_WITHOUT_MARKS
    return tokenizer


@pytest.fixture
def make_rows():
    """make_rows(list of id lists, seq_len, packing, ...) -> Rows of pre-tokenised documents."""
    from datasets import Dataset

    from bigtrain.data.pack import build_rows

    def make(documents, seq_len, packing="isolated", labels=None, **kwargs):
        columns = {"input_ids": documents}
        if labels is not None:
            columns["labels"] = labels
        return build_rows(Dataset.from_dict(columns), kwargs.pop("tokenizer", None), seq_len, packing, **kwargs)

    return make
