"""Where a loss came from: through the engine, or around it (the DDP fault).

A forward through `engine.module` skips DeepSpeed's bookkeeping: at stage 0 each rank then trains its own replica, at stage 3
the gradients of earlier micro steps are overwritten, both without an error. So every training forward marks what it returns,
and a backward from the wrong mark, from one of an earlier step, or outside of `engine.backward`, is refused as it starts.

A backward that gives no trained parameter a gradient passes: `torch.autograd.grad` for an input, or a loss of another engine's behind
this model while it is frozen. DeepSpeed's hooks on outputs must not see those: they would divide by the accumulation, and begin a
reduction. Attributes of its engine that are substituted, on the instance: _backward_prologue, _backward_prologue_per_tensor.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import torch

from bigtrain import ranks, zero
from bigtrain.engine import steps
from bigtrain.engine.misuse import Misuse, refuse_wrapped
from bigtrain.errors import BypassError, UsageError
from bigtrain.meeting import announce_failure
from bigtrain.models.compiled import without_wrappers

log = logging.getLogger(__name__)
_OUTPUT = "bigtrain_output"  # in the metadata of autograd's nodes
_taken: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()  # modules of engines that were not closed


def make_fit(module: Any) -> None:
    """Check that this is a module, not wrapped, that no engine trains already; its parts in `torch.compile(part)` get plain names.

    Raises:
        UsageError: saying what to hand in.
    """
    refuse_wrapped(module)
    trained = {id(p) for other in _taken for p in other.parameters()}
    if module in _taken or any(id(p) in trained for p in module.parameters()):
        raise UsageError(
            f"this {type(module).__name__} (or a part of it) belongs to an Engine that was not closed, and whose hooks are on its parameters. Call "
            "engine.close() on that one first."
        )
    without_wrappers(module)


def _noted(node: Any) -> dict[str, Any]:
    """What is noted at a node of autograd's graph, for as long as it lives."""
    noted: dict[str, Any] = node.metadata
    return noted


def _reaches(trained: Sequence[torch.nn.Parameter]) -> bool:
    """Whether the backward that runs now will put a gradient into one of these; call from a hook.

    `torch.autograd.grad` for an input (a penalty, an adversarial sample) and a backward through frozen weights do not.
    """
    for param in trained:
        if not param.requires_grad:
            continue
        with torch.enable_grad():
            node = torch.autograd.graph.get_gradient_edge(param).node
        try:
            if torch._C._will_engine_execute_node(node):
                return True
        except RuntimeError:  # torch.autograd.grad for this parameter: it is returned, and put nowhere
            return False
    return False


