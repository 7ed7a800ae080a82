"""Two ranks train, the others serve: torchrun --nproc-per-node 3 examples/hand_over.py

The policy is sharded over ranks 0 and 1; the others have a whole copy in bfloat16, under the engine's own names. After
each update the weights go from rank to rank, and none of the trainers ever holds the whole policy.
"""

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh

import fullshard

TRAINERS = 2
NAMES = {"blocks.*.up.*": "layers.*.in.*", "blocks.*.down.*": "layers.*.out.*"}


class Block(nn.Module):
    def __init__(self, width, inner, names):
        super().__init__()
        self.names = names
        self.add_module(names[0], nn.Linear(width, inner))
        self.add_module(names[1], nn.Linear(inner, width))

    def forward(self, x):
        first, second = (self.get_submodule(name) for name in self.names)
        return x + second(torch.tanh(first(x)))


def main():
    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    trainers = DeviceMesh("cpu", list(range(TRAINERS)))  # every rank makes it, also those outside of it
    torch.manual_seed(0)
    policy = engine = optimizer = None
    if rank < TRAINERS:
        policy = nn.ModuleDict({"blocks": nn.Sequential(*(Block(64, 200, ("up", "down")) for _ in range(3)))})
        for block in policy["blocks"]:
            fullshard.fully_shard(block, mesh=trainers)
        optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
    else:
        engine = nn.ModuleDict({"layers": nn.Sequential(*(Block(64, 200, ("in", "out")) for _ in range(3)))})
        engine.bfloat16()
    move = fullshard.transfer(policy, engine, names=NAMES, limit_nbytes=1 << 16)
    if rank == 0:
        print(move.plan())
    for step in range(3):
        prompts = torch.randn(8, 64, generator=torch.Generator().manual_seed(10 * step + rank))
        if policy is not None:
            loss = policy["blocks"](prompts).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        move.run()  # all ranks
        if engine is not None:
            with torch.no_grad():
                reward = -engine["layers"](prompts.bfloat16()).square().mean()
            print(f"rank {rank} step {step} reward {reward.item():.3f}")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
