"""Folders as people have them: links of the hub's cache, leftovers of another save, old .bin files, half a download."""

import logging
import os

import pytest
import torch
from safetensors.torch import save_file

from bigtrain.errors import WeightsError, WrongWeightsError
from bigtrain.weights import load_into
from tests.unit.weights.damage import INDEX, SHARDS, Net, pristine, values, write


def loaded(folder, **kwargs):
    """What a load makes of a fresh model."""
    model = Net()
    load_into(model, folder, progress=False, **kwargs)
    return {name: value.detach() for name, value in model.state_dict().items()}


def equal(found, wanted):
    return found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


def refused(folder, *words):
    with pytest.raises(WeightsError) as caught:
        load_into(Net(), folder, progress=False)
    assert all(word in str(caught.value) for word in words), caught.value
    return caught.value


def test_links_of_a_hub_cache_are_followed(tmp_path):
    (tmp_path / "blobs").mkdir()
    snapshot = tmp_path / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    for number, (name, content) in enumerate(pristine().items()):
        (tmp_path / "blobs" / str(number)).write_bytes(content)
        (snapshot / name).symlink_to(f"../../blobs/{number}")
    (tmp_path / "model").symlink_to(snapshot)
    assert equal(loaded(snapshot), values()) and equal(loaded(tmp_path / "model"), values())


def test_a_link_to_nothing_is_named_with_its_target(tmp_path):
    shard = list(SHARDS)[1]
    folder = write(pristine(), tmp_path / "sharded")
    os.unlink(f"{folder}/{shard}")
    os.symlink("../blobs/12ab", f"{folder}/{shard}")
    assert refused(folder, shard, "../blobs/12ab", "incomplete download").file.endswith(shard)
    (tmp_path / "single").mkdir()
    (tmp_path / "single" / "model.safetensors").symlink_to("../blobs/34cd")
    refused(tmp_path / "single", "model.safetensors", "../blobs/34cd", "incomplete download")


def test_a_single_file_comes_before_an_index_as_in_from_pretrained(tmp_path, caplog):
    write(pristine(), tmp_path)
    other = {name: value + 1 for name, value in values().items()}
    save_file(other, tmp_path / "model.safetensors", {"format": "pt"})
    torch.save({}, tmp_path / "pytorch_model.bin")
    with caplog.at_level(logging.WARNING):
        assert equal(loaded(tmp_path), other)
    assert "holds both model.safetensors and" in caplog.text and INDEX in caplog.text


def test_one_file_under_two_names_is_refused(tmp_path):
    folder, (first, _) = write(pristine(), tmp_path), SHARDS
    os.symlink(first, f"{folder}/copy.safetensors")
    with open(f"{folder}/{INDEX}") as file:
        index = file.read()
    with open(f"{folder}/{INDEX}", "w") as file:
        file.write(index.replace(first, "copy.safetensors", 1))
    refused(folder, "embed.weight", "in two files", "copy.safetensors", first)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "config.json", INDEX])
def test_a_folder_in_the_place_of_a_file(tmp_path, name):
    folder = write(pristine(), tmp_path)
    if name != "config.json":
        os.unlink(f"{folder}/{INDEX}")
    os.mkdir(f"{folder}/{name}")
    assert refused(folder, name).file == f"{folder}/{name}"


def test_odd_values_in_config_json_do_not_stop_a_load(tmp_path):
    write({**pristine(), "config.json": b'{"text_config": "x", "quantization_config": []}'}, tmp_path)
    assert equal(loaded(tmp_path), values())


def bins(folder, **changed):
    """Two .bin shards and their index; values that are views, or not contiguous."""
    import json

    tensors = values()
    both = torch.cat([tensors["a.bias"], tensors["b.bias"]])
    tensors |= {"a.weight": tensors["a.weight"].t().contiguous().t(), "a.bias": both[:5], "b.bias": both[5:]} | changed
    weight_map = {}
    for number, names in enumerate(SHARDS.values(), 1):
        file = f"pytorch_model-{number:05d}-of-00002.bin"
        torch.save({name: tensors[name] for name in names}, folder / file)
        weight_map |= dict.fromkeys(names, file)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def test_bin_shards_with_views_and_parameters(tmp_path):
    assert equal(loaded(bins(tmp_path, **{"b.weight": torch.nn.Parameter(values()["b.weight"].double())})), values())


