"""Inputs of blocks on the host: the pieces in which they lie there."""

import pytest
import torch

from bigtrain.models.hostinputs import parts_of
from bigtrain.plan.pinned import pieces


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int8])
@pytest.mark.parametrize("shape", [(1, 3), (2, 100, 129), (1, 300, 1001), (0, 8)])
def test_the_parts_are_the_tensor(shape, dtype):
    tensor = torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)
    parts = parts_of(tensor)
    assert [part.nbytes for part in parts] == pieces(tensor.nbytes)
    for part in parts:
        part += 1  # views: what is written into them is in the tensor
    assert torch.equal(torch.cat([*parts, tensor.new_empty(0)]), tensor.flatten())


def test_parts_of_what_does_not_lie_in_one_row_are_its_values():
    tensor = torch.arange(200_000.0).reshape(400, 500).t().requires_grad_()
    parts = parts_of(tensor)
    assert torch.equal(torch.cat(parts), tensor.flatten()) and not parts[0].requires_grad
