"""A frozen teacher and a student, each in a layout of its own: torchrun --nproc-per-node 4 examples/distill.py

The teacher is sharded over all ranks, in bfloat16, and has neither gradients nor an optimizer. The student is small: it
is sharded over two ranks and replicated over the pairs. It begins with every second layer of the teacher, which goes
from the one layout to the other without a file.
"""

import re

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import gelu, kl_div

import fullshard

WIDTH, CLASSES, TEACHER, STUDENT = 48, 10, 6, 3


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, depth):
        super().__init__()
        self.stem, self.head = nn.Linear(16, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.layers = nn.ModuleList(Block() for _ in range(depth))

    def forward(self, x):
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def student_name(name):
    """Of a tensor of the teacher: layer 2n is layer n of the student, and the odd ones are left out."""
    layer = re.match(r"layers\.(\d+)\.(.*)", name)
    if layer is None:
        return name
    number, rest = int(layer[1]), layer[2]
    return None if number % 2 else f"layers.{number // 2}.{rest}"


def loss_of(student, teacher, x, heat=2.0):
    with torch.no_grad():
        wanted = (teacher(x.to(teacher.head.weight.dtype)).to(x.dtype) / heat).log_softmax(-1)
    return heat**2 * kl_div((student(x) / heat).log_softmax(-1), wanted, log_target=True, reduction="batchmean")


def batch(step, rank, size=32):
    return torch.randn(size, 16, generator=torch.Generator().manual_seed(1000 * step + rank))


def nets(dtype):
    """The same on all ranks. A real teacher comes from a file: fullshard.load_pretrained, after fully_shard."""
    torch.manual_seed(0)
    teacher = Net(TEACHER).to(dtype).requires_grad_(False).eval()
    return teacher, Net(STUDENT)


def train(steps, dtype=torch.bfloat16):
    rank, world = distributed.get_rank(), distributed.get_world_size()
    everyone = init_device_mesh("cpu", (world,))
    pairs = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("replicate", "shard"))
    teacher, student = nets(dtype)
    for net, mesh in ((teacher, everyone), (student, pairs)):
        for layer in net.layers:
            # A teacher has no backward, so each layer is freed after its forward, the last one too.
            fullshard.fully_shard(layer, mesh=mesh, reshard_after_forward=True)
        fullshard.fully_shard(net, mesh=mesh)
    start = fullshard.transfer(teacher, student, names=student_name)
    if rank == 0:
        print(start.plan())
    start.run()
    optimizer = torch.optim.AdamW(student.parameters(), lr=2e-3)
    losses = []
    for step in range(steps):
        loss = loss_of(student, teacher, batch(step, rank))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if rank == 0 and (step == 0 or step % 50 == 49):
            print(f"step {step + 1}  loss {losses[-1]:.5f}")
    return teacher, student, losses


if __name__ == "__main__":
    distributed.init_process_group("gloo")
    train(steps=200)
    distributed.destroy_process_group()
