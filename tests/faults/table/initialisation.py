"""How ranks begin: models that differ between ranks, in structure or in values, and models that are not ready."""

from __future__ import annotations

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
from tests.faults.cases import PLAIN, Case, Equal, Raises, Setup, at
from tests.faults.program import Run
from tests.harness.models import seeded
from tests.threads.programs import PROGRAMS, WIDTH, Block, of_blocks

WORLD_OF_3 = Setup(world=3)


def _differs(name: str, does: str, event: str, action: Action, *words: str, **more: Any) -> Case:
    """Rank 1 alone does it; all ranks have to say what differs, and between which ranks."""
    wanted = Raises("RanksDisagree", (*words, "rank 1"), within=more.pop("within", 5.0))
    return Case(f"init/{name}", does, wanted, (at(-1, event, action, rank=1),), **more)


def _refused(name: str, does: str, event: str, action: Action, error: str, *words: str, **more: Any) -> Case:
    step = more.pop("step", -1)
    return Case(f"init/{name}", does, Raises(error, words), (at(step, event, action),), **more)


# ---- one rank has another model ------------------------------------------------------------------------------


def _other_seed(run: Run) -> None:
    run.model = seeded(run.setup.model, seed=1 + run.rank)


def _one_element(run: Run) -> None:
    with torch.no_grad():
        run.model.head.bias[8] += 1e-6


def _rows_swapped(run: Run) -> None:
    """The same numbers at other places."""
    with torch.no_grad():
        weight = run.model.layers[1].up.weight
        weight.copy_(weight.flip(0).clone())


def _negative_zero(run: Run) -> None:
    """Equal numbers with other bits: no difference that training could show."""
    with torch.no_grad():
        run.model.layers[1].up.bias.zero_()
        if run.rank == 1:
            run.model.layers[1].up.bias.neg_()


class _Buffered(Block):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.scale)


def _other_buffer(run: Run) -> None:
    run.model.layers[1].scale.mul_(1.5)


def _replace_layer(make: Callable[[], nn.Module]) -> Action:
    def action(run: Run) -> None:
        run.model.layers[1] = seeded(make)

    return action


class _Wider(Block):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH + 2)
        self.down = nn.Linear(2 * WIDTH + 2, WIDTH)


class _Renamed(Block):
    def __init__(self) -> None:
        super().__init__()
        self.lift = self.up
        del self.up

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.lift(self.norm(x))))


def _extra_parameter(run: Run) -> None:
    run.model.layers[1].extra = nn.Parameter(torch.ones(4))


def _fewer_layers(run: Run) -> None:
    del run.model.layers[2]


def _to_bfloat16(run: Run) -> None:
    run.model.layers[1].norm.bfloat16()


def _freeze(run: Run) -> None:
    run.model.layers[1].up.weight.requires_grad_(False)


def _reorder_parameters(run: Run) -> None:
    """The same names, registered in another order."""
    layer = run.model.layers[1]
    up = layer.up
    del layer.up
    layer.up = up


def _shard_as(**options: Callable[[Run], Any]) -> Action:
    """This rank gives `fully_shard` other arguments."""

    def action(run: Run) -> None:
        run.shard(**{name: make(run) for name, make in options.items()})
        run.shard = lambda **_: None  # type: ignore[method-assign]

    return action


def _units(*names: str) -> Action:
    """This rank makes other units."""

    def action(run: Run) -> None:
        run.setup = replace(run.setup, units=names)

    return action


def _bf16_policy(run: Run) -> Any:
    assert run.impl is not None
    return run.impl.MixedPrecisionPolicy(param_dtype=torch.bfloat16)


def _turned_mesh(run: Run) -> Any:
    return DeviceMesh("cpu", torch.tensor([1, 0]))


# ---- what makes it right -------------------------------------------------------------------------------------


def _synchronised(run: Run) -> None:
    """Other values on rank 1, and the call that makes them rank 0's."""
    if run.rank == 1:
        _other_seed(run)
    if run.ours:
        fullshard.sync_module_states(run.model)
    elif not run.plain:
        for tensor in [*run.model.parameters(), *run.model.buffers()]:
            dist.broadcast(tensor.data, 0)


