"""Models of Hugging Face by family, from the defaults of their config classes, as training sets them; and tiny ones.

The defaults are built on the meta device alone. Tiny models have the same layers, fewer and narrower ones, so that a
step of them can be counted. No file and no network is needed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fullshard.program import Program, blocks_apart
from tests.harness.packages import offline
from tests.harness.planned import Planned

# What a tiny model has of each attribute that its config knows.
_SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "d_model": 64,
    "n_embd": 64,
    "intermediate_size": 128,
    "ffn_dim": 128,
    "d_ff": 128,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
    "num_hidden_layers": 3,
    "num_layers": 3,
    "num_decoder_layers": 3,
    "n_layer": 3,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "num_attention_heads": 4,
    "num_heads": 4,
    "n_head": 4,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "num_key_value_heads": 2,
    "d_kv": 16,
    "head_dim": 16,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_local_experts": 4,
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@dataclass(frozen=True)
class Family:
    """`auto`: the class of transformers that makes the model of a config. `kind`: of its batches. `given`: sets what
    training sets otherwise than the defaults; `small`: what a tiny one has beside `_SMALL`; `length`: tokens of a
    sample by the defaults."""

    auto: str
    kind: str = "text"
    given: dict[str, Any] = field(default_factory=dict)
    small: dict[str, Any] = field(default_factory=dict)
    length: int = 512


def _images(**small: Any) -> dict[str, Any]:
    return {"image_size": 32, "patch_size": 8, **small}


_SPEECH = dict(
    conv_dim=(16, 16, 16), conv_stride=(5, 2, 2), conv_kernel=(10, 3, 3), num_feat_extract_layers=3,
    num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=4,
)  # fmt: skip
_STILL = dict(apply_spec_augment=False, layerdrop=0.0)
_DECODER, _MASKED, _PAIR = "AutoModelForCausalLM", "AutoModelForMaskedLM", "AutoModelForSeq2SeqLM"
_IMAGE, _CTC = "AutoModelForImageClassification", "AutoModelForCTC"

FAMILIES: dict[str, Family] = {
    # Text, from left to right.
    "llama": Family(_DECODER),
    "mistral": Family(_DECODER),
    "qwen2": Family(_DECODER),
    "qwen3": Family(_DECODER),
    "gemma2": Family(_DECODER),
    "gpt2": Family(_DECODER, small=dict(n_positions=64)),
    "gpt_neox": Family(_DECODER),
    "gptj": Family(_DECODER, small=dict(rotary_dim=8, n_positions=64)),
    "opt": Family(_DECODER, small=dict(word_embed_proj_dim=64)),
    "bloom": Family(_DECODER),
    "falcon": Family(_DECODER),
    "phi": Family(_DECODER),
    "phi3": Family(_DECODER),
    "olmo2": Family(_DECODER),
    "stablelm": Family(_DECODER),
    "starcoder2": Family(_DECODER),
    "gpt_bigcode": Family(_DECODER, small=dict(n_positions=64)),
    "smollm3": Family(_DECODER),
    "cohere": Family(_DECODER),
    "granite": Family(_DECODER),
    "mpt": Family(_DECODER, small=dict(n_heads=4, n_layers=3, max_seq_len=64)),
    # Experts.
    "mixtral": Family(_DECODER),
    "qwen2_moe": Family(_DECODER),
    "qwen3_moe": Family(_DECODER),
    "olmoe": Family(_DECODER),
    "granitemoe": Family(_DECODER),
    "gpt_oss": Family(_DECODER, small=dict(layer_types=["sliding_attention", "full_attention", "full_attention"])),
    "llama4_text": Family(_DECODER),
    "phimoe": Family(_DECODER),
    # State spaces and other recurrences. Without kernels of their own they are a loop over tokens.
    "mamba": Family(_DECODER, small=dict(state_size=8, expand=2, time_step_rank=4), length=64),
    "mamba2": Family(_DECODER, small=dict(state_size=8, num_heads=8, head_dim=16, n_groups=1, chunk_size=16)),
    "falcon_mamba": Family(_DECODER, small=dict(state_size=8, expand=2, time_step_rank=4), length=64),
    "bamba": Family(
        _DECODER,
        small=dict(attn_layer_indices=[1], mamba_n_heads=8, mamba_d_head=16, mamba_d_state=8, mamba_chunk_size=16),
    ),
    "qwen3_next": Family(
        _DECODER, small=dict(layer_types=["linear_attention", "full_attention", "linear_attention"]), length=64
    ),
    "lfm2": Family(_DECODER, small=dict(layer_types=["conv", "full_attention", "conv"])),
    "rwkv": Family(_DECODER, small=dict(attention_hidden_size=64, context_length=64), length=64),
    # Text, in both directions.
    "bert": Family(_MASKED),
    "roberta": Family(_MASKED, small=dict(max_position_embeddings=80)),
    "distilbert": Family(_MASKED, small=dict(dim=64, hidden_dim=128, n_layers=3, n_heads=4)),
    "electra": Family(_MASKED, small=dict(embedding_size=32)),
    "albert": Family(_MASKED, small=dict(embedding_size=32)),
    "deberta-v2": Family(_MASKED),
    "modernbert": Family(_MASKED, small=dict(global_attn_every_n_layers=2, local_attention=16)),
    "longformer": Family(_MASKED, small=dict(attention_window=16, max_position_embeddings=80)),
    "funnel": Family(_MASKED, small=dict(block_sizes=[1, 1, 1], d_head=16, d_inner=128)),
    # From text to text.
    "t5": Family(_PAIR, "pair", given=dict(decoder_start_token_id=0)),
    "bart": Family(_PAIR, "pair"),
    "marian": Family(_PAIR, "pair", small=dict(decoder_vocab_size=96, decoder_start_token_id=0)),
    "pegasus": Family(_PAIR, "pair"),
    "led": Family(
        _PAIR,
        "pair",
        small=dict(attention_window=16, max_encoder_position_embeddings=64, max_decoder_position_embeddings=64),
    ),
    # Images.
    "vit": Family(_IMAGE, "image", small=_images()),
    "vit_msn": Family(_IMAGE, "image", small=_images()),
    "beit": Family(_IMAGE, "image", small=_images()),
    "dinov2": Family(_IMAGE, "image", small=_images()),
    "swin": Family(
        _IMAGE,
        "image",
        small=dict(image_size=64, patch_size=4, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4),
    ),
    "convnext": Family(_IMAGE, "image", small=dict(image_size=32, hidden_sizes=[16, 32, 32, 32], depths=[1, 2, 2, 1])),
    "resnet": Family(
        _IMAGE, "image", small=dict(embedding_size=16, hidden_sizes=[16, 32, 32, 32], depths=[1, 2, 1, 1])
    ),
    "regnet": Family(
        _IMAGE,
        "image",
        small=dict(embedding_size=16, hidden_sizes=[16, 32, 32, 32], depths=[1, 2, 1, 1], groups_width=8),
    ),
    "segformer": Family(_IMAGE, "image", small=dict(hidden_sizes=[8, 16, 16, 32], depths=[1, 1, 1, 1])),
    "poolformer": Family(_IMAGE, "image", small=dict(hidden_sizes=[8, 16, 16, 32], depths=[1, 2, 1, 1])),
    "mobilenet_v2": Family(_IMAGE, "image", small=dict(image_size=32, depth_multiplier=0.35)),
    "focalnet": Family(
        _IMAGE,
        "image",
        small=dict(
            image_size=32, embed_dim=16, hidden_sizes=[16, 32], depths=[1, 2], focal_levels=[2, 2], focal_windows=[3, 3]
        ),
    ),
    # Speech.
    "wav2vec2": Family(_CTC, "speech", given=_STILL, small=_SPEECH),
    "hubert": Family(_CTC, "speech", given=_STILL, small=_SPEECH),
    "wavlm": Family(_CTC, "speech", given=_STILL, small=_SPEECH),
    "sew": Family(_CTC, "speech", given=_STILL, small={**_SPEECH, "squeeze_factor": 2}),
    "audio-spectrogram-transformer": Family(
        "AutoModelForAudioClassification", "spectrogram", small=dict(max_length=32, num_mel_bins=32, patch_size=8)
    ),
    "whisper": Family(
        "AutoModelForSpeechSeq2Seq",
        "whisper",
        small=dict(num_mel_bins=16, max_source_positions=32, max_target_positions=32, decoder_start_token_id=1),
    ),
}


def config_of(name: str, *, tiny: bool = False) -> Any:
    """The config of a family: the defaults of its class, with no cache, or of the tiny model."""
    offline()
    import transformers

    family = FAMILIES[name]
    config = transformers.AutoConfig.for_model(name)
    if tiny:
        there = config.to_dict()
        small = {key: value for key, value in _SMALL.items() if key in there and type(there[key]) in (int, type(None))}
        config = transformers.AutoConfig.for_model(name, **(small | family.small | family.given))
    else:
        config = transformers.AutoConfig.for_model(name, **family.given)
    if hasattr(config, "use_cache"):
        config.use_cache = False
    return config


@dataclass(frozen=True)
class Corpus(Planned):
    """A model of `FAMILIES` as the planner's tests take models: `kind`, `config` say what its batches are."""

    kind: str = "text"
    config: Any = None
    length: int = 32

    def batch(self, index: int, size: int) -> Any:
        generator = torch.Generator().manual_seed(index)
        config, length = self.config, self.length

        def tokens(count: int) -> Tensor:
            most = getattr(config, "vocab_size", None) or config.get_text_config().vocab_size
            return torch.randint(3, most, (size, count), generator=generator)

        if self.kind == "image":
            side = getattr(config, "image_size", 224)
            return {"pixel_values": torch.randn(size, 3, side, side, generator=generator)}
        if self.kind == "speech":
            return {"input_values": torch.randn(size, 50 * length, generator=generator)}
        if self.kind == "spectrogram":
            return {"input_values": torch.randn(size, config.max_length, config.num_mel_bins, generator=generator)}
        if self.kind == "whisper":
            shape = (size, config.num_mel_bins, 2 * config.max_source_positions)
            labels = tokens(min(length, config.max_target_positions // 2))
            return {"input_features": torch.randn(shape, generator=generator), "labels": labels}
        ids = tokens(length)
        return {"input_ids": ids, "labels": ids.clone()}

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        found = model(**batch)
        if "labels" in batch:
            return found.loss  # type: ignore[no-any-return]
        return found.logits.float().square().mean()  # type: ignore[no-any-return]


def corpus_model(name: str, *, tiny: bool) -> Corpus:
    """The family of that name; its units are those that `shard_blocks` makes."""
    offline()
    import transformers

    family, config = FAMILIES[name], config_of(name, tiny=tiny)

    def make() -> nn.Module:
        given: dict[str, Any] = {"dtype": torch.float32}
        model: nn.Module = getattr(transformers, family.auto).from_config(config, **given)
        return model.train()

    with torch.device("meta"):
        model = make()
    names = {id(module): dotted for dotted, module in model.named_modules()}
    units = tuple(names[id(block)] for block in blocks_apart(model))
    length = 32 if tiny else family.length
    return Corpus(make, units, (), kind=family.kind, config=config, length=length)


def corpus_program(name: str, size: int = 1) -> Program:
    """The family of that name, by the defaults of its config class."""
    found = corpus_model(name, tiny=False)
    return Program(found.make, found.loss, lambda index: found.batch(index, size))
