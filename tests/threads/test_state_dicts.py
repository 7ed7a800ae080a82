"""State dicts of a sharded model and of its optimizer: taken at any moment without a message, loaded in every way.

After loading, the next steps are those of plain training from the same state: parameters and optimizer state.
"""

from __future__ import annotations

import copy
import io
import re
import threading
import weakref
from collections.abc import Iterator
from functools import cache
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
)
from torch.distributed.tensor import DTensor, distribute_tensor

from tests.harness import tolerance
from tests.harness.behaviours import behaviour
from tests.harness.implementations import (
    FULLSHARD,
    TORCH,
    Implementation,
    for_each_implementation,
    run,
    sharded,
)
from tests.harness.models import BY_NAME, Case, Trained, adamw, assert_same_training, collect, seeded, train_reference
from tests.harness.threads import WORLD

CASES = ("residual", "tiny_dims", "tied", "frozen")
# Steps before a state is taken, and after it was loaded.
BEFORE, AFTER = 2, 2


@cache
def reference(name: str, world: int) -> Trained:
    """Plain training of all steps."""
    case = BY_NAME[name]
    batches = [[case.batch(step, rank) for rank in range(world)] for step in range(BEFORE + AFTER)]
    return train_reference(case.build(), case.loss, batches)


def train(case: Case, model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: range) -> None:
    for step in steps:
        case.loss(model, case.batch(step, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()


def trained(case: Case, impl: Implementation, rank: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and its optimizer after the first steps."""
    model = case.shard(case.build(), impl.fully_shard)
    optimizer = adamw(model.parameters())
    train(case, model, optimizer, rank, range(BEFORE))
    return model, optimizer


def finish(case: Case, model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, expected: Trained) -> None:
    """Train the last steps and compare with plain training."""
    train(case, model, optimizer, rank, range(BEFORE, BEFORE + AFTER))
    assert_same_training(collect(model, optimizer), expected)


def copied(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value.clone() for name, value in state.items()}


# ---- taking ----------------------------------------------------------------------------------------------------


@behaviour(
    "`state_dict` of model and optimizer is sharded at any moment",
    area="state",
    torch="different",
    reason="ours sends no message and frees nothing; torch's frees what is full, and that rank alone gathers it again",
)
@for_each_implementation
def test_state_dicts_are_sharded_at_any_moment_without_a_message(impl: Implementation) -> None:
    """With ours one rank alone takes them: a collective would wait for the other one, and the test would hang. With
    torch's that is so only when nothing is full: it frees what is, and that rank then gathers alone."""
    case = BY_NAME["tied"]

    def rank_main(rank: int, impl: Implementation) -> None:
        model: Any = case.shard(case.build(), impl.fully_shard)
        optimizer = adamw(model.parameters())
        names = list(case.build().state_dict())
        shards = {name: id(p) for name, p in model.named_parameters(remove_duplicate=False)}

        def take(moment: str) -> None:
            if rank == 0 or impl is TORCH:
                state = model.state_dict()
                assert list(state) == names, moment
                for module in (model, *model.layers, model.head):
                    for name, value in module.state_dict(keep_vars=True).items():
                        assert isinstance(value, DTensor), f"{moment}: {name} of {type(module).__name__}"
                assert {n: id(p) for n, p in model.state_dict(keep_vars=True).items()} == shards, moment
                for values in optimizer.state_dict()["state"].values():
                    assert isinstance(values["exp_avg"], DTensor) and values["exp_avg"].shape, moment
            dist.barrier()
            if impl is FULLSHARD and "full" in moment:
                assert not isinstance(model.head.weight, DTensor), "what was full stays so"

        take("before the first forward")
        model.unshard()
        take("full by hand")
        loss = case.loss(model, case.batch(0, rank))
        take("full between forward and backward")
        loss.backward()
        take("before the step")
        optimizer.step()
        optimizer.zero_grad()
        model.set_requires_gradient_sync(False)
        case.loss(model, case.batch(1, rank)).backward()
        take("in a window without synchronisation")
        model.set_requires_gradient_sync(True)
        case.loss(model, case.batch(2, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            case.loss(model.eval(), case.batch(3, rank))
        take("after an evaluation")
        # None of this changed what is trained: both micro-batches counted.
        plain = case.build()
        plain_optimizer = adamw(plain.parameters())
        for micro_batches in ((0,), (1, 2)):
            for step in micro_batches:
                for other in range(WORLD):
                    (case.loss(plain, case.batch(step, other)) / WORLD).backward()
            plain_optimizer.step()
            plain_optimizer.zero_grad()
        assert_same_training(collect(model, optimizer), collect(plain, plain_optimizer))

    run(rank_main, impl)


@behaviour("`torch.save` of a state dict writes the rows of the rank alone", area="state")
@for_each_implementation
def test_saved_values_are_those_of_this_rank_and_no_more(impl: Implementation) -> None:
    """`torch.save` writes the rows of the rank, under both names of a tied parameter."""
    world = 4

    def rank_main(rank: int, impl: Implementation) -> tuple[int, int]:
        model: Any = seeded(lambda: nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))))
        model[3].weight = model[2].weight
        impl.fully_shard(model)
        model(torch.zeros(1, 64)).sum().backward()
        state = model.state_dict()
        assert {"2.weight", "3.weight"} <= set(state)
        file = io.BytesIO()
        torch.save(state, file)
        return file.tell(), sum(p.to_local().nbytes for p in model.parameters())

    for written, own in run(rank_main, impl, world=world):
        assert own == 4 * (3 * 64 * 64 + 4 * 64) // world
        # Beside the values there are names and meshes: a few hundred bytes for each entry.
        assert own <= written < own + 10_000, (written, own)


# ---- loading ---------------------------------------------------------------------------------------------------


@pytest.mark.sample(1)
@behaviour("`load_state_dict`, in place or assigned, before or in the middle of training", area="state")
@for_each_implementation
@pytest.mark.parametrize("name", CASES)
def test_the_next_steps_after_loading_are_those_of_plain_training(name: str, impl: Implementation) -> None:
    """In place or assigned, before the first forward or in the middle of training, before the optimizer or after."""
    case = BY_NAME[name]
    expected = reference(name, WORLD)

    def rank_main(rank: int, impl: Implementation) -> None:
        source, source_optimizer = trained(case, impl, rank)
        state, optimizer_state = copied(source.state_dict()), copy.deepcopy(source_optimizer.state_dict())
        for assign, used, optimizer_first in product((False, True), (False, True), (False, True)):
            if impl is TORCH and assign and (optimizer_first or name == "tied"):
                continue  # its optimizer goes on with parameters that the model has no longer; its ties are undone
            model = case.shard(case.build(seed=1), impl.fully_shard)
            optimizer = adamw(model.parameters())
            if used:
                train(case, model, optimizer, rank, range(1))
            given = copied(state)
            if assign and used:  # as parameters
                given = {name: nn.Parameter(value) for name, value in given.items()}
            result = model.load_state_dict(given, assign=assign)
            assert not result.missing_keys and not result.unexpected_keys
            if not optimizer_first:
                optimizer = adamw(model.parameters())
            optimizer.load_state_dict(copy.deepcopy(optimizer_state))
            finish(case, model, optimizer, rank, expected)

    run(rank_main, impl)


@behaviour(
    "`load_state_dict(assign=True)` keeps an optimizer that was built before",
    area="state",
    torch="better",
    reason="torch's replaces the parameters; the optimizer keeps those that the model has no longer, silently",
)
def test_assigning_keeps_parameter_objects_marks_and_hooks(impl: Implementation) -> None:
    """Whatever is assigned: values, another dtype, data for the meta device, a frozen parameter."""

    def rank_main(rank: int, impl: Implementation) -> None:
        seen: list[str] = []
        for how in ("values", "dtype", "meta"):
            with torch.device("meta" if how == "meta" else "cpu"):
                model = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 5))
            model[1].bias.requires_grad_(False)
            impl.fully_shard(model)
            before = dict(model.named_parameters())
            for name, parameter in before.items():
                parameter.mark = name  # type: ignore[attr-defined]
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(lambda p: seen.append(p.mark))
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            dtype = torch.float64 if how == "dtype" else torch.float32
            values = {n: torch.full(p.shape, 0.5, dtype=dtype) for n, p in before.items()}
            sharded = {n: distribute_tensor(v, before[n].device_mesh, before[n].placements) for n, v in values.items()}
            model.load_state_dict(sharded, assign=True)
            model(torch.ones(2, 5, dtype=dtype)).sum().backward()
            optimizer.step()
            for name, parameter in model.named_parameters():
                assert parameter is before[name] and parameter.mark == name and parameter.dtype is dtype
                assert parameter.requires_grad == (name != "1.bias")
                moved = not torch.equal(parameter.full_tensor(), values[name])
                assert moved == (name != "1.bias"), f"{how}: the optimizer holds another {name}"
            assert sorted(seen) == ["0.bias", "0.weight", "1.weight"], how
            seen.clear()

    run(rank_main, impl)


