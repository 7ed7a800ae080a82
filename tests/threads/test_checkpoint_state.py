"""State dicts of models and optimizers: names, groups, dtypes, what is refused, the same in mid-step."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from fullshard import FSDPModule, checkpoint
from fullshard.checkpoint import CheckpointMismatch
from tests.harness.behaviours import behaviour
from tests.harness.implementations import FULLSHARD, Implementation
from tests.harness.models import BY_NAME, assert_same_training, collect, seeded
from tests.harness.threads import WORLD, run_ranks


def model() -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2)))


class Master(torch.optim.Optimizer):
    """An optimizer whose state has another dtype than its parameters."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state.setdefault("master", parameter.float() * 1.001)
                state.setdefault("seen", []).append(1)
                state["nested"] = {"a": None}
                state["master"] -= group["lr"] * 1e-4
                parameter.copy_(state["master"])


def test_names_are_those_of_the_plain_model() -> None:
    plain = model()
    wrapped = torch.compile(nn.Sequential(checkpoint_wrapper(plain[0]), plain[1]), backend="eager")
    state, _ = checkpoint.get_state_dict(wrapped)
    assert list(state) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    changed = {name: torch.full_like(value, 2.0) for name, value in state.items()}
    checkpoint.set_state_dict(wrapped, model_state_dict=changed)
    assert all((parameter == 2.0).all() for parameter in plain.parameters())


def test_state_keeps_its_dtype(tmp_path: Any) -> None:
    """torch's load_state_dict casts it to the parameter's, and so loses what a master copy is for."""
    trained = model().to(torch.bfloat16)
    optimizer = Master(trained.parameters())
    optimizer.step()
    names, state = checkpoint.get_state_dict(trained, optimizer)
    checkpoint.save({"m": names, "o": state}, checkpoint_id=tmp_path)
    other = model().to(torch.bfloat16)
    fresh = Master(other.parameters())
    names, target = checkpoint.get_state_dict(other, fresh)
    loaded: dict[str, Any] = {"m": names, "o": target}
    with pytest.raises(CheckpointMismatch, match="unexpected: o.state.0.bias.nested.a"):
        checkpoint.load(loaded, checkpoint_id=tmp_path)
    checkpoint.load(loaded, checkpoint_id=tmp_path, allow_unexpected=["*.nested.a"])
    checkpoint.set_state_dict(other, fresh, model_state_dict=loaded["m"], optim_state_dict=loaded["o"])
    for mine, theirs in zip(trained.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs)
        found: Tensor = fresh.state[theirs]["master"]
        assert found.dtype is torch.float32 and torch.equal(found, optimizer.state[mine]["master"])
        assert fresh.state[theirs]["seen"] == [1]


def test_several_optimizers_are_one_state() -> None:
    trained = model()
    optimizers = [torch.optim.Adam(trained[0].parameters(), lr=0.1), torch.optim.SGD(trained[1].parameters(), lr=0.2)]
    trained(torch.ones(1, 2)).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
    _, state = checkpoint.get_state_dict(trained, optimizers)
    assert set(state["state"]) >= {"0.weight", "0.bias"}
    assert [group["params"] for group in state["param_groups"]] == [["0.weight", "0.bias"], ["1.weight", "1.bias"]]
    other = model()
    fresh = [torch.optim.Adam(other[0].parameters()), torch.optim.SGD(other[1].parameters(), lr=9.0)]
    checkpoint.set_state_dict(other, fresh, optim_state_dict=state)
    assert [optimizer.param_groups[0]["lr"] for optimizer in fresh] == [0.1, 0.2]
    assert torch.equal(fresh[0].state[other[0].weight]["exp_avg"], optimizers[0].state[trained[0].weight]["exp_avg"])


def test_parameters_may_be_grouped_and_numbered_otherwise() -> None:
    """Names decide, not positions; groups of different settings cannot become one."""
    trained = model()
    first = torch.optim.AdamW(trained.parameters(), lr=0.3)
    trained(torch.ones(1, 2)).sum().backward()
    first.step()
    _, state = checkpoint.get_state_dict(trained, first)
    parameters = list(trained.parameters())[::-1]
    second = torch.optim.AdamW([{"params": parameters[:1]}, {"params": parameters[1:]}])
    checkpoint.set_state_dict(trained, second, optim_state_dict=state)
    assert [group["lr"] for group in second.param_groups] == [0.3, 0.3]
    for parameter in parameters:
        assert torch.equal(second.state[parameter]["exp_avg"], first.state[parameter]["exp_avg"])
    second.param_groups[0]["lr"] = 0.7
    _, state = checkpoint.get_state_dict(trained, second)
    before = first.state_dict()["param_groups"]
    with pytest.raises(CheckpointMismatch, match="different settings"):
        checkpoint.set_state_dict(trained, first, optim_state_dict=state)
    assert first.state_dict()["param_groups"] == before


