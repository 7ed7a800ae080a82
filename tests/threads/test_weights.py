"""`weights`: full tensors in buckets, equal to those of the plain model on every rank, under any names and layouts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from fullshard import fully_shard, weights
from fullshard.extras import WeightInfo
from tests.harness.models import CASES, Case, seeded
from tests.harness.threads import run_ranks

BY_NAME = {case.name: case for case in CASES}


class Odd(nn.Module):
    """Ties, a buffer, frozen and ignored parameters, several dtypes, fewer rows than ranks, a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.q = nn.Linear(4, 6, bias=False)
        self.k = nn.Linear(4, 2, bias=False)
        self.experts = nn.ModuleList(nn.Linear(4, 3) for _ in range(3))
        self.norm = nn.BatchNorm1d(4)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.low = nn.Parameter(torch.randn(5, 3, dtype=torch.bfloat16), requires_grad=False)
        self.own = nn.Parameter(torch.randn(3))
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight


def sharded(rank: int, replicas: int = 1) -> Odd:
    model: Any = seeded(Odd)
    world = torch.distributed.get_world_size()
    if replicas > 1:
        mesh = init_device_mesh("cpu", (replicas, world // replicas), mesh_dim_names=("replicate", "shard"))
    else:
        mesh = init_device_mesh("cpu", (world,))
    ignored = {model.own, model.scale}
    for unit in (model.q, model.experts[1]):
        fully_shard(unit, mesh=mesh)
    fully_shard(model, mesh=mesh, ignored_params=ignored)
    return model  # type: ignore[no-any-return]


def plain() -> dict[str, Tensor]:
    return dict(seeded(Odd).state_dict())


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert found[name].dtype is tensor.dtype and torch.equal(found[name], tensor), name


@pytest.mark.sample(3)
@pytest.mark.parametrize(("world", "replicas"), [(1, 1), (2, 1), (3, 1), (4, 1), (4, 2)])
@pytest.mark.parametrize("nbytes", [1, 64, 1 << 20])
def test_every_rank_gets_the_plain_models_tensors(world: int, replicas: int, nbytes: int) -> None:
    def rank_main(rank: int) -> None:
        model = sharded(rank, replicas)
        found = weights(model, bucket_nbytes=nbytes)
        expected = plain()
        buckets = list(found)
        assert len(found) == len(buckets)
        order = [name for bucket in buckets for name, _ in bucket]
        assert sorted(order) == sorted(expected)
        for name, tensor in ((name, tensor) for bucket in buckets for name, tensor in bucket):
            assert type(tensor) is Tensor and torch.equal(tensor, expected[name]), name
            assert tensor.dtype is expected[name].dtype
        # A bucket is over the limit only where one tensor is, or what shares memory with it.
        for bucket in buckets:
            assert len({t.data_ptr() for _, t in bucket}) == 1 or sum(t.nbytes for _, t in bucket) <= nbytes
        info = [WeightInfo(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in found.tensors()]
        assert found.metadata() == info
        tied = dict(found.tensors())
        assert tied["embed.weight"].data_ptr() == tied["head.weight"].data_ptr()
        # The caller's: the model does not change with them.
        for bucket in buckets:
            for _, tensor in bucket:
                tensor.zero_()
        again = dict(found.tensors())
        assert all(torch.equal(again[name], tensor) for name, tensor in expected.items())

    run_ranks(world, rank_main)


RULES = {
    ("q.weight", "k.weight"): "attn.qk.weight",
    "experts.#.*": "moe.*",
    "low": (("low.a", 2), ("low.b", 3)),
    "head.weight": None,
    "norm.*": "bn.*",
}


def renamed() -> dict[str, Tensor]:
    there = plain()
    found = {
        "embed.weight": there["embed.weight"],
        "attn.qk.weight": torch.cat([there["q.weight"], there["k.weight"]]),
        "low.a": there["low"][:2],
        "low.b": there["low"][2:],
        "scale": there["scale"],
        "own": there["own"],
    }
    found |= {f"moe.{p}": torch.stack([there[f"experts.{i}.{p}"] for i in range(3)]) for p in ("weight", "bias")}
    return found | {f"bn.{name.removeprefix('norm.')}": t for name, t in there.items() if name.startswith("norm.")}


@pytest.mark.parametrize(("world", "replicas"), [(1, 1), (3, 1), (4, 2)])
def test_names_fuse_split_and_pack(world: int, replicas: int) -> None:
    def rank_main(rank: int) -> None:
        found = weights(sharded(rank, replicas), names=RULES, bucket_nbytes=100)
        expected = renamed()
        arrived = dict(found.tensors())
        assert arrived.keys() == expected.keys()
        assert all(torch.equal(arrived[name], tensor) for name, tensor in expected.items())
        assert {info.name: info.shape for info in found.metadata()} == {n: tuple(t.shape) for n, t in expected.items()}
        # The parts of all ranks together, each from its offsets.
        made = {name: torch.full_like(tensor, 7) for name, tensor in expected.items()}
        seen = {name: torch.zeros(tensor.shape, dtype=torch.int32) for name, tensor in expected.items()}
        parts: list[Any] = [None] * world
        torch.distributed.all_gather_object(
            parts, [part._replace(tensor=part.tensor.clone()) for part in found.boxes()]
        )
        for part in [part for there in parts for part in there]:
            at = tuple(slice(o, o + n) for o, n in zip(part.offsets, part.tensor.shape, strict=True))
            made[part.name][at] = part.tensor
            seen[part.name][at] += 1
            assert part.shape == expected[part.name].shape and part.dtype is expected[part.name].dtype
        assert all(torch.equal(made[name], tensor) for name, tensor in expected.items())
        assert all(bool((count >= 1).all()) for count in seen.values())

    run_ranks(world, rank_main)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_dtype_casts_what_is_floating_point(world: int) -> None:
    def rank_main(rank: int) -> None:
        for dtype in (torch.bfloat16, torch.float64):
            found = weights(sharded(rank), dtype=dtype)
            arrived = dict(found.tensors())
            expected = {n: t.to(dtype) if t.is_floating_point() else t for n, t in plain().items()}
            assert all(torch.equal(arrived[name], tensor) for name, tensor in expected.items())
            assert {info.name: info.dtype for info in found.metadata()} == {n: t.dtype for n, t in expected.items()}

    run_ranks(world, rank_main)


@pytest.mark.parametrize("case", [case for case in CASES if case.name in ("tiny_dims", "mixed_shapes", "tied")])
def test_weights_are_those_between_forward_and_backward(case: Case) -> None:
    """Where a unit is full on its modules, its shards are read."""

    def rank_main(rank: int) -> None:
        model = case.shard(case.build(), fully_shard, reshard_after_forward=False)
        loss = case.loss(model, case.batch(0, rank))
        found = dict(weights(model).tensors())
        expected = case.build().state_dict()
        assert_same({name: found[name] for name in expected}, expected)
        loss.backward()

    run_ranks(2, rank_main)


def test_tensor_parallel_and_strided_shards_are_gathered_over_both_axes() -> None:
    def rank_main(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model: Any = seeded(lambda: nn.Sequential(nn.Linear(5, 6), nn.Linear(6, 5), nn.LayerNorm(5)))
        expected = seeded(lambda: nn.Sequential(nn.Linear(5, 6), nn.Linear(6, 5), nn.LayerNorm(5))).state_dict()
        tp = mesh["tp"]
        for name, module in model.named_children():
            for own, parameter in list(module.named_parameters()):
                placement = Replicate() if name == "2" or (name == "1" and own == "bias") else Shard(int(name))
                module.register_parameter(own, nn.Parameter(distribute_tensor(parameter.detach(), tp, [placement])))
        fully_shard(model[0], mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
        assert_same(dict(weights(model).tensors()), dict(expected))

    run_ranks(4, rank_main)


def test_a_value_that_overflows_is_named_on_all_ranks() -> None:
    def rank_main(rank: int) -> list[str]:
        model: Any = sharded(rank)
        with torch.no_grad():
            model.q.weight.to_local()[...] = 1.0
            if rank == 1:
                model.q.weight.to_local()[0, 0] = 1e6
        arrived = []
        with pytest.raises(OverflowError, match=r"finite values in torch.float16, found larger ones in q.weight"):
            for bucket in weights(model, dtype=torch.float16, bucket_nbytes=1):
                arrived += [name for name, _ in bucket]
        with torch.no_grad():  # inf was inf before
            model.q.weight.to_local()[...] = torch.inf
        for _ in weights(model, dtype=torch.float16):
            pass
        return arrived

    first, second = run_ranks(2, rank_main)
    assert first == second and "q.weight" not in first


@pytest.mark.parametrize("how", ["break", "raise"])
def test_a_rank_that_leaves_the_loop_early_is_an_error_on_the_others(how: str) -> None:
    def rank_main(rank: int) -> str:
        model = sharded(rank)
        try:
            for number, _ in enumerate(weights(model, bucket_nbytes=1)):
                if number == 2 and rank == 1:
                    if how == "break":
                        break
                    raise KeyError("the engine is gone")
        except (RuntimeError, KeyError) as error:
            found = str(error)
        else:
            found = ""
        # All leave at the same bucket: nobody minds, and the next time works.
        for number, _ in enumerate(weights(model, bucket_nbytes=1)):
            if number == 1:
                break
        assert len(dict(weights(model).tensors())) == len(plain())
        return found

    others, own = run_ranks(2, rank_main)
    assert "found that rank 1 left it or raised at an earlier one than number 3 of" in others
    assert own == ("" if how == "break" else "'the engine is gone'")


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"names": {"q.weight": "k.weight"}}, ValueError, "k.weight: made of two tensors"),
        ({"names": 3}, TypeError, "names: expected a mapping"),
        ({"dtype": torch.int32}, TypeError, "dtype: expected a floating-point dtype"),
        ({"bucket_nbytes": 0}, ValueError, "bucket_nbytes"),
        ({"names": {("low", "own"): "both"}}, ValueError, "does not fit beside"),
        ({"names": {("low", "q.weight"): "both"}}, ValueError, "does not fit beside|one dtype"),
    ],
)
def test_wrong_arguments_are_refused(options: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        weights(seeded(Odd), **options)


def test_a_tensor_that_is_no_plain_memory_is_named() -> None:
    model = nn.Linear(3, 3)
    model.weight = nn.Parameter(torch.eye(3).to_sparse(), requires_grad=False)
    with pytest.raises(ValueError, match=r"weight: expected a dense tensor of whole bytes, found torch.sparse_coo"):
        weights(model)
