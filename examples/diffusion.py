"""A diffusion transformer and its average: torchrun --nproc-per-node 2 examples/diffusion.py [folder]

The model computes in bfloat16, and time steps reach it in float32. The average of its parameters is sharded like them,
in float32; it draws the samples, is saved with the checkpoint, and is exported as one file of plain tensors.
"""

import math
import sys
import tempfile

import torch
from safetensors.torch import save_file
from torch import distributed, nn
from torch.nn.functional import mse_loss, scaled_dot_product_attention, silu

import fullshard
from fullshard.checkpoint import get_state_dict, load, save, set_state_dict

WIDTH, HEADS, SIDE, PATCH, LAYERS, TIMES = 32, 4, 8, 2, 3, 20
KEPT = torch.cumprod(
    1 - torch.linspace(1e-3, 0.3, TIMES, dtype=torch.float64), 0
)  # how much of an image is left at each time


class Block(nn.Module):
    """Attention and a perceptron, scaled and shifted by the time."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = (nn.LayerNorm(WIDTH, elementwise_affine=False) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.adapt = nn.Linear(WIDTH, 6 * WIDTH)
        nn.init.zeros_(self.adapt.weight)
        nn.init.zeros_(self.adapt.bias)

    def forward(self, x, time):
        a, b, c, d, e, f = self.adapt(silu(time))[:, None].chunk(6, -1)
        y = self.norm1(x) * (1 + a) + b
        q, k, v = (z.unflatten(-1, (HEADS, -1)).transpose(1, 2) for z in self.qkv(y).chunk(3, -1))
        x = x + c * self.out(scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + f * self.mlp(self.norm2(x) * (1 + d) + e)


class DiT(nn.Module):
    """(n, 1, SIDE, SIDE) noisy images and (n,) times to the noise in them."""

    def __init__(self):
        super().__init__()
        self.patch = nn.Conv2d(1, WIDTH, PATCH, PATCH)
        self.position = nn.Parameter(0.02 * torch.randn((SIDE // PATCH) ** 2, WIDTH))
        self.time = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, PATCH**2)
        nn.init.zeros_(self.head.weight)

    def forward(self, x, t):
        # In bfloat16, a time of 257 would be 256.
        waves = t[:, None] * torch.exp(-math.log(1000) * torch.arange(WIDTH // 2, dtype=t.dtype) / (WIDTH // 2))
        time = self.time(torch.cat([waves.sin(), waves.cos()], 1).to(self.head.weight.dtype))
        x = self.patch(x).flatten(2).transpose(1, 2) + self.position
        for block in self.blocks:
            x = block(x, time)
        x = self.head(self.norm(x)).unflatten(1, (SIDE // PATCH, SIDE // PATCH)).unflatten(-1, (1, PATCH, PATCH))
        return x.permute(0, 3, 1, 4, 2, 5).reshape(x.shape[0], 1, SIDE, SIDE)


def shard(model, dtype):
    policy = fullshard.MixedPrecisionPolicy(dtype, output_dtype=torch.get_default_dtype(), cast_forward_inputs=["!t"])
    for block in model.blocks:
        fullshard.fully_shard(block, mp_policy=fullshard.MixedPrecisionPolicy(dtype))
    return fullshard.fully_shard(model, mp_policy=policy)


def images(n, chance):
    """Horizontal bars: all pixels of a row are equal."""
    return torch.randn(n, 1, SIDE, 1, generator=chance).sign().expand(n, 1, SIDE, SIDE)


def loss_of(model, step, rank):
    chance = torch.Generator().manual_seed(1000 * step + rank)
    x, t = images(16, chance), torch.randint(TIMES, (16,), generator=chance)
    noise, kept = torch.randn(x.shape, generator=chance), KEPT[t].to(x.dtype)[:, None, None, None]
    return mse_loss(model(kept.sqrt() * x + (1 - kept).sqrt() * noise, t.to(x.dtype)), noise)


@torch.no_grad()
def draw(model, n):
    """Images from noise, the same on all ranks."""
    x = torch.randn(n, 1, SIDE, SIDE, generator=torch.Generator().manual_seed(0))
    for t in reversed(range(TIMES)):
        noise = model(x, torch.full((n,), float(t)))
        clean = ((x - (1 - KEPT[t]).sqrt() * noise) / KEPT[t].sqrt()).clamp(-1.5, 1.5)
        before = KEPT[t - 1] if t else torch.ones(())
        x = before.sqrt() * clean + (1 - before).sqrt() * noise
    return x


def train(folder, steps, dtype=torch.bfloat16, decay=0.98):
    rank = distributed.get_rank()
    torch.manual_seed(0)
    model = shard(DiT(), dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    mean = fullshard.average(model, decay=decay)
    for step in range(steps):
        loss_of(model, step, rank).backward()
        optimizer.step()
        optimizer.zero_grad()
        mean.update()
        if rank == 0 and step % 100 == 99:
            print(f"step {step + 1}")
    values, moments = get_state_dict(model, optimizer)
    save({"model": values, "optimizer": moments, "average": mean}, checkpoint_id=f"{folder}/checkpoint")
    with mean.applied():
        drawn = draw(model, 16)
        # Full tensors one bucket at a time, which all ranks leave together; one of them keeps them.
        plain = {}
        for bucket in fullshard.weights(model):
            if rank == 0:
                plain.update(bucket)
    if rank == 0:
        save_file(plain, f"{folder}/average.safetensors")
        print(f"pixels differ from the mean of their row by {drawn.std(-1).mean():.2f}, those of noise by 1")
    return model, optimizer, mean, drawn


def resume(folder, dtype=torch.bfloat16):
    """On any number of ranks: model, optimizer and average as they were saved."""
    torch.manual_seed(1)
    model = shard(DiT(), dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    mean = fullshard.average(model, decay=0.98)
    values, moments = get_state_dict(model, optimizer)
    load({"model": values, "optimizer": moments, "average": mean}, checkpoint_id=f"{folder}/checkpoint")
    set_state_dict(model, optimizer, model_state_dict=values, optim_state_dict=moments)
    return model, optimizer, mean


if __name__ == "__main__":
    distributed.init_process_group("gloo")
    folder = [sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()]
    distributed.broadcast_object_list(folder)  # one for all
    drawn = train(folder[0], steps=300)[-1]
    model, _, mean = resume(folder[0])
    with mean.applied():
        assert torch.equal(draw(model, 16), drawn)
    if distributed.get_rank() == 0:
        print("the loaded average draws the same images")
    distributed.destroy_process_group()
