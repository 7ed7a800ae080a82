"""Ranks that disagree at the beginning: an error on all of them that says where, and none where they rightly differ."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import fullshard
from fullshard import MixedPrecisionPolicy, fully_shard
from fullshard.peers import RanksDisagree, watch
from tests.harness.behaviours import behaviour
from tests.harness.models import seeded
from tests.harness.threads import run_ranks
from tests.threads.programs import Block, Model, Tied, batch, part, shard

# Whose model or calls are other than those of the rest.
ODD = 1


class Small(Model):
    """A parameter of one row beside the others, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("mean", torch.zeros(3))

    def out(self, x: Tensor) -> Any:
        return self.head(x) * self.scale


BASE: Any = seeded(Small)
OTHER: Any = seeded(Small, seed=1)


def step(model: Any, rank: int, index: int = 0) -> None:
    model(part(batch(dist.get_world_size(), index), rank)).pow(2).mean().backward()


# ---- what differs --------------------------------------------------------------------------------------------


class Odd(NamedTuple):
    """What the odd rank does, and how the error begins on all ranks. `before`: to its model, before it is sharded;
    `shard`: in the place of sharding as the others do; `after`: behind that."""

    expected: str
    before: Callable[[Any], object] = lambda model: None
    shard: Callable[[Any], object] = shard
    after: Callable[[Any], object] = lambda model: None
    world: int = 2


def swap_order(model: Any) -> None:
    """The head is registered before the embedding."""
    embedding = model.embedding
    del model.embedding
    model.embedding = embedding


def rename(model: Any) -> None:
    model.output, model.head.out_features = model.head, 0
    del model.head


def all_but(*left_out: int) -> Callable[[Any], object]:
    def apply(model: Any) -> None:
        for i, layer in enumerate(model.layers):
            if i not in left_out:
                fully_shard(layer)
        fully_shard(model)

    return apply


def inner_too(model: Any) -> None:
    fully_shard(model.layers[0].up)
    shard(model)


def two_as_one(model: Any) -> None:
    fully_shard([model.layers[0], model.layers[1]])
    fully_shard(model.layers[2])
    fully_shard(model)


def with_(layer: int | None = None, **options: Any) -> Callable[[Any], object]:
    """Sharded with `options` for one layer, or for all units."""

    def apply(model: Any) -> None:
        for i, block in enumerate(model.layers):
            fully_shard(block, **(options if layer in (None, i) else {}))
        fully_shard(model, **(options if layer is None else {}))

    return apply


def without(parameter: str) -> Callable[[Any], object]:
    def apply(model: Any) -> None:
        for block in model.layers:
            fully_shard(block)
        fully_shard(model, ignored_params={model.get_parameter(parameter)})

    return apply


def change(parameter: str, edit: Callable[[Tensor], Tensor]) -> Callable[[Any], object]:
    def apply(model: Any) -> None:
        with torch.no_grad():
            p = model.get_parameter(parameter)
            p.copy_(edit(p.clone()))

    return apply


def negate_last(value: Tensor) -> Tensor:
    value.view(-1)[-1] *= -1
    return value


def next_float(value: Tensor) -> Tensor:
    value.view(-1)[3] = torch.nextafter(value.view(-1)[3], torch.tensor(9.0))
    return value


def negative_zero(value: Tensor) -> Tensor:
    return -value


def columns_exchanged(value: Tensor) -> Tensor:
    """Sums of all rows and columns stay as they are."""
    value[0, 0], value[0, 1], value[1, 0], value[1, 1] = value[0, 1], value[0, 0], value[1, 1], value[1, 0]
    return value


BFLOAT16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
SHAPE, UNITS, VALUES = (
    "expected the same shape",
    "expected a unit (fully_shard) of this name",
    "expected the same values",
)
PRESENT = "expected this parameter on every rank, found it on"

