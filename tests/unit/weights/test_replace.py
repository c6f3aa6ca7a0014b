"""What an export replaces: an earlier one of its own kind, known by the mark in its weights, and nothing else."""

import pytest
import torch
from safetensors.torch import save_file

from bigtrain import cli
from bigtrain.errors import UsageError, WeightsError
from bigtrain.weights import adapters, export_model
from bigtrain.weights.header import encode_header
from bigtrain.weights.replace import METADATA, beside_adapter, refuse_foreign

SMALL = ("config.json", "model.safetensors.index.json", "tokenizer.json", "spiece.model", "modeling_own.py")


def _put(folder, *names):
    folder.mkdir(exist_ok=True)
    for name in names:
        (folder / name).mkdir() if name.endswith("/") else (folder / name).touch()


@pytest.mark.parametrize(
    "more",
    ["COMMIT", "rank-00000-of-00001.safetensors", "adapter_model.safetensors", "a.bin", "model-of-mine.safetensors", "sub/"],
)
def test_a_checkpoint_an_adapter_and_a_folder_of_models_are_no_earlier_export(tmp_path, more):
    head, _ = encode_header([("a", "F32", (0,))], METADATA)
    _put(tmp_path, *SMALL, "additional_chat_templates/")
    (tmp_path / "model-00001-of-00001.safetensors").write_bytes(head)
    refuse_foreign(str(tmp_path))
    _put(tmp_path, more)
    with pytest.raises(UsageError, match="is not an earlier export"):
        refuse_foreign(str(tmp_path))


def test_a_model_from_elsewhere_stays_whatever_is_said(tmp_path, capsys):
    """--overwrite replaced a downloaded base model: its files are those of an export, but for the mark."""
    base, run = tmp_path / "base", tmp_path / "run"
    _put(base, *SMALL)
    _put(run)
    save_file({"weight": torch.ones(2, 2)}, base / "model.safetensors", {"format": "pt"})
    for words in ([], ["--overwrite"]):
        assert cli.main(["export", str(run), str(base), *words]) == 2
        said = capsys.readouterr().err
        assert "that no export of bigtrain wrote (model.safetensors: no mark" in said and "--overwrite" not in said
    with pytest.raises(UsageError, match="remove it yourself first"):
        export_model(torch.nn.Linear(2, 2), base, dtype="float32")
    (base / "model.safetensors").write_bytes(b"no header")
    with pytest.raises(UsageError, match="no export of bigtrain wrote"):
        export_model(torch.nn.Linear(2, 2), base, dtype="float32")
    (base / "model.safetensors").unlink()
    with pytest.raises(UsageError, match="is not an earlier export"):
        export_model(torch.nn.Linear(2, 2), base, dtype="float32")
    assert sorted(p.name for p in base.iterdir()) == sorted(SMALL)


def test_an_export_replaces_an_earlier_one_also_of_a_model_without_a_config(tmp_path):
    for value in (1.0, 2.0):
        model = torch.nn.Linear(2, 2)
        torch.nn.init.constant_(model.weight, value)
        export_model(model, tmp_path / "out", dtype="float32")
    from safetensors import safe_open

    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "writer": "bigtrain"}
        assert file.get_tensor("weight").tolist() == [[2.0, 2.0], [2.0, 2.0]]


@pytest.mark.parametrize("more", ["checkpoint-2/", "optimizer.pt", "notes.txt"])
def test_an_adapter_replaces_adapters_only(tmp_path, more):
    beside = [
        "README.md",
        "additional_chat_templates/",
        "preprocessor_config.json",
        "sentencepiece.bpe.model",
        "tokenizer_config.json",
    ]
    _put(tmp_path, "adapter_config.json", "adapter_model.safetensors", *beside)
    assert beside_adapter(str(tmp_path)) == [name.rstrip("/") for name in beside]
    _put(tmp_path, more)
    with pytest.raises(WeightsError, match=f"holds {more.rstrip('/')}, other things"):
        beside_adapter(str(tmp_path))


def test_what_stands_beside_an_adapter_goes_on_standing_there(tmp_path):
    """A folder with a processor's files was refused, and the tokenizer's went with the adapter before."""
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(torch.nn.Sequential(torch.nn.Linear(2, 2)), LoraConfig(r=1, target_modules=["0"]))
    out = tmp_path / "adapter"
    first = adapters.export_adapter(model, out)
    (out / "preprocessor_config.json").write_text("{}")
    _put(out, "additional_chat_templates/")
    (out / "additional_chat_templates" / "tool_use.jinja").write_text("{{ x }}")
    (out / "adapter_model.safetensors").write_bytes(b"old")
    assert adapters.export_adapter(model, out) == first
    assert (out / "preprocessor_config.json").read_text() == "{}"
    assert (out / "additional_chat_templates" / "tool_use.jinja").read_text() == "{{ x }}"
    assert (out / "adapter_model.safetensors").stat().st_size > 100
