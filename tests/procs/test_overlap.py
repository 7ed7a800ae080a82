"""Communication is under way while units compute: on real gloo, by the order of events and never by time.

Three kinds of evidence. The trace, with marks where a unit computes and where a message was really given to gloo or
waited for. A peer that does not send before this rank says that it computes: were the computation to wait for the peer,
neither would go on. And an `unshard(async_op=True)` whose peer comes only after the call has returned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fullshard import fully_shard
from fullshard.comm.group import ShardGroup
from fullshard.observe import record
from tests.harness import tolerance
from tests.harness.models import seeded
from tests.harness.pool import pool

TIMEOUT = 30.0
PATIENCE = timedelta(seconds=10)
DEPTH = 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 24)
        self.down = nn.Linear(24, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(5, 8)
        self.layers = nn.ModuleList(Block() for _ in range(DEPTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for layer in self.layers:
            x = layer(x)
        return x


def _model() -> Any:
    model: Any = seeded(Model)
    for layer in model.layers:
        fully_shard(layer)
    return fully_shard(model)


def _loss(model: nn.Module, rank: int, step: int) -> Tensor:
    x = torch.randn(3, 5, generator=torch.Generator().manual_seed(10 * step + rank))
    return model(x).pow(2).mean()


def _when_computing(model: Any, note: Callable[[str], None]) -> None:
    """Call `note` in the midst of each block's forward ("forward layers.i") and backward ("backward layers.i")."""

    def mark(i: int) -> Callable[..., None]:
        def forward(_module: nn.Module, _args: Any, output: Tensor) -> None:
            note(f"forward layers.{i}")
            if output.requires_grad:
                output.register_hook(lambda _gradient: note(f"backward layers.{i}"))

        return forward

    for i, layer in enumerate(model.layers):
        layer.up.register_forward_hook(mark(i))


class _Messages:
    """Notes when a message is given to gloo, and when it is waited for: "sent gather 3", "received gather 3"."""

    def __init__(self, note: Callable[[str], None], before: Callable[[str, int], None] | None = None) -> None:
        self.note = note
        self.before = before  # called before a message is given to gloo, with its kind and number
        self.count = {"gather": 0, "exchange": 0}

    @contextmanager
    def __call__(self) -> Iterator[None]:
        gather, exchange = ShardGroup.gather_into, ShardGroup.exchange
        ShardGroup.gather_into = self._noting("gather", gather)  # type: ignore[method-assign]
        ShardGroup.exchange = self._noting("exchange", exchange)  # type: ignore[method-assign]
        try:
            yield
        finally:
            ShardGroup.gather_into, ShardGroup.exchange = gather, exchange  # type: ignore[method-assign]

    def _noting(self, kind: str, send: Callable[..., Any]) -> Any:
        def sending(group: ShardGroup, out: Tensor, pieces: Tensor) -> Any:
            number = self.count[kind]
            self.count[kind] += 1
            if self.before is not None:
                self.before(kind, number)
            work = send(group, out, pieces)
            self.note(f"sent {kind} {number}")
            return _Work(work, lambda: self.note(f"received {kind} {number}"))

        return sending


class _Work:
    def __init__(self, work: Any, waited: Callable[[], None]) -> None:
        self.work, self.waited = work, waited

    def wait(self) -> None:
        self.work.wait()
        self.waited()


# ---- the order of events -------------------------------------------------------------------------------------


def _traces(rank: int, steps: int) -> list[tuple[list[str], list[str]]]:
    """For each step the lines of its forward and of its backward, marks of compute and messages among them."""
    model = _model()
    traces = []
    with record(model) as trace:
        note = lambda text: trace.lines.append(f"* {text}")  # noqa: E731
        _when_computing(model, note)
        with _Messages(note)():
            for step in range(steps):
                del trace.lines[:]
                loss = _loss(model, rank, step)
                middle = len(trace.lines)
                loss.backward()
                traces.append((trace.lines[:middle], trace.lines[middle:]))
    return traces


