"""The recipes of docs/how-to as tests: each program of examples/ beside the same training in one process.

Both compute in float64, where they may differ by rounding that grew by less than half of the digits; any other fault is
larger.
"""

from __future__ import annotations

import importlib.util
import pickle
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn

import fullshard
from tests.harness import forked
from tests.harness.installed import clear_sharding_cache
from tests.harness.pool import pool

HALF = 2.0**-26
EXAMPLES = Path(__file__).parents[2] / "examples"


@cache
def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module
    spec.loader.exec_module(module)
    return module


@contextmanager
def float64() -> Iterator[None]:
    # Ranks 0 and 1 of another test had a mesh of their own, equal to the whole of this one's.
    clear_sharding_cache()
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def whole(model: Any) -> dict[str, Tensor]:
    return dict(fullshard.weights(model).tensors())


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def assert_close(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        most = float(tensor.abs().max())
        assert float((found[name] - tensor).abs().max()) <= HALF * max(most, 1e-3), name


# ---- an engine in processes of its own -------------------------------------------------------------------------------


def _grpo(rank: int, steps: int) -> Any:
    with float64():
        rewards, difference, policy, engine, answers = example("grpo").train(steps)
        parts = None if engine is None else {name: local(part) for name, part in engine.weights().items()}
        return rewards, difference, None if policy is None else whole(policy), parts, answers


def _grpo_in_one_process(steps: int) -> tuple[list[float], Any, Any]:
    """The same loop: the policy answers itself, and learns from all answers at once."""
    grpo = example("grpo")
    torch.manual_seed(0)
    policy, rewards = grpo.Policy(), []
    optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-3)
    for step in range(steps):
        with torch.no_grad():
            tokens, before = grpo.sample(policy, step)
        reward = grpo.reward_of(tokens).unflatten(0, (grpo.QUESTIONS, grpo.ANSWERS))
        rewards.append(float(reward.mean()))
        advantage = ((reward - reward.mean(1, keepdim=True)) / (reward.std(1, keepdim=True) + 1e-4)).flatten()
        for _ in range(2):
            now = policy(tokens[:, :-1])[:, 1:].gather(-1, tokens[:, 2:, None]).squeeze(-1)
            ratio = (now - before).exp()
            gain = torch.minimum(ratio * advantage[:, None], ratio.clamp(0.8, 1.2) * advantage[:, None])
            (-gain.mean()).backward()
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        return rewards, policy, grpo.sample(policy, steps)


def test_an_engine_answers_as_the_trained_policy_would() -> None:
    steps = 3
    found = pool(4).run(_grpo, steps, timeout=110)
    with float64():
        rewards, plain, (tokens, logs) = _grpo_in_one_process(steps)
    expected = dict(plain.state_dict())
    for rank, (of_rank, difference, weights, parts, answers) in enumerate(found):
        assert of_rank == rewards
        assert difference <= HALF
        if rank < 2:
            assert_close(weights, expected)
            continue
        # The engine's memory has the bits of the trainers' shards.
        trained = {name: tensor for name, tensor in found[0][2].items() if name != "head.weight"}
        assert parts.keys() == trained.keys()
        for name, part in parts.items():
            dim = 1 if "o_proj" in name or "down_proj" in name else 0
            pieces = trained[name].chunk(2, dim) if "proj" in name else (trained[name],) * 2
            assert torch.equal(part, pieces[rank - 2]), name
        assert torch.equal(answers[0], tokens)
        assert float((answers[1] - logs).abs().max()) <= HALF


# ---- a teacher and a student -----------------------------------------------------------------------------------------


def _distill(rank: int, steps: int) -> Any:
    with float64():
        teacher, student, losses = example("distill").train(steps, torch.float64)
        assert all(p.grad is None and not p.requires_grad for p in teacher.parameters())
        layouts = [net.head.weight.device_mesh.shape for net in (teacher, student)]
        assert layouts == [(4,), (2, 2)]
        return whole(teacher), whole(student), losses