DIVERGENCES: dict[str, Odd] = {
    # ---- the model
    "a layer more": Odd(f"layers.3: {UNITS}", lambda m: m.layers.append(Block())),
    "a layer less": Odd(f"layers.2: {UNITS}", lambda m: m.layers.pop(2)),
    "no layers": Odd(f"layers.0: {UNITS}", lambda m: setattr(m, "layers", nn.ModuleList())),
    "another width": Odd(f"layers.1.up.weight: {SHAPE}", lambda m: setattr(m.layers[1], "up", nn.Linear(6, 14))),
    "another vocabulary": Odd(f"embedding.weight: {SHAPE}", lambda m: setattr(m, "embedding", nn.Embedding(12, 6))),
    "a vector that is a column": Odd(f"scale: {SHAPE}", lambda m: setattr(m, "scale", nn.Parameter(torch.ones(1, 1)))),
    "no bias": Odd(f"head.bias: {PRESENT} rank 0 ", lambda m: setattr(m.head, "bias", None)),
    "a parameter more": Odd(
        f"extra: {PRESENT} rank 1 and not", lambda m: m.register_parameter("extra", nn.Parameter(torch.ones(2)))
    ),
    "another name": Odd(f"head.weight: {PRESENT} ranks 0 and 2 ", rename, world=3),
    "another order": Odd("embedding.weight: expected the same order of parameters", swap_order),
    "a dtype": Odd("layers.0.norm.weight: expected the same dtype", lambda m: m.layers[0].norm.double()),
    "all dtypes": Odd("scale: expected the same dtype", lambda m: m.bfloat16()),
    "tied": Odd("embedding.weight: expected the same number", lambda m: setattr(m.head, "weight", m.embedding.weight)),
    "frozen": Odd("head.bias: expected the same requires_grad", lambda m: m.head.bias.requires_grad_(False)),
    "frozen afterwards": Odd("layers.2.norm.weight: expected the", after=lambda m: m.layers[2].requires_grad_(False)),
    # ---- fully_shard
    "a layer not wrapped": Odd(f"layers.1: {UNITS}", shard=all_but(1), world=3),
    "the root alone": Odd(f"layers.0: {UNITS}", shard=fully_shard),
    "an inner module too": Odd(f"layers.0.up: {UNITS}", shard=inner_too, world=3),
    "two as one": Odd(f"layers.0: {UNITS}", shard=two_as_one),
    "ignored": Odd(f"head.bias: {PRESENT} rank 0 and", shard=without("head.bias")),
    "another dim": Odd(
        "layers.2.up.weight: expected the same placement",
        shard=with_(2, shard_placement_fn=lambda p: Shard(p.ndim - 1)),
    ),
    "kept after forward": Odd(
        "layers.1: expected the same reshard_after_forward", shard=with_(1, reshard_after_forward=False)
    ),
    "the root freed": Odd(
        "root: expected the same reshard_after_forward", shard=with_(reshard_after_forward=True), world=3
    ),
    "kept in parts": Odd(
        "expected all ranks to come to the same places in the same order, found ranks 0 and 2 and 3 at the units and "
        "parameters of the model, rank 1 at fully_shard(..., reshard_after_forward=2)",
        shard=with_(0, reshard_after_forward=2),
        world=4,
    ),
    "compute dtype": Odd("layers.0: expected the same mp_policy", shard=with_(0, mp_policy=BFLOAT16)),
    "reduce dtype": Odd(
        "root: expected the same mp_policy", shard=with_(mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float64))
    ),
    "output dtype": Odd(
        "layers.2: expected the same mp", shard=with_(2, mp_policy=MixedPrecisionPolicy(output_dtype=torch.float64))
    ),
    "inputs not cast": Odd(
        "root: expected the same mp_policy", shard=with_(mp_policy=MixedPrecisionPolicy(cast_forward_inputs=False))
    ),
    "another order of ranks": Odd(
        "root: expected the same mesh", shard=lambda m: with_(mesh=DeviceMesh("cpu", [1, 0]))(m)
    ),
    # ---- what is set behind it
    "forward prefetch": Odd(
        "layers.0: expected the same forward prefetch",
        after=lambda m: m.layers[0].set_modules_to_forward_prefetch([m.layers[1], m.layers[2]]),
    ),
    "backward prefetch": Odd(
        "layers.2: expected the same backward prefetch",
        after=lambda m: m.layers[2].set_modules_to_backward_prefetch([m.layers[0]]),
    ),
    "divide factor": Odd(
        "layers.1: expected the same gradient divide factor", after=lambda m: m.layers[1].set_gradient_divide_factor(3)
    ),
    "freed behind backward": Odd(
        "root: expected the same reshard_after_backward",
        after=lambda m: m.set_reshard_after_backward(False, recurse=False),
    ),
    "bytes ahead": Odd(
        "root: expected the same prefetch_nbytes", after=lambda m: m.set_memory_budget(prefetch=1 << 20)
    ),
    "gradient bytes": Odd(
        "root: expected the same gradient_nbytes", after=lambda m: m.set_memory_budget(gradients=1 << 20)
    ),
    # ---- values
    "a buffer": Odd("mean (rank 0 unlike rank 1): expected the same values of a buffer", lambda m: m.mean.fill_(1)),
    "another seed": Odd(f"embedding.weight: {VALUES}", lambda m: m.load_state_dict(OTHER.state_dict())),
    "one sign": Odd(f"head.weight: {VALUES}", change("head.weight", negate_last), world=3),
    "one bit": Odd(f"layers.1.down.weight: {VALUES}", change("layers.1.down.weight", next_float)),
    "a sign of zero": Odd(f"layers.1.norm.bias: {VALUES}", change("layers.1.norm.bias", negative_zero)),
    "rows in another order": Odd(f"embedding.weight: {VALUES}", change("embedding.weight", lambda v: v.flip(0))),
    "four elements exchanged": Odd(f"layers.0.up.weight: {VALUES}", change("layers.0.up.weight", columns_exchanged)),
    "one row, of another rank": Odd(f"scale: {VALUES}", change("scale", lambda v: v + 1), world=3),
    "scaled": Odd(f"layers.2.up.bias: {VALUES}", change("layers.2.up.bias", lambda v: v * 2), world=4),
}