def _in_order(lines: list[str], *wanted: str) -> None:
    """Each of `wanted` is there once, one after the other."""
    for text in wanted:
        assert lines.count(text) == 1, f"{text!r} is there {lines.count(text)} times in\n" + "\n".join(lines)
    positions = [lines.index(text) for text in wanted]
    assert positions == sorted(positions), f"expected {wanted} in this order, found\n" + "\n".join(lines)


def _behind(lines: list[str], text: str, start: str) -> str:
    """The first line that starts with `start` behind the line `text`."""
    return next(line for line in lines[lines.index(text) :] if line.startswith(start))


@pytest.fixture(scope="module")
def traces() -> list[tuple[list[str], list[str]]]:
    """Of rank 0; all ranks have the same commands."""
    ranks = pool(2).run(_traces, 3, timeout=TIMEOUT)
    commands = [[[line for line in part if line[0] != "*"] for step in steps for part in step] for steps in ranks]
    assert commands[0] == commands[1]
    return ranks[0]


@pytest.mark.sample(3)
@pytest.mark.parametrize("step", [1, 2])
@pytest.mark.parametrize("i", range(DEPTH - 1))
def test_in_forward_the_next_unit_travels_while_this_one_computes(traces: Any, step: int, i: int) -> None:
    """From the second step on, when the order is known."""
    forward, _ = traces[step]
    unshard, wait = f"  unshard layers.{i + 1}", f"  wait layers.{i + 1}"
    sent = _behind(forward, unshard, "* sent gather")
    _in_order(forward, unshard, sent, f"* forward layers.{i}", wait, sent.replace("sent", "received"))


@pytest.mark.sample(3)
@pytest.mark.parametrize("step", [0, 1, 2])
@pytest.mark.parametrize("i", range(1, DEPTH))
def test_in_backward_the_next_unit_travels_while_this_one_computes(traces: Any, step: int, i: int) -> None:
    """At every step: the order of backward is that of the forward before it."""
    _, backward = traces[step]
    unshard, wait = f"  unshard layers.{i - 1}", f"  wait layers.{i - 1}"
    sent = _behind(backward, unshard, "* sent gather")
    _in_order(backward, unshard, sent, f"* backward layers.{i}", wait, sent.replace("sent", "received"))


@pytest.mark.parametrize("i", range(1, DEPTH))
def test_gradients_travel_while_the_next_unit_computes(traces: Any, i: int) -> None:
    _, backward = traces[1]
    reduce = f"  reduce layers.{i}"
    sent = _behind(backward, reduce, "* sent exchange")
    _in_order(backward, reduce, sent, f"* backward layers.{i - 1}", sent.replace("sent", "received"))


def test_in_the_first_forward_nothing_is_gathered_ahead(traces: Any) -> None:
    """The order is not known yet: late, but right."""
    forward, _ = traces[0]
    for i in range(DEPTH - 1):
        _in_order(forward, f"* forward layers.{i}", f"  unshard layers.{i + 1}", f"  wait layers.{i + 1}")


# ---- a peer that sends only after this rank computes ---------------------------------------------------------


def _store(folder: str, world: int) -> dist.Store:
    store = dist.FileStore(f"{folder}/events", world)
    store.set_timeout(PATIENCE)
    return store


