"""A small model of any class of transformers: its own default configuration with small sizes, by the names of keys."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from typing import Any

import torch

from tests.harness.models import seeded
from tests.harness.packages import offline

MAX_NUMEL = 12_000_000
_SIZES: dict[str, int] = {
    **dict.fromkeys(("vocab_size", "text_vocab_size"), 99),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers", "depth", "encoder_layers"), 2),
    **dict.fromkeys(("decoder_layers", "num_decoder_layers", "num_encoder_layers", "decoder_num_hidden_layers"), 2),
    **dict.fromkeys(("hidden_size", "d_model", "embed_dim", "n_embd", "dim", "decoder_hidden_size", "width"), 32),
    **dict.fromkeys(("intermediate_size", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff", "ffn_dim", "mlp_dim"), 48),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads", "encoder_attention_heads", "heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "decoder_num_attention_heads", "attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_global_key_value_heads"), 2),
    **dict.fromkeys(("head_dim", "global_head_dim", "v_head_dim", "qk_nope_head_dim", "attention_head_dim"), 8),
    **dict.fromkeys(("qk_rope_head_dim",), 4),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "o_lora_rank"), 8),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "num_selected_experts", "moe_k"), 2),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group"), 1),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 16),
    **dict.fromkeys(("max_position_embeddings", "max_source_positions"), 128),
    **dict.fromkeys(("image_size",), 32),
    **dict.fromkeys(("patch_size",), 8),
    **dict.fromkeys(("vocab_size_per_layer_input", "hidden_size_per_layer_input"), 8),
    **dict.fromkeys(("num_queries", "projector_hidden_size", "out_hidden_size", "output_hidden_size"), 32),
}


def small_config(kind: Any) -> Any:
    """A small configuration of class `kind`, with the parts that it has."""
    default = kind()
    options: dict[str, Any] = {}
    for name, part in vars(default).items():
        if type(part).__name__.endswith("Config") and hasattr(part, "to_dict"):
            options[name] = small_config(type(part))
    options |= {name: size for name, size in _SIZES.items() if isinstance(getattr(default, name, None), int)}
    vocabulary = options.get("vocab_size", 99)
    for name, value in vars(default).items():
        if name.endswith(("_token_id", "_token_index")) and isinstance(value, int) and value >= vocabulary:
            options[name] = 5
    return _made(kind, options)


def _made(kind: Any, options: dict[str, Any]) -> Any:
    """Without the options that the class refuses, one by one."""
    try:
        return kind(**options)
    except Exception:
        kept: dict[str, Any] = {}
        for name, value in options.items():
            try:
                kind(**kept, **{name: value})
            except Exception:
                continue
            kept[name] = value
        return kind(**kept)


def classes_of(key: str) -> Iterator[Any]:
    """The classes of models to which an entry of transformers' table of conversions applies: the class itself; of a
    type of models one with a head, and one without."""
    offline()
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if inspect.isclass(kind := getattr(transformers, key, None)):
        yield kind
        return
    config = CONFIG_MAPPING[key]
    module = importlib.import_module(config.__module__.replace("configuration_", "modeling_"))
    found = [
        kind
        for name, kind in vars(module).items()
        if inspect.isclass(kind) and issubclass(kind, transformers.PreTrainedModel)
        if getattr(kind, "config_class", None) is config and not name.endswith("PreTrainedModel")
    ]
    found.sort(key=lambda kind: ("ForCausalLM" not in kind.__name__, "For" not in kind.__name__, kind.__name__))
    yield from found[:1]
    yield from [kind for kind in found[1:] if "For" not in kind.__name__][:1]


def small_model(kind: Any) -> Any:
    """A model of class `kind` in evaluation mode. Raises `ValueError` if it is too large."""
    config = small_config(kind.config_class)
    with torch.device("meta"):
        numel = sum(parameter.numel() for parameter in kind(config).parameters())
    if numel > MAX_NUMEL:
        raise ValueError(f"{numel:,} parameters")
    return seeded(lambda: kind(config)).eval()
