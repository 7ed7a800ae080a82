"""QLoRA: a base in 4 bits, cut over the ranks, and adapters in bfloat16 that train on it.

    torchrun --standalone --nproc-per-node 2 examples/qlora.py [folder of a model] [folder for the adapters]

The base in 4 bits has to fit into the memory of each process while it is loaded; afterwards a rank keeps its rows.
Without the first folder it makes a small Llama. Needs transformers, peft and bitsandbytes: the extra `packages`.
"""

import sys
import tempfile

import torch
from peft import LoraConfig, get_peft_model
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

import fullshard
from fullshard import fully_shard

TEXT = (torch.__doc__ or "") * 2


def small_model(folder: str) -> str:
    """A Llama of random values for bytes, written to `folder`."""
    sizes = dict(hidden_size=128, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4)
    LlamaForCausalLM(LlamaConfig(vocab_size=256, **sizes, tie_word_embeddings=False)).save_pretrained(folder)
    return folder


def batch(rank: int, step: int) -> torch.Tensor:
    """Four rows of 64 bytes of text, others on each rank and step."""
    data = torch.frombuffer(bytearray(TEXT.encode()), dtype=torch.uint8).long()
    starts = torch.randint(len(data) - 64, (4,), generator=torch.Generator().manual_seed(1000 * rank + step))
    return torch.stack([data[start : start + 64] for start in starts])


torch.manual_seed(0)  # the same initial values on every rank
with tempfile.TemporaryDirectory() as made:
    model = AutoModelForCausalLM.from_pretrained(
        sys.argv[1] if sys.argv[1:] and sys.argv[1] else small_model(made),
        dtype=torch.bfloat16,
        device_map={"": "cpu"},
        quantization_config=BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16,
        ),
    )
distributed.init_process_group("gloo")
rank, mesh = distributed.get_rank(), init_device_mesh("cpu", (distributed.get_world_size(),))
adapters = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", modules_to_save=["lm_head"])
model = get_peft_model(model, adapters, autocast_adapter_dtype=False)  # False: bfloat16, as they are given
for block in model.get_decoder().layers:
    fully_shard(block, mesh=mesh)
fully_shard(model, mesh=mesh)
model.train()  # a loaded model is in eval(), where bitsandbytes packs weights for inference
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
for step in range(1, 41):
    loss = model(input_ids=(x := batch(rank, step)), labels=x).loss
    loss.backward()
    fullshard.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if step % 10 == 0 and rank == 0:
        print(f"step {step}  loss {loss.item():.3f}", flush=True)
with fullshard.full_params(model, rank0_only=True, offload_to_cpu=True):  # the adapters alone are saved
    if rank == 0:
        model.save_pretrained(sys.argv[2] if len(sys.argv) > 2 else tempfile.mkdtemp(prefix="qlora-"))
distributed.destroy_process_group()
