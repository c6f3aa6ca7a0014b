"""Batches to a device: what needs no GPU of it. The kernel: tests/gpu/test_upload_gpu.py."""

import pytest
import torch

from bigtrain.engine import steps
from bigtrain.errors import DataError
from bigtrain.kernels.upload import _words, to_device

CPU = torch.device("cpu")


def test_without_a_gpu_it_is_an_ordinary_move():
    held = []
    source = torch.arange(5)
    assert to_device(source, CPU, held) is source and held == []


def test_words_are_the_same_bytes():
    source = torch.arange(6, dtype=torch.int32)
    assert _words(source).dtype == torch.int64 and _words(source).numel() == 3
    assert _words(source[1:]).dtype == torch.uint8 and _words(source[1:]).numel() == 20
    assert _words(source[1:3]).data_ptr() == source[1:].data_ptr()
    assert torch.equal(_words(source[2:]).view(torch.int32), source[2:])
    assert _words(torch.tensor(True)).dtype == torch.uint8


def test_floating_inputs_get_the_models_dtype_others_their_own():
    moved = steps.move({"x": torch.ones(2), "ids": torch.ones(2, dtype=torch.int64), "name": "n"}, CPU, torch.bfloat16, [])
    assert moved["x"].dtype == torch.bfloat16 and moved["ids"].dtype == torch.int64 and moved["name"] == "n"


def test_tensors_in_mappings_and_lists_are_moved_too():
    there = torch.device("meta")
    batch = {"images": {"pixels": torch.ones(2, 3), "sizes": [torch.ones(2, dtype=torch.int64), 5]}, "mask": None}
    moved = steps.move(batch, there, torch.bfloat16)
    assert moved["images"]["pixels"].device == there and moved["images"]["pixels"].dtype == torch.bfloat16
    assert moved["images"]["sizes"][0].device == there and moved["images"]["sizes"][1] == 5 and moved["mask"] is None
    assert steps.samples(batch) == 2


def test_a_batch_without_tensors_says_what_it_holds():
    with pytest.raises(DataError, match="'ids': 'ndarray'"):
        steps.samples({"ids": torch.ones(2).numpy()})


def test_a_loss_that_would_be_divided_twice_is_refused():
    """Of transformers' Trainer: with it a gradient was too small by the number of micro batches, without a word."""
    with pytest.raises(DataError, match="num_items_in_batch = 31"):
        steps.counted({"labels": torch.ones(2, 3), "num_items_in_batch": 31}, steps.samples)
    assert steps.counted({"labels": torch.ones(2, 3), "num_items_in_batch": None}, steps.samples) == 2
