"""Steps on one stream after another; a backward that fails on a device; options of communicators of our own."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import Any

import torch

import fullshard
from fullshard._torch.groups import own_options
from tests.harness import on_device
from tests.harness.on_device import Setup
from tests.harness.pool import pool

CASE = on_device.case_of(Setup())


def _model() -> tuple[Any, Any]:
    model = on_device.sharded(CASE.build().to("simulated"), Setup())
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def _loss(model: Any, rank: int, step: int = 0) -> torch.Tensor:
    return CASE.loss(model, tuple(part.to("simulated") for part in CASE.batch(step, rank)))  # type: ignore[arg-type]


def _one_after_the_other(rank: int) -> list[str]:
    from tests.harness import simulated

    model, _ = _model()
    with simulated.watched() as seen:
        side = torch.Stream(device="simulated")
        for _ in range(2):
            _loss(model, rank).backward()
            side.wait_stream(torch.accelerator.current_stream())
            with side:
                model.zero_grad()
                _loss(model, rank).backward()
            torch.accelerator.current_stream().wait_stream(side)
            model.zero_grad()
    return [str(race) for race in seen.races]


def test_whole_steps_may_change_the_stream() -> None:
    assert pool(2, backend="nccl").run(_one_after_the_other) == [[], []]


def _captured(rank: int) -> tuple[list[str], str]:
    """A graph is captured while messages are under way; then one of the model itself."""
    from fullshard.engine import unit_of
    from fullshard.peers.watch import _under_way
    from tests.harness import simulated

    model, _ = _model()
    # No event is over, so the watch has something to ask for.
    with simulated.watched(queries=lambda: False):
        _loss(model, rank).backward()
        scopes = unit_of(model).root.companion.scopes  # type: ignore[union-attr]
        assert any(_under_way(scope) for scope in scopes)
        with simulated.graph() as graph:
            looks = threading.Thread(target=lambda: [_under_way(scope) for scope in scopes])
            looks.start()
            looks.join()
            time.sleep(0.3)  # the watch's own thread looks four times a second
            broken = list(graph.broken)
            try:
                model(CASE.batch(0, rank)[0].to("simulated"))
            except RuntimeError as error:
                return broken, str(error)
    return broken, ""


def test_nobody_asks_the_device_while_a_graph_is_captured() -> None:
    for broken, said in pool(2, backend="nccl").run(_captured):
        assert broken == []
        assert "expected no graph to be captured" in said and "all-gather" in said


def _captures(rank: int, library: str, offload: bool) -> tuple[list[str], str, list[torch.Tensor]]:
    """One rank warms up on a side stream, and captures a step. What would end the capture on hardware, the error, and
    the gradients."""
    from tests.harness import simulated

    setup = Setup(offload=offload)
    torch.manual_seed(0)
    model = on_device.sharded(CASE.build().to("simulated"), setup, library)
    side = torch.Stream(device="simulated")
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        for _ in range(3):
            _loss(model, rank).backward()
            model.zero_grad()
    torch.accelerator.current_stream().wait_stream(side)
    inputs, targets = (part.to("simulated") for part in CASE.batch(0, rank))
    with simulated.watched() as seen, simulated.graph() as graph:
        try:
            torch.nn.functional.mse_loss(model(inputs), targets).backward()
        except RuntimeError as error:
            return graph.broken, str(error), []
    broken = [*graph.broken, *(race.explain() for race in seen.races)]
    return broken, "", [p.grad.full_tensor().cpu() for p in model.parameters()]


def test_one_rank_is_captured_as_with_fsdp2() -> None:
    """No message, no wait of the host, and no wait for what the warm-up ran on its stream."""
    ((broken, said, mine),) = pool(1, backend="nccl").run(_captures, "fullshard", False)
    ((theirs, _, expected),) = pool(1, backend="nccl").run(_captures, "torch", False)
    assert broken == theirs == [] and not said
    assert mine and all(map(torch.equal, mine, expected))


def test_offload_in_a_capture_is_refused() -> None:
    ((broken, said, _),) = pool(1, backend="nccl").run(_captures, "fullshard", True)
    assert broken == [] and said.startswith("offload: expected no graph to be captured")


def _fails_in_backward(rank: int) -> tuple[str, list[torch.Tensor]]:
    """Rank 0's backward raises, and something still holds its callback, as the engine's thread may."""
    from fullshard.engine import unit_of

    model, optimizer = _model()
    held: list[Any] = []

    def fail(module: Any, args: Any, output: torch.Tensor) -> None:
        output.register_hook(lambda _: held.append(unit_of(model).root._backward.end()))
        output.register_hook(_raise)

    handle = model[0].register_forward_hook(fail) if rank == 0 else None
    told = ""
    for attempt in range(3):
        try:
            _loss(model, rank).backward()
            break
        except (ArithmeticError, RuntimeError) as error:
            assert attempt < 2
            told = told or f"{type(error).__name__}: {error}"
            if handle is not None:
                handle.remove()
            optimizer.zero_grad()
            # Messages were under way, so the model is lost, as rank 0 learns when it meets rank 1. Nothing was written.
            fullshard.mark_restored(model)
    assert rank or held[0] is not None
    return told, [p.grad.full_tensor().cpu() for p in model.parameters()]


def _raise(_: torch.Tensor) -> None:
    raise ArithmeticError("on purpose")


def test_a_failed_backward_is_told_though_the_engine_holds_its_callback() -> None:
    plain = CASE.build()
    for rank in range(2):
        (CASE.loss(plain, CASE.batch(0, rank)) / 2).backward()
    (mine, first), (theirs, second) = pool(2, backend="nccl").run(_fails_in_backward, timeout=40)
    assert "on purpose" in mine
    assert theirs.startswith("PeerFailed") and "rank 0" in theirs and "backward" in theirs
    for a, b, p in zip(first, second, plain.parameters(), strict=True):
        assert torch.equal(a, b) and p.grad is not None
        assert torch.allclose(a, p.grad, rtol=1e-5, atol=1e-6)


class _Config:
    """As `NCCLConfig`: what is not set is None or a number that says so, and no number is a text."""

    def __init__(self) -> None:
        self.max_ctas = -2147483648
        self._name: str | None = None

    @property
    def net_name(self) -> str | None:
        return self._name

    @net_name.setter
    def net_name(self, name: str) -> None:
        assert isinstance(name, str)
        self._name = name

    def unsafe_get_ptr(self) -> int:
        return id(self)


class _Options:
    """As `ProcessGroupNCCL.Options` after torch split the user's group from another one."""

    def __init__(self) -> None:
        self._timeout = timedelta(minutes=10)
        self.is_high_priority_stream = False
        self.config = _Config()
        self.split_from: Any = None
        self.split_color = -1
        self.global_ranks_in_group: list[int] = []
        self.group_name = ""


def test_a_communicator_of_ours_is_no_split_of_the_users() -> None:
    """Its first message would be a split of the parent, a collective over all of the parent's ranks."""
    users = _Options()
    users._timeout, users.is_high_priority_stream = timedelta(seconds=7), True
    users.split_from, users.split_color = object(), 3
    users.global_ranks_in_group, users.group_name = [0, 1, 2, 3], "theirs"
    users.config.max_ctas = 4
    ours = own_options(users, [2, 3], "ours")
    assert ours is not users and ours.split_from is None and ours.split_color == -1
    assert (ours._timeout, ours.is_high_priority_stream, ours.config.max_ctas) == (timedelta(seconds=7), True, 4)
    assert ours.config is not users.config and ours.config.net_name is None
    users.config.net_name = "Socket"
    assert own_options(users, [2, 3], "ours").config.net_name == "Socket"
    assert (ours.global_ranks_in_group, ours.group_name) == ([2, 3], "ours")
