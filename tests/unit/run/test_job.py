"""From arguments to a job: what is seen before the data is read."""

import json
from dataclasses import replace

import pytest
from transformers import AutoTokenizer, LlamaConfig

from bigtrain.data import plan_steps
from bigtrain.data.demo import train_tokenizer
from bigtrain.data.isolation_choice import VARLEN
from bigtrain.errors import CheckpointError, ConfigError, ModelError, UsageError
from bigtrain.models.source import config_from
from bigtrain.run.argument_problems import ATTENTIONS, all_of, find_problems
from bigtrain.run.arguments import TrainArguments
from bigtrain.run.job import Job, read_ds_config
from bigtrain.run.model_files import about_files, choose_seq_len, load_tokenizer, tell_foreign_tokenizer

ARGS = TrainArguments(model_name_or_path="m", train_data="d", output_dir="o", ds_config="c")


def test_rows_longer_than_the_model_are_refused_before_the_data_is_read():
    config = LlamaConfig(max_position_embeddings=64)
    assert choose_seq_len(ARGS, config) == choose_seq_len(replace(ARGS, seq_len=64), config) == 64
    with pytest.raises(
        UsageError, match="seq_len 65 is above the max_position_embeddings 64 of m: write --seq_len 64, or less"
    ):
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


@pytest.mark.parametrize(
    ("value", "said"), [(100, "not a multiple of the number of attention heads"), ("192", "expected int, got str")]
)
def test_a_value_that_a_config_cannot_have_is_told_for_tokenizer_and_model(tmp_path, value, said):
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_attention_heads": 6, "hidden_size": value}
    (tmp_path / "config.json").write_text(json.dumps(config))
    args = replace(ARGS, model_name_or_path=str(tmp_path))
    with pytest.raises(ModelError, match=said):
        config_from(args.model_name_or_path, args.trust_remote_code)
    with pytest.raises(UsageError, match=said), about_files("tokenizer"):
        load_tokenizer(args)


def test_an_empty_file_beside_a_tokenizer_hides_nothing_of_what_is_wrong(tmp_path):
    (tmp_path / "trainer_state.json").touch()
    with pytest.raises(UsageError, match=r"loaded: ValueError: no such class$"), about_files("tokenizer", str(tmp_path)):
        raise ValueError("no such class")
    (tmp_path / "special_tokens_map.json").touch()
    with pytest.raises(UsageError, match=r"special_tokens_map.json is empty: .* \(ValueError: no such class\)$"), about_files("tokenizer", str(tmp_path)):  # fmt: skip
        raise ValueError("no such class")


def test_all_that_is_wrong_with_a_ds_config_is_in_one_report():
    """What DeepSpeed would not take, and what it would and bigtrain does not follow; a section that is none is no traceback."""
    wrong = {
        "zero_optimization": {"stage": 7},
        "optimizer": {"type": "Muon", "params": {"lr": 1e-3, "momentum": 0.5}},
        "scheduler": "none",
    }
    with pytest.raises(ConfigError) as refused:
        read_ds_config(replace(ARGS, ds_config=json.dumps(wrong)))
    for part in ("zero_optimization.stage = 7", "optimizer.params.momentum", "scheduler"):
        assert part in str(refused.value)


def test_an_attention_that_nobody_knows_is_told_with_the_other_arguments():
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    mapped = dict(ALL_ATTENTION_FUNCTIONS.items())  # other tests register functions of their own
    theirs = {name for name, f in mapped.items() if f.__module__.startswith("transformers.") and "paged" not in name}
    assert len(theirs) > 3
    assert theirs <= set(ATTENTIONS)
    for name in ("spda", VARLEN, *ATTENTIONS, "kernels-community/flash-attn"):
        told = [
            line for line in find_problems(replace(ARGS, attn_implementation=name)) if line.startswith("--attn_implementation")
        ]
        assert bool(told) == (name in ("spda", VARLEN))
    of_its_own = replace(ARGS, attn_implementation="mine", trust_remote_code=True)
    assert not [line for line in find_problems(of_its_own) if "attn_implementation" in line]


def test_what_several_checks_refuse_is_said_at_once():
    config = LlamaConfig(max_position_embeddings=64, num_hidden_layers=2)
    checks = [
        lambda: choose_seq_len(replace(ARGS, seq_len=65), config),
        lambda: 3,
        lambda: _raise(ModelError("too many tokens")),
    ]
    with pytest.raises(UsageError, match=r"(?s)2 problems:.* --seq_len 65 is above.* too many tokens"):
        all_of(*checks)
    with pytest.raises(ModelError, match=r"^too many tokens$"):  # alone as it is
        all_of(*checks[1:])
    assert all_of(lambda: 1, lambda: 2) == [1, 2]


def _raise(error):
    raise error


@pytest.mark.parametrize(
    "content, said",
    [("[]", "is no JSON object, {...}, but a list"), ("", "config.json' is empty"), ("{", "config.json' is not JSON")],
)
def test_a_config_that_is_none_is_told_with_the_other_arguments(tmp_path, content, said):
    """A list ended in a TypeError of the tokenizer's."""
    (tmp_path / "config.json").write_text(content)
    told = [line for line in find_problems(replace(ARGS, model_name_or_path=str(tmp_path))) if line.startswith("--model_name")]
    assert len(told) == 1 and said in told[0]
    told = "\n".join(find_problems(replace(ARGS, model_name_or_path=__file__)))
    assert "test_job.py is a file: name the folder of the model" in told


def test_a_tokenizers_file_that_is_no_json_is_named(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    with (
        pytest.raises(UsageError, match=r"tokenizer\.json is no JSON: download or copy it again"),
        about_files("tokenizer", str(tmp_path)),
    ):
        load_tokenizer(replace(ARGS, model_name_or_path=str(tmp_path)))


def test_steps_that_were_planned_from_a_damaged_checkpoint_with_another_batch_are_not_trained():
    """160 rows; steps of 8 rows before, of 4 now: 20 are left after step 10, but 24 after step 8."""
    plan = plan_steps(160, 2, 1, 2, done=(10, 80))
    job = Job(
        args=ARGS,
        resolved=None,
        tokenizer=None,
        seq_len=8,
        model_config=None,
        config_overrides={},
        resize_vocab_to=None,
        steps=plan,
    )
    with pytest.raises(CheckpointError, match=r"checkpoint-10 is damaged.*move it away, and start again from checkpoint-8"):
        job.going_on({}, 8, 64, (10, 80))