def _loaded_everywhere(run: Run) -> None:
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


def _build_anew(run: Run) -> None:
    if run.rank == 1:
        _other_seed(run)


# ---- models that are not ready -------------------------------------------------------------------------------


def _optimizer_before(run: Run) -> None:
    run.optimizer = torch.optim.AdamW(run.model.parameters(), lr=1e-2)


def _on_meta(run: Run) -> None:
    run.model.to("meta")


def _to_empty(run: Run) -> None:
    run.model.to_empty(device="cpu")


def _optimizer_then_assign(run: Run) -> None:
    """The values of a checkpoint take the place of the parameters that the optimizer has."""
    state = {name: value.clone() for name, value in run.model.state_dict().items()}
    run.model.load_state_dict(state, assign=True)


def _optimizer_over_full(run: Run) -> None:
    if run.plain:
        return
    run.model.unshard()
    for layer in run.model.layers:
        layer.unshard()
    run.optimizer = torch.optim.AdamW(run.model.parameters(), lr=1e-2)
    run.model.reshard()


def _parameter_replaced(run: Run) -> None:
    run.model.layers[1].up.weight = nn.Parameter(torch.ones(2 * WIDTH + 1, WIDTH))


def _not_contiguous(run: Run) -> None:
    linear = run.model.layers[1].up
    linear.weight = nn.Parameter(linear.weight.detach().t().contiguous().t())


def _tied_across_units(run: Run) -> None:
    run.model.layers[1].up.weight = run.model.layers[0].up.weight


def _tied_behind(run: Run) -> None:
    run.model.head.weight = run.model.embedding.weight


def _scalar(run: Run) -> None:
    run.model.layers[1].gain = nn.Parameter(torch.tensor(1.0))


def _root_first(run: Run) -> None:
    assert run.impl is not None
    run.impl.fully_shard(run.model)


def _twice(run: Run) -> None:
    assert run.impl is not None
    run.impl.fully_shard(run.model.layers[1])
    run.impl.fully_shard(run.model.layers[1])


def _module_list(run: Run) -> None:
    assert run.impl is not None
    run.impl.fully_shard(run.model.layers)


def _three_axes(run: Run) -> Any:
    return init_device_mesh("cpu", (1, 1, 2), mesh_dim_names=("a", "b", "c"))


def _list_as_root(run: Run) -> None:
    assert run.impl is not None
    run.impl.fully_shard([run.model.embedding, run.model.head])
    run.shard = lambda **_: None  # type: ignore[method-assign]
    run.model.embedding(torch.zeros(1, 1, dtype=torch.int64))


def _mesh_of_another_rank(run: Run) -> Any:
    return DeviceMesh("cpu", torch.tensor([0]))


def _shard_columns(run: Run) -> Any:
    return lambda p: Shard(1) if p.ndim > 1 else None


def _uneven_columns(impl: Any) -> dict[str, Any]:
    return {"shard_placement_fn": lambda p: Shard(1) if p.ndim > 1 and p.shape[1] % 2 else None}


