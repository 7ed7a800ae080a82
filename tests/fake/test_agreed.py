"""What ranks compare of a model, each fact by itself: a rank that has another one is named. One process that
describes several models, and stand-ins for what ranks answer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard

from fullshard import fully_shard
from fullshard.agree import structure
from fullshard.agree.differences import differences
from fullshard.agree.ledger import TENSOR, Statement, dumps, stated
from fullshard.agree.structure import Drift, describe, differing, digests_of, find_drift, mesh_text, meshes_of
from fullshard.engine import unit_of
from fullshard.engine.root import root_of
from fullshard.peers import RanksDisagree
from fullshard.policy import Options
from tests.harness.fake import fake_world


class Model(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.head = nn.Linear(4, width)


def described(change: Callable[[Any], object], after: Callable[[Any], object], **options: Any) -> list[Statement]:
    model: Any = Model(options.pop("width", 4))
    change(model)
    for layer in model.layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    after(model)
    unit = unit_of(model)
    assert unit is not None
    root = root_of(unit)
    root.options = ROOT.get("options", root.options)
    return describe(root, (0, 1), ROOT.get("mode", "full"))


# What is set for the root that is described next: its options, and what ranks compare.
ROOT: dict[str, Any] = {}


def options(**fields: Any) -> Options:
    return dataclasses.replace(Options.current(), **fields)


def nothing(model: Any) -> None:
    pass


def use_twice(model: Any) -> None:
    """As a model whose head has the weights of another module."""
    unit: Any = unit_of(model)
    param = unit.groups[0].params[0]
    param.slots = (*param.slots, *param.slots)


# The fact, and what a rank does otherwise: to its model, after sharding it, or as an option.
ODD: dict[str, dict[str, Any]] = {
    "shape": {"width": 5},
    "dtype": {"change": lambda m: m.head.double()},
    "requires_grad": {"change": lambda m: m.head.bias.requires_grad_(False)},
    "placement": {"shard_placement_fn": lambda p: Shard(p.ndim - 1)},
    "number of modules that share it": {"after": use_twice},
    "mesh": {"mesh": [1, 0]},
    "reshard_after_forward": {"reshard_after_forward": False},
    "reshard_after_backward": {"after": lambda m: m.layers[0].set_reshard_after_backward(False)},
    "unshard_in_backward": {"after": lambda m: m.layers[0].set_unshard_in_backward(False)},
    "gradient divide factor": {"after": lambda m: m.layers[0].set_gradient_divide_factor(3.0)},
    "sums without averages": {"after": lambda m: m.layers[0].set_force_sum_reduction_for_comms(True)},
    "all-reduce": {"after": lambda m: m.layers[0].set_requires_all_reduce(False)},
    "forward prefetch": {"after": lambda m: m.layers[0].set_modules_to_forward_prefetch([m.layers[1]])},
    "backward prefetch": {"after": lambda m: m.layers[1].set_modules_to_backward_prefetch([m.layers[0]])},
    "prefetch_depth": {"root": {"prefetch_depth": 3}},
    "FULLSHARD_COMMUNICATION": {"root": {"communication": "torch"}},
    "FULLSHARD_GUARD": {"mode": "structure"},
}


def test_each_fact_is_compared_by_itself() -> None:
    with fake_world(2):
        plain = described(nothing, nothing)
        for fact, odd in ODD.items():
            odd = dict(odd)
            if "mesh" in odd:
                odd["mesh"] = DeviceMesh("cpu", odd["mesh"])
            fields = odd.pop("root", {})
            if "mode" in odd:
                ROOT["mode"] = odd.pop("mode")
            if fields:
                ROOT["options"] = options(**fields)
            try:
                other = described(odd.pop("change", nothing), odd.pop("after", nothing), **odd)
            finally:
                ROOT.clear()
            difference = next(differences({0: plain, 1: other}), None)
            assert difference is not None and difference.fact.name == fact, (fact, difference and difference.text)


def test_with_the_guard_off_only_that_is_compared() -> None:
    with fake_world(2):
        ROOT["mode"] = "off"
        try:
            off = described(nothing, nothing)
            ROOT["options"] = options(prefetch_depth=3)
            assert described(nothing, nothing, reshard_after_forward=False) == off
        finally:
            ROOT.clear()
        difference = next(differences({0: off, 1: described(nothing, nothing)}), None)
        assert len(off) == 1 and difference is not None and difference.fact.name == "FULLSHARD_GUARD"


def test_a_mesh_of_any_size_is_a_short_text_and_each_order_of_ranks_another() -> None:
    """Each unit and parameter states its mesh, and a value in torch's store may have 8 MiB."""
    for world in (16, 17, 2000):
        ranks = list(range(world))
        with fake_world(world):
            orders = (ranks, [*ranks[:8], ranks[9], ranks[8], *ranks[10:]])
            usual, other = (mesh_text(DeviceMesh("cpu", order)) for order in orders)
        assert usual != other and f"[0, 1, 2, 3, {'4, 5' if world == 16 else '...'}" in usual
        assert len(usual) < 100 and f"{world - 1}]" in usual


