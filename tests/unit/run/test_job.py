"""From arguments to a job: what is seen before the data is read."""

import json
from dataclasses import replace

import pytest
from transformers import AutoTokenizer, LlamaConfig

from bigtrain.data.demo import train_tokenizer
from bigtrain.errors import UsageError
from bigtrain.run.arguments import TrainArguments
from bigtrain.run.job import choose_seq_len, tell_foreign_tokenizer

ARGS = TrainArguments(model_name_or_path="m", train_data="d", output_dir="o", ds_config="c")


def test_rows_longer_than_the_model_are_refused_before_the_data_is_read():
    config = LlamaConfig(max_position_embeddings=64)
    assert choose_seq_len(ARGS, config) == choose_seq_len(replace(ARGS, seq_len=64), config) == 64
    with pytest.raises(UsageError, match="seq_len 65 is above the max_position_embeddings 64 of m"):
        choose_seq_len(replace(ARGS, seq_len=65), config)


def test_a_tokenizer_that_is_not_the_models_is_told(tmp_path, caplog):
    for name, text in (("own", "one two three "), ("other", "qux zip vow ")):
        (tmp_path / name).write_text(json.dumps({"text": text * 20}) + "\n")
        train_tokenizer(tmp_path / name, tmp_path / f"{name}-model", 270)
    words = (tmp_path / "other-model" / "tokenizer.json").read_text()
    (tmp_path / "other-model" / "tokenizer.json").write_text(_moved(words))
    args = replace(ARGS, model_name_or_path=str(tmp_path / "own-model"))
    for name, told in (("own-model", 0), ("other-model", 1)):
        folder = str(tmp_path / name)
        tell_foreign_tokenizer(replace(args, tokenizer_name_or_path=folder), AutoTokenizer.from_pretrained(folder))
        assert caplog.text.count("is another tokenizer than that of") == told


def _moved(text):
    """The same tokenizer with the ids of its bytes the other way round."""
    tokenizer = json.loads(text)
    vocab = tokenizer["model"]["vocab"]
    top = max(vocab.values())
    tokenizer["model"]["vocab"] = {t: i if t.startswith("<|") else top + 5 - i for t, i in vocab.items()}
    return json.dumps(tokenizer)
