"""Parameter names and shapes from the config alone against the real classes on the meta device."""

import functools
import json
import subprocess
import sys

import pytest
import torch
import transformers

from bigtrain import shapes
from bigtrain.errors import UsageError
from bigtrain.plan.families import contradictions, model_parameters, parameters_from_shapes, supported
from bigtrain.plan.family_others import ROBERTA, T5
from tests.unit.plan.family_configs import CAUSAL, OTHER

CASES = {name: ("AutoModelForCausalLM", config) for name, config in CAUSAL.items()} | OTHER


def build(auto_class, config):
    return _built(auto_class, json.dumps(config))


@functools.cache  # several tests look at the same model, and none changes it
def _built(auto_class, config):
    with torch.device("meta"):
        return getattr(transformers, auto_class).from_config(transformers.AutoConfig.for_model(**json.loads(config)))


def check_equal(model, planned):
    real = [(name, tuple(p.shape)) for name, p in model.named_parameters()]
    assert [(p.name, p.shape) for p in planned.items] == real
    assert planned.elems == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("name", CASES)
def test_small_configs_equal_the_real_class_name_by_name(name):
    auto_class, config = CASES[name]
    check_equal(build(auto_class, config), model_parameters(config))


def test_at_least_twenty_families():
    assert len({config["model_type"] for _, config in CASES.values()}) >= 20
    assert {config["model_type"] for _, config in CASES.values()} <= set(supported())


# Text families whose class defaults are a real model: a config.json that leaves every size out.
# (These classes cannot be built from their own defaults: no number of key/value heads, no size of a head, or no experts.)
DECODER_KINDS = sorted({c["model_type"] for c in CAUSAL.values()} - {"nemotron", "ministral", "hunyuan_v1_dense", "dots1"})
DEFAULT_SIZED = [*DECODER_KINDS, "bert", *ROBERTA, *T5, "vit", "gemma3", "llava"]


@pytest.mark.parametrize("kind", DEFAULT_SIZED)
def test_left_out_sizes_are_the_class_defaults(kind):
    auto_class = {c["model_type"]: a for a, c in OTHER.values()}.get(kind, "AutoModelForCausalLM")
    check_equal(build(auto_class, {"model_type": kind}), model_parameters({"model_type": kind}))


@pytest.mark.parametrize("name", shapes.names())
def test_presets_equal_the_real_class(name):
    config = shapes.config_dict(name)
    auto_class = "AutoModelForImageTextToText" if "vision_config" in config else "AutoModelForCausalLM"
    check_equal(build(auto_class, config), model_parameters(config))


@pytest.mark.parametrize(
    ("name", "elems"),
    [  # published counts, and those that issues name
        ("llama-8b", 8_030_261_248), ("llama-8.36b", 8_361_000_000), ("llama-13b", 13_015_864_320),
        ("llama-20b", 20_000_000_000), ("gpt-neox-20b", 20_554_567_680),
    ],
)  # fmt: skip
def test_presets_have_the_size_that_they_are_named_after(name, elems):
    assert model_parameters(shapes.config_dict(name)).elems == pytest.approx(elems, rel=0.02)


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma2", "gpt2", "opt"])
@pytest.mark.parametrize("tied", [True, False])
def test_tied_and_untied(name, tied):
    auto_class, config = CASES[name]
    config = {**config, "tie_word_embeddings": tied}
    planned = model_parameters(config)
    check_equal(build(auto_class, config), planned)
    assert bool(planned.tied) is tied


@pytest.mark.parametrize("name", CASES)
def test_saved_config_json_is_enough(name, tmp_path):
    auto_class, config = CASES[name]
    model = build(auto_class, config)
    model.config.save_pretrained(tmp_path)
    check_equal(model, model_parameters(json.loads((tmp_path / "config.json").read_text())))


LLAVA, QWEN_VL = (CASES[name][1] for name in ("llava", "qwen2_vl"))


