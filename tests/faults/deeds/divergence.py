"""What the cases of divergence do on one rank, and the models that they do it to."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import fullshard
from tests.faults.actions import parameter, skip_layer, swap_layers
from tests.faults.program import Run
from tests.threads.programs import WIDTH, Block, Model


class Unlike(Block):
    made = 0

    def __init__(self) -> None:
        super().__init__()
        type(self).made += 1
        hidden = 2 * WIDTH + 1 + type(self).made % 3
        self.up = torch.nn.Linear(WIDTH, hidden)
        self.down = torch.nn.Linear(hidden, WIDTH)


class UnlikeModel(Model):
    """Blocks of different sizes."""

    block = Unlike

    def __init__(self) -> None:
        Unlike.made = 0
        super().__init__()


def swapped_evaluation(run: Run) -> None:
    swap_layers(0, 1)(run)
    run.evaluate()


def drop_by_own_seed(run: Run) -> None:
    """Layer drop, whose random numbers are another on each rank."""
    skip_layer(run.rank)(run)


def drop_by_shared_seed(run: Run) -> None:
    skip_layer(run.step % 3)(run)


def early_exit(run: Run, tokens: Tensor) -> Tensor:
    """Leaves behind the first layer, on rank 1 in step 1."""
    depth = 1 if run.rank == 1 and run.step == 1 else None
    found: Tensor = run.model(tokens, depth=depth).pow(2).mean()
    return found


class Gated(Block):
    """A part that only some ranks use."""

    used = True

    def forward(self, x: Tensor) -> Tensor:
        inner = torch.tanh(self.up(self.norm(x)))
        return x + (self.down(inner) if self.used else inner[..., :WIDTH])


def gate_off(run: Run) -> None:
    run.model.layers[1].used = False


def gate_plain(run: Run, tokens: Tensor) -> Tensor:
    """The same in plain training, where this process has the batches of all ranks."""
    if run.plain and run.step >= 1:
        run.model.layers[1].used = run.kept.setdefault("turn", 0) % 2 == 0
        run.kept["turn"] += 1
    found: Tensor = run.model(tokens).pow(2).mean()
    return found


def unused_root_part(run: Run, tokens: Tensor) -> Tensor:
    """Rank 1's loss is made of the last layer, not of the head."""
    second = run.plain and run.kept.setdefault("turn", 0) % 2 == 1
    if run.plain:
        run.kept["turn"] += 1
    out = run.model(tokens)
    return out.pow(2).mean() * (0.0 if second or run.rank == 1 else 1.0)


def one_more_micro_batch(run: Run) -> None:
    run.loss(run.batches(step=70)[0]).backward()


def one_more_held(run: Run) -> None:
    run.model.set_requires_gradient_sync(False)
    run.loss(run.batches(step=70)[0]).backward()
    run.model.set_requires_gradient_sync(True)


def fewer_micro_batches(run: Run) -> None:
    run.setup = replace(run.setup, micros=1)


def two_evaluations_more(run: Run) -> None:
    run.evaluate(2)


def uneven_evaluation(run: Run) -> None:
    """Rank 1 has two batches more."""
    run.evaluate(2 + 2 * run.rank)


def joined_evaluation(run: Run) -> None:
    """The same, with the call that lets ranks have unequal numbers."""
    batches = [run.batches(step=50 + i)[0] for i in range(2 + 2 * run.rank)]
    with torch.no_grad():
        for tokens in (turn.batch for turn in fullshard.joined(run.model, batches)) if run.ours else batches:
            run.model(tokens)


def one_step_more(run: Run) -> None:
    run.optimizer.step()


def no_step(run: Run) -> None:
    """This rank leaves its update out, once."""
    step = run.optimizer.step

    def nothing() -> None:
        run.optimizer.step = step

    run.optimizer.step = nothing


def sync_off(run: Run) -> None:
    run.model.set_requires_gradient_sync(False)


def stop_here(run: Run) -> None:
    sys.exit(0)


def no_backward(run: Run) -> None:
    """This rank finds nothing to learn from in its batch, and goes on to the update."""
    run.kept["losses"] = []


