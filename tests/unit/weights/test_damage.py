"""A damaged checkpoint is a named error, never garbage; in one process here, on two ranks in tests/ranks."""

from collections import Counter

import torch

from bigtrain.errors import WeightsError
from tests.unit.weights.damage import SHARDS, Net, damage, pristine, values, write


def test_sound_files_load(tmp_path):
    from bigtrain.weights import load_into

    model = Net()
    report = load_into(model, write(pristine(), tmp_path), progress=False, verify=True)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in values().items())
    assert report.bytes_read == sum(value.numel() * 2 for value in values().values()) and report.verified == 6


def test_two_thousand_damaged_checkpoints(tmp_path):
    from bigtrain.weights import load_into

    sound, outcomes = values(), Counter()
    for seed in range(2000):
        what, files = damage(seed)
        folder = write(files, tmp_path)
        model = Net()
        try:
            load_into(model, folder, progress=False)
        except WeightsError as error:
            outcomes["refused"] += 1
            assert error.file and str(tmp_path) in str(error), what
            untouched = all(torch.isnan(value).all() for value in model.state_dict().values())
            assert untouched, f"{what}: a tensor was read before the check was over"
        else:
            outcomes["harmless"] += 1
            wrong = [name for name, value in sound.items() if not torch.equal(model.state_dict()[name], value)]
            assert not wrong, f"{what}: garbage in {wrong}"
    assert outcomes["refused"] > 1900, outcomes


def test_B21_a_damaged_shard_is_named_with_expected_and_actual_bytes(tmp_path):
    from bigtrain.weights import load_into

    shard = list(SHARDS)[1]
    size = len(pristine()[shard])
    cases = {
        "cut": ({shard: pristine()[shard][:-100]}, (shard, str(size), str(size - 100), "cut off")),
        "absent": ({shard: None}, (shard, "missing", "Download")),
    }
    for what, (change, words) in cases.items():
        files = {name: content for name, content in (pristine() | change).items() if content is not None}
        try:
            load_into(Net(), write(files, tmp_path), progress=False)
        except WeightsError as error:
            assert all(word in str(error) for word in words), (what, str(error))
            assert error.file.endswith(shard)
        else:
            raise AssertionError(what)
