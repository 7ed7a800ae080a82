"""`fullshard.sleep` and `wake`: what is refused meanwhile, and that nothing changed. Memory: tests/device."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import fullshard
from fullshard import checkpoint
from fullshard.extras import Slept
from fullshard.extras.sleep import _asleep
from fullshard.extras.slept_memory import SleptMemory, tensors_in
from tests.harness.models import BY_NAME, Trained, adamw, assert_same_training, collect, seeded
from tests.harness.threads import run_ranks

CASE = BY_NAME["tied"]


class _Normed(nn.Module):
    """With buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 6)
        self.norm = nn.BatchNorm1d(6)
        self.last = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)))


def _model(**options: Any) -> Any:
    return CASE.shard(CASE.build(), fullshard.fully_shard, **options)


def _step(model: Any, optimizer: Any, rank: int, step: int, case: Any = CASE) -> None:
    case.loss(model, case.batch(step, rank)).backward()
    optimizer.step()
    optimizer.zero_grad()


def _trains(rank: int, sleeps: bool, shape: tuple[int, int] | None = None, **options: Any) -> tuple[Trained, Any]:
    if shape is not None:
        options["mesh"] = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    model = _model(**options)
    optimizer = adamw(model.parameters(), watched=False)
    mean = fullshard.average(model, decay=0.5)
    reports: list[Slept] = []
    same = True
    for step in range(3):
        _step(model, optimizer, rank, step)
        mean.update()
        # One micro-batch of a window, and gradients that were reduced.
        model.set_requires_gradient_sync(step != 1)
        CASE.loss(model, CASE.batch(10 + step, rank)).backward()
        model.set_requires_gradient_sync(True)
        if sleeps:
            held = [*model.parameters(), *(p._local_tensor for p in model.parameters())]
            reports.append(fullshard.sleep(model, optimizer, average=mean))
            reports.append(fullshard.wake(model))
            now = [*model.parameters(), *(p._local_tensor for p in model.parameters())]
            same = same and all(one is other for one, other in zip(held, now, strict=True))
    _step(model, optimizer, rank, 20)
    return collect(model, optimizer), (reports, same, mean.state_dict()["means"])