@pytest.mark.sample(8)
@behaviour(
    "ranks that build, shard or set up something else: an error that says where",
    area="failures",
    torch="none",
    reason="pieces of different models are trained, or ranks hang or abort in C++",
)
@pytest.mark.parametrize("name", DIVERGENCES)
def test_what_differs_is_named_on_all_ranks(name: str) -> None:
    odd = DIVERGENCES[name]

    def job(rank: int) -> str:
        model = copy.deepcopy(BASE)
        with pytest.raises(RanksDisagree) as caught:
            if rank == ODD:
                odd.before(model)
                odd.shard(model)
                odd.after(model)
            else:
                shard(model)
            step(model, rank)
        if name != "kept in parts":
            with pytest.raises(RanksDisagree):  # and again: nothing was let through
                step(model, rank)
        return str(caught.value)

    texts = run_ranks(odd.world, job)
    assert len(set(texts)) == 1
    assert texts[0].startswith(odd.expected), texts[0]
    assert "rank 1" in texts[0] or "ranks" in texts[0]


def test_there_are_as_many_as_promised() -> None:
    assert len(DIVERGENCES) >= 40


# ---- what rightly differs ------------------------------------------------------------------------------------


# ---- what rightly differs ------------------------------------------------------------------------------------


def real_on_rank_0(rank: int) -> Any:
    """Weights on rank 0 alone, everything else on the meta device, sharded; rank 0's values go to all."""
    if rank == 0:
        model = copy.deepcopy(BASE)
    else:
        with torch.device("meta"):
            model = Small()
    shard(model)
    if rank:
        model.to_empty(device="cpu")
        model.mean.zero_()
    return given(model)


