"""Buffers of transformers models in bf16: the types and bits of plain `from_pretrained`, on the way in and out."""

import pytest
import torch

from bigtrain.models import build_model
from bigtrain.models.buffers import take_dtypes
from bigtrain.weights import export_model

_MOE = dict(
    vocab_size=61, hidden_size=16, intermediate_size=24, moe_intermediate_size=8, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=2, n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1, q_lora_rank=6, kv_lora_rank=6,
    qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=8, first_k_dense_replace=1,
)  # fmt: skip
_M2M = dict(
    vocab_size=61, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2,
    encoder_ffn_dim=24, decoder_ffn_dim=24, max_position_embeddings=32,
)  # fmt: skip


def _models():
    import transformers as t

    xielu = dict(vocab_size=61, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, head_dim=8)
    backbone = t.RTDetrResNetConfig(
        embedding_size=8, hidden_sizes=[8, 8, 8, 8], depths=[1, 1, 1, 1], out_features=["stage2", "stage3", "stage4"]
    )
    detector = dict(
        backbone_config=backbone, encoder_hidden_dim=16, encoder_in_channels=[8, 8, 8], d_model=16, encoder_ffn_dim=16,
        decoder_ffn_dim=16, decoder_in_channels=[16, 16, 16], num_queries=5, encoder_attention_heads=2,
        decoder_attention_heads=2, decoder_layers=1, encoder_layers=1, num_denoising=0,
    )  # fmt: skip
    return {
        "sines": lambda: t.M2M100ForConditionalGeneration(t.M2M100Config(**_M2M)),
        "frozen_norms": lambda: t.RTDetrForObjectDetection(t.RTDetrConfig(**detector)),
        "scalars": lambda: t.ApertusForCausalLM(t.ApertusConfig(**xielu, num_key_value_heads=2)),
        "router": lambda: t.DeepseekV3ForCausalLM(t.DeepseekV3Config(**_MOE)),
    }


KINDS = ("sines", "frozen_norms", "scalars", "router")


def _made(kind):
    """In fp32, with values in its persistent buffers that bf16 cannot hold."""
    torch.manual_seed(0)
    model = _models()[kind]()
    for name, buffer in model.named_buffers():
        if buffer.is_floating_point() and name in model.state_dict() and not name.endswith(("running_var", "inv_freq")):
            buffer.data = buffer + torch.rand_like(buffer) / 3
    return model


def _bits(tensors):
    return {name: (t.dtype, t.contiguous().view(-1).view(torch.uint8).tolist()) for name, t in tensors.items()}


def _inputs(kind):
    ids = torch.arange(5, 14)[None]
    if kind == "frozen_norms":
        return {"pixel_values": torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(1)).bfloat16()}
    return {"input_ids": ids, "decoder_input_ids": ids} if kind == "sines" else {"input_ids": ids}


@pytest.mark.parametrize("kind", KINDS)
def test_buffers_are_those_of_from_pretrained_and_the_forward_is(tmp_path, kind):
    """Sines and frozen norms in fp32 stopped the forward of a bf16 model; BatchNorm's own statistics stay in fp32."""
    _made(kind).save_pretrained(tmp_path)
    ours = build_model(tmp_path, dtype=torch.bfloat16).eval()
    theirs = type(ours).from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    norms = {n for n, m in ours.named_modules() if isinstance(m, torch.nn.BatchNorm2d)}
    mine, plain = ({n: b for n, b in model.named_buffers() if n.rpartition(".")[0] not in norms} for model in (ours, theirs))
    assert any(b.is_floating_point() for b in mine.values()) and _bits(mine) == _bits(plain)
    with torch.no_grad():
        out, want = ours(**_inputs(kind)), theirs(**_inputs(kind))
    if kind == "frozen_norms":  # BatchNorm in fp32 rounds otherwise than in bf16
        assert out.logits.dtype == want.logits.dtype == torch.bfloat16
    elif kind != "router":  # whose weight is bf16 here and fp32 there
        assert torch.equal(out.logits, want.logits)


@pytest.mark.parametrize("kind", ["sines", "frozen_norms"])
def test_a_fresh_model_has_the_same_types(kind):
    plain = _models()[kind]()
    plain.config.architectures = [type(plain).__name__]
    ours = build_model(plain.config, dtype=torch.bfloat16).eval()
    with torch.no_grad():
        assert ours(**_inputs(kind)).logits.dtype == torch.bfloat16


@pytest.mark.parametrize("kind", KINDS)
def test_an_export_keeps_every_bit_of_a_buffer(tmp_path, kind):
    """A router's correction in fp32 was rounded to bf16, so that the exported model chose other experts than the trained one."""
    _made(kind).save_pretrained(tmp_path / "from")
    ours = build_model(tmp_path / "from", dtype=torch.bfloat16)
    export_model(ours, tmp_path / "to", dtype="bfloat16")
    from safetensors.torch import load_file

    written = load_file(tmp_path / "to" / "model.safetensors")
    held = {n: b for n, b in ours.named_buffers() if n in written}
    assert _bits(held) == _bits({n: written[n] for n in held})
    if kind == "router":
        type(ours).from_pretrained(tmp_path / "from", dtype=torch.bfloat16).save_pretrained(tmp_path / "plain")
        plain = load_file(tmp_path / "plain" / "model.safetensors")
        correction, weight = (f"model.layers.1.mlp.gate.{name}" for name in ("e_score_correction_bias", "weight"))
        assert {n: t.dtype for n, t in written.items()} == {n: t.dtype for n, t in plain.items()}
        assert written[weight].dtype == torch.float32 and torch.equal(written[correction], plain[correction])
        assert not torch.equal(written[correction], written[correction].bfloat16().float())


def test_a_live_hf_deepspeed_config_does_not_shard_the_skeleton_that_is_asked(caplog):
    """transformers entered zero.Init for each part that it makes by its Auto classes, and the buffers stayed as they were."""
    import transformers as t
    from transformers.integrations import HfDeepSpeedConfig

    sizes = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2)
    text, vision = (
        dict(**sizes, vocab_size=61, num_key_value_heads=1, head_dim=8),
        dict(**sizes, image_size=28, patch_size=14),
    )
    model = t.Gemma3ForConditionalGeneration(t.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4))
    live = HfDeepSpeedConfig({"zero_optimization": {"stage": 3}})
    take_dtypes(model, torch.bfloat16)
    del live
    assert model.get_input_embeddings().embed_scale.dtype == torch.bfloat16 and not caplog.records
