"""Group relative policy optimization with an engine in processes of its own:

    torchrun --nproc-per-node 4 examples/grpo.py

Ranks 0 and 1 train a sharded policy. Ranks 2 and 3 are a stand-in for an inference engine: tensor parallel, with fused
weights, as vLLM has them. Before each step the weights go from shards to the engine's own memory; the engine answers,
and the trainers learn from the answers. A trainer's probabilities of an answer are the engine's, but for rounding.
"""

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.functional import embedding, linear, scaled_dot_product_attention, silu

import fullshard

TRAINERS, ENGINES = [0, 1], [2, 3]
VOCABULARY, WIDTH, INNER, HEADS, KEYS, HEAD, LAYERS, LENGTH = 8, 32, 64, 4, 2, 8, 2, 6
QUESTIONS, ANSWERS = 16, 8  # answers per question: a group


def attend(q, k, v):
    """Of (batch, length, heads * HEAD), the keys of fewer heads, each token to those before it."""
    q, k, v = (x.unflatten(-1, (-1, HEAD)).transpose(1, 2) for x in (q, k, v))
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    return scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.mlp_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.q_proj = nn.Linear(WIDTH, HEADS * HEAD, bias=False)
        self.k_proj = nn.Linear(WIDTH, KEYS * HEAD, bias=False)
        self.v_proj = nn.Linear(WIDTH, KEYS * HEAD, bias=False)
        self.o_proj = nn.Linear(HEADS * HEAD, WIDTH, bias=False)
        self.gate_proj = nn.Linear(WIDTH, INNER, bias=False)
        self.up_proj = nn.Linear(WIDTH, INNER, bias=False)
        self.down_proj = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x):
        y = self.norm(x)
        x = x + self.o_proj(attend(self.q_proj(y), self.k_proj(y), self.v_proj(y)))
        y = self.mlp_norm(x)
        return x + self.down_proj(silu(self.gate_proj(y)) * self.up_proj(y))


class Policy(nn.Module):
    """(batch, length) tokens to the log-probabilities of the next ones. Embedding and head are tied."""

    def __init__(self):
        super().__init__()
        self.embed, self.position = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = nn.init.normal_(self.embed.weight, std=0.2)

    def forward(self, tokens):
        x = self.embed(tokens) + self.position.weight[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x)).log_softmax(-1)


