"""Head and cross entropy of a micro step on the tape, for each way in which a loss is computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from bigtrain.plan.activations import fused_loss_rows
from bigtrain.plan.constants import CHUNK_LOGITS, SCALED_AT_A_TIME
from bigtrain.plan.inputs import PlanInput
from bigtrain.plan.tape import Tape


class Losses:
    """Forward and backward of the head and the cross entropy of one plan.

    Args:
        head: parameters of the head. tied: it is the embedding too.
        open_backward: the backward of the micro step begins. deliver: autograd delivers the gradient of a parameter.
    """

    def __init__(
        self,
        plan: PlanInput,
        tape: Tape,
        head: Sequence[int],
        tied: bool,
        open_backward: Callable[[], None],
        deliver: Callable[[int], None],
    ):
        self.plan, self.tape, self.head, self.tied = plan, tape, head, tied
        self.g, self.t = plan.geometry, plan.tokens
        self._open_backward, self._deliver = open_backward, deliver

    @property
    def sum_is_apart(self) -> bool:
        """Whether a tied matrix's two gradients have a sum beside them: a linear layer's is transposed, and autograd adds to none that is a
        view (torch/csrc/autograd/input_buffer.cpp `can_accumulate_inplace`)."""
        return self.tied and self.plan.loss_kind == "full"

    def run(self) -> None:
        """One micro step's."""
        match self.plan.loss_kind:
            case "full":
                self._full_loss()
            case "chunked":
                self._chunked_loss()
            case "fused":
                self._fused_loss()

    def _full_loss(self) -> None:
        tape, size = self.tape, self.t * self.g.vocab
        tape.hold("logits", 2 * size, "logits, bf16")
        if self.plan.scales_logits:
            tape.hold("scaled", 2 * size, "logits, bf16")
            tape.drop("logits")
        if self.g.soft_cap:
            tape.hold("cap", 4 * size, "logits, soft cap")
        tape.hold("logits32", 4 * size, "logits, fp32")
        tape.hold("logp", 4 * size, "log-probabilities, fp32")
        tape.drop("logits32", "logits", "scaled")
        self.tape.phase("loss backward")
        self._open_backward()
        tape.hold("nll", 4 * size, "loss gradients, fp32")
        tape.hold("dlogits32", 4 * size, "loss gradients, fp32")
        tape.drop("nll", "logp")
        if self.plan.scales_logits:
            tape.hold("dscaled", 2 * size, "loss gradient, bf16")
            tape.drop("dlogits32")
        tape.hold("dlogits", 2 * size, "loss gradient, bf16")
        tape.drop("dlogits32", "dscaled", "cap")
        self._head_backward()

    def _chunked_loss(self) -> None:
        """bigtrain/kernels/cross_entropy.py: both gradients are made in forward, the head's summed in fp32."""
        tape, row, trains = self.tape, "loss in chunks", self._head_trains()
        hidden, weight = 2 * self.t * self.g.hidden, self.g.vocab * self.g.hidden
        logits = min(self.t, max(1, CHUNK_LOGITS[self.plan.device] // self.g.vocab)) * self.g.vocab
        tape.hold("dhidden", hidden, row)
        if trains:
            tape.hold("dhead32", 4 * weight, row)
        # In fp32 beside the chunk's own; a cap keeps its tanh for the gradient.
        tape.touch(max((10 if self.g.soft_cap else 6) * logits, 2 * logits + 2 * weight if trains else 0), row)
        if trains:
            tape.hold("dhead", 2 * weight, row)
            tape.drop("dhead32")
        tape.phase("loss backward")
        self._open_backward()
        # Scaled where they lie, 2^22 elements in fp32 at a time.
        tape.touch(2 * 4 * min(SCALED_AT_A_TIME, max(hidden // 2, weight if trains else 0)), row)
        tape.drop("dhead")
        self._deliver_head_grad()
        tape.drop("dhidden")

    def _fused_loss(self) -> None:
        """bigtrain/kernels/cross_entropy.py with Triton: both gradients are made in forward and scaled where they lie."""
        weight = self.g.vocab * self.g.hidden
        self.tape.hold("dhidden", 2 * self.t * self.g.hidden, "fused loss")
        if self._head_trains():
            self.tape.hold("dhead", 2 * weight, "fused loss")
        # The chunk's logits become their gradient in place, and the head's gradient is summed up in place.
        self.tape.touch(2 * fused_loss_rows(self.g.vocab, self.t) * self.g.vocab, "fused loss")
        self.tape.phase("loss backward")
        self._open_backward()
        self.tape.drop("dhead")
        self._deliver_head_grad()
        self.tape.drop("dhidden")

    def _head_backward(self) -> None:
        self.tape.hold("dhidden", 2 * self.t * self.g.hidden, "backward, residual stream")
        if self._head_trains():
            self.tape.hold("dhead", 2 * self.g.vocab * self.g.hidden, "gradient of the head")
        self.tape.drop("dlogits", "dhead")
        self._deliver_head_grad()
        self.tape.drop("dhidden")

    def _head_trains(self) -> bool:
        return any(self.plan.trains[i] for i in self.head)

    def _deliver_head_grad(self) -> None:
        if self.tied and self._head_trains():
            # Autograd waits for the embedding's part before it hands the sum over.
            self.tape.hold("tied", 2 * self.g.vocab * self.g.hidden, "gradient of the tied matrix")
            return
        for i in self.head:
            self._deliver(i)