def given(model: Any, base: Any = BASE) -> Any:
    """Every parameter gets the values of `base`, by a copy: of some, those that it has."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(dtensor(base.get_parameter(name), p))
    return model


def dtensor(value: Tensor, like: Any) -> DTensor:
    return distribute_tensor(value.detach(), like.device_mesh, like.placements, src_data_rank=None)


def random_then_loaded(rank: int) -> Any:
    model = shard(seeded(Small, seed=rank))
    model.load_state_dict({name: dtensor(BASE.get_parameter(name), p) for name, p in model.named_parameters()}, False)
    return model


def random_then_assigned(rank: int) -> Any:
    model = shard(seeded(Small, seed=rank))
    state = {name: dtensor(BASE.get_parameter(name), p) for name, p in model.named_parameters()}
    model.load_state_dict(state, strict=False, assign=True)
    return model


def random_then_data(rank: int) -> Any:
    """Written in a way that no version counts."""
    model = shard(seeded(Small, seed=rank))
    for name, p in model.named_parameters():
        p.data.to_local().copy_(dtensor(BASE.get_parameter(name), p).to_local())
    return model


def reset_after_to_empty(rank: int) -> Any:
    model = shard(seeded(Small, seed=rank))
    model.to_empty(device="cpu")
    model.mean.zero_()
    torch.manual_seed(rank)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    with torch.no_grad():
        model.scale.fill_(1.0)
    return model


def materialised(rank: int) -> Any:
    with torch.device("meta"):
        model = Model()
    return fullshard.materialize(shard(model), seed=3)


def some_loaded(rank: int) -> Any:
    """The head differs and is loaded; the rest is equal and is not."""
    model = copy.deepcopy(BASE)
    model.head = seeded(lambda: nn.Linear(6, 11), seed=rank)
    shard(model)
    with torch.no_grad():
        for name, p in model.head.named_parameters():
            p.copy_(dtensor(BASE.head.get_parameter(name), p))
    return model


def one_row_loaded_with_what_it_had(rank: int) -> Any:
    """Rank 0 alone has rows of `scale`, and is given the value that it had; the others had another one."""
    model = copy.deepcopy(BASE)
    model.scale.data.fill_(1.0 + rank)
    model.head.bias.data.fill_(1.0 * rank)
    shard(model)
    for value, p in ((5.0, model.head.bias), (1.0, model.scale)):
        p.data.to_local().numpy().fill(value)  # a write that no version counts
    return model


def ignored_differ(rank: int) -> Any:
    model = copy.deepcopy(BASE)
    model.scale.data.fill_(1.0 + rank)
    for layer in model.layers:
        fully_shard(layer)
    return fully_shard(model, ignored_params={model.scale})


def synchronised(rank: int) -> Any:
    model = seeded(Small, seed=rank)
    model.mean.fill_(rank)
    return shard(fullshard.sync_module_states(model))


def converted(rank: int) -> Any:
    return shard(copy.deepcopy(BASE)).bfloat16()


def frozen(rank: int) -> Any:
    model = copy.deepcopy(BASE)
    model.layers[1].requires_grad_(False)
    return shard(model)


def unsharded_before(rank: int) -> Any:
    model = shard(copy.deepcopy(BASE))
    model.layers[0].unshard()
    model.layers[2].unshard(async_op=True).wait()
    return model


def replicated(rank: int) -> Any:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return shard(copy.deepcopy(BASE), mesh=mesh)


def of_two_stages(rank: int) -> Any:
    """Ranks 0 and 1 have another model than 2 and 3, as the stages of a pipeline."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "data"))
    model = seeded(Small, seed=rank // 2)
    if rank >= 2:
        model.layers.append(seeded(Block, seed=5))
    return shard(model, mesh=mesh["data"])


class Experts(Model):
    """Two experts in all, of which each rank of the axis "expert" has one, under its own name."""

    def __init__(self, which: int) -> None:
        super().__init__()
        self.experts = nn.ModuleDict({f"e{which}": Block()})

    def out(self, x: Tensor) -> Any:
        return self.head(next(iter(self.experts.values()))(x))


def of_experts(rank: int) -> Any:
    """The experts differ in name, width and values; the rest is on all four ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "expert"))
    which = mesh.get_local_rank("expert")
    model = seeded(lambda: Experts(0))
    own = seeded(Block, seed=7 + which)
    own.norm.weight.requires_grad_(which == 0)
    model.experts = nn.ModuleDict({f"e{which}": own})
    fully_shard(own, mesh=mesh["data"], reshard_after_forward=which == 0)
    return shard(model)


def of_experts_in_the_unit(rank: int) -> Any:
    """Likewise without a unit of their own: `shard_placement_fn` says which mesh they are on."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "expert"))
    which = mesh.get_local_rank("expert")
    model = seeded(lambda: Experts(0))
    model.experts = nn.ModuleDict({f"e{which}": seeded(Block, seed=7 + which)})
    own = set(model.experts.parameters())
    place = fullshard.ShardPlacementResult(Shard(0), mesh["data"])
    return shard(model, shard_placement_fn=lambda p: place if p in own else None)


LEGAL: dict[str, tuple[Callable[[int], Any], int]] = {
    **{
        make.__name__: (make, world)
        for make, world in [
            (real_on_rank_0, 3), (random_then_loaded, 2), (random_then_assigned, 2), (random_then_data, 2),
            (reset_after_to_empty, 2), (materialised, 2), (some_loaded, 3), (one_row_loaded_with_what_it_had, 3),
            (ignored_differ, 2), (synchronised, 3), (converted, 2), (frozen, 2), (unsharded_before, 2),
            (replicated, 4), (of_two_stages, 4), (of_experts, 4), (of_experts_in_the_unit, 4),
        ]
    },
    "equal on one rank": (lambda rank: shard(copy.deepcopy(BASE)), 1),
    "equal on four": (lambda rank: shard(copy.deepcopy(BASE)), 4),
    "tied": (lambda rank: shard(seeded(Tied)), 3),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:DTensor random operators")
@pytest.mark.sample(4)
@pytest.mark.parametrize("name", LEGAL)
def test_what_rightly_differs_is_not_accused(name: str) -> None:
    """No error and no warning, in three steps and an evaluation."""
    make, world = LEGAL[name]

    def job(rank: int) -> None:
        model = make(rank)
        for index in range(3):
            step(model, rank, index)
            model.zero_grad()
        with torch.no_grad():
            model(part(batch(world, 9), rank))

    run_ranks(world, job)


@pytest.mark.sample(1)
@pytest.mark.filterwarnings("ignore:DTensor random operators")
@pytest.mark.parametrize("late", [None, 1])
def test_experts_are_compared_among_themselves(late: int | None) -> None:
    """A difference on one mesh is raised by its ranks, and told to those who wait on another one. All continue. One
    who is told before it waits there tells those of its own other mesh."""

    def job(rank: int) -> tuple[str, bool]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "expert"))
        model = seeded(lambda: Experts(0))
        model.layers = nn.ModuleList()
        fully_shard(model.experts["e0"], mesh=mesh["data"])
        shard(model)
        weight = model.experts["e0"].down.weight
        weight.requires_grad_(rank != 2)
        if rank == late:
            time.sleep(1.0)
            own = watch()
            assert own is not None
            own.post()  # and hears what it was told
        with pytest.raises(RanksDisagree) as caught:
            step(model, rank)
        weight.requires_grad_(True)
        step(model, rank)
        return str(caught.value), bool(caught.value.by_rank)

    found = run_ranks(4, job, timeout=50)
    assert len({text for text, _ in found}) == 1
    assert found[0][0].startswith(
        "experts.e0.down.weight: expected the same requires_grad on every rank, found True on rank 0 and False on rank "
        "2"
    )
    assert [told for _, told in found] == [True, False, True, False]


