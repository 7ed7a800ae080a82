"""`fullshard.full_params`: plain full parameters for a while, and the training that goes on afterwards.

FSDP1's `summon_full_params` is the oracle for what is refused; values come from a plain model.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

import fullshard
from fullshard import full_params, fully_shard
from tests.harness import tolerance
from tests.harness.behaviours import behaviour
from tests.harness.models import BY_NAME, adamw, assert_same_training, collect, seeded
from tests.harness.threads import WORLD, run_ranks, several
from tests.threads.test_tensor_parallel import batch, blocks, plan_tp

CASES = ("residual", "tiny_dims", "tied", "frozen", "mixed_shapes")


def plain_steps(case: Any, model: nn.Module, optimizer: torch.optim.Optimizer, world: int, steps: range) -> None:
    for step in steps:
        for rank in range(world):
            (case.loss(model, case.batch(step, rank)) / world).backward()
        optimizer.step()
        optimizer.zero_grad()


def steps_of(case: Any, model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: range) -> None:
    for step in steps:
        case.loss(model, case.batch(step, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()


def assert_sharded(model: nn.Module) -> None:
    assert all(isinstance(p, DTensor) for p in model.parameters())
    assert not any(unit.full_nbytes_live for unit in fullshard.report(model).units)


@pytest.mark.sample(2)
@behaviour(
    "`fullshard.full_params`: full plain parameters for a while",
    area="state",
    torch="none",
    reason="FSDP1's `summon_full_params`, which FSDP2 lacks",
)
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("name", CASES)
def test_full_parameters_are_those_of_the_plain_model_and_training_goes_on(name: str, world: int) -> None:
    """Before the first forward, between steps, after an evaluation; with edits dropped and with edits written back."""
    case = BY_NAME[name]

    def rank_main(rank: int) -> None:
        model, plain = case.shard(case.build(), fully_shard), case.build()
        ours, theirs = adamw(model.parameters()), adamw(plain.parameters())
        shards = list(model.parameters())

        def look() -> None:
            bounds = tolerance.watched(theirs)
            with full_params(model):
                found = dict(model.named_parameters(remove_duplicate=False))
                wanted = dict(plain.named_parameters(remove_duplicate=False))
                assert list(found) == list(wanted)
                assert len({id(p) for p in found.values()}) == len({id(p) for p in wanted.values()}), "ties"
                for n, p in found.items():
                    assert type(p) is nn.Parameter and p.is_leaf and p.grad is None, n
                    assert p.requires_grad == wanted[n].requires_grad, n
                    known = bounds is not None and any(q is wanted[n] for q in bounds.parameters)
                    limit = bounds.of_parameter(wanted[n]) if bounds is not None and known else 0.0
                    assert tolerance.largest(p, wanted[n]) <= limit, n
                with torch.no_grad():
                    out = model(case.batch(7, rank)[0])
                    assert tolerance.close(out, plain(case.batch(7, rank)[0]))
                    for p in model.parameters():
                        p.fill_(float("nan"))  # dropped: nothing of it may ever be seen again
            assert_sharded(model)
            assert all(p is q for p, q in zip(model.parameters(), shards, strict=True)), "optimizers hold these"

        look()
        steps_of(case, model, ours, rank, range(2))
        plain_steps(case, plain, theirs, world, range(2))
        look()
        with torch.no_grad():
            model(case.batch(0, rank)[0])
        with full_params(model, writeback=True), torch.no_grad():
            for p in model.parameters():
                p.mul_(0.75)
        with torch.no_grad():
            for q in plain.parameters():
                q.mul_(0.75)
        look()
        steps_of(case, model, ours, rank, range(2, 4))
        plain_steps(case, plain, theirs, world, range(2, 4))
        assert_same_training(collect(model, ours), collect(plain, theirs))

    run_ranks(world, rank_main)


@behaviour(
    "`fullshard.full_params(writeback=True)`",
    area="state",
    torch="none",
    reason="FSDP1's `summon_full_params`, which FSDP2 lacks",
)
def test_write_back_takes_what_stands_there_at_the_end_also_when_the_block_raises() -> None:
    """Edits in place, through .data, a parameter put in the place of another, a loaded state dict; tied ones once."""
    case = BY_NAME["tied"]

    def rank_main(rank: int) -> None:
        model: Any = case.shard(case.build(), fully_shard)
        other = case.build(seed=5)
        with full_params(model, writeback=True):
            assert model.head.weight is model.embedding.weight
            model.load_state_dict(other.state_dict())
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(p.full_tensor(), q)
        norm, bias = model.layers[0].attention_norm, model.norm.weight.shape
        with pytest.raises(ZeroDivisionError), full_params(model, writeback=True):
            norm.weight.data = torch.full_like(norm.weight, 3.0)
            model.norm.weight = nn.Parameter(torch.full(bias, 4.0, dtype=torch.float64))
            model.head.weight = nn.Parameter(torch.ones_like(model.head.weight))
            raise ZeroDivisionError
        assert_sharded(model)
        assert torch.equal(norm.weight.full_tensor(), torch.full_like(norm.weight.full_tensor(), 3.0))
        assert torch.equal(model.norm.weight.full_tensor(), torch.full(bias, 4.0)), "in the dtype of the shards"
        assert model.head.weight is model.embedding.weight and model.head.weight.full_tensor().eq(1).all()
        for spoil in (
            lambda: setattr(model.norm, "weight", nn.Parameter(torch.zeros(3))),
            lambda: setattr(model.norm, "weight", None),
            lambda: [setattr(m, "weight", nn.Parameter(m.weight * 2)) for m in (model.head, model.embedding)],
        ):
            with pytest.raises(RuntimeError, match="weight: expected one plain parameter of shape"):
                with full_params(model, writeback=True):
                    spoil()
            assert_sharded(model)
            with full_params(model):  # without writeback it does not matter
                spoil()
            assert_sharded(model)
        assert model.head.weight.full_tensor().eq(1).all()
        case.loss(model, case.batch(0, rank)).backward()

    run_ranks(WORLD, rank_main)


@behaviour(
    "`fullshard.full_params(rank0_only=True)`",
    area="state",
    torch="none",
    reason="FSDP1's `summon_full_params`, which FSDP2 lacks",
)
def test_the_first_rank_alone() -> None:
    """It may save, load elsewhere and evaluate; the others hold their shards, and nobody waits for anybody."""
    case = BY_NAME["residual"]

    def rank_main(rank: int) -> None:
        model = case.shard(case.build(), fully_shard)
        inputs = case.batch(0, 0)[0]
        with full_params(model, rank0_only=True, offload_to_cpu=True):
            if rank == 0:
                assert not any(isinstance(p, DTensor) for p in model.parameters())
                assert all(p.device.type == "cpu" for p in model.parameters())
                file = io.BytesIO()
                torch.save(model.state_dict(), file)
                plain = case.make()
                file.seek(0)
                plain.load_state_dict(torch.load(file))
                with torch.no_grad():
                    assert torch.equal(model(inputs), plain(inputs))
                built = case.build().state_dict()
                assert all(torch.equal(value, built[name]) for name, value in plain.state_dict().items())
                # As the plain model writes: parameters do not share memory with anything.
                reference = io.BytesIO()
                torch.save(built, reference)
                assert file.getbuffer().nbytes <= reference.getbuffer().nbytes + 1024
            else:
                assert all(isinstance(p, DTensor) for p in model.parameters())
                assert all(isinstance(v, DTensor) for v in model.state_dict().values())
                with torch.no_grad(), pytest.raises(RuntimeError, match="another rank than the first"):
                    model(inputs)
        assert_sharded(model)
        with full_params(model, rank0_only=True, recurse=False):
            with torch.no_grad(), pytest.raises(RuntimeError, match="rank0_only=True"):
                model(inputs)  # its blocks would gather, and the others would not
        case.loss(model, case.batch(0, rank)).backward()

    run_ranks(3, rank_main)


def test_without_recursion_only_the_unit_itself() -> None:
    case = BY_NAME["nested"]

    def rank_main(rank: int) -> None:
        model: Any = case.shard(case.build(), fully_shard)
        inner = {id(p) for p in model.layers[0].mlp.parameters()}
        for module in (model.layers[0], model.layers[0].mlp):
            with full_params(module, recurse=False):
                for name, p in module.named_parameters():
                    full = module is model.layers[0].mlp or id(p) not in inner
                    assert isinstance(p, DTensor) != full, name
        held: list[int] = []
        for module in (model, *model.layers, model.layers[0].mlp):
            if isinstance(module, fullshard.FSDPModule):  # unit by unit: no more than one is full
                with full_params(module, recurse=False):
                    held.append(sum(p.nbytes for p in model.parameters() if not isinstance(p, DTensor)))
        assert sum(held) == sum(p.nbytes for p in case.build().parameters())
        # A layer opened before the model ever ran does not become a root; the model runs around an open layer.
        with full_params(model.layers[0]), torch.no_grad():
            model(case.batch(0, rank)[0])
        case.loss(model, case.batch(0, rank)).backward()
        assert_sharded(model)

    run_ranks(WORLD, rank_main)


def test_tensor_parallel_parameters_are_whole_as_well() -> None:
    """Cut twice, also within one dim; loaded from plain tensors, and written back, in every one of their pieces."""

    def rank_main(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        plain, model = blocks(), blocks()
        plan_tp(model, mesh["tp"], sequence=False)
        for child in model.children():
            fully_shard(child, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
        placements = {str(p.placements) for p in model.parameters() if isinstance(p, DTensor)}
        assert any("_StridedShard" in found for found in placements) and any("Shard(dim=1)" in p for p in placements)
        x = batch(0, rank // 2)

        def assert_is_plain(factor: float) -> None:
            with full_params(model):
                for (name, p), (_, q) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
                    assert type(p) is nn.Parameter and torch.equal(p, factor * q), name

        assert_is_plain(1)
        with full_params(model, writeback=True), torch.no_grad():
            for p in model.parameters():
                p.mul_(2)
            with pytest.raises(RuntimeError, match="tensor or expert parallelism"):
                model(x)
        assert_is_plain(2)
        for assign in (False, True):
            model(x).sum().backward()
            model.load_state_dict(plain.state_dict(), assign=assign)
            assert_is_plain(1)
            assert tolerance.close(model(x), plain(x))
            with torch.no_grad():
                for p in model.parameters():
                    p.mul_(2)
        with full_params(model, rank0_only=True):
            assert all(isinstance(p, DTensor) != (rank == 0) for p in model.parameters())

    run_ranks(4, rank_main)


def test_contexts_nest() -> None:
    case = BY_NAME["residual"]

    def rank_main(rank: int) -> None:
        model: Any = case.shard(case.build(), fully_shard)
        before = [p.full_tensor().detach().clone() for p in model.parameters()]
        with full_params(model):
            outer = model[0].up.weight
            with full_params(model[0], writeback=True), torch.no_grad():
                assert model[0].up.weight is outer
                outer.add_(1)
                model[1].up.weight.add_(1)
            assert model[0].up.weight is outer, "the outer context goes on"
            for options in ({"rank0_only": True}, {"offload_to_cpu": True}):
                with pytest.raises(RuntimeError, match="nested contexts"), full_params(model, **options):
                    pass
        with full_params(model[0]):
            with full_params(model):
                assert not any(isinstance(p, DTensor) for p in model.parameters())
            assert {type(p) for p in model[0].parameters()} == {nn.Parameter}
            assert all(isinstance(p, DTensor) for p in model[1].parameters())
        assert_sharded(model)
        for (name, p), old in zip(model.named_parameters(), before, strict=True):
            assert torch.equal(p.full_tensor(), old + 1 if name == "0.up.weight" else old), name

    run_ranks(WORLD, rank_main)


def test_between_forward_and_backward_in_a_window_and_in_inference_mode() -> None:
    case = BY_NAME["tied"]

    def rank_main(rank: int) -> None:
        model: Any = case.shard(case.build(), fully_shard)
        plain = case.build()
        ours, theirs = adamw(model.parameters()), adamw(plain.parameters())
        with torch.inference_mode(), full_params(model):
            model(case.batch(0, rank)[0])
        with torch.inference_mode(), full_params(model, writeback=True):
            for p in model.parameters():
                assert not p.is_inference()
                p.mul_(1.25)
        with torch.no_grad():
            for q in plain.parameters():
                q.mul_(1.25)
        model.set_requires_gradient_sync(False)
        case.loss(model, case.batch(0, rank)).backward()
        with full_params(model):
            pass
        model.set_requires_gradient_sync(True)
        loss = case.loss(model, case.batch(1, rank))  # the root stays full for its backward
        with full_params(model):
            assert not any(isinstance(p, DTensor) for p in model.parameters())
        loss.backward()
        ours.step()
        for step in (0, 1):
            for other in range(WORLD):
                (case.loss(plain, case.batch(step, other)) / WORLD).backward()
        theirs.step()
        assert_same_training(collect(model, ours), collect(plain, theirs))

    run_ranks(WORLD, rank_main)


def test_mixed_precision_shows_the_storage_dtype() -> None:
    def rank_main(rank: int) -> None:
        policy = fullshard.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        plain = seeded(lambda: nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 5)))
        model: Any = copy.deepcopy(plain)
        fully_shard(model[0], mp_policy=policy)
        fully_shard(model, mp_policy=policy)
        with full_params(model), torch.no_grad():
            for p, q in zip(model.parameters(), plain.parameters(), strict=True):
                assert p.dtype is torch.float32 and torch.equal(p, q)
            x = torch.ones(2, 5) / 3
            assert torch.equal(model(x), plain(x)), "nothing is cast"
        assert model(x).dtype is torch.bfloat16

    run_ranks(WORLD, rank_main)


def test_what_is_refused_inside_and_then_works_outside() -> None:
    case = BY_NAME["residual"]

    def rank_main(rank: int) -> None:
        model: Any = case.shard(case.build(), fully_shard)
        optimizer = adamw(model.parameters())
        case.loss(model, case.batch(0, rank)).backward()
        refused: dict[str, Callable[[], object]] = {
            "no forward with gradients": lambda: model(case.batch(0, rank)[0]),
            "unshard: expected sharded": lambda: model.unshard(),
            "reshard: expected sharded": lambda: model[0].reshard(),
            "conversion of the module": lambda: model.double(),
        }
        with full_params(model):
            for message, call in refused.items():
                with pytest.raises(RuntimeError, match=message):
                    call()
            assert not any(isinstance(p, DTensor) for p in model.parameters())
        with full_params(model, writeback=True):
            with pytest.raises(RuntimeError, match=r"AdamW\.step\(\): expected no step"):
                optimizer.step()
            torch.optim.SGD([nn.Parameter(torch.zeros(1))]).step()  # of something else
        shard = model[0].up.weight
        with pytest.raises(RuntimeError, match="0: expected sharded parameters that nobody writes"):
            with full_params(model, writeback=True), torch.no_grad():
                shard.zero_()
        assert shard.full_tensor().eq(0).all()
        with full_params(model):
            optimizer.step()  # nothing is written back: the step counts
        optimizer.zero_grad()
        model.double()
        model.unshard()
        model.reshard()
        assert_sharded(model)

    run_ranks(WORLD, rank_main)


def test_inside_a_step_it_is_refused() -> None:
    class Calls(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor, when: str) -> Tensor:
            x = self.linear(self.inner(x))
            if when == "forward":
                with full_params(self.inner):
                    pass
            if when == "backward":
                x.register_hook(lambda _: full_params(self).__enter__())
            return x

    def rank_main(rank: int) -> None:
        model: Any = seeded(Calls)
        fully_shard(model.inner)
        fully_shard(model)
        for when, message in (("forward", "found the forward of"), ("backward", "found a backward running")):
            with pytest.raises(RuntimeError, match=message):
                model(torch.ones(2, 4), when).sum().backward()
            with full_params(model):  # what the failed step left does not matter
                pass
            assert_sharded(model)
        model(torch.ones(2, 4), "").sum().backward()

    run_ranks(WORLD, rank_main)


def test_arguments_as_fsdp1_and_modules() -> None:
    def rank_main(rank: int) -> None:
        model: Any = fully_shard(nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 5)))
        theirs = FullyShardedDataParallel(nn.Linear(2, 2), device_id=torch.device("cpu"))
        contexts: list[Callable[..., AbstractContextManager[None]]] = [
            lambda **options: full_params(model, **options),
            lambda **options: FullyShardedDataParallel.summon_full_params(theirs, **options),
        ]
        for context in contexts:
            with pytest.raises(NotImplementedError), context(writeback=True, rank0_only=True):
                pass
        for module, recurse in ((model[0], True), (model[0], False), (nn.ModuleList([model[1]]), True)):
            with pytest.raises(ValueError, match="belongs to a unit around it"), full_params(module, recurse=recurse):
                pass
        with pytest.raises(TypeError, match=r"expected an nn\.Module, found list"), full_params([model]):  # type: ignore[arg-type]
            pass
        plain = nn.Linear(2, 2)
        weight = plain.weight
        with full_params(plain, writeback=True):  # nothing is sharded: its parameters are full as they are
            assert plain.weight is weight
        with torch.device("meta"):
            empty = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 5))
        fully_shard(empty[0])
        fully_shard(empty)
        with pytest.raises(RuntimeError, match="weight, .*bias on the meta device"):
            with full_params(empty):
                pass
        empty.to_empty(device="cpu")
        with full_params(empty):
            assert all(p.device.type == "cpu" for p in empty.parameters())

    run_ranks(several(), rank_main)


def test_nothing_is_left_when_the_gather_of_a_unit_fails() -> None:
    case = BY_NAME["residual"]

    def rank_main(rank: int) -> None:
        model: Any = case.shard(case.build(), fully_shard)
        original, calls = DTensor.full_tensor, []

        def failing(self: DTensor, **options: Any) -> Tensor:
            calls.append(self)
            if len(calls) == 7:
                raise ConnectionError("the peer is gone")
            return original(self, **options)

        context = full_params(model)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(DTensor, "full_tensor", failing)
            with pytest.raises(ConnectionError):
                context.__enter__()
        assert_sharded(model)
        case.loss(model, case.batch(0, rank)).backward()

    run_ranks(1, rank_main)


@pytest.mark.parametrize("part", [False, True])
def test_one_rank_may_evaluate_before_any_forward(part: bool) -> None:
    """A forward of plain modules sends nothing and forms nothing: the others are not asked, and the model may still be
    run by a module around the one that ran."""

    def rank_main(rank: int) -> None:
        model: Any = nn.Sequential(*(fully_shard(seeded(lambda: nn.Linear(4, 4), seed)) for seed in range(2)))
        fully_shard(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        opened = model[0] if part else model
        with full_params(opened), torch.no_grad():
            if rank == 0:
                opened(torch.ones(2, 4))
        for step in range(2):
            model(torch.full((2, 4), float(rank + step))).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert_sharded(model)

    run_ranks(several(), rank_main)
