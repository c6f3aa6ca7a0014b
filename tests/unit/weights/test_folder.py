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
    refused(tmp_path, "pytorch_model.bin", "Damaged")
    torch.save({**values(), 5: dense}, tmp_path / "pytorch_model.bin")
    refused(tmp_path, "pytorch_model.bin", "found 5")


def test_one_pattern_as_text_is_not_a_sequence_of_letters(tmp_path):
    """The "*" in "head.*" alone would let everything be missing."""
    save_file({name: value for name, value in values().items() if "a." not in name}, tmp_path / "model.safetensors")
    with pytest.raises(WrongWeightsError, match=r"missing, 2 tensors") as refused_:
        loaded(tmp_path, allow_missing="head.*")
    assert refused_.value.exit_code == 2 and WeightsError.exit_code == 1  # the folder is whole, and the wrong one
    assert len(loaded(tmp_path, allow_missing="a.*")) == 6
