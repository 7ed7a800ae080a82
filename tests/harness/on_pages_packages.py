"""What a reader of pages about other people's packages has already: a Llama in a folder, a quantised model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.harness.packages import VOCABULARY, llama, offline


def llama_folder(folder: str) -> None:
    """A Llama of a few thousand parameters with a tokenizer of one word for each number, as a hub has it."""
    if dist.get_rank() == 0:
        llama(tied=True).save_pretrained(folder)
        from tokenizers import Tokenizer, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast

        words = Tokenizer(models.WordLevel({str(i): i for i in range(VOCABULARY)}, unk_token="0"))
        words.pre_tokenizer = pre_tokenizers.Whitespace()
        PreTrainedTokenizerFast(tokenizer_object=words, unk_token="0").save_pretrained(folder)
        assert (Path(folder) / "tokenizer.json").exists()
    dist.barrier()


def quantised_llama() -> Any:
    """With Linear4bit layers, on the CPU."""
    offline()
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    llama_folder("quantised")
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    return AutoModelForCausalLM.from_pretrained("quantised", device_map={"": "cpu"}, quantization_config=config)
