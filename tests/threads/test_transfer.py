"""`transfer`: from any layout into any other one, over overlapping, disjoint and equal sets of ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from fullshard import fully_shard, transfer
from fullshard.extras import TransferError
from tests.harness import mailbox
from tests.harness.models import assert_same_training, collect, seeded
from tests.harness.threads import run_ranks
from tests.threads.test_weights import RULES, Odd, plain, renamed

Layout = Callable[[int, dict[str, Tensor]], Mapping[str, Tensor] | None]


def fsdp(*ranks: int) -> Layout:
    return lambda rank, full: {n: _shard(t, DeviceMesh("cpu", list(ranks)), [Shard(0)]) for n, t in full.items()}


def hsdp(rank: int, full: dict[str, Tensor]) -> Mapping[str, Tensor]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return {name: _shard(tensor, mesh, [Replicate(), Shard(0)]) for name, tensor in full.items()}


def tp(*ranks: int) -> Layout:
    """The last dim on an axis of its own."""
    return lambda rank, full: {
        n: _shard(t, DeviceMesh("cpu", list(ranks)), [Shard(max(t.dim() - 1, 0))]) for n, t in full.items()
    }


def both(rank: int, full: dict[str, Tensor]) -> Mapping[str, Tensor]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    return {name: _shard(tensor, mesh, [Shard(0), Shard(max(tensor.dim() - 1, 0))]) for name, tensor in full.items()}


def whole_on(*ranks: int) -> Layout:
    return lambda rank, full: {n: t.clone() for n, t in full.items()} if rank in ranks else None


def stages(rank: int, full: dict[str, Tensor]) -> Mapping[str, Tensor]:
    """A pipeline: half of the tensors on half of the ranks, whose shards they are."""
    names = list(full)[rank // 2 :: 2]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "shard"))["shard"]
    return {name: _shard(full[name], mesh, [Shard(0)]) for name in names}


def _shard(tensor: Tensor, mesh: DeviceMesh, placements: list[Any]) -> Any:
    """A DTensor with this rank's part of `tensor`, without a message."""
    if not tensor.dim():
        if mesh.get_coordinate() is None:
            return None  # torch has no DTensor without dims there
        placements = [Replicate()] * mesh.ndim
    local = tensor.detach().clone()
    coordinate = mesh.get_coordinate()
    for axis, placement in enumerate(placements):
        if coordinate is None:
            local = tensor.new_empty(0)
        elif isinstance(placement, Shard):
            pieces = local.chunk(mesh.size(axis), placement.dim)
            at = coordinate[axis]
            local = pieces[at] if at < len(pieces) else local.narrow(placement.dim, local.shape[placement.dim], 0)
    return DTensor.from_local(
        local.contiguous().clone(), mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def values() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    return {
        "weight": draw(7, 5),
        "small": draw(2, 3),
        "low": draw(5, dtype=torch.bfloat16),
        "one": draw(),
        "cube": draw(3, 4, 5),
        "count": torch.arange(6),
        "flags": torch.tensor([True, False, True]),
    }


LAYOUTS: dict[str, Layout] = {
    "fsdp 4": fsdp(0, 1, 2, 3),
    "fsdp 2": fsdp(0, 1),
    "fsdp on 2, 3": fsdp(2, 3),
    "fsdp backwards": fsdp(3, 1, 0),
    "tp 2": tp(0, 1),
    "tp on 1, 2, 3": tp(1, 2, 3),
    "both": both,
    "hsdp": hsdp,
    "one": whole_on(0),
    "some": whole_on(1, 3),
    "pipeline": stages,
}


def laid_out(layout: str, rank: int, full: dict[str, Tensor]) -> dict[str, Tensor] | None:
    made = LAYOUTS[layout](rank, full)
    return None if made is None else {name: tensor for name, tensor in made.items() if tensor is not None}


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def assert_moved(target: Mapping[str, Tensor] | None, expected: Mapping[str, Tensor] | None) -> None:
    assert (target is None) is (expected is None)
    for name, tensor in (expected or {}).items():
        found = (target or {})[name]
        assert torch.equal(_local(found), _local(tensor)), name


@pytest.mark.threads_only("counts the messages of all ranks in one process")
@pytest.mark.parametrize("to", LAYOUTS)
@pytest.mark.parametrize("of", LAYOUTS)
@pytest.mark.sample(12, full=30)
def test_from_any_layout_into_any_other(of: str, to: str) -> None:
    full = values()
    nothing = {name: torch.zeros_like(tensor) for name, tensor in full.items()}

    def rank_main(rank: int) -> Any:
        source, target = laid_out(of, rank, full), laid_out(to, rank, nothing)
        move = transfer(source, target, limit_nbytes=48)
        plan = move.plan()
        torch.distributed.barrier()
        move.run()
        assert_moved(target, laid_out(to, rank, full))
        assert_moved(source, laid_out(of, rank, full))
        return [(route.source, route.target, route.nbytes, route.messages) for route in plan.routes()], str(plan)

    found = run_ranks(4, rank_main)
    assert all(one == found[0] for one in found)
    # What was sent is what the plan says.
    routes, _ = found[0]
    for source, target, nbytes, messages in routes:
        sizes = [size for _, one, other, size in mailbox.SENT if (one, other) == (source, target)]
        assert (sum(sizes), len(sizes)) == (nbytes, messages) and max(sizes) <= 48
        assert messages <= nbytes / 48 + 2
    assert sum(nbytes for _, _, nbytes, _ in routes) == sum(size for *_, size in mailbox.SENT)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_models_names_ties_and_ignored_parameters(world: int) -> None:
    """From a sharded model into plain ones with other names, and back; on the way every memory is written once."""

    def rank_main(rank: int) -> None:
        model: Any = seeded(Odd)
        mesh = init_device_mesh("cpu", (world,))
        fully_shard(model.q, mesh=mesh)
        fully_shard(model, mesh=mesh, ignored_params={model.own, model.scale})
        wanted = {name: torch.zeros_like(tensor) for name, tensor in renamed().items()}
        transfer(model, wanted if rank == 0 else None, names=RULES).run()
        if rank == 0:
            assert_moved(wanted, renamed())
        other: Any = seeded(Odd, seed=1)
        fully_shard(other.experts[0], mesh=mesh)
        fully_shard(other, mesh=mesh, ignored_params={other.own, other.scale})
        transfer(model, other).run()
        for name, tensor in other.state_dict().items():
            found = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            assert torch.equal(found, plain()[name]), name
        assert other.head.weight is other.embed.weight
        # Back from fused and packed ones.
        back = {"bn." + name.removeprefix("norm."): name for name in plain() if name.startswith("norm.")}
        rules: Any = {
            "attn.qk.weight": ("q.weight", "k.weight"),
            "moe.*": "experts.#.*",
            ("low.a", "low.b"): "low",
            **back,
        }
        third: Any = seeded(Odd, seed=2)
        fully_shard(third, mesh=mesh, ignored_params={third.own, third.scale})
        transfer(renamed() if rank == world - 1 else None, third, names=rules).run()
        for name, tensor in third.state_dict().items():
            found = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            assert torch.equal(found, plain()[name]), name

    run_ranks(world, rank_main)


def test_the_targets_dtype_arrives_and_a_dtype_rounds_what_stays_too() -> None:
    full = {"a": torch.randn(6, 3, generator=torch.Generator().manual_seed(0)), "n": torch.arange(4, dtype=torch.int32)}

    def rank_main(rank: int) -> None:
        source = fsdp(0, 1)(rank, full)
        for dtype in (torch.bfloat16, torch.float64):
            wanted = {"a": full["a"].to(dtype), "n": full["n"].long()}
            target = whole_on(0, 1)(rank, {name: torch.zeros_like(t) for name, t in wanted.items()})
            move = transfer(source, target)
            assert move.plan().wire_dtype(move.plan().links[0]) == ("bfloat16" if dtype.itemsize == 2 else "float32")
            move.run()
            assert_moved(target, wanted)
        target = {name: torch.zeros_like(t) for name, t in full.items()}
        transfer(source, target, dtype=torch.bfloat16).run()
        assert_moved(target, {"a": full["a"].bfloat16().float(), "n": full["n"]})

    run_ranks(2, rank_main)


@pytest.mark.parametrize(
    ("source", "target", "options", "text"),
    [
        ({"a": (2, 3)}, {"a": (3, 2)}, {}, r"a: \(2, 3\) from the source, \(3, 2\) in the target"),
        ({"a": (2,), "b": (2,)}, {"a": (2,)}, {}, "b: not in the target"),
        ({"a": (2,)}, {"a": (2,), "b": (2,)}, {}, "b: not in the source"),
        ({"a": (2,)}, {"a": (2,)}, {"names": {"a": "c"}}, "c: not in the target; a: not in the source"),
    ],
)
def test_names_that_do_not_fit_are_errors_on_all_ranks(
    source: Any, target: Any, options: dict[str, Any], text: str
) -> None:
    def rank_main(rank: int) -> None:
        there = {name: torch.ones(shape) for name, shape in source.items()} if rank == 0 else None
        here = {name: torch.zeros(shape) for name, shape in target.items()} if rank == 2 else None
        with pytest.raises(ValueError, match=text):
            transfer(there, here, **options)

    run_ranks(3, rank_main)


def test_a_rank_with_other_rules_is_named() -> None:
    def rank_main(rank: int) -> None:
        there = {"a": torch.ones(3)} if rank == 0 else None
        here = {"b": torch.zeros(3)} if rank == 1 else None
        with pytest.raises(ValueError, match=r"rank 1: a: not in the target; rank 1: b: not in the source"):
            transfer(there, here, names={"a": "b"} if rank == 0 else None)

    run_ranks(2, rank_main)


def test_a_cast_that_overflows_leaves_the_target_unchanged() -> None:
    def rank_main(rank: int) -> None:
        full = {"a": torch.ones(4, 2), "b": torch.full((4, 2), 2.0)}
        source = fsdp(0, 1)(rank, full)
        if rank == 1:
            source["b"].to_local()[0, 0] = 1e5  # type: ignore[index]
        target = {name: torch.full((4, 2), 7.0, dtype=torch.float16) for name in full} if rank == 0 else None
        move = transfer(source, target)
        with pytest.raises(
            TransferError, match=r"rank 1: b: finite values that are none in float16; the target is unch"
        ):
            move.run()
        if target is not None:
            assert all(bool((tensor == 7).all()) for tensor in target.values())
        if rank == 1:
            source["b"].to_local()[0, 0] = torch.inf  # type: ignore[index]
        move.run()
        if target is not None:
            assert target["b"][2, 0] == torch.inf and target["a"][0, 0] == 1

    run_ranks(2, rank_main)


def test_a_target_without_memory_is_refused_unless_it_can_get_some() -> None:
    def rank_main(rank: int) -> None:
        full = dict(seeded(lambda: nn.Linear(3, 5)).state_dict())
        with torch.device("meta"):
            target = nn.Linear(3, 5)
        move = transfer(full if rank == 0 else None, target if rank == 1 else None)
        with pytest.raises(TransferError, match=r"rank 1: weight: no memory"):
            move.run()
        fully_shard(target)  # gives it memory itself
        transfer(full if rank == 0 else None, target).run()
        for name, tensor in target.state_dict().items():
            assert torch.equal(tensor.full_tensor(), full[name])

    run_ranks(2, rank_main)


def test_a_rank_that_fails_while_it_sends_loses_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    """On threads the failing rank's own view: procs shows the others (tests/procs/test_transfer.py)."""
    from fullshard.comm import exchange

    def rank_main(rank: int) -> None:
        model: Any = nn.Linear(3, 5)
        fully_shard(model)
        move = transfer(dict(nn.Linear(3, 5).state_dict()), model)

        def fails(*args: Any) -> None:
            raise RuntimeError("the link is down")

        monkeypatch.setattr(exchange.Exchange, "_exchange", fails)
        with pytest.raises(RuntimeError, match="the link is down") as caught:
            move.run()
        assert caught.value.__notes__ == [
            "transfer: 2 tensor(s) of the target on this rank are lost: load or transfer them again"
        ]
        assert bool(model.weight.to_local().isnan().all())
        with pytest.raises(RuntimeError, match="expected every parameter and buffer to have a value"):
            model(torch.ones(2, 3))
        monkeypatch.undo()
        move.run()
        assert not model.weight.to_local().isnan().any()
        model(torch.ones(2, 3))

    run_ranks(1, rank_main)


# ---- `load_state_dict` of a model with another layout --------------------------------------------------------


def _mesh(layout: str) -> DeviceMesh:
    if layout == "hsdp":
        return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    if layout == "hsdp across":
        return DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=("replicate", "shard"))
    return DeviceMesh("cpu", [0, 1, 2, 3])