CASES: tuple[Case, ...] = (
    _differs(
        "seed",
        "rank 1 builds its model from another seed",
        "built",
        _other_seed,
        "embedding.weight",
        "seed",
        "sync_module_states",
        fast=True,
    ),
    _differs(
        "seed_of_three",
        "rank 1 of three builds its model from another seed",
        "built",
        _other_seed,
        "embedding.weight",
        "seed",
        setup=WORLD_OF_3,
    ),
    _differs("one_element", "one element of head.bias differs by 1e-6", "built", _one_element, r"head\.bias"),
    _differs(
        "rows_swapped", "the same values in another order of rows", "built", _rows_swapped, r"layers\.1\.up\.weight"
    ),
    Case(
        "init/seeds_all_different",
        "each of three ranks has a seed of its own",
        Raises("RanksDisagree", ("embedding.weight", "seed")),
        (at(-1, "built", _other_seed),),
        WORLD_OF_3,
    ),
    Case(
        "init/seeds_bf16",
        "rank 1 has another seed, the model is in bfloat16",
        Raises("RanksDisagree", ("embedding.weight", "rank 1")),
        (at(-1, "built", _other_seed, rank=1), at(-1, "built", lambda run: run.model.bfloat16() and None)),
    ),
    _differs(
        "another_block",
        "rank 1 has a block with a wider linear",
        "built",
        _replace_layer(_Wider),
        r"layers\.1",
        "shape|13|14",
        fast=True,
    ),
    _differs(
        "renamed", "a module of rank 1 has another name", "built", _replace_layer(_Renamed), r"layers\.1", "lift|up"
    ),
    _differs("extra_parameter", "rank 1 has a parameter more", "built", _extra_parameter, r"layers\.1", "extra"),
    _differs("fewer_layers", "rank 1 has a layer less", "built", _fewer_layers, r"layers\.2"),
    _differs("another_dtype", "a norm of rank 1 is bfloat16", "built", _to_bfloat16, r"layers\.1\.norm", "bfloat16"),
    _differs(
        "frozen",
        "a weight is frozen on rank 1 alone",
        "built",
        _freeze,
        r"layers\.1\.up\.weight",
        "requires_grad|frozen",
    ),
    _differs(
        "order_of_parameters",
        "rank 1 registered its linears in another order",
        "built",
        _reorder_parameters,
        r"layers\.1",
    ),
    _differs(
        "unit_left_out",
        "rank 1 does not shard layers.1",
        "built",
        _units("layers.0", "layers.2"),
        r"layers\.1",
        "unit",
        fast=True,
    ),
    _differs(
        "unit_inside",
        "rank 1 shards a linear of layers.1 by itself",
        "built",
        _units("layers.0", "layers.1.up", "layers.1", "layers.2"),
        r"layers\.1\.up",
        "unit",
    ),
    _differs("no_units", "rank 1 makes one unit of the whole model", "built", _units(), r"layers\.0", "unit"),
    Case(
        "init/other_order_of_wrapping",
        "rank 1 shards its layers in another order",
        Equal(),
        (at(-1, "built", _units("layers.2", "layers.0", "layers.1"), rank=1),),
    ),
    _differs("mixed_precision", "rank 1 computes in bfloat16", "built", _shard_as(mp_policy=_bf16_policy), "bfloat16"),
    _differs(
        "reshard",
        "rank 1 keeps its parameters after forward",
        "built",
        _shard_as(reshard_after_forward=lambda run: False),
        "reshard",
    ),
    _differs(
        "columns",
        "rank 1 shards columns",
        "built",
        _shard_as(shard_placement_fn=_shard_columns),
        r"Shard\(?(dim=)?1|placement",
    ),
    _differs(
        "turned_mesh",
        "rank 1's mesh has the ranks in another order",
        "built",
        _shard_as(mesh=_turned_mesh),
        "mesh|rank",
        limit=15.0,
    ),
    Case(
        "init/synchronised",
        "rank 1 has another seed; sync_module_states before fully_shard",
        Equal(),
        (at(-1, "built", _synchronised),),
        fast=True,
    ),
    Case(
        "init/loaded_everywhere",
        "every rank has another seed, and loads the same checkpoint behind fully_shard",
        Equal(),
        (at(-1, "built", _build_anew), at(-1, "wrapped", _loaded_everywhere)),
    ),
    Case(
        "init/negative_zero",
        "ranks differ in the sign of zeros alone",
        Equal("plain", bound=2e-5),
        (at(-1, "built", _negative_zero),),
        also=Raises("RanksDisagree", (r"layers\.1\.up\.bias", "rank 1")),
    ),
    Case(
        "init/buffer",
        "a buffer of rank 1 has other values",
        Raises("RanksDisagree", (r"layers\.1\.scale", "rank 1")),
        (at(-1, "built", _other_buffer, rank=1),),
        Setup(model=of_blocks(_Buffered)),
    ),
    _refused(
        "optimizer_before",
        "the optimizer is built before fully_shard",
        "built",
        _optimizer_before,
        "RuntimeError",
        "fully_shard",
        "after|behind|parameters",
        fast=True,
    ),
    _refused(
        "meta",
        "the model is on the meta device at the first forward",
        "built",
        _on_meta,
        "RuntimeError",
        "meta",
        r"embedding\.weight|embedding",
        "to_empty|materialize",
    ),
    _refused(
        "forgotten_values",
        "to_empty, and nobody writes values",
        "wrapped",
        _to_empty,
        "RuntimeError",
        r"embedding\.weight",
        "to_empty|value",
        fast=True,
    ),
    Case(
        "init/assign_behind_optimizer",
        "load_state_dict(assign=True) of equal values, behind an optimizer",
        Equal(),
        (at(-1, "ready", _optimizer_then_assign),),
        also=Raises("RuntimeError", ("parameter", "optimizer|AdamW")),
    ),
    _refused(
        "optimizer_over_full",
        "the optimizer is built over full parameters",
        "wrapped",
        _optimizer_over_full,
        "RuntimeError",
        "AdamW|optimizer",
        "full|shard",
        fast=True,
    ),
    _refused(
        "parameter_replaced",
        "a plain parameter takes the place of a sharded one",
        "ready",
        _parameter_replaced,
        "RuntimeError",
        r"layers\.1\.up\.weight|up\.weight",
        "shard|replaced|assign",
    ),
    _refused(
        "not_contiguous",
        "a parameter that is not contiguous",
        "built",
        _not_contiguous,
        "NotImplementedError",
        "contiguous",
    ),
    _refused(
        "tied_across_units",
        "a parameter is tied from one unit to another",
        "built",
        _tied_across_units,
        "ValueError",
        r"layers\.0|up\.weight",
        "unit|group|once",
        setup=Setup(),
    ),
    Case(
        "init/tied_behind",
        "two parameters of the root are tied behind fully_shard",
        PLAIN,
        (at(-1, "wrapped", _tied_behind),),
        also=Raises("RuntimeError", (r"head\.weight", "tie|before fully_shard|replaced|assign")),
    ),
    _refused("scalar", "a parameter without dimensions", "built", _scalar, "ValueError", "gain", "1D|1-D|dimension"),
    _refused(
        "root_first",
        "the root is sharded before its parts",
        "built",
        _root_first,
        "RuntimeError",
        "inner|before|parent",
    ),
    _refused(
        "twice",
        "fully_shard is called twice for one module",
        "built",
        _twice,
        "AssertionError",
        "already|twice|applied",
    ),
    _refused(
        "module_list",
        "fully_shard is called for a ModuleList",
        "built",
        _module_list,
        "ValueError",
        "ModuleList",
        "forward",
    ),
    _refused("three_axes", "a mesh with three axes", "built", _shard_as(mesh=_three_axes), "ValueError", "mesh", "3"),
    _refused(
        "bad_reshard",
        "reshard_after_forward=3 on two ranks",
        "built",
        _shard_as(reshard_after_forward=lambda run: 3),
        "ValueError",
        "reshard_after_forward",
        "3",
    ),
    _refused("list_as_root", "a list of modules as the root", "built", _list_as_root, "RuntimeError", "list|root"),
    Case(
        "init/rank_outside_of_mesh",
        "rank 1 is not in the mesh that it is given",
        Raises("ValueError", ("mesh", "rank 1"), on=(1,)),
        (at(-1, "built", _shard_as(mesh=_mesh_of_another_rank)),),
        fast=True,
    ),
    Case(
        "init/uneven_columns",
        "Shard(1) of columns that do not divide",
        PLAIN,
        setup=Setup(options=_uneven_columns),
        also=Raises("NotImplementedError", ("even",)),
    ),
    Case(
        "init/two_dtypes",
        "parameters of two dtypes in one unit, trained beside plain training",
        PLAIN,
        setup=Setup(model=PROGRAMS["two_dtypes_in_a_unit"].model),
        also=Raises("AssertionError", ("dtype",)),
    ),
)