@behaviour(
    "a parameter that `load_state_dict(assign=True)` had to replace is named, an optimizer that has it is refused",
    area="state",
    torch="better",
    reason="torch replaces all of them; the optimizer keeps those that the model has no longer, silently",
)
def test_a_parameter_that_cannot_be_kept_is_named(impl: Implementation, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch exchanges no tensors to which there are weak references, or which a graph holds."""
    # Not `pytest.warns`: what it changes belongs to the process, and ranks are threads or processes.
    said: list[str] = []
    warnings = SimpleNamespace(warn=lambda text, kind, stacklevel: said.append(f"{kind.__name__}: {text}"))
    monkeypatch.setattr("fullshard.engine.state_dict.warnings", warnings)

    def rank_main(rank: int, impl: Implementation) -> None:
        model = sharded(impl, nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 5)))
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        before = dict(model.named_parameters())
        values = {name: torch.full(p.shape, 0.5, dtype=torch.float64) for name, p in before.items()}
        state = {n: distribute_tensor(v, before[n].device_mesh, before[n].placements) for n, v in values.items()}
        held = weakref.ref(before["0.weight"]), before["1.bias"].pow(2).sum()
        model.load_state_dict(state, assign=True)
        weakly, in_graph = (
            r"UserWarning: .*found 0\.weight: .* weakref",
            r"found 1\.bias: .* use_count.*step is refused",
        )
        assert re.search(weakly, " ".join(said)) and re.search(in_graph, " ".join(said))
        x = torch.ones(2, 5, dtype=torch.float64)
        model(x).sum().backward()
        kept = {name for name, p in model.named_parameters() if p is before[name]}
        assert kept == {"0.bias", "1.weight"}
        with pytest.raises(RuntimeError, match=r"load_state_dict\(assign=True\) replaced: 0\.weight, 1\.bias; "):
            optimizer.step()
        del held
        torch.optim.SGD(model.parameters(), lr=1.0).step()
        assert not any(torch.equal(p.full_tensor(), values[name]) for name, p in model.named_parameters())

    run(rank_main, impl)


@behaviour("keys that do not match, with `strict` and without", area="state")
@for_each_implementation
def test_keys_that_do_not_match_are_named(impl: Implementation) -> None:
    def rank_main(rank: int, impl: Implementation) -> None:
        model = impl.fully_shard(nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 5)))
        state = copied(model.state_dict())
        part = {"0.weight": state["0.weight"] + 1, "extra": torch.zeros(1)}
        with pytest.raises(RuntimeError, match=r'(?s)Missing key.*"0.bias".*Unexpected key.*"extra"'):
            model.load_state_dict(part)
        model.load_state_dict(state)
        for assign in (False, True):
            result = model.load_state_dict(part, strict=False, assign=assign)
            assert result.unexpected_keys == ["extra"] and "1.weight" in result.missing_keys
            assert torch.equal(model[0].weight.full_tensor(), part["0.weight"].full_tensor())
            assert torch.equal(model[1].weight.full_tensor(), state["1.weight"].full_tensor())
        wrong = state | {"0.weight": state["1.weight"]}
        with pytest.raises(RuntimeError, match=r"size mismatch for 0\.weight"):
            model.load_state_dict(wrong)
        model(torch.ones(2, 5)).sum().backward()

    run(rank_main, impl)


@pytest.mark.sample(1)
@behaviour(
    "`load_state_dict` takes plain full tensors: each rank its own part",
    area="state",
    torch="better",
    reason="torch's refuses them in place, and fails in the next forward when they are assigned",
)
@pytest.mark.parametrize("world", [1, 3])
def test_plain_full_tensors_are_loaded_as_well(world: int, impl: Implementation) -> None:
    """torch's refuses them in place ("got mixed torch.Tensor and DTensor"), and fails later when they are assigned."""
    case = BY_NAME["tied"]
    expected = reference("tied", world)

    def rank_main(rank: int, impl: Implementation) -> None:
        plain = case.build()
        plain_optimizer = adamw(plain.parameters())
        for step in range(BEFORE):
            for other in range(world):
                (case.loss(plain, case.batch(step, other)) / world).backward()
            plain_optimizer.step()
            plain_optimizer.zero_grad()
        source_optimizer = trained(case, impl, rank)[1].state_dict()
        for assign, on_meta, part_by_part in ((False, False, False), (True, True, False), (True, False, True)):
            with torch.device("meta" if on_meta else "cpu"):
                model: Any = case.make() if on_meta else case.build(seed=1)
            case.shard(model, impl.fully_shard)
            optimizer = adamw(model.parameters())
            given = plain.state_dict()
            if part_by_part:  # the state dict of a module that is no unit
                for child_name, child in model.named_children():
                    child.load_state_dict(plain.get_submodule(child_name).state_dict(), assign=assign)
            else:
                model.load_state_dict(given, assign=assign)
            assert all(isinstance(p, DTensor) for p in model.parameters())
            assert model.head.weight is model.embedding.weight
            assert not any(isinstance(value, DTensor) for value in given.values()), "the caller's dict was changed"
            optimizer.load_state_dict(copy.deepcopy(source_optimizer))
            finish(case, model, optimizer, rank, expected)
        other = nn.Linear(4, 2).state_dict()
        with pytest.raises(RuntimeError, match="size mismatch"):
            model.head.load_state_dict(other, strict=False)

    run(rank_main, impl, world=world)


# ---- torch.distributed.checkpoint.state_dict -------------------------------------------------------------------


OPTIONS = [
    StateDictOptions(),
    StateDictOptions(full_state_dict=True),
    StateDictOptions(full_state_dict=True, cpu_offload=True),
    StateDictOptions(cpu_offload=True),
]


def flat(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of nested dicts and lists, by path."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from flat(inner, f"{prefix}.{key}")
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            yield from flat(inner, f"{prefix}.{i}")
    else:
        yield prefix, value


def described(value: Any) -> Any:
    """What two implementations must agree on."""
    if not isinstance(value, torch.Tensor):
        return value
    if isinstance(value, DTensor):
        return ("sharded", value.placements, tuple(value.shape), value.dtype, value.to_local().tolist())
    return ("plain", tuple(value.shape), value.dtype, value.device, value.tolist())


@behaviour("`get_model_state_dict`, `get_optimizer_state_dict` with every option", area="state", torch="equal")
def test_what_dcp_gets_is_what_it_gets_of_torch_s_model() -> None:
    """Keys, shapes, dtypes, placements, values; on every rank, with every option."""
    case = BY_NAME["tied"]

    def rank_main(rank: int, impl: Implementation) -> list[Any]:
        model, optimizer = trained(case, impl, rank)
        found: list[Any] = []
        for options in OPTIONS:
            whole = get_state_dict(model, optimizer, options=options)
            parts = (
                get_model_state_dict(model, options=options),
                get_optimizer_state_dict(model, optimizer, options=options),
            )
            for pair in (whole, parts):
                found.append([(path, described(value)) for half in pair for path, value in flat(half)])
        return found

    ours, theirs = (run(rank_main, impl) for impl in (FULLSHARD, TORCH))
    for rank, (found, wanted) in enumerate(zip(ours, theirs, strict=True)):
        for state, oracle in zip(found, wanted, strict=True):
            assert [path for path, _ in state] == [path for path, _ in oracle]
            for (path, value), (_, expected) in zip(state, oracle, strict=True):
                if isinstance(value, tuple) and value[0] in ("plain", "sharded"):
                    assert value[:-1] == expected[:-1], f"rank {rank}: {path}"
                    a, b = torch.tensor(value[-1]), torch.tensor(expected[-1])
                    assert tolerance.close(a, b), f"rank {rank}: {path}"
                else:
                    assert value == expected, f"rank {rank}: {path}"
        # A full state dict is on every rank, or with cpu_offload on rank 0 alone.
        assert bool(found[4]) == (rank == 0)


# ---- ties, copies ----------------------------------------------------------------------------------------------


@behaviour("tied weights stay tied through load, save and `to_empty`", area="state")
@for_each_implementation
def test_ties_survive_loading_saving_and_to_empty(impl: Implementation) -> None:
    case = BY_NAME["tied"]
    expected = reference("tied", WORLD)

    def tied(model: Any) -> bool:
        return model.head.weight is model.embedding.weight

    def rank_main(rank: int, impl: Implementation) -> None:
        source, source_optimizer = trained(case, impl, rank)
        state, optimizer_state = copied(source.state_dict()), copy.deepcopy(source_optimizer.state_dict())
        assert torch.equal(state["head.weight"].to_local(), state["embedding.weight"].to_local())
        with torch.device("meta"):
            model: Any = case.make()
        case.shard(model, impl.fully_shard)
        assert tied(model)
        model.to_empty(device="cpu")
        assert tied(model)
        model.load_state_dict(state)
        model.load_state_dict(model.state_dict())
        assert tied(model)
        model.load_state_dict({n: v for n, v in state.items() if n != "head.weight"}, strict=False)
        optimizer = adamw(model.parameters())
        optimizer.load_state_dict(optimizer_state)
        finish(case, model, optimizer, rank, expected)
        assert tied(model)

    run(rank_main, impl)


@behaviour("copies of parameters, and refusals of copies of models", area="state")
@for_each_implementation
def test_copies_of_parameters_and_refusals_of_copies_of_models(impl: Implementation) -> None:
    import pickle

    def rank_main(rank: int, impl: Implementation) -> None:
        model: Any = impl.fully_shard(seeded(lambda: nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 5))))
        model(torch.ones(1, 5)).sum().backward()
        with pytest.raises(AssertionError, match="FSDP does not support deepcopy"):
            copy.deepcopy(model)
        for dump in (lambda: pickle.dumps(model), lambda: torch.save(model, io.BytesIO())):
            with pytest.raises((AssertionError, pickle.PicklingError), match="state_dict" if impl is FULLSHARD else ""):
                dump()
        assert isinstance(copy.deepcopy(model.state_dict()), dict)
        weight = model[0].weight
        for make in (copy.deepcopy, lambda p: pickle.loads(pickle.dumps(p))):
            other = make(weight)
            assert isinstance(other, DTensor) and other.placements == weight.placements
            assert torch.equal(other.to_local(), weight.to_local())
            with torch.no_grad():
                other.to_local().zero_()
            assert weight.to_local().abs().sum() > 0, "the copy shares memory"

    run(rank_main, impl)


