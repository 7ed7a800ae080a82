"""`guard(model, optimizer)`: all ranks take the step or none; else every forward says so until a load."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fullshard
from fullshard import PeerFailed, RanksDisagree, checkpoint, fully_shard
from tests.harness.models import seeded
from tests.harness.threads import run_ranks

LOAD = "load a checkpoint"


class Halfway(torch.optim.SGD):
    """Writes one parameter after the other, and may raise after the first."""

    fails = False

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(parameter.grad, alpha=-group["lr"])
                if self.fails:
                    self.fails = False
                    raise MemoryError("in the middle")


def build(kind: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW) -> tuple[Any, torch.optim.Optimizer]:
    model: Any = seeded(lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)))
    fully_shard(model[0])
    fully_shard(model)
    return model, kind(model.parameters(), lr=0.1)


def batch(rank: int, step: int) -> Tensor:
    return torch.arange(8.0).view(2, 4).add(rank + 2 * step).sin()


def backward(model: Any, rank: int, step: int) -> None:
    model(batch(rank, step)).square().mean().backward()


def attempt(model: Any, optimizer: torch.optim.Optimizer, rank: int, step: int) -> None:
    with fullshard.guard(model, optimizer):
        backward(model, rank, step)
        optimizer.step()
    optimizer.zero_grad()


def state(model: Any, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    found = [parameter.detach().full_tensor() for parameter in model.parameters()]
    for parameter in model.parameters():
        for _, value in sorted(optimizer.state.get(parameter, {}).items()):
            found.append(value.full_tensor() if hasattr(value, "full_tensor") else torch.as_tensor(value))
    return [value.clone() for value in found]


def undisturbed(rank: int, steps: int = 3, kind: Any = torch.optim.AdamW) -> list[Tensor]:
    model, optimizer = build(kind)
    for step in range(steps):
        attempt(model, optimizer, rank, step)
    return state(model, optimizer)


def same(found: list[list[Tensor]], expected: list[list[Tensor]]) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        assert len(mine) == len(theirs) and all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def once(optimizer: torch.optim.Optimizer, where: str) -> None:
    """The next step of `optimizer` raises, before it writes or after it."""

    def hook(*_: Any) -> None:
        handle.remove()
        raise ValueError(f"injected {where}")

    register = optimizer.register_step_pre_hook if where == "before" else optimizer.register_step_post_hook
    handle = register(hook)


# ---- before anything is written ------------------------------------------------------------------------------


def _tried_again(rank: int) -> tuple[list[Tensor], str]:
    model, optimizer = build()
    said = ""
    attempt(model, optimizer, rank, 0)
    for step in (1, 2):
        for tries in range(2):
            try:
                with fullshard.guard(model, optimizer):
                    backward(model, rank, step)
                    if rank == 1 and step == 1 and not tries:
                        raise ValueError("injected in the block")
                    optimizer.step()
            except (ValueError, PeerFailed) as error:
                said = str(error)
                optimizer.zero_grad()
                continue
            optimizer.zero_grad()
            break
    return state(model, optimizer), said


@pytest.mark.sample(1)
@pytest.mark.parametrize("world", [2, 3])
def test_who_fails_before_the_step_prevents_it_everywhere(world: int) -> None:
    expected = run_ranks(world, undisturbed)
    found = run_ranks(world, _tried_again)
    same([state for state, _ in found], expected)
    assert "in a guarded block: ValueError: injected in the block" in found[0][1] and LOAD not in found[0][1]


def _hook_before(rank: int) -> tuple[list[Tensor], str]:
    model, optimizer = build()
    said = ""
    for step in range(3):
        if rank == 1 and step == 1:
            once(optimizer, "before")
        for _ in range(2):
            try:
                attempt(model, optimizer, rank, step)
            except (ValueError, PeerFailed) as error:
                said = str(error)
                optimizer.zero_grad()
                continue
            break
    return state(model, optimizer), said


def test_a_hook_that_raises_before_the_step_prevents_it_everywhere() -> None:
    found = run_ranks(2, _hook_before)
    same([state for state, _ in found], run_ranks(2, undisturbed))
    assert "injected before" in found[0][1] and LOAD not in found[0][1]


# ---- where some rank has written -----------------------------------------------------------------------------


def _refused(rank: int, how: str, kind: Any, given: bool) -> list[str]:
    """Rank 1 fails in its step, which the others take; all continue."""
    model, optimizer = build(kind)
    attempt(model, optimizer, rank, 0)
    said = []
    if rank == 1:
        if how == "middle":
            optimizer.fails = True  # type: ignore[attr-defined]
        else:
            once(optimizer, how)
    try:
        if given:
            attempt(model, optimizer, rank, 1)
        else:
            with fullshard.guard(model):
                backward(model, rank, 1)
                optimizer.step()
    except (ValueError, MemoryError, PeerFailed) as error:
        said.append("\n".join([str(error), *getattr(error, "__notes__", ())]))
    optimizer.zero_grad()
    for _ in range(2):
        with pytest.raises(RanksDisagree) as caught:
            backward(model, rank, 1)
        said.append(str(caught.value))
    fullshard.find_drift(model)
    return said


CASES: dict[str, tuple[str, Any, bool, str]] = {
    "after": ("after", torch.optim.AdamW, True, "2 on rank 0 and 1, and the middle of one of AdamW, on rank 1"),
    "middle": ("middle", Halfway, True, "2 on rank 0 and 1, and the middle of one of Halfway, on rank 1"),
    "not given": ("after", torch.optim.AdamW, False, "2 on rank 0 and 1 on rank 1"),
    "not given, before": ("before", torch.optim.AdamW, False, "2 on rank 0 and 1 on rank 1"),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", CASES)
def test_a_step_that_some_ranks_took_and_others_not(name: str) -> None:
    how, kind, given, words = CASES[name]
    for said in run_ranks(2, _refused, how, kind, given):
        assert len(said) == 3 and (LOAD in said[0] or not given), said
        for text in said[1:]:
            assert words in text and LOAD in text, text


def _all_in_the_middle(rank: int) -> None:
    model, optimizer = build(Halfway)
    attempt(model, optimizer, rank, 0)
    optimizer.fails = True  # type: ignore[attr-defined]
    with pytest.raises(MemoryError) as caught:
        attempt(model, optimizer, rank, 1)
    assert any(LOAD in note for note in caught.value.__notes__)
    optimizer.zero_grad()
    with pytest.raises(RanksDisagree, match="1, and the middle of one of Halfway, on ranks 0 and 1"):
        backward(model, rank, 1)


def test_all_ranks_fail_in_the_middle() -> None:
    run_ranks(2, _all_in_the_middle)


def _unseen(rank: int) -> None:
    """torch's list operations write without a trace: a step that failed may have written."""
    model, optimizer = build(lambda parameters, lr: torch.optim.SGD(parameters, lr=lr, foreach=True))
    attempt(model, optimizer, rank, 0)
    optimizer.param_groups[0]["lr"] = "not a number"
    with pytest.raises((TypeError, RuntimeError, ValueError)):
        attempt(model, optimizer, rank, 1)
    optimizer.param_groups[0]["lr"] = 0.1
    with pytest.raises(RanksDisagree, match="middle of one of SGD"):
        backward(model, rank, 1)