class Engine:
    """The same function on the ranks of `mesh`, each with some heads. Its memory is fused: `qkv` has the rows of q, k
    and v after each other, `gate_up` those of gate and up."""

    def __init__(self, mesh):
        self.mesh, parts = mesh, mesh.size()
        self.embed, self.position = torch.zeros(VOCABULARY, WIDTH), torch.zeros(LENGTH, WIDTH)
        self.norms = torch.zeros(2 * LAYERS + 1, WIDTH)
        self.rows = [HEADS * HEAD // parts, KEYS * HEAD // parts, KEYS * HEAD // parts]
        self.qkv = torch.zeros(LAYERS, sum(self.rows), WIDTH)
        self.o = torch.zeros(LAYERS, WIDTH, HEADS * HEAD // parts)
        self.gate_up = torch.zeros(LAYERS, 2 * INNER // parts, WIDTH)
        self.down = torch.zeros(LAYERS, WIDTH, INNER // parts)

    def weights(self):
        """Its memory under the policy's names, for `fullshard.transfer`: views, as parts of tensors on the mesh."""

        def part(tensor, placement):
            return DTensor.from_local(tensor, self.mesh, [placement], run_check=False)

        named = {"embed": self.embed, "position": self.position, "norm": self.norms[-1]}
        found = {f"{name}.weight": part(tensor, Replicate()) for name, tensor in named.items()}
        for i in range(LAYERS):
            fused = [*self.qkv[i].split(self.rows), *self.gate_up[i].chunk(2)]
            for name, tensor in zip(("q", "k", "v", "gate", "up"), fused, strict=True):
                found[f"layers.{i}.{name}_proj.weight"] = part(tensor, Shard(0))
            found[f"layers.{i}.o_proj.weight"] = part(self.o[i], Shard(1))
            found[f"layers.{i}.down_proj.weight"] = part(self.down[i], Shard(1))
            found[f"layers.{i}.norm.weight"] = part(self.norms[2 * i], Replicate())
            found[f"layers.{i}.mlp_norm.weight"] = part(self.norms[2 * i + 1], Replicate())
        return found

    def next(self, tokens):
        """Log-probabilities of the token after each of (batch, length) tokens."""

        def normed(x, number):
            return nn.functional.rms_norm(x, (WIDTH,), self.norms[number])

        def summed(x):
            distributed.all_reduce(x, group=self.mesh.get_group())
            return x

        x = embedding(tokens, self.embed) + self.position[: tokens.shape[1]]
        for i in range(LAYERS):
            q, k, v = linear(normed(x, 2 * i), self.qkv[i]).split(self.rows, dim=-1)
            x = x + summed(linear(attend(q, k, v), self.o[i]))
            gate, up = linear(normed(x, 2 * i + 1), self.gate_up[i]).chunk(2, dim=-1)
            x = x + summed(linear(silu(gate) * up, self.down[i]))
        return linear(normed(x, -1), self.embed).log_softmax(-1)


def sample(next_of, step):
    """Questions of two tokens, and what `next_of` answers, token by token; all of it the same wherever it runs.
    Returns (batch, LENGTH) tokens, and the log-probability of each token of the answers."""
    chance = torch.Generator().manual_seed(step)
    tokens = torch.randint(VOCABULARY, (QUESTIONS, 2), generator=chance).repeat_interleave(ANSWERS, 0)
    found = []
    for _ in range(LENGTH - 2):
        logs = next_of(tokens)[:, -1]
        noise = -torch.empty(logs.shape).exponential_(generator=chance).log()
        tokens = torch.cat([tokens, (logs + noise).argmax(-1, keepdim=True)], dim=1)
        found.append(logs.gather(-1, tokens[:, -1:]))
    return tokens, torch.cat(found, dim=1)


def reward_of(tokens):
    """How much of an answer repeats the first token of its question."""
    return (tokens[:, 2:] == tokens[:, :1]).to(torch.get_default_dtype()).mean(1)


def train(steps):
    """Returns the rewards, the largest difference between engine and trainer, the policy, the engine, and what it
    answers in the end."""
    rank = distributed.get_rank()
    trainers, engines = DeviceMesh("cpu", TRAINERS), DeviceMesh("cpu", ENGINES)  # all ranks make both
    torch.manual_seed(0)
    policy = engine = None
    if rank in TRAINERS:
        policy = Policy()
        for layer in policy.layers:
            fullshard.fully_shard(layer, mesh=trainers)
        fullshard.fully_shard(policy, mesh=trainers)
        optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-3)
    else:
        engine = Engine(engines)
    move = fullshard.transfer(policy, engine and engine.weights(), names={"head.weight": None})
    if rank == 0:
        print(move.plan())
    rewards, difference = [], 0.0
    tokens = torch.empty(QUESTIONS * ANSWERS, LENGTH, dtype=torch.int64)
    before = torch.empty(QUESTIONS * ANSWERS, LENGTH - 2)
    for step in range(steps):
        move.run()  # all ranks
        if engine is not None:
            tokens, before = sample(engine.next, step)
        distributed.broadcast(tokens, src=ENGINES[0])
        distributed.broadcast(before, src=ENGINES[0])
        rewards.append(reward_of(tokens).mean().item())
        if policy is None:
            continue
        mine = slice(rank, None, len(TRAINERS))  # some answers to each question
        reward = reward_of(tokens).unflatten(0, (QUESTIONS, ANSWERS))
        advantage = ((reward - reward.mean(1, keepdim=True)) / (reward.std(1, keepdim=True) + 1e-4)).flatten()[mine]
        for inner in range(2):
            now = policy(tokens[mine, :-1])[:, 1:].gather(-1, tokens[mine, 2:, None]).squeeze(-1)
            if inner == 0:
                difference = max(difference, (now - before[mine]).abs().max().item())
            ratio = (now - before[mine]).exp()
            gain = torch.minimum(ratio * advantage[:, None], ratio.clamp(0.8, 1.2) * advantage[:, None])
            (-gain.mean()).backward()
            optimizer.step()
            optimizer.zero_grad()
        if rank == 0 and step % 10 == 9:
            print(f"step {step + 1}  reward {rewards[-1]:.2f}  engine and trainer differ by at most {difference:.0e}")
    move.run()
    return rewards, difference, policy, engine, engine and sample(engine.next, steps)


if __name__ == "__main__":
    distributed.init_process_group("gloo")
    train(steps=40)
    distributed.destroy_process_group()