def keep_full(run: Run) -> None:
    run.model.set_reshard_after_forward(False)


def freeze(run: Run) -> None:
    run.model.layers[1].requires_grad_(False)


def prefetch(run: Run) -> None:
    run.model.set_modules_to_forward_prefetch([run.model.layers[2], run.model.layers[0]])


def no_all_reduce(run: Run) -> None:
    run.model.set_requires_all_reduce(False)


def clip(run: Run) -> None:
    assert run.impl is not None
    run.impl.clip(run.model.parameters(), 0.05)


def full_tensor(run: Run) -> None:
    parameter(run, "layers.1.up.weight").full_tensor()


def full_state(run: Run) -> None:
    """As `if rank == 1: torch.save(...)` around it has it."""
    run.kept["state"] = {name: value.full_tensor() for name, value in run.model.state_dict().items()}


def full_state_of_all(run: Run) -> None:
    if not run.plain:
        full_state(run)


def gradient_full_tensor(run: Run) -> None:
    """As a log of gradient norms has it."""
    parameter(run, "layers.1.up.weight").grad.full_tensor()


def gradient_norm(run: Run) -> None:
    parameter(run, "layers.1.up.weight").grad.norm().full_tensor()


def state_full_tensor(run: Run) -> None:
    run.optimizer.state[parameter(run, "layers.1.up.weight")]["exp_avg"].full_tensor()


def all_reduce(run: Run) -> None:
    """Of a loss, as a log has it."""
    torch.distributed.all_reduce(torch.ones(1))


def barrier(run: Run) -> None:
    torch.distributed.barrier()


def object_gather(run: Run) -> None:
    torch.distributed.all_gather_object([None] * run.setup.world, {"loss": 1.0})


def all_reduce_of_all(run: Run) -> None:
    """Begun before a forward by rank 0, which the others finish long before it looks."""
    if run.plain:
        return
    if run.rank == 2:
        time.sleep(4)
    work = torch.distributed.all_reduce(torch.ones(1), async_op=run.rank == 0)
    run.kept["under way"] = work


def full_params_of_all(run: Run) -> None:
    if run.ours:
        with fullshard.full_params(run.model):
            run.kept["norm"] = sum(float(p.detach().square().sum()) for p in run.model.parameters())


def full_params_beside_evaluation(run: Run) -> None:
    full_params(run) if run.rank == 1 else run.evaluate()


def zero_grad_of_a_block(run: Run) -> None:
    run.model.layers[1].zero_grad()


def gradient_taken_away(run: Run) -> None:
    for p in run.model.layers[2].parameters():
        p.grad = None


def full_params(run: Run) -> None:
    if run.ours:
        with fullshard.full_params(run.model):
            pass
    else:
        run.model.unshard()


def state_dict(run: Run) -> None:
    run.model.state_dict()
    run.optimizer.state_dict()


def unshard(run: Run) -> None:
    run.model.layers[1].unshard()


def recompute_one(run: Run) -> None:
    from tests.faults.program import _recompute

    _recompute(run.model.layers[1])


def longer_batch(run: Run, tokens: Tensor) -> Tensor:
    """Ranks have batches of different lengths."""
    if run.rank == 1:
        tokens = tokens[:, :2]
    found: Tensor = run.model(tokens).pow(2).mean()
    return found


def other_buffer(run: Run) -> None:
    run.model.layers[1].scale.mul_(1.5)


class Buffered(Block):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.scale)


class Normed(Block):
    """Running statistics of this rank's batches."""

    def __init__(self) -> None:
        super().__init__()
        self.statistics = torch.nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.statistics(x.transpose(1, 2)).transpose(1, 2))


def hsdp(impl: Any) -> dict[str, Any]:
    return {"mesh": init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))}


def alternate(run: Run) -> None:
    """Another order in each step, the same on all ranks."""
    swap_layers(run.step % 2, 2)(run)


def zero_grad_left_out(run: Run) -> None:
    """Gradients of the step before are still there."""
    run.optimizer.zero_grad = lambda: None


def other_sizes(run: Run) -> None:
    """One block computes in another dtype from now on: messages of another size."""
    run.model.layers[1].bfloat16()
