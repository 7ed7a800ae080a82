"""An abort on a device while messages are under way: the model is lost on all ranks until it was loaded."""

from __future__ import annotations

import copy
import gc
import multiprocessing
import os
import signal
import threading
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fullshard
from fullshard import PeerFailed, RanksDisagree, checkpoint, fully_shard
from tests.harness.fates import run_fates
from tests.harness.models import assert_close_to_tensor_max, seeded
from tests.harness.on_device import whole
from tests.harness.pool import pool

STEPS = 4
# The step that fails: in the first two, ranks ask each other before they send.
FAILED = 2
SAVED = "a model that was lost on a device:"
LOST = "expected a model whose values are sound, found it lost on a device"


class Counting(nn.Module):
    """A persistent buffer, and one that state dicts leave out; no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("forwards", torch.zeros(2))
        self.register_buffer("ones", torch.ones(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += 1
        return x * self.ones


def _plain() -> nn.Sequential:
    return seeded(lambda: nn.Sequential(nn.Linear(4, 6), Counting(), nn.Tanh(), nn.Linear(6, 2)))  # type: ignore[return-value]


def _batch(rank: int, step: int) -> Tensor:
    return torch.arange(8.0).view(2, 4).add(rank + 2 * step).sin()


def _build(mesh: DeviceMesh | None = None) -> tuple[Any, torch.optim.Optimizer]:
    model: Any = _plain().to("simulated")
    # No gather in backward: what one rank sends there are reductions.
    fully_shard(model[0], mesh=mesh, reshard_after_forward=False)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def _loss(model: Any, rank: int, step: int) -> Tensor:
    return model(_batch(rank, step).to("simulated")).square().mean()  # type: ignore[no-any-return]


def _step(model: Any, optimizer: torch.optim.Optimizer, rank: int, step: int, *, wait: bool = True) -> None:
    with fullshard.guard(model, optimizer, wait=wait):
        _loss(model, rank, step).backward()
        optimizer.step()
    optimizer.zero_grad()


def _values(model: nn.Module) -> dict[str, Tensor]:
    return {name: whole(value).cpu().clone() for name, value in model.state_dict().items()}


def _copy(state: Any) -> Any:
    if isinstance(state, Tensor):
        return state.detach().clone()
    if isinstance(state, dict):
        return {key: _copy(value) for key, value in state.items()}
    return [_copy(value) for value in state] if isinstance(state, list) else copy.copy(state)


def _expected(world: int) -> dict[str, Tensor]:
    """After plain training with the batches of all ranks."""
    model = _plain()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(STEPS):
        for rank in range(world):
            (model(_batch(rank, step)).square().mean() / world).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.detach() for name, value in model.state_dict().items() if "forwards" not in name}


def _same(found: dict[str, Tensor], world: int = 2) -> None:
    for name, value in _expected(world).items():
        assert_close_to_tensor_max(found[name], value, 12)
    assert found["1.forwards"].tolist() == [STEPS, STEPS]


def _fails(model: Any, optimizer: torch.optim.Optimizer, rank: int, step: int) -> str:
    """Rank 1 raises before its forward; the others' messages are under way then."""
    with pytest.raises((ValueError, PeerFailed)) as caught, fullshard.guard(model, optimizer):
        if rank == 1:
            raise ValueError("injected")
        _loss(model, rank, step)
    optimizer.zero_grad()
    return str(caught.value)