def test_what_cannot_be_seen_counts_as_written() -> None:
    run_ranks(2, _unseen)


# ---- and how all continue ---------------------------------------------------------------------------------------


def _goes_on(rank: int, way: str, folder: Path) -> list[Tensor]:
    model, optimizer = build()
    attempt(model, optimizer, rank, 0)
    model_state, optimizer_state = checkpoint.get_state_dict(model, optimizer)
    kept = {name: value.detach().clone() for name, value in model.state_dict().items()}
    kept_optimizer = {
        "state": {
            key: {name: value.clone() for name, value in entries.items()}
            for key, entries in optimizer.state_dict()["state"].items()
        },
        "param_groups": optimizer.state_dict()["param_groups"],
    }
    checkpoint.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
    if rank == 1:
        once(optimizer, "after")
    with pytest.raises((ValueError, PeerFailed)):
        attempt(model, optimizer, rank, 1)
    optimizer.zero_grad()
    if way == "one rank alone":
        if rank == 0:
            model.load_state_dict(kept)
            optimizer.load_state_dict(kept_optimizer)
        with pytest.raises(RanksDisagree, match=r"0 on rank 0 and 1, and the middle of one of AdamW, on rank 1"):
            backward(model, rank, 1)
        if rank == 1:
            model.load_state_dict(kept)
            optimizer.load_state_dict(kept_optimizer)
    elif way == "checkpoint":
        model_state, optimizer_state = checkpoint.get_state_dict(model, optimizer)
        loaded = {"model": model_state, "optimizer": optimizer_state}
        checkpoint.load(loaded, checkpoint_id=folder)
        checkpoint.set_state_dict(model, optimizer, optim_state_dict=loaded["optimizer"])
    elif way == "by hand":
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(kept[name])
        optimizer.load_state_dict(kept_optimizer)
        with pytest.raises(RanksDisagree):
            backward(model, rank, 1)
        fullshard.mark_restored(model)
    else:
        model.load_state_dict(kept)
        optimizer.load_state_dict(kept_optimizer)
    for step in (1, 2):
        attempt(model, optimizer, rank, step)
    return state(model, optimizer)


