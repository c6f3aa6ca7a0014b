"""Sliding windows: of which blocks, how many tokens are seen, and what a dense mask costs where no kernel keeps them."""

from __future__ import annotations

import pytest
from transformers import AutoConfig

from bigtrain import shapes
from bigtrain.diagnostics.metrics import FlopsFormula
from bigtrain.plan import attention_of
from bigtrain.plan.activations import block_bytes
from bigtrain.plan.geometry import attended, geometry, windows_of
from tests.unit.plan.family_configs import CAUSAL


@pytest.mark.parametrize("kind", ["mistral", "ministral", "gemma3_text", "cohere2", "olmo3", "exaone4", "phi3", "starcoder2"])
def test_windows_are_those_of_the_config_that_transformers_makes(kind):
    given = {**CAUSAL[kind], "num_hidden_layers": 13, "sliding_window": 32}
    made = AutoConfig.for_model(**given)
    listed = getattr(made, "layer_types", None) or ["sliding_attention"] * 13
    expected = (32,) * listed.count("sliding_attention")
    assert geometry(given).windows == expected
    assert windows_of(made.to_dict()) == expected


@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
@pytest.mark.parametrize(
    "more", [{}, {"max_window_layers": 4}, {"max_window_layers": 40}, {"sliding_window": None, "max_window_layers": 4}]
)
@pytest.mark.parametrize("used", [True, False])
def test_windows_from_a_layer_on_where_the_config_uses_them(kind, more, used):
    given = {**CAUSAL[kind], "num_hidden_layers": 31, "use_sliding_window": used, **more}
    made = AutoConfig.for_model(**given)
    expected = (made.sliding_window,) * made.layer_types.count("sliding_attention")
    assert geometry(given).windows == expected == windows_of(made.to_dict())
    assert bool(expected) == (used and more.get("max_window_layers") != 40 and "sliding_window" not in more)


def test_families_without_one_have_none():
    for kind in ("llama", "qwen2", "gpt_neox", "mixtral"):
        assert geometry(CAUSAL[kind]).windows == ()
    assert geometry({**CAUSAL["mistral"], "sliding_window": None}).windows == ()


@pytest.mark.parametrize("window", [1, 3, 7, 8, 9])
def test_what_is_seen_is_twice_the_average(window):
    """Counted key by key; a causal row's own token counts as half, as everywhere here."""
    rows, s = 2, 8
    seen = sum(min(i + 1, window) for i in range(s)) - (s if window >= s else window) / 2
    assert attended(rows, s, (window, window)) == pytest.approx(rows * (2 * seen / s if window < s else s))
    assert attended(3, s, (window,)) == pytest.approx(2 * s + attended(1, s, (window,)))


def test_flops_of_windows():
    gemma = geometry(shapes.config_dict("gemma-3-1b"))
    assert gemma.windows == (512,) * 22
    formula = FlopsFormula(trained_parameters=1000, layers=26, hidden=10, seq_len=4096, windows=gemma.windows)
    assert formula.per_token == 6000 + 6 * 10 * (4 * 4096 + 22 * 960)
    assert "6 x 4 layers x 4,096 tokens x 10 (causal attention) + 6 x 22 layers x 960 tokens x 10 (windows of 512)" in str(
        formula
    )


def test_only_a_dense_mask_is_counted_as_one():
    config = shapes.config_dict("phi-3-mini")
    of = {how: geometry(config, how) for how in ("sdpa", "varlen")}
    assert of["sdpa"].keeps.window == 2047 and of["varlen"].keeps.window == 0
    dense, kept = (block_bytes(of[how], 4096, "liger", 0, 4096) for how in ("sdpa", "varlen"))
    assert dense != kept
    assert of["sdpa"].attended(4096) == 32 * 4096  # every key is multiplied and then hidden
    assert of["varlen"].attended(4096) == pytest.approx(32 * 2047 * (2 - 2047 / 4096))