def _lost(rank: int, how: str, folder: str) -> tuple[list[str], dict[str, Tensor]]:
    from tests.harness import simulated

    said, on_host = [], dist.new_group(backend="gloo")
    with simulated.watched():
        model, optimizer = _build()
        for step in range(FAILED):
            _step(model, optimizer, rank, step)
        values, state = _values(model), _copy(optimizer.state_dict())
        if how == "checkpoint":
            checkpoint.save({"model": model.state_dict()}, checkpoint_id=folder, process_group=on_host)
        said.append(_fails(model, optimizer, rank, FAILED))
        for call in (lambda: _loss(model, rank, FAILED), optimizer.step, model.unshard):
            with pytest.raises(RanksDisagree) as refused:
                call()
            said.append(str(refused.value))
        model.reset_iter_state()  # the forward of rank 0 was interrupted
        with pytest.raises(RanksDisagree, match=LOST), fullshard.full_params(model):
            pass
        with pytest.raises(checkpoint.CheckpointMismatch, match=f"{SAVED} on rank 0 message"):
            checkpoint.save({"model": model.state_dict()}, checkpoint_id=f"{folder}/lost", process_group=on_host)
        model[0].load_state_dict({name.removeprefix("0."): v for name, v in values.items() if name[0] == "0"})
        with pytest.raises(RanksDisagree) as refused:
            _loss(model, rank, FAILED)
        said.append(str(refused.value))
        with pytest.raises(RanksDisagree):
            optimizer.step()
        if how == "parts":
            for name in ("3", "1"):
                part = {key.removeprefix(f"{name}."): v for key, v in values.items() if key[0] == name}
                model.get_submodule(name).load_state_dict(part)
        elif how == "declared":
            with torch.no_grad():
                for name, buffer in model.named_buffers():
                    if name in values:
                        buffer.copy_(values[name])
            fullshard.mark_restored(model)
        elif how == "checkpoint":
            checkpoint.load({"model": model.state_dict()}, checkpoint_id=folder, process_group=on_host)
        else:
            model.load_state_dict(values)
        if how != "declared":
            _loss(model, rank, FAILED).backward()
            with pytest.raises(RuntimeError, match="expected state that was loaded after the model was lost"):
                optimizer.step()
            optimizer.zero_grad()
            model.load_state_dict(values)
        before = optimizer.state
        if how == "new optimizer":
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        if how != "declared":
            optimizer.load_state_dict(state)
            # The dict of the lost state with what was loaded: identity says nothing, as ids of freed objects return.
            before.clear()
            before.update(optimizer.state)
            optimizer.state = before
        for step in range(FAILED, STEPS):
            _step(model, optimizer, rank, step)
        return said, _values(model)


@pytest.mark.sample(1)
@pytest.mark.parametrize("how", ["whole", "parts", "checkpoint", "new optimizer", "declared"])
def test_the_model_is_lost_on_all_ranks_until_all_of_it_was_loaded(how: str, tmp_path: Path) -> None:
    found = pool(2, backend="nccl").run(_lost, how, str(tmp_path / "checkpoint"))
    for rank, (said, values) in enumerate(found):
        first, forward, step, unshard, part = said
        assert first == "injected" if rank else "rank 1 raised" in first
        for text in (forward, step, unshard, part):
            assert (
                text.startswith(f"{LOST}: that on rank 0 message")
                and "rank 1 raised at step 2" in text
                and "ValueError: injected" in text
            )
            assert "Load a checkpoint on all ranks" in text and "mark_restored" in text
        assert "not loaded here yet: 0.weight, 0.bias, 1.forwards, 3.weight and 1 more" in forward
        assert part.endswith("not loaded here yet: 1.forwards, 3.weight, 3.bias")
        _same(values)


def _lost_beside_a_dropped_model(rank: int) -> bool:
    """A model that was dropped, and that the collector did not find yet, shares the mesh."""
    from tests.harness import simulated

    gc.disable()
    try:
        with simulated.watched():
            dropped, other = _build()
            _step(dropped, other, rank, 0)
            model, optimizer = _build()
            for step in range(FAILED):
                _step(model, optimizer, rank, step)
            values, state = _values(model), _copy(optimizer.state_dict())
            dropped.itself = [dropped]  # a cycle
            del dropped, other
            _fails(model, optimizer, rank, FAILED)
            model.load_state_dict(values)
            optimizer.load_state_dict(state)
            for step in range(FAILED, STEPS):
                _step(model, optimizer, rank, step)
    finally:
        gc.enable()
    _same(_values(model))
    return True


@pytest.mark.slow
def test_a_model_that_was_dropped_need_not_be_loaded() -> None:
    """Red before: "not loaded here yet" named its parameters, which nobody can load. Found over NCCL."""
    assert pool(2, backend="nccl").run(_lost_beside_a_dropped_model) == [True, True]


# ---- a rank that is killed -------------------------------------------------------------------------------------------


def _killed(rank: int, folder: str) -> tuple[list[str], list[str]]:
    """Rank 1 is killed while its peers' messages of a backward are under way. What is said then, and afterwards."""
    from tests.harness import simulated

    with simulated.watched():
        model, optimizer = _build()
        for step in range(FAILED):
            _step(model, optimizer, rank, step)
        if rank == 1:
            model[0].register_forward_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        with pytest.raises(PeerFailed) as caught:
            _step(model, optimizer, rank, FAILED)
        said, refused = [str(caught.value)], []
        stepped = next(iter(optimizer.state.values()))["step"].item()
        assert stepped == FAILED
        optimizer.zero_grad()
        model.reset_iter_state()
        for call in (
            optimizer.step,
            lambda: _loss(model, rank, FAILED),
            lambda: checkpoint.save({"m": model.state_dict()}, checkpoint_id=folder),
        ):
            with pytest.raises((PeerFailed, RanksDisagree, checkpoint.CheckpointError)) as later:
                call()
            refused.append(str(later.value))
        return said, refused