@pytest.mark.sample(1)
@pytest.mark.parametrize("way", ["load_state_dict", "checkpoint", "by hand", "one rank alone"])
def test_a_load_brings_all_ranks_together_again(way: str, tmp_path: Path) -> None:
    same(run_ranks(2, _goes_on, way, tmp_path / "c"), run_ranks(2, undisturbed))


# ---- several steps, shards, scalers ------------------------------------------------------------------------


def _two(rank: int, fails: bool) -> tuple[list[Tensor], str]:
    """Two optimizers, each with a part of the parameters; the second one fails on one rank."""
    model, first = build(lambda parameters, lr: torch.optim.SGD([next(parameters)], lr=lr))
    second = torch.optim.AdamW([p for p in model.parameters() if p is not first.param_groups[0]["params"][0]], lr=0.1)
    said = ""
    for step in range(3):
        if fails and rank == 1 and step == 1:
            once(second, "before")
        try:
            with fullshard.guard(model, first, second):
                backward(model, rank, step)
                first.step()
                second.step()
        except (ValueError, PeerFailed) as error:
            said = "\n".join([str(error), *getattr(error, "__notes__", ())])
            break
        model.zero_grad()
    if fails:
        model.zero_grad()
        # The first one's step was taken by all ranks, the second one's by none: they are alike.
        backward(model, rank, 2)
    return state(model, second), said


def test_two_optimizers() -> None:
    for _, said in run_ranks(2, _two, True):
        assert "the step of" in said and LOAD in said
    plain = run_ranks(2, _two, False)
    assert all(not said for _, said in plain)


def _on_shards(rank: int, fails: bool) -> list[Tensor]:
    model, optimizer = build()
    fullshard.step_on_shards(optimizer)
    for step in range(3):
        if fails and rank == 1 and step == 1:
            once(optimizer, "before")
        try:
            attempt(model, optimizer, rank, step)
        except (ValueError, PeerFailed):
            optimizer.zero_grad()
            attempt(model, optimizer, rank, step)
    return state(model, optimizer)


def test_steps_on_shards() -> None:
    same(run_ranks(2, _on_shards, True), run_ranks(2, undisturbed))


def _scaled(rank: int) -> int:
    """A step that the scaler leaves out on all ranks is none of the guard's."""
    model, optimizer = build()
    scaler = fullshard.GradScaler("cpu", init_scale=4.0)
    for step in range(3):
        with fullshard.guard(model, optimizer):
            loss = scaler.scale(model(batch(rank, step)).square().mean())
            if step == 1 and rank == 1:
                loss = loss * float("inf")
            loss.backward()
            scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return int(next(iter(optimizer.state.values()))["step"])


def test_steps_that_a_scaler_leaves_out() -> None:
    assert run_ranks(2, _scaled) == [2, 2]


def _nested(rank: int) -> list[Tensor]:
    model, optimizer = build()
    for step in range(3):
        for tries in range(2):
            try:
                with fullshard.guard(model), fullshard.guard(model, optimizer):
                    backward(model, rank, step)
                    if rank == 1 and step == 1 and not tries:
                        raise ValueError("injected")
                    optimizer.step()
            except (ValueError, PeerFailed):
                optimizer.zero_grad()
                continue
            optimizer.zero_grad()
            break
    return state(model, optimizer)


def test_nested_guards() -> None:
    same(run_ranks(2, _nested), run_ranks(2, undisturbed))


def _left_out(rank: int) -> None:
    model, optimizer = build()
    attempt(model, optimizer, rank, 0)
    expected = "rank 0 at the step of AdamW, rank 1 at the end of a guarded block; make the same calls"
    with pytest.raises(RanksDisagree, match=expected), fullshard.guard(model, optimizer):
        backward(model, rank, 1)
        if rank == 0:
            optimizer.step()


def test_a_step_that_one_rank_leaves_out() -> None:
    run_ranks(2, _left_out)


def test_what_is_no_model() -> None:
    plain = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="guarded: expected models with sharded modules"), fullshard.guard(plain):
        pass
    with pytest.raises(ValueError, match="found none"), fullshard.guard(torch.optim.SGD(plain.parameters(), lr=1.0)):
        pass
    with pytest.raises(TypeError, match="found int"), fullshard.guard(plain, 3):  # type: ignore[arg-type]
        pass
    with pytest.raises(ValueError, match="nothing sharded"):
        fullshard.mark_restored(plain)
