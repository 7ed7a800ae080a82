"""Seed 001's example of FSDP1: a policy, the meta device and an initialiser."""
import torch
import torch.nn as nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy


class TransformerBlock(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.attention = nn.Linear(dim, dim)
        self.norm1 = nn.LayerNorm(dim)

    def forward(self, x):
        return x + self.attention(self.norm1(x))


class Transformer(nn.Module):
    def __init__(self, vocab_size=20, dim=8, num_layers=3):
        super().__init__()
        self.tok_embeddings = nn.Embedding(vocab_size, dim)
        self.layers = nn.ModuleList([TransformerBlock(dim) for _ in range(num_layers)])
        self.output = nn.Linear(dim, vocab_size)

    def forward(self, x):
        x = self.tok_embeddings(x)
        for layer in self.layers:
            x = layer(x)
        return self.output(x)


def param_init_fn(module: nn.Module) -> None:
    # Custom initialization: values that depend on the place alone
    module.to_empty(device="cpu", recurse=False)
    for parameter in module.parameters(recurse=False):
        with torch.no_grad():
            parameter.copy_(torch.linspace(-0.4, 0.5, parameter.numel()).view_as(parameter))


def main():
    with torch.device("meta"):
        model = Transformer()

    policy = ModuleWrapPolicy({TransformerBlock})
    model = FSDP(model, auto_wrap_policy=policy, param_init_fn=param_init_fn)

    optim = torch.optim.SGD(model.parameters(), lr=1e-2)
    torch.manual_seed(torch.distributed.get_rank())
    losses = []
    for _ in range(3):
        x = torch.randint(0, 20, (2, 7))
        loss = nn.functional.cross_entropy(model(x).flatten(0, 1), x.flatten())
        loss.backward()
        optim.step()
        optim.zero_grad()
        losses.append(loss.item())
    return losses, model.state_dict()