# ---- settings ------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:DTensor random operators")
@pytest.mark.parametrize(("setting", "raises"), [("full", True), ("structure", False), ("off", False)])
def test_values_are_compared_unless_it_is_said(setting: str, raises: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FULLSHARD_GUARD", setting)

    def job(rank: int) -> None:
        model = shard(seeded(Small, seed=min(rank, 1)))
        if raises:
            with pytest.raises(RanksDisagree, match="seed"):
                step(model, rank)
        else:
            step(model, rank)

    run_ranks(3, job)


@pytest.mark.filterwarnings("ignore:DTensor random operators")
@pytest.mark.parametrize(("setting", "raises"), [("structure", True), ("off", False)])
def test_structure_is_compared_unless_it_is_said(setting: str, raises: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """`requires_grad` of a parameter that nothing reduces is a difference without a consequence."""
    monkeypatch.setenv("FULLSHARD_GUARD", setting)

    def job(rank: int) -> None:
        model = shard(copy.deepcopy(BASE))
        model.head.bias.requires_grad_(rank == 0)
        with torch.no_grad():
            if raises:
                with pytest.raises(RanksDisagree, match="requires_grad"):
                    model(part(batch(2, 0), rank))
            else:
                model(part(batch(2, 0), rank))

    run_ranks(2, job)


@pytest.mark.filterwarnings("ignore:DTensor random operators")
def test_an_early_unshard_compares_its_unit() -> None:
    def job(rank: int) -> None:
        model = copy.deepcopy(BASE)
        if rank:
            model.layers[1].norm.double()
        shard(model)
        model.layers[0].unshard()
        with pytest.raises(RanksDisagree, match=r"norm.weight: expected the same dtype"):
            model.layers[1].unshard()

    run_ranks(2, job)


@pytest.mark.filterwarnings("ignore:DTensor random operators")
def test_nothing_is_asked_in_later_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers and values outside of units are compared later by what a reduction carries."""
    from fullshard.peers import Scope

    asked: list[str] = []
    agree = Scope.agree

    def counting(self: Scope, what: str, value: str, **options: bool) -> Any:
        if self.rank == 0 and any(word in what for word in ("buffers", "values", "units", "to_empty", "facts")):
            asked.append(what)
        return agree(self, what, value, **options)

    monkeypatch.setattr(Scope, "agree", counting)

    def job(rank: int) -> list[int]:
        model = shard(copy.deepcopy(BASE))
        counts = []
        for index in range(17):
            step(model, rank, index)
            dist.barrier()
            counts.append(len(asked))
            dist.barrier()
        return counts

    counts = run_ranks(2, job)[0]
    assert counts[0] == 4
    assert counts[1:] == 16 * [4]