@pytest.mark.slow
def test_after_a_rank_was_killed_nothing_of_the_model_is_used(tmp_path: Path) -> None:
    # From a process of its own: autograd counts the devices once, and here it may have done so before the forks' device
    # is simulated.
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as fresh:
        folder = str(tmp_path / "lost")
        survivor, killed = fresh.submit(run_fates, 2, _killed, folder, backend="nccl", lost=(1,)).result()
    assert killed.code == -signal.SIGKILL
    assert survivor.value is not None, survivor.output
    (first,), refused = survivor.value
    assert "rank 1" in first
    assert all("rank 1" in text for text in refused), refused
    assert any(LOST in text for text in refused), refused
    assert not (tmp_path / "lost").exists() or not any((tmp_path / "lost").iterdir())


# ---- what the host waits for -----------------------------------------------------------------------------------------

REDUCTIONS = ("all-to-all", "reduce-scatter", "all-reduce")


def _cut(model: Any, rank: int) -> None:
    """What the watch does when a peer is gone."""
    from fullshard.engine.unit import module_units
    from fullshard.peers import Fault

    (scope,) = module_units(model)[0].root.companion.scopes  # type: ignore[union-attr]
    scope.fail(Fault(1 - rank, "lost", "gave no sign of life", scope.name, scope.epoch))


def _cut_in_a_step(rank: int, wait: bool) -> tuple[str, bool, bool, str, dict[str, Tensor]]:
    """The connections are cut when the host waits for the last reductions, or else after the step."""
    from tests.harness import nccl, simulated

    with simulated.watched(queries=nccl.is_quiet):
        model, optimizer = _build()
        for step in range(FAILED):
            _step(model, optimizer, rank, step)
        values, state, error = _values(model), _copy(optimizer.state_dict()), ""
        with nccl.held(*REDUCTIONS):
            if wait:
                cutting = threading.Thread(target=lambda: nccl.waits_on_host.wait(30) and _cut(model, rank))
                cutting.start()
            try:
                _step(model, optimizer, rank, FAILED, wait=wait)
            # The thread may cut before the optimizer's step, whose refusal is another class with the same reason.
            except (PeerFailed, RanksDisagree) as failed:
                error = str(failed)
            if wait:
                cutting.join()
            else:
                _cut(model, rank)
                with pytest.raises(PeerFailed):
                    _loss(model, rank, FAILED)
        stepped = next(iter(optimizer.state.values()))["step"].item() > FAILED
        spoiled = any(parameter.to_local().isnan().any().item() for parameter in model.parameters())
        optimizer.zero_grad()
        with pytest.raises(RanksDisagree) as refused:
            _loss(model, rank, FAILED)
        model.load_state_dict(values)
        optimizer.load_state_dict(state)
        for step in range(FAILED, STEPS):
            _step(model, optimizer, rank, step)
        return error, stepped, spoiled, str(refused.value), _values(model)


@pytest.mark.sample(1)
@pytest.mark.parametrize("wait", [True, False])
def test_a_guard_that_waits_notices_a_cut_before_the_step(wait: bool) -> None:
    for rank, (error, stepped, spoiled, refused, values) in enumerate(
        pool(2, backend="nccl").run(_cut_in_a_step, wait)
    ):
        if wait:
            assert f"rank {1 - rank} gave no sign of life" in error and not stepped and not spoiled
        else:
            assert not error and stepped and spoiled
        assert refused.startswith(f"{LOST}: that on ranks 0 and 1 message") and "gave no sign of life" in refused
        _same(values)


def _raises(rank: int, where: str, early: bool) -> tuple[str, bool, int, str, dict[str, Tensor]]:
    from tests.harness import nccl, simulated

    with simulated.watched(queries=nccl.is_quiet):
        model, optimizer = _build()
        for step in range(FAILED):
            _step(model, optimizer, rank, step)
        values, state = _values(model), _copy(optimizer.state_dict())
        before = optimizer.register_step_pre_hook if where == "step" else model[0].register_full_backward_pre_hook
        hook = before(lambda *_: [][0]) if rank else None
        with nccl.held(*REDUCTIONS):
            with pytest.raises((IndexError, PeerFailed)) as caught:
                _step(model, optimizer, rank, FAILED)
            waited = nccl.waits_on_host.is_set()
            if hook is not None:
                hook.remove()
            optimizer.zero_grad()
            if early:
                # Rank 1 does not know yet that rank 0 lost something; its own messages are under way still.
                model.load_state_dict(values)
            with pytest.raises(RuntimeError) as refused:
                _loss(model, rank, FAILED).backward()
                optimizer.step()
        steps = int(next(iter(optimizer.state.values()))["step"].item())
        optimizer.zero_grad()
        model.load_state_dict(values)
        optimizer.load_state_dict(state)
        for step in range(FAILED, STEPS):
            _step(model, optimizer, rank, step)
        return str(caught.value), waited, steps, str(refused.value), _values(model)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("where", "ranks"), [("backward", "rank 0"), ("step", "ranks 0 and 1")])
