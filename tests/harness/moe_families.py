"""Tiny causal language models of transformers with experts, one of each family that the installed version has.

Sizes are the same for all, under the names that a family has for them.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from tests.harness.axes import TOKENS, VOCABULARY
from tests.harness.models import seeded

# By the name of a key, where a configuration has it.
_SIZES: dict[str, Any] = dict(
    vocab_size=VOCABULARY,
    hidden_size=16,
    intermediate_size=24,
    moe_intermediate_size=12,
    shared_expert_intermediate_size=12,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=4,
    max_position_embeddings=TOKENS,
    num_experts=4,
    num_local_experts=4,
    n_routed_experts=4,
    num_experts_per_tok=2,
    n_shared_experts=1,
    n_group=1,
    topk_group=1,
    first_k_dense_replace=1,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    output_router_logits=False,
    attention_dropout=0.0,
    router_jitter_noise=0.0,
    input_jitter_noise=0.0,
)
# Attention over a part of each head without positions, and one with.
LATENT: dict[str, Any] = dict(q_lora_rank=8, kv_lora_rank=8, qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=4)
OF_EACH_HEAD = {**LATENT, "num_key_value_heads": 4}
# What `expert_parallel_degree` divides, with the keys that a family needs beside the sizes.
DIVIDED: dict[str, dict[str, Any]] = {
    **{kind: {} for kind in ("Mixtral", "Qwen2Moe", "Qwen3Moe", "Olmoe", "FlexOlmo", "GptOss", "Phimoe", "Mellum")},
    **{kind: OF_EACH_HEAD for kind in ("DeepseekV2", "DeepseekV3", "Glm4MoeLite", "AXK1")},
    **{kind: {} for kind in ("GraniteMoe", "GraniteMoeShared", "GraniteMoeSWA", "MiniMax", "MiniMaxM2", "Afmoe")},
    **{
        kind: {} for kind in ("Glm4Moe", "Dots1", "Ernie4_5_Moe", "ExaoneMoe", "HunYuanMoEV1", "Cohere2Moe", "AriaText")
    },
    **{kind: {} for kind in ("HYV3", "HYV4", "Laguna", "Kolibri1", "MiMoV2Flash", "SolarOpen", "NemotronH")},
    "DeepseekV4": LATENT,
    "Jamba": {"attn_layer_offset": 0, "attn_layer_period": 2, "use_mamba_kernels": False},
}


def family(kind: str, **own: Any) -> nn.Module:
    """The model `{kind}ForCausalLM` with random values, in training mode, unless its router draws random numbers there.
    own: keys of its configuration."""
    import transformers

    config_class: Any = getattr(transformers, f"{kind}Config")
    names = {*vars(config_class()), *getattr(config_class, "attribute_map", {})}
    given = {key: value for key, value in _SIZES.items() if key in names}
    config = config_class(**(given | DIVIDED.get(kind, {}) | own))
    config.use_cache = False
    made: nn.Module = seeded(lambda: getattr(transformers, f"{kind}ForCausalLM")(config))
    return made.train(kind != "Phimoe")
