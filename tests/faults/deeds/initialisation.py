"""What the cases of initialisation do to a model, on one rank or on all, before and behind `fully_shard`."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard

import fullshard
from tests.faults.actions import Action, local
from tests.faults.program import Run, steps
from tests.harness.models import seeded
from tests.threads.programs import WIDTH, Block, Model


def other_seed(run: Run) -> None:
    run.model = seeded(run.setup.model, seed=1 + run.rank)


def one_element(run: Run) -> None:
    with torch.no_grad():
        run.model.head.bias[8] += 1e-6


def rows_swapped(run: Run) -> None:
    """The same numbers at other places."""
    with torch.no_grad():
        weight = run.model.layers[1].up.weight
        weight.copy_(weight.flip(0).clone())


def zero_bias() -> nn.Module:
    model = Model()
    nn.init.zeros_(model.layers[1].up.bias)  # type: ignore[arg-type]
    return model


def negative_zero(run: Run) -> None:
    """Equal numbers with other bits: no difference that training could show."""
    with torch.no_grad():
        run.model.layers[1].up.bias.neg_()


def other_buffer(run: Run) -> None:
    run.model.layers[1].scale.mul_(1.5)


def replace_layer(make: Callable[[], nn.Module]) -> Action:
    def action(run: Run) -> None:
        run.model.layers[1] = seeded(make)

    return action


def wider() -> nn.Module:
    """A block whose linears have one row, and one column, more."""
    block = Block()
    block.up = nn.Linear(WIDTH, 2 * WIDTH + 2)
    block.down = nn.Linear(2 * WIDTH + 2, WIDTH)
    return block


class Renamed(Block):
    def __init__(self) -> None:
        super().__init__()
        self.lift = self.up
        del self.up

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.lift(self.norm(x))))


def extra_parameter(run: Run) -> None:
    run.model.layers[1].extra = nn.Parameter(torch.ones(4))


def fewer_layers(run: Run) -> None:
    del run.model.layers[2]


def to_bfloat16(run: Run) -> None:
    run.model.layers[1].norm.bfloat16()


def freeze(run: Run) -> None:
    run.model.layers[1].up.weight.requires_grad_(False)


def reorder_parameters(run: Run) -> None:
    """The same names, registered in another order."""
    layer = run.model.layers[1]
    up = layer.up
    del layer.up
    layer.up = up


def shard_as(**options: Callable[[Run], Any]) -> Action:
    """This rank gives `fully_shard` other arguments."""

    def action(run: Run) -> None:
        run.shard(**{name: make(run) for name, make in options.items()})
        run.shard = lambda **_: None  # type: ignore[method-assign]

    return action


def units(*names: str) -> Action:
    """This rank makes other units."""

    def action(run: Run) -> None:
        run.setup = replace(run.setup, units=names)

    return action


def bf16_policy(run: Run) -> Any:
    assert run.impl is not None
    return run.impl.MixedPrecisionPolicy(param_dtype=torch.bfloat16)


def turned_mesh(run: Run) -> Any:
    return DeviceMesh("cpu", torch.tensor([1, 0]))


def synchronised(run: Run) -> None:
    """Other values on rank 1, and the call that makes them rank 0's."""
    if run.rank == 1:
        other_seed(run)
    if run.ours:
        fullshard.sync_module_states(run.model)
    elif not run.plain:
        for tensor in [*run.model.parameters(), *run.model.buffers()]:
            dist.broadcast(tensor.data, 0)


