"""Tiny models of transformers whose weights are in files otherwise than in memory, of each kind that its table of
conversions has: names looked up by class or by type, prefixes, experts, fused and permuted weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fullshard.program import Program
from tests.harness.models import seeded
from tests.harness.packages import offline

TEXT: dict[str, Any] = dict(
    vocab_size=61, hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4, pad_token_id=0
)
GROUPED = dict(**TEXT, num_key_value_heads=2)
VISION = dict(hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4, image_size=16)
PATCHES = dict(**VISION, patch_size=8)


def _of(name: str, config: str, /, **sizes: Any) -> Callable[[Any], Any]:
    return lambda package: getattr(package, name)(getattr(package, config)(**sizes))


def _llava(package: Any) -> Any:
    text, vision = package.LlamaConfig(**GROUPED), package.CLIPVisionConfig(**PATCHES)
    return package.LlavaForConditionalGeneration(
        package.LlavaConfig(text_config=text, vision_config=vision, image_token_id=60)
    )


def _detr(name: str) -> Callable[[Any], Any]:
    sizes = dict(d_model=16, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=24, decoder_ffn_dim=24, num_queries=5)
    heads = dict(encoder_attention_heads=8, decoder_attention_heads=8, use_timm_backbone=False)

    def build(package: Any) -> Any:
        stages = dict(hidden_sizes=[8, 8, 8, 8], depths=[1, 1, 1, 1], out_features=[f"stage{n}" for n in range(1, 5)])
        backbone = package.ResNetConfig(embedding_size=8, **stages)
        config = package.DetrConfig(**sizes, **heads, backbone_config=backbone)
        return getattr(package, name)(config)

    return build


def _qwen2_vl(package: Any) -> Any:
    vision = dict(depth=1, embed_dim=16, hidden_size=24, num_heads=2, patch_size=8, mlp_ratio=2)
    text = dict(**GROUPED, rope_parameters={"type": "mrope", "mrope_section": [1, 1, 1], "rope_theta": 1e4})
    return package.Qwen2VLForConditionalGeneration(package.Qwen2VLConfig(text_config=text, vision_config=vision))


_EXPERTS = dict(num_experts=5, num_experts_per_tok=2, moe_intermediate_size=16)
# Those that `make test` runs: looked up by class (names, prefixes, vision), by type (experts, a head below a prefix).
EVERYDAY: dict[str, Callable[[Any], Any]] = {
    "gpt_neox": _of("GPTNeoXForCausalLM", "GPTNeoXConfig", **TEXT),
    "vit": _of("ViTForImageClassification", "ViTConfig", **PATCHES),
    "qwen2_vl": _qwen2_vl,
    "detr": _detr("DetrForObjectDetection"),
    "llava": _llava,
    "mixtral": _of("MixtralForCausalLM", "MixtralConfig", **GROUPED, num_local_experts=5),
}
MORE: dict[str, Callable[[Any], Any]] = {
    "vit base": _of("ViTModel", "ViTConfig", **PATCHES),
    "deit": _of("DeiTForImageClassification", "DeiTConfig", **PATCHES),
    "dinov2": _of("Dinov2Model", "Dinov2Config", **PATCHES),
    "segformer": _of("SegformerForSemanticSegmentation", "SegformerConfig", hidden_sizes=[8, 8, 16, 16]),
    "clip vision": _of("CLIPVisionModel", "CLIPVisionConfig", **PATCHES),
    "siglip text": _of("SiglipTextModel", "SiglipTextConfig", **TEXT),
    "detr base": _detr("DetrModel"),
    "detr masks": _detr("DetrForSegmentation"),
    "qwen2_moe": _of(
        "Qwen2MoeForCausalLM", "Qwen2MoeConfig", **GROUPED, **_EXPERTS, shared_expert_intermediate_size=16
    ),
    "qwen3_moe": _of("Qwen3MoeForCausalLM", "Qwen3MoeConfig", **GROUPED, **_EXPERTS, head_dim=6),
    "olmoe": _of("OlmoeForCausalLM", "OlmoeConfig", **GROUPED, **_EXPERTS),
    "phimoe": _of("PhimoeForCausalLM", "PhimoeConfig", **GROUPED, num_local_experts=4),
    "granitemoe": _of("GraniteMoeForCausalLM", "GraniteMoeConfig", **GROUPED, num_local_experts=4),
    "jamba": _of(
        "JambaForCausalLM", "JambaConfig", **GROUPED, num_experts=4, attn_layer_offset=0, use_mamba_kernels=False
    ),
    "nomic_bert": _of("NomicBertModel", "NomicBertConfig", **TEXT),
    "esm": _of("EsmForMaskedLM", "EsmConfig", **TEXT, position_embedding_type="rotary"),
    "timesfm2_5": _of(
        "TimesFm2_5ModelForPrediction",
        "TimesFm2_5Config",
        **{**TEXT, "vocab_size": 1} | dict(head_dim=6, num_key_value_heads=4),
    ),
    "videomae": _of(
        "VideoMAEModel", "VideoMAEConfig", **PATCHES, num_frames=2, decoder_hidden_size=8, decoder_num_attention_heads=2
    ),
}
FAMILIES = EVERYDAY | MORE


def family(kind: str, dtype: torch.dtype = torch.float32) -> Any:
    """The tiny model `kind` with random weights, the same on every rank; in evaluation mode."""
    offline()
    import transformers

    return seeded(lambda: FAMILIES[kind](transformers)).to(dtype).eval()


def family_program(kind: str) -> Program:
    """A tiny model of transformers, in training mode, and a loss on what its forward returns."""
    offline()
    import transformers

    def build() -> nn.Module:
        return FAMILIES[kind](transformers).train()  # type: ignore[no-any-return]

    def loss(model: nn.Module, batch: Any) -> Tensor:
        found = model(**batch)
        values = [value for value in found.to_tuple() if isinstance(value, Tensor) and value.requires_grad]
        return found.loss if getattr(found, "loss", None) is not None else torch.stack([v.mean() for v in values]).sum()

    return Program(build, loss, lambda index: family_batch(kind, index))


def family_batch(kind: str, index: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(index)
    ids = torch.randint(1, 59, (2, 7), generator=generator)
    if kind in ("vit", "vit base", "deit", "dinov2", "clip vision"):
        return {"pixel_values": torch.randn(2, 3, 16, 16, generator=generator)}
    if kind in ("segformer", "detr", "detr base", "detr masks"):
        return {"pixel_values": torch.randn(1, 3, 32, 32, generator=generator)}
    if kind == "videomae":
        return {
            "pixel_values": torch.randn(2, 2, 3, 16, 16, generator=generator),
            "bool_masked_pos": torch.tensor([[True, False, False, False]] * 2),
        }
    if kind == "timesfm2_5":
        return {"past_values": list(torch.randn(2, 64, generator=generator))}
    if kind in ("siglip text", "nomic_bert"):
        return {"input_ids": ids}
    return {"input_ids": ids, "labels": ids}