def _model(layout: str, seed: int) -> Any:
    model: Any = seeded(Odd, seed)
    mesh = _mesh(layout)
    fully_shard(model.q, mesh=mesh)
    fully_shard(model, mesh=mesh, ignored_params={model.own, model.scale})
    return model


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize(
    ("of", "to"),
    [("fsdp", "hsdp"), ("hsdp", "fsdp"), ("hsdp across", "fsdp"), ("hsdp", "hsdp across")],
)
@pytest.mark.sample(2, full=8)
def test_a_state_dict_of_another_layout_loads(of: str, to: str, assign: bool) -> None:
    def rank_main(rank: int) -> None:
        source, target = _model(of, 0), _model(to, 1)
        before = dict(target.named_parameters())
        loaded = target.load_state_dict(source.state_dict(), assign=assign)
        assert not loaded.missing_keys and not loaded.unexpected_keys
        for name, tensor in target.state_dict().items():
            found = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            assert torch.equal(found, plain()[name]), name
        assert all(
            parameter is before[name]
            for name, parameter in target.named_parameters()
            if name[:5] != "scale" and name != "own"
        )
        assert target.head.weight is target.embed.weight

    run_ranks(4, rank_main)


def test_training_continues_from_it() -> None:
    """Two steps after the load are those of a model that never changed its layout."""

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))

    def rank_main(rank: int) -> Any:
        found = []
        for layout in ("fsdp", "hsdp"):
            source: Any = seeded(make)
            fully_shard(source, mesh=_mesh("fsdp"))
            model: Any = seeded(make, seed=1) if layout == "hsdp" else source
            if layout == "hsdp":
                fully_shard(model, mesh=_mesh("hsdp"))
                model.load_state_dict(source.state_dict())
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
            for step in range(2):
                x = torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + rank))
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            found.append(collect(model, optimizer))
        return found

    for one, other in run_ranks(4, rank_main):
        # Sums of four ranks in another order: 2 eps for each of two steps.
        assert_same_training(one, other, 4.0)


def test_ranks_that_no_group_has_are_named() -> None:
    def rank_main(rank: int) -> None:
        low, high = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [1, 2])
        if rank in (0, 3):
            return
        source: Any = nn.Linear(3, 4)
        target: Any = nn.Linear(3, 4)
        fully_shard(target, mesh=high)
        state = dict(source.state_dict())
        state["weight"] = DTensor.from_local(
            torch.ones(2, 3), low, target.weight.placements, run_check=False, shape=(4, 3), stride=(3, 1)
        )
        with pytest.raises(RuntimeError, match=r"found meshes of ranks \[0, 1, 2\]; move them with fullshard.transfer"):
            target.load_state_dict(state)

    run_ranks(4, rank_main)
