"""The most that forward and backward of real models hold at once on a CPU, tensor by tensor, beside what the plan's tape holds."""

import weakref

import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from bigtrain.kernels.attach import use_chunked_loss, why_not_chunked
from bigtrain.models import enable_activation_checkpointing
from bigtrain.models.checkpointing import disable_cache
from bigtrain.plan import plan_input
from bigtrain.plan.device import Run
from bigtrain.plan.tape import Tape
from tests.unit.plan.test_activations import NO_DROPOUT, sized

ROWS, LENGTH, LAYERS = 2, 320, 3
LONG = 768
POSITIONS = {"max_position_embeddings": 512, "n_positions": 512}
# One of each order of operations.
FAMILIES = (
    "llama", "llama-tied-biased", "mistral", "qwen2", "qwen3", "gemma", "gemma3_text", "phi3", "phi", "olmo", "olmo2", "exaone4",
    "granite", "cohere", "starcoder2", "stablelm", "smollm3", "glm", "glm4", "nemotron", "arcee", "gpt2", "gpt_neox", "gptj", "opt",
    "falcon-40b-like", "qwen2_moe", "qwen3_moe", "olmoe", "granitemoe",
)  # fmt: skip


class _Held(TorchDispatchMode):
    """Bytes of all storages that operators made and that are still there. most: by phase."""

    def __init__(self, model):
        super().__init__()
        self.held, self.phase, self.most = 0, "forward", {}
        self._known = {x.untyped_storage()._cdata: None for x in (*model.parameters(), *model.buffers())}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in tree_iter(out):
            if isinstance(x, torch.Tensor) and x.untyped_storage()._cdata not in self._known:
                self._born(x.untyped_storage())
        self.most[self.phase] = max(self.most.get(self.phase, 0), self.held)
        return out

    def _born(self, storage):
        key, size = storage._cdata, storage.nbytes()

        def gone(_):
            self.held -= size
            del self._known[key]

        self._known[key] = weakref.ref(storage, gone)
        self.held += size


class _Taken:
    """A stage of ZeRO that takes each gradient as it comes, and lets it go."""

    def __init__(self, plan, tape):
        self.plan, self.tape = plan, tape

    def grad(self, i):
        self.tape.touch(2 * self.plan.parameters.items[i].elems, "gradient")

    def __getattr__(self, name):
        return lambda *args, **how: None


def config_of(name):
    config = {**sized(name, LAYERS, **NO_DROPOUT), "embd_pdrop": 0.0, **POSITIONS}
    return {key: value for key, value in config.items() if key != "mlp_only_layers"}


def counted(config, recomputes, attention="sdpa", length=LENGTH):
    """(most held in forward, in backward); gradients of weights go as soon as they are there."""
    hf = transformers.AutoConfig.for_model(**config)
    model = transformers.AutoModelForCausalLM.from_config(hf, dtype=torch.bfloat16, attn_implementation=attention).train()
    (enable_activation_checkpointing if recomputes else disable_cache)(model)
    use_chunked_loss(model)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    ids = torch.randint(3, 100, (ROWS, length))
    with _Held(model) as held:
        loss = model(input_ids=ids, labels=ids).loss
        held.phase = "backward"
        loss.backward()
    return held.most["forward"], held.most["backward"]


def planned(config, recomputes, **more):
    plan = plan_input(
        config, micro_batch=ROWS, device="cpu", kernels="hf", chunks_loss=True,
        checkpointing="full" if recomputes else "none", **{"seq_len": LENGTH, **more},
    )  # fmt: skip
    tape = Tape(unit=1)
    Run(plan, tape, _Taken(plan, tape)).micro_steps(steady=True)
    most = tape.ledger().by_phase
    return max(most["steady forward"], most["loss"]), max(most["loss backward"], most["backward"])