def test_meshes_come_in_one_order_on_all_ranks() -> None:
    """Small ones first, whatever units came first; those of one rank are asked nothing."""
    with fake_world(4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "expert"))
        found = [mesh, mesh["expert"], mesh["data"]]
        units: list[Any] = [
            SimpleNamespace(groups=[SimpleNamespace(placing=SimpleNamespace(mesh=one))]) for one in found
        ]
        orders = [list(meshes_of(order)) for order in (units, units[::-1], [units[1], units[0], units[2]])]
        assert orders == [[(0, 1), (0, 2), (0, 1, 2, 3)]] * 3


# ---- values ----------------------------------------------------------------------------------------------------------


def test_a_digest_is_of_one_shape_and_dtype() -> None:
    zeros = [torch.zeros(4), torch.zeros(2, 2), torch.zeros(4, dtype=torch.int32)]
    assert len({digests_of({"a": value})["a"] for value in zeros}) == 3


def test_a_name_that_some_ranks_do_not_have_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = {"a": torch.ones(1), "b": torch.ones(1)}
    values = digests_of(mine)
    texts = {rank: dumps([stated(TENSOR, "", values)]) for rank, values in ((0, values), (1, {"a": "other"}))}
    monkeypatch.setattr(structure, "ask", lambda scope, what, text: {0: "x", 1: "y"})
    monkeypatch.setattr(structure, "tell", lambda scope, what, text: texts)
    scope: Any = SimpleNamespace(rank=0)
    assert differing(scope, "buffer", mine) == [Drift("a", "buffer", ((0,), (1,)))]


def test_drift_is_looked_for_in_replicas_too(monkeypatch: pytest.MonkeyPatch) -> None:
    scope = SimpleNamespace(resume=lambda: None)
    monkeypatch.setattr(structure, "meshes_of", lambda units: {})
    monkeypatch.setattr(structure, "replicas_of", lambda units, top: {(0, 1): {"a": torch.ones(1)}})
    monkeypatch.setattr(structure, "scope_of", lambda ranks: scope)
    monkeypatch.setattr(structure, "differing", lambda scope, kind, tensors: [(kind, *tensors)])
    assert find_drift([], nn.Module()) == [("replica", "a")]  # type: ignore[comparison-overlap]


class Peers:
    def __init__(self) -> None:
        self.met = self.disagreed = 0

    def meet(self) -> None:
        self.met += 1

    @contextmanager
    def disagreeing(self, scope: object) -> Iterator[None]:
        try:
            yield
        except RanksDisagree:
            self.disagreed += 1
            raise


@pytest.fixture
def root(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A root of one unit on one mesh, whose buffers are `a` and `mask`."""
    module = nn.Module()
    module.register_buffer("a", torch.zeros(1))
    module.register_buffer("mask", torch.zeros(1, dtype=torch.bool))
    unit = SimpleNamespace(module=module, params=[SimpleNamespace(initial=7)], groups=[])
    scope = SimpleNamespace(failures=SimpleNamespace(has_raised=False))
    monkeypatch.setattr(structure, "buffers_on", lambda top, ranks: dict(top.named_buffers()))
    monkeypatch.setattr(structure, "_refuse_other_values", lambda root, on: None)
    monkeypatch.setattr(structure, "meshes_of", lambda units: {(0, 1): None})
    monkeypatch.setattr(structure, "scope_of", lambda ranks: scope)
    return SimpleNamespace(units=[unit])


def test_what_was_noted_of_initial_values_goes_after_their_comparison(
    root: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(structure, "differing", lambda scope, kind, tensors: [])
    assert structure.refuse_other_values(root, Peers()) == set()  # type: ignore[arg-type]
    assert root.units[0].params[0].initial is None


def test_buffers_of_numbers_are_refused_and_masks_are_warned_of_once(
    root: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    peers: Any = Peers()
    found = [Drift("mask", "buffer", ((0,), (1,)))]
    monkeypatch.setattr(structure, "differing", lambda scope, kind, tensors: found)
    with pytest.warns(UserWarning, match="buffers differ between ranks from the beginning: mask"):
        assert structure.refuse_other_values(root, peers) == {(0, 1)}, "where it is said once"
    found.append(Drift("a", "buffer", ((0,), (1,))))
    with pytest.raises(RanksDisagree, match=r"^a \(rank 0 unlike rank 1\): expected the same values of a buffer"):
        structure.refuse_other_values(root, peers)
    assert peers.disagreed == 1, "ranks of another mesh would wait"


def test_ranks_meet_before_they_compare_a_structure(root: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    peers: Any = Peers()
    monkeypatch.setattr(structure, "meshes_of", lambda units: {})
    structure.refuse_other_structure(root, peers, "full")
    assert peers.met == 1
