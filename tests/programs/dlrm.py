"""A recommender: embedding bags of several sizes, some smaller than the ranks are many, dot interactions; Adagrad."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard


class DLRM(nn.Module):
    def __init__(self, rows=(1, 3, 50, 7), dim=6):
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(n, dim, mode="sum") for n in rows)
        self.bottom = nn.Sequential(nn.Linear(4, 12), nn.ReLU(), nn.Linear(12, dim), nn.ReLU())
        pairs = (len(rows) + 1) * len(rows) // 2
        self.top = nn.Sequential(nn.Linear(dim + pairs, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, dense, sparse):
        x = self.bottom(dense)
        vectors = torch.stack([x] + [table(rows) for table, rows in zip(self.tables, sparse, strict=True)], dim=1)
        i, j = torch.tril_indices(vectors.shape[1], vectors.shape[1], -1)
        products = (vectors @ vectors.transpose(1, 2))[:, i, j]
        return self.top(torch.cat([x, products], dim=1)).squeeze(1)


def main():
    model = DLRM()
    for table in model.tables:
        fully_shard(table)
    fully_shard(model.bottom)
    fully_shard(model.top)
    fully_shard(model)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
    torch.manual_seed(1 + dist.get_rank())
    losses = []
    for _ in range(4):
        sparse = [torch.randint(0, table.num_embeddings, (5, 3)) for table in model.tables]
        clicked = torch.randint(0, 2, (5,)).to(torch.get_default_dtype())
        loss = F.binary_cross_entropy_with_logits(model(torch.randn(5, 4), sparse), clicked)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, optimizer, losses
