"""PPO: rollouts without gradients by the model that is trained, then epochs of shuffled minibatches, ratios clipped."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(5, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh())
        self.actor, self.critic = nn.Linear(24, 3), nn.Linear(24, 1)

    def forward(self, state):
        x = self.trunk(state)
        return torch.distributions.Categorical(logits=self.actor(x)), self.critic(x).squeeze(-1)


def main():
    model = ActorCritic()
    fully_shard(model.trunk)
    fully_shard(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, eps=1e-5)
    torch.manual_seed(1 + dist.get_rank())
    losses = []
    for _ in range(2):
        states, actions, rewards, chances, values = [], [], [], [], []
        state = torch.randn(4, 5)
        with torch.no_grad():
            for _ in range(6):
                policy, value = model(state)
                action = policy.sample()
                states.append(state), actions.append(action), values.append(value)
                chances.append(policy.log_prob(action))
                rewards.append(-(action - 1.0).abs() + 0.1 * state[:, 0])
                state = 0.8 * state.roll(1, 1) + 0.1 * torch.randn(4, 5)
            advantages, running, after = [], torch.zeros(4), model(state)[1]
            for reward, value in zip(reversed(rewards), reversed(values), strict=True):
                running = reward + 0.99 * after - value + 0.99 * 0.95 * running
                advantages.insert(0, running)
                after = value
        flat = [torch.cat(x) for x in (states, actions, chances, values, advantages)]
        for _ in range(2):
            for part in torch.randperm(24).chunk(3):
                state, action, chance, value, advantage = (x[part] for x in flat)
                policy, found = model(state)
                ratio = (policy.log_prob(action) - chance).exp()
                scaled = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
                gain = torch.minimum(ratio * scaled, ratio.clamp(0.8, 1.2) * scaled).mean()
                error = (found - value - advantage).square().mean()
                loss = -gain + 0.5 * error - 0.01 * policy.entropy().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
    return model, optimizer, losses
