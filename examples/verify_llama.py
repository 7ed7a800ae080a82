"""A tiny Llama of Hugging Face for `fullshard verify`; run it in this folder:

    fullshard verify verify_llama:program

Needs `pip install fullshard[hf]`. Take your own config, with fewer layers.
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import fullshard

CONFIG = LlamaConfig(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    tie_word_embeddings=True,
)


def batch(index: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(index)
    return {"input_ids": torch.randint(0, 256, (2, 32), generator=generator)}


def program() -> fullshard.Program:
    return fullshard.Program(
        model=lambda: LlamaForCausalLM(CONFIG),
        loss=lambda model, batch: model(**batch, labels=batch["input_ids"]).loss,
        batch=batch,
    )