def test_what_does_not_fit_is_refused_before_anything_is_set() -> None:
    trained = model()
    optimizer = torch.optim.Adam(trained.parameters())
    names, state = checkpoint.get_state_dict(trained, optimizer)
    before = {name: value.clone() for name, value in names.items()}
    less = {name: torch.zeros_like(value) for name, value in list(names.items())[1:]} | {"new": torch.ones(1)}
    with pytest.raises(CheckpointMismatch) as caught:
        checkpoint.set_state_dict(trained, optimizer, model_state_dict=less, optim_state_dict=state)
    assert caught.value.problems == ["missing: 0.weight", "unexpected: new"]
    wrong = {"state": {"gone": {}}, "param_groups": [{"params": ["0.weight"], "lr": 1.0}]}
    with pytest.raises(CheckpointMismatch) as caught:
        checkpoint.set_state_dict(trained, optimizer, model_state_dict=names, optim_state_dict=wrong)
    assert len(caught.value.problems) == 5 and "unexpected: state of gone" in caught.value.problems
    assert all(torch.equal(value, before[name]) for name, value in trained.state_dict().items())
    with pytest.raises(ValueError, match="build the optimizer after fully_shard"):
        checkpoint.get_state_dict(model(), optimizer)


def test_writing_tensor_by_tensor(tmp_path: Any) -> None:
    """For converters: announced first, in files of a given size; nothing is there before the end."""
    specs = [checkpoint.TensorSpec(("m", f"t{i}"), "int32", (i, 2)) for i in range(4)]
    with checkpoint.CheckpointWriter(tmp_path / "c", specs, {("step",): 3}, file_nbytes=20) as writer:
        for i, spec in enumerate(specs):
            writer.write(f"m.t{i}", torch.full(spec.shape, i, dtype=torch.int32))
            assert not checkpoint.is_complete(tmp_path / "c")
    manifest = checkpoint.verify(tmp_path / "c")
    assert len(manifest.files) == 3, "8, 16 and 24 bytes; the first has nothing to write"
    with checkpoint.open_checkpoint(tmp_path / "c") as opened:
        found = opened.state_dict()
        assert opened.value("step") == 3
        with pytest.raises(KeyError):
            opened.tensor("step")
    assert found["step"] == 3 and all((found["m"][f"t{i}"] == i).all() for i in range(4))
    for act, says in [
        (lambda w: w.write("m.t1", torch.zeros(1)), "expected m.t0"),
        (lambda w: w.write("m.t0", torch.zeros(0, 2)), "float32"),
        (lambda w: None, "missing"),
    ]:
        with pytest.raises(ValueError, match=says):
            with checkpoint.CheckpointWriter(tmp_path / "c", specs) as writer:
                act(writer)
        assert checkpoint.verify(tmp_path / "c").save_id == manifest.save_id, "the one before stays"
    with pytest.raises(CheckpointMismatch, match="each key once"):
        checkpoint.CheckpointWriter(tmp_path / "c", specs[:1] * 2)


OPTIMIZERS: dict[str, Any] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "RMSprop": torch.optim.RMSprop,
    "Adagrad": torch.optim.Adagrad,
    "Adamax": torch.optim.Adamax,
    "NAdam": torch.optim.NAdam,
    "Adam": torch.optim.Adam,
    "AdamW": torch.optim.AdamW,
}