@pytest.mark.parametrize(
    "config",
    [
        *(
            {k: v for k, v in c.items() if k != "num_key_value_heads"}
            for name, c in CAUSAL.items()
            if "num_key_value_heads" in c and name != "nemotron"
        ),
        {**CAUSAL["gpt2"], "hidden_size": 96},
        {**CAUSAL["bloom"], "n_embed": 96},
        {**CAUSAL["falcon"], "n_embed": 96},
        {**CAUSAL["falcon-40b-like"], "num_ln_in_parallel_attn": 0},
        {**CAUSAL["mixtral"], "num_experts": 3},
        {**CAUSAL["gpt_oss"], "num_experts": 3},
        {**CAUSAL["qwen3_moe"], "num_local_experts": 3},
        {**CAUSAL["olmoe"], "num_local_experts": 3},
        {**CAUSAL["deepseek_v3"], "num_local_experts": 8},
        {**CASES["t5"][1], "hidden_size": 96},
        {**CASES["t5-gated"][1], "num_hidden_layers": 3},
        {**CASES["t5-gated"][1], "is_gated_act": False},
        {**CASES["mt5"][1], "feed_forward_proj": "relu", "is_gated_act": True},
        {**CAUSAL["olmoe"], "head_dim": 10},
        {**CAUSAL["stablelm"], "head_dim": 10},
        {**CAUSAL["cohere2"], "use_qk_norm": True},
        {**CAUSAL["deepseek_v3"], "mlp_bias": True},
        {**CASES["vit"][1], "head_dim": 10},
        {**CASES["bert"][1], "tie_word_embeddings": False},
        {**CASES["xlm-roberta"][1], "tie_word_embeddings": False},
        {**QWEN_VL, "text_config": {**QWEN_VL["text_config"], "head_dim": 10}},
        {**CAUSAL["opt"], "hidden_size": 96, "word_embed_proj_dim": None},
        {k: v for k, v in LLAVA.items() if k != "vision_config"},
        {**LLAVA, "vision_feature_layer": [-2, -1]},
        {**LLAVA, "text_config": {**LLAVA["text_config"], "tie_word_embeddings": True}},
        {**LLAVA, "text_config": CAUSAL["gemma"]},
        {**QWEN_VL, "text_config": {**QWEN_VL["text_config"], "tie_word_embeddings": True}},
    ],
    ids=lambda c: f"{c['model_type']} {len(repr(c))}",
)
def test_what_a_config_leaves_out_or_calls_otherwise_is_what_the_class_makes_of_it(config):
    kind = config["model_type"]
    auto_class = next(a for a, c in CASES.values() if c["model_type"] == kind)
    check_equal(build(auto_class, config), model_parameters(config))


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({**CAUSAL["llama"], "architectures": ["LlamaForSequenceClassification"]}, "names LlamaForSequenceClassification"),
        ({**CAUSAL["qwen3"], "architectures": ["Qwen3Model"]}, r"of 'qwen3' the planner counts \.\.\.ForCausalLM"),
        ({**CASES["bert"][1], "architectures": ["BertForPreTraining"]}, "names BertForPreTraining"),
        ({**CAUSAL["gpt2"], "add_cross_attention": True}, "add_cross_attention"),
        ({**LLAVA, "text_config": CAUSAL["gpt2"]}, "language model 'gpt2'"),
        ({**LLAVA, "vision_config": {"model_type": "pixtral"}}, "vision tower 'pixtral'"),
    ],
)
def test_what_is_not_counted_is_said_to_be(config, said):
    with pytest.raises(UsageError, match=f"{said}.*--shapes"):
        model_parameters(config)


def test_every_other_family_of_transformers_is_refused():
    for kind in {*transformers.CONFIG_MAPPING} - {*supported()}:
        with pytest.raises(UsageError, match="is not known to the planner"):
            model_parameters({"model_type": kind})


def test_unknown_family_is_refused_with_the_way_out():
    with pytest.raises(UsageError, match=r"'lama' is not known.*llama.*--shapes"):
        model_parameters({"model_type": "lama"})


def test_missing_and_wrong_sizes_are_named():
    with pytest.raises(UsageError, match="hidden_size = -3"):
        model_parameters({"model_type": "llama", "hidden_size": -3})
    with pytest.raises(UsageError, match="'patch_size'"):
        model_parameters({"model_type": "vit", "patch_size": None})


def test_one_size_under_two_names_is_told():
    config = {"model_type": "gpt2", "n_embd": 64, "n_head": 4, "n_layer": 2, "vocab_size": 100}
    assert contradictions(config) == contradictions({**config, "hidden_size": 64}) == []
    said = contradictions({**config, "hidden_size": 128})
    assert (
        len(said) == 1 and "hidden_size = 128 and n_embd = 64, two names of one size for 'gpt2': hidden_size counts" in said[0]
    )


def test_a_gate_that_contradicts_its_activation_is_told():
    assert contradictions({"model_type": "t5", "feed_forward_proj": "gated-gelu", "is_gated_act": True}) == []
    said = contradictions({"model_type": "umt5", "feed_forward_proj": "relu", "is_gated_act": True})
    assert len(said) == 1 and "is_gated_act = True, which contradict each other: is_gated_act counts" in said[0]


@pytest.mark.parametrize("nested", [False, True])
def test_quantised_weights_are_not_planned_as_bf16(nested):
    section = {"quantization_config": {"quant_method": "gptq", "bits": 4}}
    config = {**shapes.config_dict("llama-tiny"), **({"text_config": section} if nested else section)}
    with pytest.raises(UsageError, match=r"quantization_config \(gptq\): quantised weights cannot be trained in full"):
        model_parameters(config)


def test_shapes_of_any_module():
    module = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.LayerNorm(5))
    pairs = [[n, list(p.shape)] for n, p in module.named_parameters()]
    planned = parameters_from_shapes(pairs)
    assert planned.elems == sum(p.numel() for p in module.parameters())
    assert [p.block for p in planned.items] == [0, 0, 1, 1]
    for wrong in ([], [["a"]], [["a", [0]]], [["a", [2]], ["a", [2]]], "x"):
        with pytest.raises(UsageError, match="shapes"):
            parameters_from_shapes(wrong)


def test_unknown_preset_gives_nearest_names():
    with pytest.raises(UsageError, match="llama-8b"):
        shapes.config_dict("preset:llama-8")
    assert shapes.config_dict("preset:LLAMA-8b") == shapes.config_dict("llama-8b")


def test_planning_imports_no_torch():
    code = "import sys, bigtrain.plan.cli; print([m for m in ('torch', 'numpy', 'transformers') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"
