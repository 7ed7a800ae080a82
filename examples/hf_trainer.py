"""Hugging Face's Trainer on fullshard: a program that was written for it, and one line, `fullshard.install()`.

    torchrun --nproc-per-node 2 examples/hf_trainer.py

On a CPU Accelerate, which prepares the Trainer's model, ignores `fsdp`: it wraps the model in DistributedDataParallel,
and every process holds all of it. `shard_on_a_cpu` tells it to take the way it takes on GPUs. There it is not needed.
"""

from __future__ import annotations

import tempfile

import torch
from torch.utils.data import Dataset

import fullshard

fullshard.install()  # the one line: before Accelerate asks torch for `fully_shard`

from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments  # noqa: E402


class Counting(Dataset):
    """Sequences that count on from a random number: the model has to learn to add one."""

    def __len__(self) -> int:
        return 512

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        first = torch.randint(0, 64, (1,), generator=torch.Generator().manual_seed(index))
        tokens = (first + torch.arange(16)) % 64
        return {"input_ids": tokens, "labels": tokens}


def shard_on_a_cpu(args: TrainingArguments) -> None:
    """What Accelerate does by itself where it finds a GPU: note that this run is one of FSDP2."""
    from accelerate import Accelerator, PartialState
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    state = Accelerator(cpu=True).state  # one for the process: the Trainer's own Accelerator finds it as it is
    state.fsdp_plugin = FullyShardedDataParallelPlugin(**args.fsdp_plugin_args)
    for each in (state, PartialState()):
        each.distributed_type = DistributedType.FSDP


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            output_dir=folder,
            max_steps=60,
            per_device_train_batch_size=8,
            gradient_accumulation_steps=2,
            learning_rate=5e-3,
            lr_scheduler_type="cosine",
            logging_steps=20,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=not torch.cuda.is_available(),
            fsdp=True,
            fsdp_config={"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
        )
        if args.use_cpu:
            shard_on_a_cpu(args)
        torch.manual_seed(0)
        config = LlamaConfig(vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
                             num_attention_heads=4, num_key_value_heads=2)  # fmt: skip
        trainer = Trainer(model=LlamaForCausalLM(config), args=args, train_dataset=Counting(), eval_dataset=Counting())
        trainer.train()
        found = trainer.evaluate()
        if args.process_index == 0:
            print(fullshard.report(trainer.model))
            print(f"loss {found['eval_loss']:.4f}")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