def stepped(trained: nn.Module, kind: str) -> torch.optim.Optimizer:
    optimizer: torch.optim.Optimizer = OPTIMIZERS[kind](trained.parameters())
    trained(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return optimizer


@pytest.mark.parametrize("steps", [False, True])
def test_the_state_of_another_optimizer_is_refused(steps: bool) -> None:
    """The next step would end in a KeyError, or compute something else. Adam and AdamW have one state."""
    for kind in OPTIMIZERS:
        first = model()
        _, state = checkpoint.get_state_dict(first, stepped(first, kind))
        for other in OPTIMIZERS:
            trained = model()
            optimizer = stepped(trained, other) if steps else OPTIMIZERS[other](trained.parameters())
            before = optimizer.state_dict()
            if kind == other or {kind, other} == {"Adam", "AdamW"}:
                checkpoint.set_state_dict(trained, optimizer, optim_state_dict=state)
                trained(torch.ones(1, 2)).sum().backward()
                optimizer.step()
                continue
            with pytest.raises(CheckpointMismatch, match=f"the state of {kind}, for {other}: it "):
                checkpoint.set_state_dict(trained, optimizer, optim_state_dict=state)
            assert optimizer.state_dict()["param_groups"] == before["param_groups"]
            assert optimizer.state_dict()["state"].keys() == before["state"].keys()


class Other(torch.optim.Optimizer):
    """An optimizer of nobody's, with state of its own."""

    def __init__(self, parameters: Any, name: str) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.name = name

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter][self.name] = torch.zeros_like(parameter)


def test_other_state_and_settings_of_any_optimizer() -> None:
    first = model()
    one, other = Other(first.parameters(), "sum"), Other(first.parameters(), "mean")
    one.step()
    other.step()
    _, state = checkpoint.get_state_dict(first, one)
    with pytest.raises(CheckpointMismatch, match="state of sum, for Other, which has mean"):
        checkpoint.set_state_dict(first, other, optim_state_dict=state)
    checkpoint.set_state_dict(first, Other(first.parameters(), "mean"), optim_state_dict=state)
    adam = torch.optim.Adam(first.parameters())
    with pytest.raises(
        CheckpointMismatch, match="an optimizer with the settings lr, for Adam: it lacks amsgrad, betas"
    ):
        checkpoint.set_state_dict(first, adam, optim_state_dict=state)
    # As an older torch wrote it, and with a user's own and a scheduler's settings.
    adam = stepped(first, "AdamW")  # type: ignore[assignment]
    _, state = checkpoint.get_state_dict(first, adam)
    for group in state["param_groups"]:
        del group["decoupled_weight_decay"], group["fused"]
        group["initial_lr"], group["mine"] = 0.1, "yes"
    checkpoint.set_state_dict(first, torch.optim.AdamW(first.parameters()), optim_state_dict=state)


# ---- in the middle of a step ---------------------------------------------------------------------------------

CASE = BY_NAME["tiny_dims"]
MOMENTS = ("behind forward", "in a window", "without all-reduce", "fresh")
LEVELS: dict[str, dict[str, Any]] = {
    "default": {},
    "kept": {"reshard_after_forward": False},
    "freed": {"reshard_after_forward": True},
    "a part": {"reshard_after_forward": 2},
    "replicas": {"reshard_after_forward": False},
}


def _of_checkpoint(model: nn.Module, optimizer: Any) -> Any:
    return checkpoint.get_state_dict(model, optimizer)


def _of_dcp(model: nn.Module, optimizer: Any) -> Any:
    return get_state_dict(model, optimizer)


def _of_dcp_full(model: nn.Module, optimizer: Any) -> Any:
    return get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))


def _of_dcp_alone(model: nn.Module, optimizer: Any) -> Any:
    return {}, get_optimizer_state_dict(model, optimizer)


def _plain(state: Any) -> Any:
    """`state` with local tensors as lists, comparable."""
    if isinstance(state, dict):
        return {key: _plain(value) for key, value in state.items()}
    if isinstance(state, (tuple, list)):
        return [_plain(value) for value in state]
    if isinstance(state, DTensor):
        return str(state.placements), _plain(state.to_local())
    return (type(state), state.tolist()) if isinstance(state, torch.Tensor) else state