def test_bin_files_that_hold_no_plain_values_are_refused_before_a_read(tmp_path):
    dense = values()["b.weight"].float()
    for number, (value, word) in enumerate([(dense.to_sparse(), "sparse"), (dense.to("meta"), "meta device")]):
        (tmp_path / str(number)).mkdir()
        error = refused(bins(tmp_path / str(number), **{"b.weight": value}), "b.weight", word)
        assert error.tensor == "b.weight"
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    refused(tmp_path, "pytorch_model.bin", "is empty")
    torch.save({**values(), 5: dense}, tmp_path / "pytorch_model.bin")
    refused(tmp_path, "pytorch_model.bin", "found 5")
    torch.save({**values(), "x": Code(tmp_path / "ran")}, tmp_path / "pytorch_model.bin")
    error = refused(tmp_path, "pytorch_model.bin", "mkdir", "unpickling them can run code")
    assert "weights_only" not in str(error) and not (tmp_path / "ran").exists()  # torch's advice would run it


class Code:
    def __init__(self, folder):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (str(self.folder),)


def test_one_pattern_as_text_is_not_a_sequence_of_letters(tmp_path):
    """The "*" in "head.*" alone would let everything be missing."""
    save_file({name: value for name, value in values().items() if "a." not in name}, tmp_path / "model.safetensors")
    with pytest.raises(WrongWeightsError, match=r"missing, 2 tensors") as refused_:
        loaded(tmp_path, allow_missing="head.*")
    assert refused_.value.exit_code == 2 and WeightsError.exit_code == 1  # the folder is whole, and the wrong one
    assert len(loaded(tmp_path, allow_missing="a.*")) == 6


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a21\nsize 12345\n"
PAGE = b"\n<!DOCTYPE html>\n<html><title>404</title></html>"
STANDS = {"git lfs pull": LFS, "a web page": PAGE, "'Entry not found'": b"Entry not found", "empty: download": b""}


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "config.json", INDEX])
@pytest.mark.parametrize("word", STANDS)
def test_what_a_clone_or_a_download_left_in_the_place_of_a_file_is_told(tmp_path, name, word):
    """A pointer of git-lfs was a header that claims 2336927755350992246 bytes."""
    folder = write(pristine(), tmp_path)
    if name != "config.json":
        os.unlink(f"{folder}/{INDEX}")
    (tmp_path / name).write_bytes(STANDS[word])
    assert refused(folder, f"{folder}/{name} is ", word).file == f"{folder}/{name}"


def test_a_damaged_file_is_not_taken_for_another(tmp_path):
    folder = write(pristine(), tmp_path)
    (tmp_path / next(iter(SHARDS))).write_bytes(b"version 2 of something")
    refused(folder, "Not a safetensors file, or damaged")


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", list(SHARDS)[1]])
def test_a_link_to_itself_is_told_by_every_reader(tmp_path, name):
    """`build_model` ended in a bare OSError."""
    from bigtrain.errors import BigtrainError
    from bigtrain.models import build_model

    folder = write({**pristine(), "config.json": b'{"model_type": "gpt2", "n_layer": 1, "n_embd": 8, "n_head": 1}'}, tmp_path)
    (tmp_path / name).unlink(missing_ok=True)
    if name == "model.safetensors":
        os.unlink(f"{folder}/{INDEX}")
    (tmp_path / name).symlink_to(name)
    refused(folder, name, f"a link to {name}, which leads back to itself")
    with pytest.raises(BigtrainError, match=f"is a link to {name}, which leads back to itself"):
        build_model(folder, ds_config={"train_batch_size": 1, "bf16": {"enabled": True}})


def test_config_and_tokenizer_that_are_not_there_are_told_where_they_are_named(tmp_path, caplog):
    from bigtrain import shapes
    from bigtrain.errors import ModelError, UsageError
    from bigtrain.models.source import resolve
    from bigtrain.run.model_files import about_files
    from bigtrain.weights.deepspeed_export import _model_of

    for content, word in ((LFS, "git lfs pull"), (b"", "empty")):
        (tmp_path / "config.json").write_bytes(content)
        for error, read in ((UsageError, shapes.read_config), (ModelError, resolve), (UsageError, _model_of)):
            with pytest.raises(error, match=f"config.json.* is .*{word}"):
                read(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "gpt2", "n_layer": 1, "n_embd": 8, "n_head": 1}')
    (tmp_path / "tokenizer.json").write_bytes(PAGE)
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2TokenizerFast"}')
    (tmp_path / "model.safetensors").write_bytes(LFS)  # and weights that nobody wanted are no reason
    with pytest.raises(UsageError, match=r"tokenizer of X cannot be loaded: .*tokenizer\.json is a web page"):
        with about_files("tokenizer of X", str(tmp_path)):
            raise ValueError("expected value at line 1 column 1")
    assert _model_of(tmp_path)[1] is None
    assert "the export has no tokenizer" in caplog.text and "tokenizer.json is a web page" in caplog.text
