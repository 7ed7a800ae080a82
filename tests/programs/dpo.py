"""Direct preference optimization: a policy and its frozen reference, two forwards of each per loss."""

import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard


class Policy(nn.Module):
    def __init__(self, vocabulary=19, width=16):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(width, 2, 32, 0.0, batch_first=True) for _ in range(2))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens):
        x, mask = self.embedding(tokens), nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        for layer in self.layers:
            x = layer(x, mask, is_causal=True)
        chances = self.head(x[:, :-1]).log_softmax(-1)
        return chances.gather(-1, tokens[:, 1:, None]).squeeze(-1).sum(-1)


def main():
    policy = Policy()
    reference = copy.deepcopy(policy).requires_grad_(False).eval()
    for model in (policy, reference):
        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=5e-3)
    torch.manual_seed(1 + dist.get_rank())
    losses = []
    for _ in range(3):
        prompt = torch.randint(0, 19, (3, 3))
        chosen, rejected = (torch.cat([prompt, torch.randint(0, 19, (3, 4))], dim=1) for _ in range(2))
        with torch.no_grad():
            base = reference(chosen) - reference(rejected)
        loss = -F.logsigmoid(0.1 * (policy(chosen) - policy(rejected) - base)).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return policy, reference, optimizer, losses
