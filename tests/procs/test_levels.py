"""Messages in two levels between nodes (layout/levels.py), over gloo, with ranks that believe to be on several."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import reduce
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fullshard
from fullshard import MixedPrecisionPolicy, fully_shard
from fullshard.comm import levels as levels_module
from fullshard.comm import rates as rates_module
from fullshard.comm.relay import Relayed
from fullshard.layout import Rates, UnitMemory, levels_of
from fullshard.observe import expected
from fullshard.policy import use_options
from tests.harness import optional_units, tolerance
from tests.harness.forked import run_forks
from tests.harness.parity import assert_same_bits, train_alone, train_beside_oracle
from tests.harness.random_models import ModelSpec, examples, model_specs
from tests.procs.test_pairs import SOMETIMES
from tests.threads import test_tensor_parallel as tensor_parallel
from tests.threads.test_native_reduction import _ways

TIMEOUT = 60.0


# Of hosts whose link is slow, and of hosts whose memory is.
SLOW_LINK, SLOW_MEMORY = Rates(1.0, 100.0), Rates(100.0, 1.0)


@contextmanager
def nodes(names: str, rates: Rates | None = SLOW_LINK) -> Iterator[None]:
    """Rank r is on the node names[r]. rates: measured between and within; None: those of this machine."""
    with ExitStack() as patches:
        patches.enter_context(mock.patch("fullshard.comm.choice.node", lambda: names[dist.get_rank()]))
        if rates is not None:
            patches.enter_context(mock.patch("fullshard.comm.choice.measured", lambda *_: rates))
        yield


def _plain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 21), nn.Tanh(), nn.Linear(21, 7, bias=False), nn.Tanh(), nn.Linear(7, 3))


def _model(first: Callable[[nn.Sequential], nn.Sequential] = lambda model: model, **options: Any) -> Any:
    model = first(_plain())
    for layer in model[::2]:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def _batch(rank: int) -> Tensor:
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(rank))


# ---- where -----------------------------------------------------------------------------------------------------------


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("names", "shape", "way"),
    [
        ("aabb", (4,), "LevelReduce"),
        ("abab", (4,), "LevelReduce"),
        # One rank on each node: an exchange sends no more than has to cross.
        ("abcd", (4,), "ExchangeReduce"),
        ("aaab", (4,), "NativeReduce"),
        ("aaaa", (4,), "ExchangeReduce"),
        # Groups that share: within a node, over two nodes, and of both kinds, where all do what they can all do.
        ("aabb", (2, 2), "ExchangeReduce"),
        ("abab", (2, 2), "ExchangeReduce"),
        ("aabc", (2, 2), "NativeReduce"),
    ],
)
def test_the_way_of_gradients_follows_from_where_ranks_are(names: str, shape: tuple[int, ...], way: str) -> None:
    run_forks(4, _one_way, (names, shape, way), TIMEOUT)


def _one_way(rank: int, names: str, shape: tuple[int, ...], way: str) -> None:
    with nodes(names):
        model = _model(mesh=init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :]))
        model(_batch(rank)).sum().backward()
        assert _ways(model) == {way}


def test_a_setting_says_the_way() -> None:
    run_forks(4, _settings, (), TIMEOUT)


def _settings(rank: int) -> None:
    with nodes("aabb"):
        model = _model()
        # Also after steps, there and back, on communicators of their own.
        for strategy, way, peers in (
            ("auto", "LevelReduce", 1),
            ("one-level", "LevelReduce", 2),
            ("two-levels", "LevelReduce", 1),
            ("torch", "NativeReduce", 2),
            ("auto", "LevelReduce", 1),
        ):
            model.set_communication(strategy)
            with _counted("aabb") as sent:
                model(_batch(rank)).sum().backward()
            # A weight that is alone in its unit goes from rank to rank in either case.
            assert _ways(model) == {way} and len({peer for peer, _ in sent}) == peers, strategy
        model.set_separate_reduce_scatter_group(True)
        model(_batch(rank)).sum().backward()
        assert _ways(model) == {"LevelReduce"}
        with pytest.raises(ValueError, match=r'"all-to-all".*found several'):
            model.set_communication("all-to-all")


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("rates", "ways", "peers"),
    [
        (SLOW_LINK, "two levels", 1),
        (SLOW_MEMORY, "one level", 2),
        # A ring of gloo sends gathers; gradients go from rank to rank.
        (Rates(1.0, 2.0), "one level, gathers around a ring", 2),
        (Rates(1.0, 3.0), "two levels, gathers around a ring", 1),
    ],
)
def test_measured_rates_choose_the_way(rates: Rates, ways: str, peers: int) -> None:
    run_forks(4, _chosen, (rates, ways, peers), TIMEOUT)


def _chosen(rank: int, rates: Rates, ways: str, peers: int) -> None:
    with nodes("aabb", rates):
        model = _model()
        with _counted("aabb") as sent:
            model(_batch(rank)).sum().backward()
        hosts = fullshard.report(model).hosts
        assert hosts is not None and (hosts.number, hosts.ways) == (2, ways)
        assert len({peer for peer, _ in sent}) == peers


def test_rates_are_measured_once_and_equal_on_all_ranks() -> None:
    run_forks(4, _rates, (), TIMEOUT)


def _rates(rank: int) -> None:
    with nodes("aabb", None), mock.patch.object(rates_module, "_pass", wraps=rates_module._pass) as passed:
        models = [_model(), _model()]
        for model in models:
            model(_batch(rank)).sum().backward()
        # Two stages, three rounds, a few bytes before each message: at any number of ranks.
        assert passed.call_count == 12
        reports = [fullshard.report(model).hosts for model in models]
        assert reports[0] == reports[1] and reports[0] is not None
        found = reports[0].rates
        assert found is not None and 0 < found.between < float("inf") and 0 < found.within < float("inf")
        everywhere: list[Any] = [None] * 4
        dist.all_gather_object(everywhere, (found, reports[0].ways))
        assert set(everywhere) == {(found, reports[0].ways)}
        assert "MB/s between hosts" in str(fullshard.report(models[0]))


def test_nothing_is_measured_where_the_way_is_said() -> None:
    run_forks(4, _said, (), TIMEOUT)


def _said(rank: int) -> None:
    for strategy, ways in (("one-level", "one level"), ("two-levels", "two levels")):
        with nodes("aabb", None), mock.patch.object(rates_module, "_pass", side_effect=AssertionError("measures")):
            model = _model()
            model.set_communication(strategy)
            model(_batch(rank)).sum().backward()
            hosts = fullshard.report(model).hosts
            assert hosts is not None and hosts.ways == ways and hosts.rates is None


# ---- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("names", ["abaabb", pytest.param("aabb", marks=pytest.mark.slow)])
def test_sums_are_taken_in_one_stated_order(names: str) -> None:
    """Within a node in the order of ranks, then in the order of the nodes, bit by bit."""
    run_forks(len(names), _order, (names,), TIMEOUT)


def _order(rank: int, names: str) -> None:
    with nodes(names):
        model = _model()
        model(_batch(rank)).sum().backward()
        found = [p.grad.full_tensor() for p in model.parameters()]
    for gradient, wanted in zip(found, _sums(names), strict=True):
        assert torch.equal(gradient, wanted)


def _sums(names: str, first: Callable[[nn.Sequential], nn.Sequential] = lambda model: model) -> list[Tensor]:
    """The mean gradients of the trained parameters, added in the stated order."""
    plain, each = first(_plain()), []
    for other in range(len(names)):
        plain.zero_grad()
        plain(_batch(other)).sum().backward()
        each.append([p.grad.clone() for p in plain.parameters() if p.grad is not None])
    levels = levels_of(names)
    assert levels is not None
    sums = [[reduce(Tensor.add, [each[r][i] for r in ranks]) for ranks in levels.nodes] for i in range(len(each[0]))]
    return [reduce(Tensor.add, one) / len(names) for one in sums]


POLICIES = {
    "float32": None,
    "mixed": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    "bfloat16": MixedPrecisionPolicy(param_dtype=torch.bfloat16),
    "float16": MixedPrecisionPolicy(param_dtype=torch.float16),
}


@pytest.mark.parametrize(
    "precision", ["bfloat16", *(pytest.param(name, marks=pytest.mark.slow) for name in ("float32", "mixed", "float16"))]
)
def test_the_way_changes_no_bit(precision: str) -> None:
    """So two runs may measure other rates, and a run that is continued may."""
    run_forks(6, _bits, (precision,), TIMEOUT)


def _bits(rank: int, precision: str) -> None:
    found = []
    policy = POLICIES[precision]
    options = {} if policy is None else {"mp_policy": policy}
    for rates in (SLOW_LINK, SLOW_MEMORY, Rates(1.0, 2.0), None):
        with nodes("abaabb", rates), mock.patch("fullshard.layout.gather.PAIRWISE_PARAMETER_NBYTES", 64):
            # Gradients of six ranks in other sizes, so that each order of sums has other bits.
            model = SOMETIMES.shard(_seeded(SOMETIMES.build), fully_shard, **options)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for step in range(3):
                # The way may change between two steps, too.
                if rates is None:
                    model.set_communication(("one-level", "two-levels")[step % 2])
                loss = model(_batch(10 * step + rank)).float().pow(2).mean() * 10.0 ** (rank - 3)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            found.append([p.full_tensor() for p in model.parameters()])
    for others in found[1:]:
        for one, other in zip(found[0], others, strict=True):
            assert torch.equal(one, other)


def _seeded(build: Callable[[], Any]) -> Any:
    torch.manual_seed(0)
    return build()


@examples(2, 40)
@given(spec=model_specs(), names=st.sampled_from(["aabb", "abab"]))
def test_any_model_trains_as_plain_training_does(spec: ModelSpec, names: str) -> None:
    run_forks(4, _beside_oracle, (spec, names), TIMEOUT)


def _beside_oracle(rank: int, spec: ModelSpec, names: str) -> None:
    with nodes(names), use_options(**spec.options()):
        first = train_beside_oracle(rank, spec, 4, 3, by_backend=True)
        # And once more, in the same bits.
        assert_same_bits(train_alone(rank, spec, 3), first)


@pytest.mark.slow
@pytest.mark.parametrize(
    "precision", ["float32", *(pytest.param(name, marks=pytest.mark.slow) for name in list(POLICIES)[1:])]
)
def test_large_parameters_are_what_one_level_makes_of_them(precision: str) -> None:
    """From the sizes on from which parameters are gathered directly; on six ranks of three nodes, with missing
    gradients and an accumulated window."""
    run_forks(6, _large, (precision,), TIMEOUT)


def _large(rank: int, precision: str) -> None:
    found = []
    policy = POLICIES[precision]
    options = {} if policy is None else {"mp_policy": policy}
    for names in ("aabbcc", "aaaaaa"):
        with nodes(names), mock.patch("fullshard.layout.gather.PAIRWISE_PARAMETER_NBYTES", 64):
            # Of the second, ranks have gradients of other parameters, and nobody has one of `never`.
            models = [_model(**options), SOMETIMES.shard(SOMETIMES.build(), fully_shard, **options)]
            for model in models:
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
                for step in range(3):
                    for part in range(2):
                        model.set_requires_gradient_sync(part == 1)
                        model(_batch(10 * step + 100 * part + rank)).float().pow(2).mean().backward()
                    assert model is models[0] or model.never.weight.grad is None
                    optimizer.step()
                    optimizer.zero_grad()
            found.append([p.full_tensor() for model in models for p in model.parameters()])
    epsilon = {"bfloat16": 2.0**-7, "float16": 2.0**-10}.get(precision, 2.0**-23)
    for two, one in zip(*found, strict=True):
        # Sums of six in another order, in each of three steps.
        assert (two - one).abs().max() <= 3 * 6 * epsilon * one.abs().max()


# ---- beside other features -------------------------------------------------------------------------------------------


def test_frozen_parameters_beside_trained_ones() -> None:
    """A unit without a gradient sends none, and of the others the trained parameters alone."""
    run_forks(4, _frozen, (), TIMEOUT)


def _freeze(model: nn.Sequential) -> nn.Sequential:
    model[0].requires_grad_(False)
    model[4].bias.requires_grad_(False)
    return model


def _frozen(rank: int) -> None:
    with nodes("aabb"):
        model = _model(first=_freeze)
        for _ in range(2):
            model.zero_grad()
            model(_batch(rank)).sum().backward()
        trained = [p for p in model.parameters() if p.requires_grad]
        assert len(trained) == 2 and _ways(model) == {"LevelReduce"}
        for found, wanted in zip([p.grad.full_tensor() for p in trained], _sums("aabb", _freeze), strict=True):
            assert torch.equal(found, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("rates", [SLOW_LINK, pytest.param(SLOW_MEMORY, marks=pytest.mark.slow)])
def test_optional_units_that_some_ranks_leave_out(rates: Rates) -> None:
    run_forks(4, _optional, (rates,), TIMEOUT)


def _optional(rank: int, rates: Rates) -> None:
    found = []
    for names in ("aabb", "aaaa"):
        with nodes(names, rates):
            model = optional_units.shard(_seeded(optional_units.Model), mark=True)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for step in optional_units.STEPS:
                optional_units.loss_of(model, step, rank, optional_units.parts_of(step, rank)).backward()
                optimizer.step()
                optimizer.zero_grad()
            assert _ways(model) == {"LevelReduce" if names == "aabb" else "ExchangeReduce"}
            found.append([p.full_tensor() for p in model.parameters()])
    for two, one in zip(*found, strict=True):
        # Sums of four in another order, in each of the steps.
        assert (two - one).abs().max() <= len(optional_units.STEPS) * 4 * 2.0**-23 * one.abs().max()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
def test_beside_tensor_parallelism() -> None:
    """Each node has two ranks along `tp` and two that share parameters; these travel to the other node."""
    run_forks(8, _beside_tp, (), TIMEOUT)


def _beside_tp(rank: int) -> None:
    expected = tensor_parallel.train_plain(tensor_parallel.blocks(), 4, 2)
    with nodes("aaaabbbb"):
        mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
        model: Any = tensor_parallel.blocks()
        tensor_parallel.plan_tp(model, mesh["tp"], sequence=False)
        for block in model:
            fully_shard(block, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for step in range(2):
            optimizer.zero_grad()
            model(tensor_parallel.batch(step, mesh.get_local_rank("dp"))).square().mean().backward()
            optimizer.step()
            for name, value in tensor_parallel.collect(model, optimizer).items():
                tolerance.assert_close(value, expected[step][name], what=f"step {step} {name}")
        assert _ways(model) == {"LevelReduce"}
        hosts = fullshard.report(model).hosts
        assert hosts is not None and (hosts.number, hosts.ways) == (2, "two levels")


# ---- bytes -----------------------------------------------------------------------------------------------------------


@contextmanager
def _counted(names: str) -> Iterator[list[tuple[int, int]]]:
    """(peer, bytes) of each message from this rank to one of another node."""
    sent: list[tuple[int, int]] = []
    send = dist.ProcessGroup.send

    def counted(self: Any, tensors: list[Tensor], peer: int, tag: int) -> Any:
        if names[peer] != names[dist.get_rank()]:
            sent.append((peer, tensors[0].nbytes))
        return send(self, tensors, peer, tag)

    with mock.patch.object(dist.ProcessGroup, "send", counted):
        yield sent


@pytest.mark.sample(1)
@pytest.mark.parametrize("names", ["aabb", "aabbcc"])
def test_what_crosses_is_each_ranks_part_once_for_each_other_node(names: str) -> None:
    run_forks(len(names), _bytes, (names,), TIMEOUT)


def _bytes(rank: int, names: str) -> None:
    with nodes(names):
        model = _model()
        model(_batch(rank)).sum().backward()
        report = fullshard.report(model)
        assert report is not None
        planned = [expected._planned(unit, 0, name) for name, unit in _units(model)]
        with _counted(names) as sent:
            loss = model(_batch(rank)).sum()
            gathered, before = sum(n for _, n in sent), len(sent)
            loss.backward()
        others = len(set(names)) - 1
        assert {names[peer] for peer, _ in sent} == set(names) - {names[rank]}
        parts = [_part_nbytes(group.memory) for group in planned]
        assert gathered == others * sum(parts)
        chunks = sum(group.sent.send_nbytes // len(names) for group in planned if group.sent is not None)
        # Gathered again: these units are all below a root without parameters.
        again = sum(n for _, n in sent[before:])
        assert again == others * (sum(parts) + chunks)


def _part_nbytes(memory: UnitMemory) -> int:
    """What a rank sends of its part to each other one in a gather."""
    direct = sum(memory.pack.segments[i].padded_numel for i in memory.plan.direct)
    return (direct + len(memory.plan.packed_span(memory.pack))) * memory.compute_itemsize


def _units(model: nn.Module) -> list[tuple[str, Any]]:
    from fullshard.engine import unit_of

    found = [(name, unit_of(module)) for name, module in model.named_modules()]
    return [(name, unit) for name, unit in found if unit is not None and unit.groups]


def test_the_report_knows_the_buffers() -> None:
    run_forks(4, _memory, (), TIMEOUT)


def _memory(rank: int) -> None:
    held = []
    send = levels_module.LevelReduce.send

    def noted(self: Any, flight: Any, *rest: Any) -> None:
        send(self, flight, *rest)
        held.append(flight.held_nbytes)

    with nodes("aabb"), mock.patch.object(levels_module.LevelReduce, "send", noted):
        model = _model(mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
        model(_batch(rank)).sum().backward()
        memories = [group.sent for name, unit in _units(model) if (group := expected._planned(unit, 0, name))]
        assert sorted(held) == sorted(m.send_nbytes + m.receive_nbytes for m in memories if m is not None)
        assert all(m.sums_here and m.wire_itemsize == 4 for m in memories if m is not None)


# ---- failures --------------------------------------------------------------------------------------------------------


class _Work:
    def __init__(self, error: str = "") -> None:
        self.error, self.waits = error, 0

    def wait(self) -> None:
        self.waits += 1
        if self.error:
            raise RuntimeError(self.error)

    def is_completed(self) -> bool:
        return self.waits > 0


def test_an_error_of_the_first_stage_is_raised_once_where_the_message_is_waited_for() -> None:
    first, beside = [_Work(), _Work("closed")], _Work()

    def pass_on() -> Iterator[Any]:
        for work in first:
            work.wait()
            yield second

    second = _Work()
    message = Relayed([beside], pass_on)
    assert not message.is_completed()
    thread = threading.Thread(target=message.run)
    thread.start()
    with pytest.raises(RuntimeError, match="closed"):
        message.wait()
    thread.join()
    # What was sent before is still waited for.
    message.wait()
    assert (beside.waits, second.waits) == (1, 1) and message.is_completed()


def test_a_failed_step_leaves_nothing() -> None:
    """After an exception in a backward, and a meeting, the next step is that of a model never broken."""
    run_forks(4, _broken, (), TIMEOUT)


def _broken(rank: int) -> None:
    def train(disturb: Callable[[Any], None]) -> Sequence[Tensor]:
        model = _model()
        disturb(model)
        model(_batch(rank)).sum().backward()
        return [p.grad.full_tensor() for p in model.parameters()]

    def fail(model: Any) -> None:
        broken = torch.ones(2, 6, requires_grad=True).clone()
        broken.register_hook(lambda _: (_ for _ in ()).throw(RuntimeError("broken")))
        with pytest.raises(RuntimeError, match="broken"):
            model(broken).sum().backward()

    with nodes("aabb"):
        for found, wanted in zip(train(fail), train(lambda model: None), strict=True):
            assert torch.equal(found, wanted)