class Origin:
    """Marks the outputs of a module's training forwards and checks them at backward.

    Args:
        ds: DeepSpeed's engine.
        step: gives the number of steps done.
        in_step: True while gradients are being accumulated.
        traced: every gradient that arrives calls `check`.
    """

    def __init__(self, ds: Any, step: Callable[[], int], in_step: Callable[[], bool], traced: bool):
        module = ds.module
        self._step = step
        self._traced = traced
        self._reached = False  # by the backward that runs
        self._eval_told = self._released = False
        self.misuse = Misuse(ds, in_step, self.refuse)
        self._in_forward = False
        self._in_backward = False
        self._module = weakref.ref(module)
        self._trained = [p for p in module.parameters() if p.requires_grad]
        self._ds = ds
        self._begin, self._scaled, self._begun = ds._backward_prologue, ds._backward_prologue_per_tensor, False
        ds._backward_prologue, ds._backward_prologue_per_tensor = self._prologue, self._per_tensor
        self._handles = [module.register_forward_hook(self._mark)]
        if any(zero.is_partitioned(p) for p in module.parameters()):
            self._handles.append(module.register_forward_pre_hook(self._refuse_inference))
        _taken.add(module)

    def __deepcopy__(self, memo: dict[int, Any]) -> Origin:
        """A deep copy of the module has hooks that end here: it is not watched, and nothing of DeepSpeed's is copied for it."""
        return self

    def release(self) -> None:
        """Mark no more: the engine is closed."""
        self._released = True
        self.misuse.release()
        for name in ("_backward_prologue", "_backward_prologue_per_tensor"):
            self._ds.__dict__.pop(name, None)
        for handle in self._handles:
            handle.remove()
        if (module := self._module()) is not None:
            _taken.discard(module)

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """The engine's own forward."""
        if self._released:
            raise UsageError("this Engine is closed: nothing would be trained through it. Make another for the module.")
        self._in_forward = True
        try:
            yield
        except IndexError as error:
            if "index out of range in self" in str(error):  # of an embedding, on the CPU
                error.add_note(
                    "A token id (or a position) of this batch lies beyond an embedding's rows: the tokenizer is not this model's, or its embedding "
                    "must be resized (build_model(..., resize_vocab_to=len(tokenizer))), or the rows are longer than the model's positions."
                )
            raise
        except RuntimeError as error:
            if "BFloat16" in str(
                error
            ):  # two dtypes meet; `train_step` and `evaluate` convert what they are given, not what a model holds
                error.add_note(
                    "The weights are bfloat16: hand floating inputs over as x.to(engine.device, engine.dtype), or take "
                    "engine.train_step, which does it. Buffers keep the dtype they were built with: forward must cast them where it uses them."
                )
            raise
        except AttributeError as error:
            if "has no attribute 'ds_" in str(error):
                error.add_note(
                    "At stage 3 every parameter must be in the model when the Engine is built: one came into it since. Write values into the old "
                    "one (bigtrain.zero.gathered(params, modifier_rank=0)), or save, change the model and build a new Engine."
                )
            raise
        finally:
            self._in_forward = False

    @contextlib.contextmanager
    def backward(self) -> Iterator[None]:
        """The engine's own backward."""
        self._in_backward, self._reached, self._begun = True, False, False
        try:
            yield
        except RuntimeError as error:
            if "got [0] but expected shape" in str(error):  # of a parameter that was partitioned when the loss used it
                error.add_note(
                    "At stage 3 weights are empty outside of their own module's forward: a penalty on engine.module.parameters() counts none of "
                    "them. Give Engine(weight_decay=...), or use stage 0, 1 or 2 for another penalty."
                )
            raise
        finally:
            self._in_backward = False
        if self._traced and not self._reached:
            self.refuse(
                "the loss given to backward() does not depend on the model: no parameter got a gradient from it. Compute it from what "
                "engine(...) returned."
            )

    def questionable(self, loss: Any, planned: int) -> str:
        """Why this cannot be the loss of one of `planned` micro batches; empty if it can."""
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            what = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
            return f"backward() takes the loss, a tensor of one element; it got {what}. Call engine.backward(engine(**batch).loss)."
        if not loss.requires_grad:
            return "the loss given to backward() carries no gradient: it was detached, or computed under torch.no_grad()."
        divided: Any = loss.grad_fn
        if planned > 1 and divided is not None and divided.name() == "DivBackward0":
            (inner, _), *_ = divided.next_functions
            by: Any = getattr(divided, "_saved_other", None)
            known = (
                isinstance(by, torch.Tensor) and by.device.type == "cpu" and by.numel() == 1
            )  # a number in the script: no wait
            if known and float(by) == planned and inner is not None and _OUTPUT in inner.metadata:
                return (
                    f"the loss of a forward was divided by {planned}, the number of micro batches of a step: the engine takes their mean "
                    "itself, so that gradients would be that much too small. Call engine.backward(loss) without dividing."
                )
        return ""

    def tell_eval_mode(self) -> None:
        """Say once that a loop trains a model in evaluation mode: as `from_pretrained` returns it, or since an evaluation of its own."""
        module = self._module()
        if module is None or module.training or self._eval_told:
            return
        self._eval_told = True
        if ranks.is_main():
            log.warning(
                "step %d trains a model in evaluation mode: dropout is off, BatchNorm uses and keeps its running statistics, and transformers' "
                "gradient checkpointing does nothing. Call engine.train() before the loop and after an evaluation of your own (from_pretrained "
                "returns models in evaluation mode, build_model in training mode).",
                self._step() + 1,
            )

    def _mark(self, module: torch.nn.Module, _inputs: Any, output: Any) -> None:
        if not torch.is_grad_enabled() or module is not self._module():  # a deep copy has the hook too
            return
        check = self.check if self._in_forward else self._bypassed
        at = self._step()
        for tensor in steps.output_tensors(output):
            tensor.register_hook(lambda grad: check(at))
            if tensor.grad_fn is not None:
                _noted(tensor.grad_fn)[_OUTPUT] = True

    def _refuse_inference(self, module: torch.nn.Module, _inputs: Any) -> None:
        """Weights gathered in inference mode are inference tensors for good: the next training forward could not save them."""
        if torch.is_inference_mode_enabled() and not all(zero.is_available(p) for p in module.parameters()):
            raise UsageError(
                "a forward under torch.inference_mode() at stage 3 would leave weights behind that cannot be trained: use torch.no_grad()."
            )

    def _prologue(self) -> None:
        if self._in_backward:
            self._begun = True
            self._begin()

    def _per_tensor(self, grad: torch.Tensor) -> torch.Tensor:
        if not self._in_backward:
            return grad
        if not self._begun:  # DeepSpeed asks once for each forward, and a torch.autograd.grad came first
            self._prologue()
        scaled: torch.Tensor = self._scaled(grad)
        return scaled

    def check(self, at: int | None = None) -> None:
        """Called for gradients, of outputs with the number of steps done at their forward: refuse a backward that must not be."""
        if not self._in_backward:
            if not _reaches(self._trained):
                self._refuse_differentiated()
                return
            self.refuse(
                "loss.backward() was called directly: gradients would not be reduced over ranks and micro steps. "
                "Call engine.backward(loss). Another engine's backward may pass through this model (a generator's through its critic) "
                "while its parameters have requires_grad_(False)."
            )
        if at is not None and at != self._step():
            self.refuse(
                f"this loss came from a forward before step {self._step()}, and the weights have moved since: its gradient would be that of "
                "other weights. Call backward() before step(), or run the forward again."
            )
        self._reached = True

    def _refuse_differentiated(self) -> None:
        """At stage 3 a gradient that is differentiated again would be computed from weights that are not there any more."""
        if torch.is_grad_enabled() and any(zero.is_partitioned(p) and not zero.is_persistent(p) for p in self._trained):
            self.refuse(
                "torch.autograd.grad(..., create_graph=True) at stage 3: weights are let go of after each module's backward, and the second "
                "one would need them. Use stage 0, 1 or 2 for such a penalty."
            )

    def _bypassed(self, _at: int) -> None:
        if not _reaches(self._trained):
            return
        self.refuse(
            "this loss came from engine.module(...): each rank would train its own replica (or overwrite the gradients of "
            "earlier micro steps). Call the engine itself: loss = engine(**batch).loss."
        )

    def refuse(self, message: str) -> NoReturn:
        """Tell the other ranks, then raise BypassError."""
        announce_failure(self._step())
        raise BypassError(f"step {self._step() + 1}, rank {ranks.rank()}: {message}")