def _built(level: str, impl: Implementation = FULLSHARD) -> tuple[Any, torch.optim.Optimizer]:
    options = dict(LEVELS[level])
    if level == "replicas":
        half = torch.distributed.get_world_size() // 2
        options["mesh"] = init_device_mesh("cpu", (2, half), mesh_dim_names=("replicate", "shard"))
    model = CASE.shard(CASE.build(), lambda module: impl.fully_shard(module, **options))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def _step(rank: int, model: Any, optimizer: Any, moment: str, see: Callable[[], None]) -> None:
    """A step of two micro-batches; `see` in the middle of it."""
    if moment == "in a window":
        model.set_requires_gradient_sync(False)
    if moment == "without all-reduce":
        model.set_requires_all_reduce(False)
    CASE.loss(model, CASE.batch(0, rank)).backward()
    model.set_requires_gradient_sync(True)
    model.set_requires_all_reduce(True)
    loss = CASE.loss(model, CASE.batch(1, rank))
    see()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("level", "take"),
    [
        pytest.param(level, take, marks=() if level == "kept" or take is _of_checkpoint else pytest.mark.slow)
        for level in LEVELS
        for take in (_of_checkpoint, _of_dcp, _of_dcp_full, _of_dcp_alone)
    ],
)
def test_the_middle_of_a_step_is_no_moment_of_its_own(level: str, take: Callable[..., Any]) -> None:
    def job(rank: int) -> None:
        for moment in MOMENTS:
            (model, optimizer), (other, its_optimizer) = _built(level), _built(level)
            if moment != "fresh":
                for each, one in ((model, optimizer), (other, its_optimizer)):
                    _step(rank, each, one, "", lambda: None)
            found: list[Any] = []
            # torch makes state of an optimizer that has none, by a step; not in the middle, where gradients are.
            is_made = moment == "fresh" and take is not _of_checkpoint
            wanted = None if is_made else _plain(take(other, its_optimizer))

            def see() -> None:
                standing = [id(p) for p in model.parameters()]  # noqa: B023
                found.append(_plain(take(model, optimizer)))  # noqa: B023
                assert [id(p) for p in model.parameters()] == standing, "and it changes nothing"  # noqa: B023

            _step(rank, model, optimizer, moment, see)
            assert is_made or found == [wanted], moment
            _step(rank, other, its_optimizer, moment, lambda: None)
            assert_same_training(collect(model, optimizer), collect(other, its_optimizer), eps_multiple=0)

    run_ranks(4 if level == "replicas" else 2, job)


@behaviour("torch's `get_state_dict` between forward and backward, and in a window", area="state")
@pytest.mark.parametrize("level", ["default", "kept", "freed"])
def test_torch_s_function_between_forward_and_backward(level: str, impl: Implementation) -> None:
    def job(rank: int) -> None:
        model, optimizer = _built(level, impl)
        _step(rank, model, optimizer, "", lambda: None)
        names = {name for name, _ in model.named_parameters()}

        def see() -> None:
            values, state = get_state_dict(model, optimizer)
            assert all(isinstance(value, DTensor) for value in values.values())
            assert state["state"].keys() == names

        for moment in MOMENTS[:2]:
            _step(rank, model, optimizer, moment, see)

    run_ranks(WORLD, job)


def test_a_part_of_the_model_and_a_load_in_the_middle() -> None:
    def job(rank: int) -> None:
        model, optimizer = _built("kept")
        _step(rank, model, optimizer, "", lambda: None)
        part = next(child for child in model.modules() if child is not model and isinstance(child, FSDPModule))
        assert isinstance(part, nn.Module)
        own = torch.optim.AdamW(part.parameters(), lr=0.1)

        def see() -> None:
            _, state = get_state_dict(part, own)
            assert state["param_groups"][0]["params"] == [name for name, _ in part.named_parameters()]
            assert checkpoint.get_state_dict(part, own)[1]["param_groups"][0]["lr"] == 0.1
            _, ours = checkpoint.get_state_dict(model, optimizer)
            checkpoint.set_state_dict(model, optimizer, optim_state_dict=ours)
            set_optimizer_state_dict(model, optimizer, get_optimizer_state_dict(model, optimizer))

        _step(rank, model, optimizer, "behind forward", see)

    run_ranks(2, job)


def test_what_stands_on_the_modules_is_shown_to_others() -> None:
    """As in torch: only functions that look up parameters of an optimizer get other ones. The look keeps nothing."""

    def held(model: nn.Module) -> Any:
        """A weak reference to a local of a caller."""
        local = nn.Module()
        list(model.parameters()), list(model.named_parameters())
        return weakref.ref(local)

    def job(rank: int) -> None:
        model, _ = _built("kept")
        gc.disable()
        try:
            assert held(model)() is None
        finally:
            gc.enable()
        sharded = dict(model.named_parameters())
        loss = CASE.loss(model, CASE.batch(0, rank))
        for name, parameter in itertools.chain(model.named_parameters(), model.named_parameters("", True, True)):
            assert parameter is not sharded[name] and not isinstance(parameter, DTensor)
        loss.backward()
        assert all(parameter is sharded[name] for name, parameter in model.named_parameters())

    run_ranks(2, job)