def loaded_everywhere(run: Run) -> None:
    """Other values on each rank, all written by a checkpoint before the first forward."""
    values = seeded(run.setup.model).state_dict()
    if run.plain:
        run.model.load_state_dict(values)
    else:
        with torch.no_grad():
            for name, p in run.model.named_parameters():
                full = values[name]
                first, rows = run.rank * -(-full.shape[0] // run.setup.world), local(p).shape[0]
                local(p).copy_(full[first : first + rows])


def build_anew(run: Run) -> None:
    if run.rank == 1:
        other_seed(run)


def optimizer_before(run: Run) -> None:
    run.optimizer = torch.optim.AdamW(run.model.parameters(), lr=1e-2)


def on_meta(run: Run) -> None:
    run.model.to("meta")


def to_empty(run: Run) -> None:
    run.model.to_empty(device="cpu")


def drawn(seed: int | Callable[[Run], int], fill: Callable[[Tensor], object]) -> Action:
    """After `to_empty` each rank fills the shards at random, from the generator that it has."""

    def action(run: Run) -> None:
        if run.plain:
            return
        run.model.to_empty(device="cpu")
        torch.manual_seed(seed if isinstance(seed, int) else seed(run))
        with torch.no_grad():
            for p in run.model.parameters():
                fill(p)

    return action


def optimizer_then_assign(run: Run) -> None:
    """The values of a checkpoint take the place of the parameters that the optimizer has."""
    state = {name: value.clone() for name, value in run.model.state_dict().items()}
    run.model.load_state_dict(state, assign=True)


def optimizer_over_full(run: Run) -> None:
    if run.plain:
        return
    run.model.unshard()
    for layer in run.model.layers:
        layer.unshard()
    run.optimizer = torch.optim.AdamW(run.model.parameters(), lr=1e-2)
    run.model.reshard()


def parameter_replaced(run: Run) -> None:
    run.model.layers[1].up.weight = nn.Parameter(torch.ones(2 * WIDTH + 1, WIDTH))


def not_contiguous(run: Run) -> None:
    linear = run.model.layers[1].up
    linear.weight = nn.Parameter(linear.weight.detach().t().contiguous().t())


def tied_across_units(run: Run) -> None:
    run.model.layers[1].up.weight = run.model.layers[0].up.weight


def tied_behind(run: Run) -> None:
    run.model.head.weight = run.model.embedding.weight


def scalar(run: Run) -> None:
    run.model.layers[1].gain = nn.Parameter(torch.tensor(1.0))


def root_first(run: Run) -> None:
    assert run.impl is not None
    run.impl.fully_shard(run.model)


def twice(run: Run) -> None:
    assert run.impl is not None
    run.impl.fully_shard(run.model.layers[1])
    run.impl.fully_shard(run.model.layers[1])


def module_list(run: Run) -> None:
    assert run.impl is not None
    run.impl.fully_shard(run.model.layers)


def three_axes(run: Run) -> Any:
    return init_device_mesh("cpu", (1, 1, 2), mesh_dim_names=("a", "b", "c"))


def list_as_root(run: Run) -> None:
    assert run.impl is not None
    run.impl.fully_shard([run.model.embedding, run.model.head])
    run.shard = lambda **_: None  # type: ignore[method-assign]
    run.model.embedding(torch.zeros(1, 1, dtype=torch.int64))


def apart(mesh: Callable[[Run], Any]) -> Action:
    """This rank gives `mesh`, whose ranks are not those of its peers'."""

    def action(run: Run) -> None:
        run.kept["apart"] = True
        shard_as(mesh=mesh)(run)

    return action


def train_for_long(run: Run) -> None:
    """As `train`; where ranks are apart some train at once, for longer than the others' time limit."""
    run.build()
    for _ in range(60 if run.kept.get("apart") else 0):
        run.step = 0
        run.one_step()
        time.sleep(0.3)
    steps(run)


def another_axis(run: Run) -> Any:
    """Ranks 0 and 1 give the first axis of two by two, the others the second one."""
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    return both["data" if run.rank < 2 else "model"]


def half_of_all(run: Run) -> Any:
    """Ranks 0 and 1 give all ranks, the others theirs alone."""
    everyone = init_device_mesh("cpu", (4,))
    halves = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    return everyone if run.rank < 2 else halves["model"]


def alone_on_another_axis(run: Run) -> Any:
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    return both["model" if run.rank == 3 else "data"]


def mesh_of_another_rank(run: Run) -> Any:
    return DeviceMesh("cpu", torch.tensor([0]))


def shard_columns(run: Run) -> Any:
    return lambda p: Shard(1) if p.ndim > 1 else None


def uneven_columns(impl: Any) -> dict[str, Any]:
    return {"shard_placement_fn": lambda p: Shard(1) if p.ndim > 1 and p.shape[1] % 2 else None}