def test_the_watch_ends_the_wait_of_a_guard_on_a_device(where: str, ranks: str) -> None:
    """And what was under way on the rank that raised is lost, too: its messages go with the connections."""
    found = pool(2, backend="nccl").run(_raises, where, False)
    for rank, (error, waited, steps, refused, values) in enumerate(found):
        assert rank or ("rank 1 raised at step 2" in error and waited)
        assert steps == FAILED
        assert f"that on {ranks} message" in refused
        _same(values)


@pytest.mark.slow
def test_ranks_may_load_before_they_meet() -> None:
    """The model is sound then, and is not lost by what was under way before the load; the optimizer was not loaded."""
    for _, _, steps, refused, values in pool(2, backend="nccl").run(_raises, "step", True):
        assert refused.startswith("AdamW.step: expected state that was loaded after the model was lost")
        assert steps == FAILED
        _same(values)


def _nothing_under_way(rank: int) -> tuple[str, dict[str, Tensor]]:
    from tests.harness import nccl, simulated

    with simulated.watched(queries=nccl.is_quiet):
        model, optimizer = _build()
        for step in range(FAILED):
            _step(model, optimizer, rank, step)
        # The reductions of rank 0 arrive while its host waits for them; rank 1 raises after its own arrived.
        with nccl.held(*REDUCTIONS[: 0 if rank else None]):
            arriving = threading.Thread(target=lambda: nccl.waits_on_host.wait(30) and nccl.let_go())
            arriving.start()
            hook = optimizer.register_step_pre_hook(lambda *_: [][0]) if rank else None
            with pytest.raises((IndexError, PeerFailed)) as caught:
                _step(model, optimizer, rank, FAILED)
            nccl.waits_on_host.set()
            arriving.join()
        if hook is not None:
            hook.remove()
        optimizer.zero_grad()
        model[1].forwards -= 1
        for step in range(FAILED, STEPS):
            _step(model, optimizer, rank, step)
        return str(caught.value), _values(model)


@pytest.mark.slow
def test_nothing_is_lost_when_nothing_was_under_way() -> None:
    """All reductions had arrived when the ranks failed, because the host had waited: they try again, as on a CPU."""
    for rank, (error, values) in enumerate(pool(2, backend="nccl").run(_nothing_under_way)):
        assert rank or "rank 1 raised at step 2" in error
        _same(values)


def _lost_among_replicas(rank: int) -> tuple[str, list[str], dict[str, Tensor]]:
    """Two models on one mesh of 2 x 2 ranks. The first is under way when a rank raises; the second never ran since."""
    from tests.harness import nccl, simulated

    mesh = init_device_mesh("simulated", (2, 2), mesh_dim_names=("replicate", "shard"))
    with simulated.watched(queries=nccl.is_quiet):
        (model, optimizer), (other, _) = _build(mesh), _build(mesh)
        for step in range(FAILED):
            _step(model, optimizer, rank, step)
            _loss(other, rank, step)
        values, others, state = _values(model), _values(other), _copy(optimizer.state_dict())
        first = _fails(model, optimizer, rank, FAILED)
        said = []
        for load in (lambda: None, lambda: model.load_state_dict(values)):
            load()
            with pytest.raises(RanksDisagree) as refused:
                _loss(model, rank, FAILED)
            said.append(str(refused.value))
        other.load_state_dict(others)
        optimizer.load_state_dict(state)
        for step in range(FAILED, STEPS):
            _step(model, optimizer, rank, step)
            _loss(other, rank, step)
        return first, said, _values(model)


@pytest.mark.slow
def test_models_are_lost_on_all_replicas_until_all_on_their_mesh_were_loaded() -> None:
    for rank, (first, (before, half), values) in enumerate(pool(4, backend="nccl").run(_lost_among_replicas)):
        assert first == "injected" if rank == 1 else "rank 1 raised" in first
        assert before.startswith(LOST) and half.startswith(LOST), (rank, before, half)
        assert "not loaded here yet: 0.weight, 0.bias" in half
        _same(values, 4)