def _late_peer(rank: int, folder: str, kind: str, part: str) -> list[Tensor]:
    """Some steps. In the last one, rank 1 sends the messages of `kind` that belong to `part` only once rank 0 is in the
    midst of the compute that is to hide them."""
    store = _store(folder, 2)
    model = _model()
    optimizer = torch.optim.SGD(model.parameters())
    # In the first steps ranks compare what they are about to send. Without gradients a step changes nothing.
    for _ in range(4):
        _loss(model, rank, 0).backward()
        model.zero_grad()
        optimizer.step()
    reached: list[str] = []

    def computing(text: str) -> None:
        reached.append(text)
        if rank == 0:
            store.set(text, "computing")

    # Message number -> what rank 0 is to have reached. Gathers: the root, the blocks, then all the blocks backwards.
    # Exchanges: the blocks backwards, the root.
    awaited = {
        ("gather", "forward"): {1 + i: f"forward layers.{i - 1}" for i in range(1, DEPTH)},
        ("gather", "backward"): {2 * DEPTH - i: f"backward layers.{i + 1}" for i in range(DEPTH - 1)},
        ("exchange", "backward"): {DEPTH - 1 - i: f"backward layers.{i - 1}" for i in range(1, DEPTH)},
    }[kind, part]
    waited_for: list[str] = []

    def before(message: str, number: int) -> None:
        if rank == 1 and message == kind and number in awaited:
            store.wait([awaited[number]])
            waited_for.append(awaited[number])

    _when_computing(model, computing)
    with _Messages(lambda text: None, before)():
        _loss(model, rank, 1).backward()
    assert len(waited_for) == (DEPTH - 1 if rank == 1 else 0)
    assert sorted(set(reached)) == sorted(reached), "each block computed once"
    return [p.grad.full_tensor() for p in model.parameters()]


@pytest.mark.sample(2)
@pytest.mark.parametrize(("kind", "part"), [("gather", "forward"), ("gather", "backward"), ("exchange", "backward")])
def test_compute_does_not_wait_for_a_late_peer(kind: str, part: str, tmp_path: Path) -> None:
    """Were one of these messages to block when it is issued, rank 0 would never reach what rank 1 waits for."""
    late = pool(2).run(_late_peer, str(tmp_path), kind, part, timeout=TIMEOUT)[0]
    for found, expected in zip(late, _plain_gradients(step=1), strict=True):
        tolerance.assert_close(found, expected)


def _plain_gradients(step: int) -> list[Tensor]:
    plain = seeded(Model)
    for rank in range(2):
        (_loss(plain, rank, step) / 2).backward()
    return [p.grad for p in plain.parameters() if p.grad is not None]


# ---- unshard(async_op=True) ----------------------------------------------------------------------------------


def _unshard_returns_first(rank: int, folder: str) -> list[Tensor]:
    store = _store(folder, 2)
    model = _model()
    layer = model.layers[1]
    optimizer = torch.optim.SGD(model.parameters())
    # The first use of a module connects its ranks, which takes all of them; and in the first steps they compare what
    # they are about to send.
    for _ in range(4):
        layer.unshard()
        layer.reshard()
        optimizer.step()
    if rank == 1:
        store.wait(["returned"])
    handle = layer.unshard(async_op=True)
    if rank == 0:
        store.set("returned", "the call")
    assert handle is not None
    handle.wait()
    full = [p.detach().clone() for p in layer.parameters()]
    handle.wait()  # does nothing
    layer.reshard()
    return full


def test_unshard_returns_before_its_peer_has_come(tmp_path: Path) -> None:
    """Rank 1 calls `unshard` only after rank 0's call has returned."""
    expected: Any = seeded(Model)
    for found in pool(2).run(_unshard_returns_first, str(tmp_path), timeout=TIMEOUT):
        assert all(torch.equal(a, b) for a, b in zip(found, expected.layers[1].parameters(), strict=True))


def _unshard_waits_without_async_op(rank: int, folder: str) -> bool:
    """Whether rank 1 could be told, within a second, that rank 0's call had returned before rank 1 came."""
    store = _store(folder, 2)
    model = _model()
    came_first = False
    if rank == 1:
        store.set_timeout(timedelta(seconds=0.5))
        try:
            store.wait(["returned"])
            came_first = True
        except RuntimeError:
            pass
    model.layers[1].unshard()
    if rank == 0:
        store.set("returned", "the call")
    model.layers[1].reshard()
    return came_first


def test_the_plain_call_does_wait_for_its_peer(tmp_path: Path) -> None:
    """So the test above could fail: the same program without `async_op` does not return early."""
    assert pool(2).run(_unshard_waits_without_async_op, str(tmp_path), timeout=TIMEOUT) == [False, False]