OPTIONS: dict[str, dict[str, Any]] = {
    "freed": {},
    "kept": {"reshard_after_forward": False},
    "replicas": {"shape": (2, 1)},
    "offload": {"offload_policy": fullshard.CPUOffloadPolicy(pin_memory=False)},
    "mixed": {"mp_policy": fullshard.MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("options", OPTIONS)
def test_bits_are_those_of_before(options: str) -> None:
    slept = run_ranks(2, lambda rank: _trains(rank, True, **OPTIONS[options]))
    awake = run_ranks(2, lambda rank: _trains(rank, False, **OPTIONS[options]))
    for (found, (reports, same, means)), (expected, (_, _, wanted)) in zip(slept, awake, strict=True):
        assert_same_training(found, expected, eps_multiple=0)
        assert same
        for name, mean in means.items():
            assert torch.equal(mean.to_local(), wanted[name].to_local())
        # Nothing is freed on a host, and nothing is said to be.
        assert all(report.freed_nbytes == report.moved_nbytes == 0 < report.stayed_nbytes for report in reports)


def _uses(model: Any, optimizer: Any, mean: Any, path: str) -> dict[str, Callable[[], Any]]:
    p = next(model.parameters())
    batch = CASE.batch(0, 0)
    return {
        "forward": lambda: CASE.loss(model, batch),
        "evaluation": lambda: torch.no_grad()(model)(batch[0]),
        "a forward of a part": lambda: model.layers[0](torch.zeros(1, 2, 12)),
        "step": optimizer.step,
        "step of another optimizer": torch.optim.SGD(list(model.parameters()), lr=0.1).step,
        "optimizer.state_dict": optimizer.state_dict,
        "optimizer.load_state_dict": lambda: optimizer.load_state_dict({"state": {}, "param_groups": []}),
        "state_dict": model.state_dict,
        "state_dict, keep_vars": lambda: model.state_dict(keep_vars=True),
        "load_state_dict": lambda: model.load_state_dict({}, strict=False),
        "clip": lambda: fullshard.clip_grad_norm_(model.parameters(), 1.0),
        "torch's clip": lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        "checkpoint": lambda: checkpoint.save({"model": model.state_dict()}, checkpoint_id=path),
        "full_params": lambda: fullshard.full_params(model).__enter__(),
        "unshard": model.unshard,
        "unit_open": lambda: fullshard.unit_open(model.layers[0]).__enter__(),
        "full_tensor": p.full_tensor,
        "arithmetic": lambda: p + 1,
        "in place": lambda: torch.no_grad()(p.add_)(1),
        "item": lambda: p.to_local().sum().item(),
        "copy": lambda: copy.deepcopy(p),
        "gradient": lambda: p.grad + 1,
        "state": lambda: optimizer.state[p]["exp_avg"] + 1,
        "average": mean.update,
        "weights": lambda: dict(fullshard.weights(model).tensors()),
        "step without gradients": lambda: (model.zero_grad(), optimizer.step()),
    }


def _refused(rank: int, path: str) -> dict[str, str]:
    model = _model()
    optimizer = adamw(model.parameters(), watched=False)
    mean = fullshard.average(model, decay=0.5)
    _step(model, optimizer, rank, 0)
    CASE.loss(model, CASE.batch(1, rank)).backward()
    uses = _uses(model, optimizer, mean, path)
    fullshard.sleep(model, optimizer, average=mean)
    said = {}
    for name, use in uses.items():
        try:
            use()
            said[name] = "nothing"
        except Exception as error:
            said[name] = f"{type(error).__name__}: {error}"
    return said


def test_every_use_meanwhile_is_an_error_by_name(tmp_path: Path) -> None:
    (said,) = run_ranks(1, lambda rank: _refused(rank, str(tmp_path / "x")))
    wrong = {name: text for name, text in said.items() if "asleep" not in text or "fullshard.wake" not in text}
    assert not wrong


def _calls(rank: int) -> list[str]:
    said: list[str] = []

    def refused(call: Callable[[], Any]) -> None:
        with pytest.raises((RuntimeError, ValueError, TypeError)) as caught:
            call()
        said.append(str(caught.value))

    model = _model()
    optimizer = adamw(model.parameters(), watched=False)
    refused(lambda: fullshard.wake(model))
    refused(lambda: fullshard.sleep(nn.Linear(2, 2)))
    handle = model.layers[1].register_forward_hook(lambda *_: fullshard.sleep(model))
    refused(lambda: CASE.loss(model, CASE.batch(0, rank)))
    handle.remove()
    fullshard.sleep(model)  # what the failed forward left is discarded
    fullshard.wake(model)
    _step(model, optimizer, rank, 0)
    fullshard.sleep(model)
    refused(lambda: fullshard.sleep(model))
    refused(lambda: fullshard.wake(model, load=lambda: None))
    fullshard.wake(model)
    CASE.loss(model, CASE.batch(0, rank)).backward()
    refused(lambda: fullshard.sleep(model, drop=True))
    model.zero_grad()
    with fullshard.full_params(model):
        refused(lambda: fullshard.sleep(model))
    return said


def test_calls_out_of_place() -> None:
    (said,) = run_ranks(1, _calls)
    expected = [
        "expected a model that is asleep",
        "expected one that fully_shard was applied to",
        "expected no forward and no backward",
        "expected a model that is awake",
        "leave load out",
        "expected no gradients with drop=True",
        "leave full_params first",
    ]
    assert all(part in text for part, text in zip(expected, said, strict=True)), said


def _dropped(rank: int, path: str) -> tuple[Slept, list[str], bool, Trained, Trained]:
    model = _model()
    optimizer = adamw(model.parameters(), watched=False)
    _step(model, optimizer, rank, 0)
    before = collect(model, optimizer)
    saved, of_optimizer = checkpoint.get_state_dict(model, optimizer)
    checkpoint.save({"model": saved, "optimizer": of_optimizer}, checkpoint_id=path)
    del saved, of_optimizer  # their tensors share the memory
    report = fullshard.sleep(model, optimizer, drop=True)
    said = []

    def broken() -> None:
        raise OSError("no such disk")

    def load() -> None:
        state = dict(zip(("model", "optimizer"), checkpoint.get_state_dict(model, optimizer), strict=True))
        checkpoint.load(state, checkpoint_id=path)
        checkpoint.set_state_dict(
            model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )

    for given in (None, broken, lambda: None):
        try:
            fullshard.wake(model, load=given)
        except (OSError, RuntimeError, ValueError) as error:
            said.append(str(error))
    try:
        model.state_dict()
    except RuntimeError as error:
        said.append(str(error))
    fullshard.wake(model, load=load)
    after = collect(model, optimizer)
    _step(model, optimizer, rank, 1)
    return report, said, True, before, after


def test_dropped_and_loaded(tmp_path: Path) -> None:
    for report, said, _, before, after in run_ranks(2, lambda rank: _dropped(rank, str(tmp_path / "x"))):
        assert report.dropped_nbytes >= report.freed_nbytes > 0 == report.moved_nbytes
        assert ["pass load=", "no such disk", "without values", "asleep"] == [
            next(part for part in ("pass load=", "no such disk", "without values", "asleep") if part in text)
            for text in said
        ]
        assert_same_training(after, before, eps_multiple=0)


def _from_a_peer(rank: int) -> tuple[Trained, Trained]:
    """A peer, whole on each rank and awake, has what the sleeping model and its optimizer dropped."""
    model, peer = _model(), CASE.build()
    optimizer = adamw(model.parameters(), watched=False)
    _step(model, optimizer, rank, 0)
    before = collect(model, optimizer)
    of_peer = adamw(peer.parameters(), watched=False)
    fullshard.transfer((model, optimizer), (peer, of_peer)).run()
    fullshard.sleep(model, optimizer, drop=True)
    fullshard.wake(model, load=lambda: fullshard.transfer((peer, of_peer), (model, optimizer)).run())
    after = collect(model, optimizer)
    _step(model, optimizer, rank, 1)
    return before, after


@pytest.mark.sample(1)
@pytest.mark.parametrize("world", [1, 2, 3])
def test_dropped_and_taken_from_a_peer(world: int) -> None:
    for before, after in run_ranks(world, _from_a_peer):
        assert_same_training(after, before, eps_multiple=0)


def _hsdp(replicas: int, shards: int) -> tuple[Any, Any, Any]:
    mesh = init_device_mesh("cpu", (replicas, shards), mesh_dim_names=("replicate", "shard"))
    model = _model(mesh=mesh)
    optimizer = adamw(model.parameters(), watched=False)
    _step(model, optimizer, dist.get_rank(), 0)
    mean = fullshard.average(model, decay=0.5)
    return model, optimizer, mean


def _held_by_replicas(rank: int, replicas: int, shards: int) -> tuple[Slept, Slept, int, Any, Any, Any]:
    model, optimizer, mean = _hsdp(replicas, shards)
    # Gradients of a window, which replicas do not have alike.
    model.set_requires_gradient_sync(False)
    CASE.loss(model, CASE.batch(1, rank)).backward()
    model.set_requires_gradient_sync(True)
    before = collect(model, optimizer)
    report = fullshard.sleep(model, optimizer, average=mean, drop="replicas")
    held = {id(memory): memory for memory in _asleep[model]._memory.values()}.values()
    kept = sum(0 if memory._host is None else memory._host.nbytes for memory in held)
    back = fullshard.wake(model)
    after = collect(model, optimizer)
    _step(model, optimizer, rank, 1)
    mean.update()
    means = {name: mean.to_local().clone() for name, mean in mean.state_dict()["means"].items()}
    return report, back, kept, before, after, (collect(model, optimizer), means)


def _held_by_each(rank: int, replicas: int, shards: int) -> Any:
    model, optimizer, mean = _hsdp(replicas, shards)
    model.set_requires_gradient_sync(False)
    CASE.loss(model, CASE.batch(1, rank)).backward()
    model.set_requires_gradient_sync(True)
    _step(model, optimizer, rank, 1)
    mean.update()
    return collect(model, optimizer), {k: v.to_local().clone() for k, v in mean.state_dict()["means"].items()}


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("replicas", "shards"),
    [(2, 1), (3, 1), pytest.param(2, 2, marks=pytest.mark.slow), pytest.param(4, 1, marks=pytest.mark.slow)],
)
def test_replicas_keep_a_part_each(replicas: int, shards: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SleptMemory, "slab_nbytes", 1000)
    found = run_ranks(replicas * shards, lambda rank: _held_by_replicas(rank, replicas, shards))
    expected = run_ranks(replicas * shards, lambda rank: _held_by_each(rank, replicas, shards))
    for (report, back, kept, before, after, (ended, means)), (awake, wanted) in zip(found, expected, strict=True):
        assert_same_training(after, before, eps_multiple=0)
        assert_same_training(ended, awake, eps_multiple=0)
        assert all(torch.equal(means[name], wanted[name]) for name in wanted)
        assert report == back and report.moved_nbytes == kept > 0
        assert report.freed_nbytes == report.moved_nbytes + report.dropped_nbytes
    # Together the replicas of a shard keep its bytes once, whatever remains for each piece of 16 bytes.
    for shard in range(shards):
        reports = [found[replica * shards + shard][0] for replica in range(replicas)]
        assert len({report.freed_nbytes for report in reports}) == 1
        assert sum(report.moved_nbytes for report in reports) == reports[0].freed_nbytes


def _differing(rank: int) -> list[str]:
    model, optimizer, _ = _hsdp(2, 1)
    said = []
    with torch.no_grad():
        model.head.weight.to_local()[:, 0].add_(0 if rank == 0 else 1)
    before = collect(model, optimizer)
    for drop in ("replicas", False):
        try:
            fullshard.sleep(model, optimizer, drop=drop)
            said.append("asleep")
        except RuntimeError as error:
            said.append(f"{type(error).__name__}: {error}")
    fullshard.wake(model)
    assert_same_training(collect(model, optimizer), before, eps_multiple=0)
    return said


def test_replicas_that_differ_are_named_and_keep_their_own() -> None:
    for said in run_ranks(2, _differing):
        assert "RanksDisagree" in said[0] and "head.weight" in said[0] and "ranks 0 and 1" in said[0], said
        assert said[1] == "asleep"


def _held_by_the_program(rank: int) -> tuple[Slept, Slept, bool, bool]:
    """A part of the first model is held, of the second one nothing."""
    reports = []
    for holds in (True, False):
        model = _model()
        optimizer = fullshard.step_on_shards(adamw(model.parameters(), watched=False))
        _step(model, optimizer, rank, 0)
        view = model.layers[1].mlp.up.weight.to_local() if holds else None
        reports.append(fullshard.sleep(model, optimizer, drop=True))
        if holds:
            first = view is not None and not view.isnan().any()
        fullshard.wake(model, load=lambda model=model: _fill(model))
        if holds:
            second = view is not None and bool(torch.equal(view, model.layers[1].mlp.up.weight.to_local()))
    return reports[0], reports[1], bool(first), second


def _fill(model: Any) -> None:
    with torch.no_grad():
        for number, p in enumerate(model.parameters()):
            p.fill_(number)


@pytest.mark.threads_only("warnings of ranks are caught here")
def test_what_the_program_holds_stays_and_is_named() -> None:
    with pytest.warns(UserWarning, match=r"memory stays on the device.* layers.1.mlp.up.weight; delete") as caught:
        found = run_ranks(2, _held_by_the_program)
    assert len(caught) == 2
    for held, free, is_there, same in found:
        assert is_there and same
        assert 0 < held.freed_nbytes < free.freed_nbytes
        assert held.stayed_nbytes > free.stayed_nbytes


def _own_state(rank: int) -> tuple[list[Any], list[Any], Slept]:
    """State that only this rank has: whole on an owner, in lists, and a share of another tensor."""
    model, optimizer, _ = _hsdp(2, 1)
    p = next(model.parameters())
    optimizer.state[p]["factors"] = [torch.full((3,), float(rank)), {"left": torch.full((2, 2), 10.0 + rank)}]
    before = [tensor.clone() for _, tensor in tensors_in(optimizer.state[p]["factors"])]
    report = fullshard.sleep(model, optimizer, drop="replicas")
    fullshard.wake(model)
    return before, [tensor for _, tensor in tensors_in(optimizer.state[p]["factors"])], report


def test_state_of_owners_is_no_replica_s() -> None:
    for before, after, _ in run_ranks(2, _own_state):
        assert len(before) == 2 and all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


def _objects(rank: int) -> tuple[dict[str, str], bool, list[str]]:
    """Tensors that the program took before, and what it finds in lists of the optimizer's state."""
    model = fullshard.fully_shard(seeded(_Normed), ignored_params=set())
    optimizer = adamw(model.parameters(), watched=False)
    x = torch.randn(4, 7, generator=torch.Generator().manual_seed(rank))
    model(x).sum().backward()
    optimizer.step()
    p = next(model.parameters())
    factors = optimizer.state[p]["factors"] = [torch.ones(3), torch.ones(2)]
    held = {
        "norm.running_mean": model.norm.running_mean,
        "first.weight": p._local_tensor,
        "the gradient of first.weight": p.grad,
        "exp_avg of first.weight in AdamW": optimizer.state[p]["exp_avg"]._local_tensor,
        "factors[1] of first.weight in AdamW": factors[1],
    }
    before = {name: type(tensor) for name, tensor in held.items()}
    fullshard.sleep(model, optimizer)
    said = {}
    for name, tensor in held.items():
        for number, use in enumerate((lambda t=tensor: t + 1, lambda t=tensor: torch.ones(()).add(t), tensor.sum)):
            try:
                use()
                said[f"{name} {number}"] = "nothing"
            except Exception as error:
                said[f"{name} {number}"] = f"{type(error).__name__}: {error}"
    shapes = [tuple(tensor.shape) for tensor in held.values()]
    text = [repr(held["norm.running_mean"])]
    fullshard.wake(model)
    same = all(type(tensor) is before[name] for name, tensor in held.items())
    same = same and shapes == [tuple(tensor.shape) for tensor in held.values()]
    return said, same and bool((factors[1] == 1).all()), text


def test_objects_of_before_refuse_by_name() -> None:
    for said, same, text in run_ranks(2, _objects):
        wrong = {
            key: found for key, found in said.items() if key.rpartition(" ")[0] not in found or "asleep" not in found
        }
        assert not wrong and len(said) == 15 and same, wrong
        assert text == ["AsleepInPlace(norm.running_mean)"]


def _views(rank: int) -> tuple[int, bool]:
    """Views of state and of a buffer."""
    model = _model()
    optimizer = adamw(model.parameters(), watched=False)
    _step(model, optimizer, rank, 0)
    p = model.layers[1].mlp.up.weight
    whole = fullshard.sleep(model, optimizer, drop=True).freed_nbytes
    fullshard.wake(model, load=lambda: _fill(model))
    _step(model, optimizer, rank, 1)
    view = optimizer.state[p]["exp_avg"].to_local()[:1].view(torch.int32)
    before = view.clone()
    return whole - fullshard.sleep(model, optimizer, drop=True).freed_nbytes, torch.equal(view, before)


@pytest.mark.threads_only("warnings of ranks are caught here")
def test_views_of_state_keep_it() -> None:
    with pytest.warns(UserWarning, match="exp_avg of layers.1.mlp.up.weight in AdamW; delete") as caught:
        found = run_ranks(2, _views)
    assert len(caught) == 2 and all(stays > 0 and same for stays, same in found)


def _no_replicas(rank: int) -> list[str]:
    model, said = _model(), []
    for drop in ("replicas", "halves"):
        with pytest.raises(ValueError) as caught:
            fullshard.sleep(model, drop=drop)  # type: ignore[arg-type]
        said.append(str(caught.value))
    return said


def test_replicas_of_a_model_that_has_none() -> None:
    for said in run_ranks(2, _no_replicas):
        assert "no axis of them" in said[0] and "True, False or 'replicas'" in said[1]


def _alone(rank: int, what: str) -> str:
    model = _model()
    optimizer = adamw(model.parameters(), watched=False)
    _step(model, optimizer, rank, 0)
    try:
        if what == "sleep" and rank == 0:
            _step(model, optimizer, rank, 1)
        elif what == "arguments":
            fullshard.sleep(model, optimizer if rank else None)
        else:
            fullshard.sleep(model)
        if what == "wake" and rank == 0:
            fullshard.wake(model)
        _step(model, optimizer, rank, 1)
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.sample(1)
@pytest.mark.parametrize("what", ["sleep", "arguments", "wake"])
def test_one_rank_alone_is_named(what: str) -> None:
    for said in run_ranks(2, lambda rank: _alone(rank, what)):
        assert "sleep" in said or "wake" in said, said


def _no_room(rank: int) -> tuple[str, str, bool]:
    model = _model()
    optimizer = adamw(model.parameters(), watched=False)
    _step(model, optimizer, rank, 0)
    before = collect(model, optimizer)
    fullshard.sleep(model, optimizer)
    said = []
    for use in (lambda: fullshard.wake(model), model.state_dict):
        try:
            use()
            said.append("")
        except RuntimeError as error:
            said.append(str(error))
    fullshard.wake(model)
    after = collect(model, optimizer)
    return said[0], said[1], all(torch.equal(after.params[name], before.params[name]) for name in before.params)


def test_without_room_all_stay_asleep(monkeypatch: pytest.MonkeyPatch) -> None:
    """The third allocation of rank 1 fails, once."""
    calls = {rank: 0 for rank in range(2)}
    real = SleptMemory.allocate

    def full(self: Any) -> None:
        rank = dist.get_rank()
        calls[rank] += 1
        if (rank, calls[rank]) == (1, 3):
            raise torch.OutOfMemoryError("out of memory, tried to allocate 2 GiB\nmore")
        real(self)

    monkeypatch.setattr(SleptMemory, "allocate", full)
    for rank, (said, used, same) in enumerate(run_ranks(2, _no_room)):
        assert "none on rank 1" in said and ("2 GiB" in said) is (rank == 1)
        assert "asleep" in used and same


def _hooked(rank: int) -> bool:
    model = fullshard.fully_shard(seeded(_Normed))
    optimizer = adamw(model.parameters(), watched=False)
    seen: list[Tensor] = []
    p = next(model.parameters())
    p.register_hook(lambda gradient: seen.append(gradient))
    x = torch.randn(4, 7, generator=torch.Generator().manual_seed(rank))
    model(x).sum().backward()
    fullshard.sleep(model, optimizer)
    fullshard.wake(model)
    model(x).sum().backward()
    return len(seen) == 2 and isinstance(p, DTensor) and p is next(model.parameters())


def test_hooks_and_buffers() -> None:
    assert run_ranks(1, _hooked) == [True]
