"""Speech: dilated causal convolutions with weight norm, a CTC loss of sequences of several lengths."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.utils.parametrizations import weight_norm


class Block(nn.Module):
    def __init__(self, width, dilation):
        super().__init__()
        self.pad = 2 * dilation
        self.gate = weight_norm(nn.Conv1d(width, 2 * width, 3, dilation=dilation))
        self.out = nn.Conv1d(width, width, 1)

    def forward(self, x):
        return x + self.out(F.glu(self.gate(F.pad(x, (self.pad, 0))), dim=1))


def main():
    model = nn.Sequential(nn.Conv1d(8, 10, 1), *(Block(10, 2**i) for i in range(3)), nn.Conv1d(10, 6, 1))
    for block in model[1:4]:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.RAdam(model.parameters(), lr=1e-2)
    torch.manual_seed(1 + dist.get_rank())
    losses = []
    for _ in range(4):
        frames, letters = torch.randn(3, 8, 20), torch.randint(1, 6, (3, 5))
        lengths = torch.tensor([20, 17, 14])
        chances = model(frames).permute(2, 0, 1).log_softmax(-1)
        loss = F.ctc_loss(chances, letters, lengths, torch.tensor([5, 4, 3]))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, optimizer, losses