@pytest.mark.parametrize(
    "asked, packing, device, how",
    [
        ("auto", "isolated", "cuda", "varlen"),
        ("auto", "none", "cuda", "varlen"),
        ("flash_attention_2", "none", "cuda", "varlen"),
        ("sdpa", "isolated", "cuda", "masked"),
        ("sdpa", "none", "cuda", "sdpa"),
        ("auto", "isolated", "cpu", "masked"),
        ("auto", "none", "cpu", "sdpa"),
        ("eager", "isolated", "cuda", "eager"),
    ],
)
def test_which_attention_a_run_takes(asked, packing, device, how):
    assert attention_of(asked, packing, device, "llama") == how
    for kind, fused in (("gemma2", "flex"), ("gpt_oss", "varlen"), ("bloom", "eager")):  # they have no sdpa
        taken = fused if (asked, device) == ("auto", "cuda") else how if asked == "flash_attention_2" else "eager"
        assert attention_of(asked, packing, device, kind) == taken


@pytest.mark.parametrize("kind", ["gemma2", "gpt_oss"])
@pytest.mark.parametrize(
    "unfit, of", [({"seq_len": 1000}, "gemma2"), ({"selective": True}, "gemma2"), ({"dropout": 0.1}, "both")]
)
def test_scores_are_counted_where_a_run_takes_single_operations(kind, unfit, of):
    """As run/attention.py `choose`: Gemma 2 2B at 4,096 tokens holds 1 GB of scores for each row and layer, which a plan left out."""
    fused = attention_of("auto", "none", "cuda", kind, seq_len=4096)
    taken = attention_of("auto", "none", "cuda", kind, **unfit)
    assert fused != "eager" and taken == ("eager" if of in (kind, "both") else fused)


@pytest.mark.parametrize(
    "version, how", [("5.17.0", "eager"), ("5.23.1", "eager"), ("5.24.0", "varlen"), ("6.0.0.dev0", "varlen")]
)
def test_gptj_has_scores_before_the_version_that_gave_it_sdpa(version, how):
    """GPT-J 6B under transformers 5.17 held 1.2 GiB more than was planned."""
    assert attention_of("auto", "none", "cuda", "gptj", version) == how
    assert attention_of("auto", "none", "cuda", "llama", version) == "varlen"


def test_a_softmax_on_a_gpu_makes_a_product_more_in_backward():
    """aten/src/ATen/native/cuda/SoftMax.cu: result times gradient, in the dtype of the softmax. Bloom and gpt-oss held 1 GiB more for it."""
    t = 2048
    for name, width in (("bloom-1b7", 4), ("gpt-oss-20b", 2)):
        g = geometry(shapes.config_dict(name), "eager")
        on = {device: block_bytes(g, t, "hf", 0, t, device).attention_extra for device in ("cpu", "cuda")}
        assert on["cuda"] - on["cpu"] == width * g.heads * t * t


def test_gemma2_keeps_its_scores_but_in_a_compiled_kernel():
    config, t = shapes.config_dict("gemma-2-2b"), 8192
    kept = {how: block_bytes(geometry(config, how), t, "liger", 0, t).attention for how in ("eager", "flex")}
    assert kept["eager"] > 8 * 8 * t * t > kept["flex"]  # heads, bytes of each score


def test_packed_attention_keeps_no_product_of_queries_keys_and_values():
    """Phi-3 mini on an H200, windows of 2,047: 48.28 GiB with 1 x 4,096 tokens and 30.35 with 4 x recomputed, planned 49.78 and 30.54 before."""
    config, t, d, heads = shapes.config_dict("phi-3-mini"), 4096, 3072, 32
    windowed = block_bytes(geometry(config, "varlen"), t, "liger", 0, t).attention
    assert windowed == 4 * 2 * t * d + 4 * t * heads  # queries, keys, values, output, statistics
    whole = block_bytes(geometry({**config, "sliding_window": None}, "varlen"), t, "liger", 0, t).attention
    assert whole - windowed == 2 * 2 * t * d