@pytest.mark.slow
def test_a_student_learns_from_a_teacher_in_another_layout() -> None:
    steps, distill = 4, example("distill")
    found = pool(4).run(_distill, steps, timeout=110)
    with float64():
        teacher, student = distill.nets(torch.float64)
        names = {name: distill.student_name(name) for name in teacher.state_dict()}
        student.load_state_dict({new: teacher.state_dict()[name] for name, new in names.items() if new is not None})
        before = {name: tensor.clone() for name, tensor in teacher.state_dict().items()}
        optimizer = torch.optim.AdamW(student.parameters(), lr=2e-3)
        losses = []
        for step in range(steps):
            loss = distill.loss_of(student, teacher, torch.cat([distill.batch(step, rank) for rank in range(4)]))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    for own, learned, _ in found:
        assert all(torch.equal(own[name], tensor) for name, tensor in before.items())
        assert_close(learned, dict(student.state_dict()))
    for step, loss in enumerate(losses):
        mean = sum(of_rank[step] for _, _, of_rank in found) / 4
        assert abs(mean - loss) <= HALF * max(loss, 1e-3)


# ---- the average of a diffusion model --------------------------------------------------------------------------------


def _diffusion(rank: int, folder: str, steps: int) -> Any:
    with float64():
        model, optimizer, mean, drawn = example("diffusion").train(folder, steps, torch.float64)
        own = whole(model)
        with mean.applied():
            return own, whole(model), drawn


def _diffusion_again(rank: int, folder: str) -> Any:
    with float64():
        model, optimizer, mean = example("diffusion").resume(folder, torch.float64)
        own = whole(model)
        steps = {float(state["step"]) for state in optimizer.state.values()}
        with mean.applied():
            return own, whole(model), example("diffusion").draw(model, 16), mean.updates, steps


@pytest.mark.slow
def test_the_average_of_a_diffusion_model_draws_is_saved_loaded_and_exported(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    steps, diffusion = 3, example("diffusion")
    found = pool(2).run(_diffusion, str(tmp_path), steps, timeout=110)
    ((own, averaged, drawn, updates, counts),) = pool(1).run(_diffusion_again, str(tmp_path), timeout=110)
    assert updates == steps and counts == {float(steps)}
    exported = load_file(tmp_path / "average.safetensors")
    with float64():
        torch.manual_seed(0)
        model = diffusion.DiT()
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
        mean = AveragedModel(model, avg_fn=get_ema_avg_fn(0.98))
        for step in range(steps):
            (sum(diffusion.loss_of(model, step, rank) for rank in range(2)) / 2).backward()
            optimizer.step()
            optimizer.zero_grad()
            mean.update_parameters(model)
        expected = diffusion.draw(mean.module, 16)
        plain = diffusion.DiT()
        plain.load_state_dict(exported)
        again = diffusion.draw(plain, 16)
    assert_close({"drawn": again}, {"drawn": drawn})
    for trained, its_mean, its_drawing in found:
        assert_close(trained, dict(model.state_dict()))
        assert_close(its_mean, dict(mean.module.state_dict()))
        assert_close({"drawn": its_drawing}, {"drawn": expected})
        assert torch.equal(its_drawing, drawn), "a loaded average draws other images"
        for name, tensor in its_mean.items():
            assert torch.equal(tensor, averaged[name]) and torch.equal(tensor, exported[name])
            assert torch.equal(trained[name], own[name])


# ---- elastic replicas ------------------------------------------------------------------------------------------------


def _replica(conn: Any, replica: int, rank: int, port: int, count: int, steps: int, killed: tuple[int, ...]) -> None:
    forked.prepare()
    elastic = example("elastic_replicas")
    dies = elastic.os.getpid if (replica, rank) == killed[:2] else None
    with float64():
        found = elastic.rank_main(replica, rank, port, 2, count, steps, killed[2] if dies else -1)
    conn.send_bytes(pickle.dumps(found))
    elastic.os._exit(0)


@pytest.mark.parametrize(
    "count",
    [2, pytest.param(3, marks=pytest.mark.slow)],
)
@pytest.mark.hang_after(120)
def test_a_replica_is_killed_and_the_others_continue_as_if_undisturbed(count: int) -> None:
    """One rank of the last replica is killed, so its other rank ends by itself."""
    steps, elastic = 6, example("elastic_replicas")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    killed = (count - 1, 1, 3)
    forks = {
        (replica, rank): forked.fork(_replica, replica, rank, store.port, count, steps, killed)
        for replica in range(count)
        for rank in range(2)
    }
    try:
        found = {where: pickle.loads(conn.recv_bytes()) for where, (_, conn) in forks.items() if where[0] != count - 1}
    finally:
        for pid, conn in forks.values():
            conn.close()
            forked.end(pid)
    with float64():
        expected = elastic.undisturbed(steps)
    first = found[0, 0]
    for one in found.values():
        assert all(torch.equal(one[name], tensor) for name, tensor in first.items())
    assert_close(first, expected)