class Slow(nn.Linear):
    """Its state dict is under way while a step goes on."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.running, self.read, self.go_on = (threading.Event() for _ in range(3))

    def _save_to_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._save_to_state_dict(*args, **kwargs)
        if self.running.is_set():
            self.read.set()
            assert self.go_on.wait(20)


@behaviour(
    "`state_dict()` in another thread gives shards while a step swaps parameters, and leaves modules alone: {keeps}",
    area="state",
    torch="none",
    reason="torch's reshards what the step computes with",
)
@pytest.mark.parametrize("keeps", ["values", "keep_vars=True"])
def test_another_thread_takes_a_state_dict_while_a_step_swaps_parameters(keeps: str) -> None:
    """What it read was full; until it is done the layer was reshared, and computed with again by a backward."""

    def rank_main(rank: int, impl: Implementation) -> None:
        model: Any = seeded(lambda: nn.Sequential(nn.Linear(4, 4), Slow(4, 4), nn.Linear(4, 4)))
        plain = [p.detach().clone() for p in model.parameters()]
        for layer in model:
            impl.fully_shard(layer)
        impl.fully_shard(model)
        shards, slow, taken = dict(model.named_parameters()), model[1], {}
        thread = threading.Thread(target=lambda: taken.update(model.state_dict(keep_vars=keeps != "values")))

        def begin(*_: object) -> None:
            if not slow.running.is_set():
                assert not isinstance(slow.weight, DTensor)
                slow.running.set()
                thread.start()
                assert slow.read.wait(20)

        slow.register_forward_hook(begin, prepend=True)
        loss = model(torch.ones(2, 4)).sum()
        assert isinstance(slow.weight, DTensor)
        slow.go_on.set()
        thread.join(20)
        for (name, value), whole in zip(taken.items(), plain, strict=True):
            assert isinstance(value, DTensor) and torch.equal(value.full_tensor(), whole), name
            assert (value is shards[name]) == (keeps != "values"), name
        loss.backward()
        assert all(p is shards[name] and p.grad is not None for name, p in model.named_parameters())

    run(rank_main, FULLSHARD)
