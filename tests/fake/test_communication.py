"""What is communicated, counted where torch counts it: one message more or less turns this red."""

from __future__ import annotations

import itertools
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode

from fullshard import fully_shard, register_fsdp_forward_method
from fullshard.comm import data_group
from fullshard.comm.data_group import Sent, Works
from fullshard.engine import unit_of
from fullshard.peers.wait import Waits
from fullshard.policy import use_options
from tests.harness.fake import fake_world
from tests.threads.programs import Model, batch, shard

# CommDebugMode puts backward hooks on modules that get tokens, and torch warns of that.
pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook is firing")

WORLD = 4
C10D = torch.ops.c10d


def _counts(comm: CommDebugMode) -> dict[Any, int]:
    return {op: n for op, n in comm.get_comm_counts().items() if n}


def _trained_model() -> Any:
    torch.manual_seed(0)
    model = shard(Model())
    model(batch(1, 0)).pow(2).mean().backward()
    model.zero_grad()
    return model


def test_state_dicts_need_no_communication() -> None:
    with fake_world(WORLD):
        model = _trained_model()
        optimizer = torch.optim.AdamW(model.parameters())
        model(batch(1, 0)).pow(2).mean().backward()
        optimizer.step()
        with CommDebugMode() as comm:
            model.state_dict()
            optimizer.state_dict()
        assert _counts(comm) == {}