@pytest.mark.parametrize("recomputes", (False, True), ids=("keeps", "recomputes"))
@pytest.mark.parametrize("name", FAMILIES)
def test_the_plan_holds_what_a_real_step_holds(name, recomputes):
    config = config_of(name)
    assert max(planned(config, recomputes)) == pytest.approx(max(counted(config, recomputes)), rel=0.03)


@pytest.mark.parametrize("recomputes", (False, True), ids=("keeps", "recomputes"))
@pytest.mark.parametrize("name", ("bloom", "gpt_oss", "gemma2", "llama", "gpt2"))
def test_the_plan_holds_what_attention_of_single_operations_holds(name, recomputes):
    """In long rows scores are nearly all there is: forward and backward each by itself, as either can be the most of a step."""
    config = {**config_of(name), "max_position_embeddings": LONG, "n_positions": LONG}
    for said, is_there in zip(
        planned(config, recomputes, attention="eager", seq_len=LONG), counted(config, recomputes, "eager", LONG)
    ):
        assert said == pytest.approx(is_there, rel=0.05)


@pytest.mark.parametrize("recomputes", (False, True), ids=("keeps", "recomputes"))
def test_falcons_positions_are_a_bias_of_all_scores_that_stays_to_the_end_of_backward(recomputes):
    """Of each head, made once for all blocks: 1 GiB of 32 heads and four rows of 2,048 tokens, which were not planned."""
    config = {**config_of("falcon-rw-like"), "alibi": True}
    bias = 2 * ROWS * LENGTH * LENGTH * 6
    most = max(counted(config, recomputes))
    assert max(planned(config, recomputes)) == pytest.approx(most, rel=0.03)
    assert bias > 4 * 0.03 * most


@pytest.mark.parametrize("in_chunks", (False, True))
def test_a_tied_matrix_has_the_sum_of_its_gradients_beside_them_unless_the_loss_goes_in_chunks(in_chunks):
    """Autograd adds to no gradient that is a view, as a linear layer's is: 2 GB of Command-R7B that were not planned."""
    config = {**config_of("gemma"), "vocab_size": 4000}
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config), dtype=torch.bfloat16)
    if in_chunks:
        use_chunked_loss(model)
    ids = torch.randint(3, 100, (1, 8))
    loss = model(input_ids=ids, labels=ids).loss
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as seen:
        loss.backward()
    sums = [e.name for e in seen.events() if e.name.startswith("aten::add") and e.input_shapes[:1] == [[4000, 192]]]
    assert sums == ["aten::add_" if in_chunks else "aten::add"]
    plan = plan_input(config, micro_batch=1, seq_len=8, device="cpu", kernels="hf", chunks_loss=in_chunks)
    tape = Tape(unit=1)
    run = Run(plan, tape, _Taken(plan, tape))
    run.micro_steps(steady=True)
    assert run.losses.sum_is_apart != in_chunks
    # Both gradients and their sum, or one added to the other: the logits of eight tokens are less.
    of_one = 2 * 4000 * 192
    assert (2 if in_chunks else 3) * of_one <= tape.ledger().by_phase["backward"] < (2.5 if in_chunks else 3.5) * of_one


@pytest.mark.parametrize("name", ("gemma2", "cohere2", "granite"))
def test_scaled_and_capped_logits_are_there_a_chunk_at_a_time(name):
    """A cap's chunk holds its tanh too. Whole, they and what the loss makes of them were 12 to 14 bytes of each."""
    config = {**config_of(name), "vocab_size": 30_000, "eos_token_id": 2}
    counts, plans = counted(config, True, "eager"), planned(config, True, attention="eager")
    assert plans == pytest.approx(counts, rel=0.02)
    assert max(counts) < 4 * ROWS * LENGTH * 30_000


@pytest.mark.parametrize("name", FAMILIES)
def test_the_plan_knows_whose_loss_goes_in_chunks(name):
    config = config_of(name)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config))
    plan = plan_input(config, chunks_loss=True)
    assert (why_not_chunked(model) is None) == (plan.loss_kind != "full")
