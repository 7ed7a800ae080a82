"""Message passing on graphs of another size on each rank, edge and node networks shared by all rounds."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard


class GraphNet(nn.Module):
    def __init__(self, width=12, rounds=3):
        super().__init__()
        self.embed = nn.Linear(4, width)
        self.edge = nn.Sequential(nn.Linear(2 * width, width), nn.ReLU(), nn.Linear(width, width))
        self.node = nn.GRUCell(width, width)
        self.out = nn.Linear(width, 1)
        self.rounds = rounds

    def forward(self, nodes, edges):
        x = self.embed(nodes)
        for _ in range(self.rounds):
            messages = self.edge(torch.cat([x[edges[0]], x[edges[1]]], dim=1))
            x = self.node(torch.zeros_like(x).index_add(0, edges[1], messages), x)
        return self.out(x.mean(0))


def main():
    model = GraphNet()
    fully_shard(model.edge)
    fully_shard(model.node)
    fully_shard(model)
    optimizer = torch.optim.NAdam(model.parameters(), lr=1e-2)
    torch.manual_seed(1 + dist.get_rank())
    losses = []
    for step in range(4):
        size = 5 + step + 3 * dist.get_rank()
        nodes, edges = torch.randn(size, 4), torch.randint(0, size, (2, 3 * size))
        loss = F.mse_loss(model(nodes, edges), nodes.mean(0)[:1])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, optimizer, losses
