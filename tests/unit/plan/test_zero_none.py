"""What stages that keep whole gradients in fp32 copy to reduce them, against DeepSpeed's own buckets."""

import types

import torch
from torch._utils import _flatten_dense_tensors

from bigtrain import shapes
from bigtrain.plan import ZeroSettings, plan_input, predict
from bigtrain.plan.tape import Tape
from bigtrain.plan.zero_none import REDUCED_AT_ONCE_ELEMS, Bf16Sharding, WholeSharding, copied_elems


def deepspeeds(sizes):
    """Elements of the largest copy that `allreduce_no_retain` makes of such tensors."""
    from deepspeed.runtime.engine import MEMORY_OPT_ALLREDUCE_SIZE, DeepSpeedEngine

    copies = [0]

    def reduce(bucket, *_):
        whole = torch.empty(2, 3)
        assert _flatten_dense_tensors([whole]).data_ptr() == whole.data_ptr()
        copies.append(sum(x.numel() for x in bucket) if len(bucket) > 1 else 0)

    tensors = [torch.empty(size, device="meta") for size in sizes]
    DeepSpeedEngine.allreduce_no_retain(
        types.SimpleNamespace(allreduce_and_copy=reduce), tensors, None, MEMORY_OPT_ALLREDUCE_SIZE
    )
    return max(copies)


def test_gradients_that_are_copied_together_are_those_of_deepspeeds_buckets():
    limit = REDUCED_AT_ONCE_ELEMS
    for sizes in ([limit + 1, 5], [5, limit + 1], [limit, 5, 7], [7], [], [3, 4], [limit // 2, limit, limit // 3, limit // 5]):
        assert copied_elems(sizes) == deepspeeds(sizes)
    assert copied_elems([limit + 1, 5]) == 0 and copied_elems([5, limit + 1]) == limit + 6


def test_two_flat_groups_are_reduced_where_they_lie():
    """GPT-2 XL and Qwen2.5 1.5B at stage 1 were planned with 1.9 GB more, which was the peak of both."""
    plan = plan_input(shapes.config_dict("gpt2-xl"), seq_len=1024, settings=ZeroSettings(stage=1, grad_bytes=4), kernels="hf")
    assert len(Bf16Sharding(plan, Tape()).sums()) == 2
    assert "reduce copy" not in {row.name for row in predict(plan).gpu.rows}
    whole = WholeSharding(plan.but(stage=0), Tape()).sums()
    assert sum(whole) == plan.trained_elems and copied_elems(whole) > REDUCED_AT_ONCE_ELEMS
