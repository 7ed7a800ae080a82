"""Deep Q learning: a target network that is copied now and then by `load_state_dict`, double Q, a dueling head."""

import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard


class Q(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU())
        self.value, self.advantage = nn.Linear(32, 1), nn.Linear(32, 3)

    def forward(self, state):
        x = self.trunk(state)
        advantage = self.advantage(x)
        return self.value(x) + advantage - advantage.mean(-1, keepdim=True)


def main():
    online = Q()
    target = copy.deepcopy(online).requires_grad_(False)
    for model in (online, target):
        fully_shard(model.trunk)
        fully_shard(model)
    optimizer = torch.optim.Adam(online.parameters(), lr=1e-2)
    torch.manual_seed(1 + dist.get_rank())
    losses = []
    for step in range(6):
        state, following = torch.randn(8, 6), torch.randn(8, 6)
        action, reward = torch.randint(0, 3, (8,)), torch.randn(8)
        with torch.no_grad():
            best = online(following).argmax(-1, keepdim=True)
            wanted = reward + 0.9 * target(following).gather(1, best).squeeze(1)
        loss = F.smooth_l1_loss(online(state).gather(1, action[:, None]).squeeze(1), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 2:
            target.load_state_dict(online.state_dict())
        losses.append(loss.item())
    return online, target, optimizer, losses