@pytest.mark.parametrize(("communication", "messages"), [("auto", 1), ("torch", 1)])
def test_messages_of_a_step(communication: str, messages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three blocks and the root: each gathers in forward, the blocks again in backward, each reduces once."""
    monkeypatch.setenv("FULLSHARD_COMMUNICATION", communication)
    with fake_world(WORLD):
        model = _trained_model()
        with CommDebugMode() as comm:
            model(batch(1, 0)).pow(2).mean().backward()
        counts = {str(op): n for op, n in _counts(comm).items()}
        gathers = sum(n for op, n in counts.items() if "allgather" in op or "all_gather" in op)
        reductions = {op: n for op, n in counts.items() if "gather" not in op}
        assert gathers == 4 + 3, counts
        assert list(reductions.values()) == [4 * messages], counts
        assert ("reduce_scatter" in next(iter(reductions))) == (communication == "torch"), counts


def test_a_method_that_calls_forward_is_reduced_once() -> None:
    """Gradients of what the inner forward computed are there before those of the method around it."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.second(x))

        def both(self, x: torch.Tensor) -> torch.Tensor:
            inner: torch.Tensor = self(torch.tanh(self.first(x)))
            return inner

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.block = nn.Linear(4, 4), Block()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.block.both(self.before(x))
            return out

    with fake_world(WORLD):
        model: Any = Outer()
        register_fsdp_forward_method(fully_shard(model.block), "both")
        fully_shard(model)
        reduced: list[str] = []
        model(torch.ones(2, 4)).sum().backward()
        executor = unit_of(model).root.executor  # type: ignore[union-attr]
        executor.listeners.append(
            lambda command: reduced.append(command.unit.name) if command.kind == "reduce" else None
        )
        model(torch.ones(2, 4)).sum().backward()
        assert sorted(reduced) == ["block", "root"]


def test_no_sync_sends_nothing_but_gathers(monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_world(WORLD):
        model = _trained_model()
        model.set_requires_gradient_sync(False)
        with CommDebugMode() as comm:
            model(batch(1, 0)).pow(2).mean().backward()
        assert all("gather" in str(op) for op in _counts(comm)), _counts(comm)


def test_a_world_of_one_communicates_nothing() -> None:
    with fake_world(1), CommDebugMode() as comm:
        _trained_model()
        assert _counts(comm) == {}


def test_the_strategy_may_be_set_after_sharding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where large parameters arrive in place, `set_communication("torch")` makes it one gather a unit."""
    monkeypatch.setattr("fullshard.layout.gather.GROUPING_BACKENDS", frozenset({"fake"}))
    # The package has a function of the module's name.
    monkeypatch.setattr(sys.modules["fullshard.api.fully_shard"], "DIRECT_GATHER_NBYTES", 0)
    with fake_world(WORLD):
        model = _trained_model()
        counted = []
        for strategy in ("auto", "torch", "auto"):
            model.set_communication(strategy)
            with CommDebugMode() as comm:
                model(batch(1, 0)).pow(2).mean().backward()
            counts = _counts(comm)
            scatters = counts.get(C10D._reduce_scatter_base_, 0)
            joined = counts.get(C10D.allgather_into_tensor_coalesced_, 0)
            counted.append((counts.get(C10D._allgather_base_, 0) + joined, scatters, joined))
            model.zero_grad()
        units = len(list(model.layers)) + 1
        gathers = units + units - 1
        assert counted[1] == (gathers, units, 0)
        # All large parameters of a unit in one launch.
        assert counted[0] == counted[2] == (gathers, 0, gathers)


class _Stuck:
    """A collective of gloo that was issued while its connection closed: it never ends."""

    waits = 0

    def wait(self, timeout: timedelta) -> None:
        self.waits += 1
        assert timeout.total_seconds() > 0
        raise RuntimeError("Operation timed out!")

    def is_completed(self) -> bool:
        return False


class _LateBy:
    """A collective that is over, well or not, just after a slice of the wait for it was."""

    def __init__(self, error: str) -> None:
        self.error, self.waits = error, 0

    def wait(self, timeout: timedelta | None = None) -> str:
        self.waits += 1
        if timeout is not None or self.error:
            raise RuntimeError("Operation timed out!" if timeout is not None else self.error)
        return "arrived"

    def is_completed(self) -> bool:
        return self.waits > 0


def _group(cuts: Iterator[float]) -> Any:
    class Group:
        observer, on_streams = None, False
        device, scope = torch.device("cpu"), SimpleNamespace(renewed=0, watch=SimpleNamespace(waiting={}))
        cut_at = property(lambda _: next(cuts))

        def refuse(self, number: int, error: RuntimeError) -> None:
            raise LookupError(f"message {number}: {error}")

    return Group()


def test_a_message_that_arrives_as_a_slice_of_the_wait_ends_has_not_failed() -> None:
    came: Any = _LateBy("")
    assert Sent(_group(iter([])), came, 7, in_one=False).wait() == "arrived" and came.waits == 2
    lost: Any = _LateBy("Connection closed by peer")
    with pytest.raises(LookupError, match="message 7: Connection closed by peer"):
        Sent(_group(iter([])), lost, 7, in_one=False).wait()


def test_a_message_that_no_cut_ends_is_given_up() -> None:
    """Some time after the cut, and not before."""
    now = time.monotonic()
    group = _group(iter([0.0, now, now, now - 60]))
    work: Any = _Stuck()
    with pytest.raises(LookupError, match="message 7: Operation timed out"):
        Sent(group, work, 7, in_one=False).wait()
    assert work.waits == 4 and not group.scope.watch.waiting


class _Counted:
    """One of the works of a message, which ends well or not."""

    def __init__(self, error: str = "") -> None:
        self.error, self.waits = error, 0

    def wait(self) -> None:
        self.waits += 1
        if self.error:
            raise RuntimeError(self.error)

    def is_completed(self) -> bool:
        return self.waits > 0


def test_works_that_are_one_message_are_each_waited_for_once() -> None:
    """A wait ends with the first that fails; to drain the message is to wait for all of them."""
    first, lost, last = works = [_Counted(), _Counted("Connection closed by peer"), _Counted()]
    whole = Works(works)
    assert not whole.is_completed() and Works().is_completed()
    group = _group(itertools.repeat(1.0))
    group.is_cut = True
    sent = Sent(group, whole, 7, in_one=True)
    with pytest.raises(LookupError, match="message 7: Connection closed by peer"):
        sent.wait()
    assert [work.waits for work in works] == [1, 1, 0]
    sent.wait()
    assert last.waits == first.waits == lost.waits == 1 and sent.is_completed and sent.future is None


def test_a_message_that_failed_is_drained_to_its_end() -> None:
    """Its buffers are free afterwards, whichever of its works failed; an error without a cut is raised."""

    class Group(type(_group(iter([])))):  # type: ignore[misc]
        cut_at, is_cut = 1.0, True

        def refuse(self, number: int, error: RuntimeError) -> None:
            raise RuntimeError(f"message {number}: {error}")

    works = [_Counted("one"), _Counted(), _Counted("two"), _Counted()]
    Sent(Group(), Works(works), 7, in_one=True).drain()
    assert [work.waits for work in works] == [1, 1, 1, 1]
    alone = Sent(Group(), cast(Any, _Counted("one")), 7, in_one=True)
    alone.drain()
    Group.is_cut = False
    with pytest.raises(RuntimeError, match="message 7: two"):
        Sent(Group(), Works([_Counted("two")]), 7, in_one=True).drain()


def test_the_strategy_is_that_of_the_last_setting_or_of_the_options_when_the_root_forms() -> None:
    """Resolved where it may change, and nowhere else: channels, comparisons and reports read it."""

    def found(model: Any) -> list[tuple[str, list[bool]]]:
        units = [unit for module in model.modules() if (unit := unit_of(module)) is not None]
        return [(unit.channels.strategy, [links.exchanges for links in unit.links]) for unit in units]

    with fake_world(WORLD):
        model = shard(Model())
        exchanged = found(model)
        assert {strategy for strategy, _ in exchanged} == {"auto"} and all(all(each) for _, each in exchanged)
        native = [("torch", [False] * len(each)) for _, each in exchanged]
        model.set_communication("torch")
        assert found(model) == native
        model.set_communication("auto")
        assert found(model) == exchanged
        with use_options(communication="torch"):
            # Set on the units, so the options say nothing.
            model(batch(1, 0)).pow(2).mean().backward()
        assert found(model) == exchanged
        model.set_communication("torch")
        assert found(model) == native
        later = shard(Model())
        with use_options(communication="torch"):
            later(batch(1, 0)).pow(2).mean().backward()
        assert found(later) == native


def test_a_message_of_connections_that_were_given_up_is_no_wait_of_the_new_epoch() -> None:
    """A rank that drains what a failed step left behind does not wait for its peers: they met, and number messages
    anew. It was read as two ranks that wait for each other."""
    group = _group(iter([]))
    group.name, group.ranks, scope = "data 0.1", (0, 1), group.scope
    vars(scope).update(name="everyone", ranks=(0, 1), epoch=5, told="", failures=None)
    scope.watch.host = SimpleNamespace(now=time.monotonic, event=threading.Event)
    waits = Waits()
    kept = Sent(group, cast(Any, _LateBy("")), 24, in_one=False)
    for epoch, renewed, blocks in ((5, 0, True), (6, 0, True), (7, 1, False), (8, 2, False)):
        vars(scope).update(epoch=epoch, renewed=renewed)
        waits[threading.get_ident()] = kept
        kept.since += 1  # another wait for it begins
        assert [one.told()["number"] for one in waits.current().values()] == ([24] if blocks else [])


def test_a_message_of_connections_that_were_given_up_is_waited_for_some_seconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also when its group has new connections, which are not cut: nothing else would end that wait."""
    monkeypatch.setattr(data_group, "_CUT_SECONDS", 0.05)
    group = _group(itertools.repeat(0.0))
    sent = Sent(group, cast(Any, _Stuck()), 7, in_one=False)
    group.scope.renewed = 1
    with pytest.raises(RuntimeError, match="Operation timed out"):
        sent.wait()
    assert not group.scope.watch.waiting
