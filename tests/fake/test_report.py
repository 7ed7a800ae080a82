"""`fullshard.report`: what it expects is what is there; what is left unsharded and what looks wrong is named."""

from __future__ import annotations

import dataclasses
import gc
import json
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fullshard
from fullshard import MixedPrecisionPolicy, fully_shard
from fullshard.comm.reduce import MessageReduce
from fullshard.engine import Unit, unit_of
from fullshard.layout import FACTS_NUMEL
from fullshard.observe import expected
from fullshard.observe.report import human
from tests.harness.behaviours import behaviour
from tests.harness.fake import fake_world
from tests.harness.models import BY_NAME, Transformer, adamw

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": adamw,
    "amsgrad": lambda p: torch.optim.Adam(p, amsgrad=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "rmsprop": lambda p: torch.optim.RMSprop(p, momentum=0.9, centered=True),
    "adagrad": torch.optim.Adagrad,
    "adadelta": torch.optim.Adadelta,
    "adamax": torch.optim.Adamax,
    "radam": torch.optim.RAdam,
}


def units_of(model: nn.Module) -> list[tuple[str, Unit]]:
    """Those with parameters, by name."""
    found = [(name, unit_of(module)) for name, module in model.named_modules()]
    return [(name, unit) for name, unit in found if unit is not None and unit.groups]


def steps(case: Any, model: nn.Module, optimizer: torch.optim.Optimizer, count: int = 2) -> None:
    """The last one without its zero_grad."""
    for step in range(count):
        optimizer.zero_grad()
        case.loss(model, case.batch(step)).backward()
        optimizer.step()


def test_units_have_ranks_sizes_and_names_and_the_former_call_returns_them() -> None:
    with fake_world(4):
        net = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6))
        with pytest.warns(DeprecationWarning, match=r"use report\(model\)\.units") as told:
            assert fullshard.observe.inspect_units(net) == ()
        assert told[0].filename == __file__
        fully_shard([net[0], net[1]], mp_policy=fullshard.MixedPrecisionPolicy(torch.bfloat16, torch.float64))
        root, pair = fullshard.report(fully_shard(net)).units
        assert (pair.storage_itemsize, pair.compute_itemsize, pair.reduce_itemsize, pair.world) == (4, 2, 8, 4)
        # Two of six rows on each of the first three ranks.
        assert pair.local_numel == 2 * (2 * 6 + 2) <= pair.padded_local_numel
        assert (pair.name, pair.param_names) == ("0+1", ("0.weight", "0.bias", "1.weight", "1.bias"))
        # Asked about one module of the two, the other has its names in the unit.
        assert len(fullshard.report(net[0]).units[0].param_names) == 4
        with pytest.warns(DeprecationWarning):
            assert fullshard.observe.inspect_units(net) == (root, pair)


@pytest.mark.sample(4)
@behaviour(
    "`report`: units, what is not sharded, bytes expected and measured",
    area="state",
    torch="none",
    reason="a tool of ours",
)
@pytest.mark.parametrize("world", [1, 3, 1000])
@pytest.mark.parametrize("name", ["tied", "tiny_dims", "frozen", "mixed_shapes"])
def test_expected_bytes_are_the_measured_ones(name: str, world: int) -> None:
    """Of every unit, after a step: parameters, gradients, AdamW's state. On the first, a middle and the last rank."""
    case = BY_NAME[name]
    for rank in {0, world // 2, world - 1}:
        with fake_world(world, rank=rank):
            model = case.shard(case.build(), fully_shard)
            optimizer = adamw(model.parameters())
            before = fullshard.report(model, optimizer)
            steps(case, model, optimizer)
            after = fullshard.report(model, optimizer)
            assert before.expected == after.expected and before.rank == after.rank == rank
            for unit in after.units:
                assert unit.measured == unit.expected, f"rank {rank}: {unit.name or 'root'}"
                assert unit.full_nbytes_live == 0
            assert after.measured == after.expected
            assert before.measured == dataclasses.replace(before.expected, gradients=0, optimizer=0)
            assert sum(unit.numel for unit in after.units) == sum(p.numel() for p in case.build().parameters())
            assert sum(unit.local_numel for unit in after.units) == sum(
                p.to_local().numel() for p in model.parameters()
            )


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_of_torch_s_elementwise_optimizers_is_expected(name: str) -> None:
    case = BY_NAME["frozen"]
    with fake_world(4, rank=1):
        model = case.shard(case.build(), fully_shard)
        optimizer = OPTIMIZERS[name](p for p in model.parameters() if p.requires_grad)
        steps(case, model, optimizer, 1)
        report = fullshard.report(model, optimizer)
        assert report.measured.optimizer == report.expected.optimizer
        assert (report.expected.optimizer == 0) == (name == "sgd")


def test_another_optimizer_s_state_is_not_known_but_measured() -> None:
    class Own(torch.optim.AdamW):
        pass

    case = BY_NAME["one_unit"]
    with fake_world(2):
        model = case.shard(case.build(), fully_shard)
        optimizer = Own(model.parameters())
        steps(case, model, optimizer, 1)
        report = fullshard.report(model, optimizer)
        assert report.expected.optimizer is None and report.measured.optimizer
        assert " / ?" in str(report)
        assert fullshard.report(model).measured.optimizer is None


def test_rows_say_what_the_units_are() -> None:
    case = BY_NAME["tied"]
    with fake_world(8, rank=3):
        mesh = init_device_mesh("cpu", (8,), mesh_dim_names=("dp",))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        model = case.shard(case.build(), fully_shard, mesh=mesh, mp_policy=policy)
        report = fullshard.report(model)
        root, block = report.units[:2]
        assert [unit.name for unit in report.units] == ["", "layers.0", "layers.1", "layers.2"]
        assert root.module_class == "Transformer" and root.tied == (("embedding.weight", "head.weight"),)
        assert root.placements == ("(Shard(dim=0),) on dp=8",)
        assert (root.storage_dtypes, root.compute_dtypes, root.reduce_dtypes) == (
            ("float32",), ("bfloat16",), ("float32",),
        )  # fmt: skip
        assert "layers.0.attention_norm.weight" in block.param_names
        assert block.num_params == block.num_trainable == len(block.param_names)
        assert report.peak_nbytes == sum(nbytes for _, nbytes in report.peak_terms) > report.expected.parameters
        text = str(report)
        for part in (
            "layers.0 .. layers.2",
            "_Block x3",
            "float32 bfloat16 float32",
            "rank 3;",
            "dp=8",
            "expected peak",
        ):
            assert part in text, part
        assert "tied: embedding.weight = head.weight" in text
        assert all(len(line) < 200 for line in text.splitlines())
        fields = json.loads(report.to_json())
        assert fields["units"][1]["param_names"] == list(block.param_names)
        assert fields["peak_nbytes"] == report.peak_nbytes and fields["measured"]["optimizer"] is None
        with pytest.raises(dataclasses.FrozenInstanceError):
            report.rank = 0  # type: ignore[misc]
        # Another order of execution is the one that counts for the peak, once it is known.
        model(case.batch(0)[0])
        live = fullshard.report(model).units[0].full_nbytes_live
        assert live == sum(unit.full_nbytes_live for unit in fullshard.report(model).units) > 0


def test_kept_parts_are_in_the_report() -> None:
    """An integer reshard: what is kept is expected before the first step, is there after forward and not after
    backward; and it is a part of the peak."""
    case = dataclasses.replace(
        BY_NAME["transformer"], make=lambda: Transformer(depth=6), units=tuple(f"layers.{i}" for i in range(6))
    )
    with fake_world(16, rank=5):
        mesh = init_device_mesh("cpu", (2, 8), mesh_dim_names=("replicate", "shard"))
        model: Any = case.shard(case.build(), fully_shard, mesh=mesh, reshard_after_forward=2)
        before = fullshard.report(model)
        assert all(unit.kept_nbytes > 0 and unit.kept_nbytes_live == 0 for unit in before.units)
        loss = case.loss(model, case.batch(0))
        during = fullshard.report(model)
        for unit, info in zip(during.units, fullshard.report(model).units, strict=True):
            assert unit.kept_nbytes == unit.kept_nbytes_live == info.kept_nbytes_live
        kept = sum(unit.kept_nbytes for unit in during.units)
        line = "kept between forward and backward, of an integer reshard_after_forward"
        assert f"{line}: {human(kept)}; now {human(kept)}" in str(during)
        loss.backward()
        after = fullshard.report(model)
        assert not any(unit.kept_nbytes_live for unit in after.units)
        for found in (before, after):
            terms = dict(found.peak_terms)
            parts = {name: nbytes for name, nbytes in terms.items() if name.startswith("kept part of")}
            assert parts and set(parts.values()) == {after.units[1].kept_nbytes}
        model.set_reshard_after_forward(True)
        assert not any(unit.kept_nbytes for unit in fullshard.report(model).units)
        assert line not in str(fullshard.report(model))


def test_the_peak_knows_replicas_and_who_adds() -> None:
    """Behind an exchange the sum over replicas has memory of its own; a backend sums in the reduce dtype."""
    case = BY_NAME["residual"]
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    peaks = {}
    for shape, communication in (((1, 8), None), ((8, 8), None), ((8, 8), "torch")):
        with fake_world(shape[0] * shape[1]):
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
            model: Any = case.shard(case.build(), fully_shard, mesh=mesh, mp_policy=policy)
            if communication:
                model.set_communication(communication)
            steps(case, model, torch.optim.SGD(model.parameters(), lr=0.1), 2)
            groups = [expected._planned(unit, 0, name) for name, unit in units_of(model)]
            memories = [group.sent for group in groups if group.sent is not None]
            peaks[shape, communication] = [(m.send_nbytes, m.receive_nbytes, m.replicating_nbytes) for m in memories]
    for alone, exchanged, native in zip(*peaks.values(), strict=True):
        send, receive, chunk = exchanged
        assert alone == (send, receive, 0) and receive == send and chunk == 2 * send // 8
        # float32 instead of bfloat16, and no room for a digest; one chunk arrives, and it is summed over the replicas.
        assert native[0] == 2 * (send - 8 * FACTS_NUMEL * 2) and native[1] == native[2] == native[0] // 8


def test_a_unit_of_several_modules_and_one_without_parameters() -> None:
    with fake_world(2):
        net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
        fully_shard([net[0], net[2]])
        fully_shard(net[1])
        fully_shard(net)
        report = fullshard.report(net)
        assert [(u.name, u.module_class, u.num_params) for u in report.units] == [
            ("", "Sequential", 0),
            ("0+2", "Linear+Linear", 4),
            ("1", "Linear", 2),
        ]
        assert report.units[1].param_names == ("0.weight", "0.bias", "2.weight", "2.bias")
        assert report.expected.optimizer is None and "?" not in str(report)


def test_what_is_left_unsharded_is_named() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(8, 8)
            self.norm = nn.BatchNorm1d(8)
            self.scale = nn.Parameter(torch.ones(3, dtype=torch.float16))
            self.outside = nn.Linear(8, 2)

    with fake_world(2):
        net = Net()
        fully_shard(net.body)
        fully_shard(net.norm, ignored_params={net.norm.weight})
        net.outside.requires_grad_(False)
        report = fullshard.report(net, torch.optim.SGD(net.parameters(), lr=1.0))
        rows = {
            item.name: (item.kind, item.shape, item.dtype, item.nbytes, item.requires_grad) for item in report.unsharded
        }
        assert rows == {
            "scale": ("parameter", (3,), "float16", 6, True),
            "norm.weight": ("parameter", (8,), "float32", 32, True),
            "norm.running_mean": ("buffer", (8,), "float32", 32, False),
            "norm.running_var": ("buffer", (8,), "float32", 32, False),
            "norm.num_batches_tracked": ("buffer", (), "int64", 8, False),
            "outside.weight": ("parameter", (2, 8), "float32", 64, False),
            "outside.bias": ("parameter", (2,), "float32", 8, False),
        }
        assert [unit.name for unit in report.units] == ["body", "norm"]
        (note,) = report.notes
        assert note.startswith("trainable and in no unit: scale, norm.weight;")
        said = str(report)
        assert "not sharded: parameter norm.weight (8,) float32, 32 B, trainable" in said
        assert "not sharded: buffer norm.running_mean .. norm.running_var x2 (8,) float32, 64 B\n" in said


def test_what_looks_wrong_is_noted() -> None:
    with fake_world(4):
        plain = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
        early = torch.optim.SGD(plain.parameters(), lr=1.0)  # the trap: built before fully_shard
        fully_shard(plain[0])
        fully_shard(plain)
        notes = fullshard.report(plain, early).notes
        assert [note.split(":")[0] for note in notes] == [
            "the optimizer holds 4 tensors that are no parameters of this model",
            "trainable, but not in the optimizer",
        ]
        assert fullshard.report(plain, torch.optim.SGD(plain.parameters(), lr=1.0)).notes == ()
        with torch.device("meta"):
            empty = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
        fully_shard(empty)
        report = fullshard.report(empty)
        assert report.measured.parameters == 0 and report.expected.parameters == 4 * (2 * 64 * 64 + 2 * 64) // 4
        assert report.notes[0].startswith("on the meta device: 0.weight, 0.bias, 1.weight, 1.bias;")
        plain.set_requires_gradient_sync(False)
        plain(torch.ones(1, 64)).sum().backward()
        report = fullshard.report(plain)
        assert report.notes[0].startswith("gradients accumulated and not reduced yet: 1.weight")
        assert report.measured.gradients == sum(p.numel() * 4 for p in plain.parameters()), "whole, on every rank"
    with fake_world(64):
        wide = nn.Sequential(nn.Linear(512, 2), nn.Linear(2, 512))
        fully_shard(wide[0])
        assert fullshard.report(wide).notes[0] == (
            "trainable and in no unit: 1.weight, 1.bias; their gradients are not averaged over the ranks"
        )
        fully_shard(wide)
        assert fullshard.report(wide).notes == ("more padding than parameters: 0; dims are small for so many ranks",)
    with pytest.raises(ValueError, match="apply fully_shard first"):
        fullshard.report(nn.Linear(2, 2))


def test_memory_that_waits_for_a_recorded_graph_is_noted() -> None:
    """A backward that records a graph, thrown away; then what ends the wait."""
    with fake_world(2):
        model: Any = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
        x = torch.ones(2, 6, requires_grad=True)
        for ends in (lambda: model(x).sum().backward(), lambda: [layer.reshard() for layer in model]):
            assert fullshard.report(model).notes == ()
            torch.autograd.grad(model(x).pow(2).sum(), x, create_graph=True)
            live = sum(unit.full_nbytes_live for unit in fullshard.report(model).units)
            (note,) = fullshard.report(model).notes
            assert live and f"0, 1, {human(live)}; " in note and "create_graph" in note
            ends()
        assert fullshard.report(model).notes == ()


def test_it_sends_nothing_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    case = BY_NAME["residual"]
    with fake_world(2) as group:
        model = case.shard(case.build(), fully_shard)
        optimizer = adamw(model.parameters())
        case.loss(model, case.batch(0)).backward()
        loss = case.loss(model, case.batch(1))
        standing = [id(p) for p in model.parameters()]
        before = [(p.data_ptr(), p._version) for p in model.parameters()]
        states = len(optimizer.state)
        sent: list[str] = []
        singles = ("all_gather_single", "all_to_all_single", "reduce_scatter_single")
        for name in (*singles, "allreduce", "broadcast", "allgather"):
            monkeypatch.setattr(type(group), name, lambda *_, name=name, **__: sent.append(name))
        fullshard.report(model, optimizer).to_json()
        assert not sent and [id(p) for p in model.parameters()] == standing and len(optimizer.state) == states
        assert [(p.data_ptr(), p._version) for p in model.parameters()] == before
        with pytest.raises(AttributeError):  # that the above would have been seen
            loss.backward()
        assert sent


def _random_subsets(world: int, steps: int, accumulate: int) -> list[int]:
    """Bytes of the kept message buffers after each step, of a model of which each step trains other parameters."""
    draw = random.Random(0)
    found = []
    with fake_world(world):
        model = nn.Sequential(*(nn.Sequential(nn.Linear(48, 48), nn.Linear(48, 48)) for _ in range(4)))
        for module in (*model, model):
            fully_shard(module)
        for _ in range(steps):
            for param in model.parameters():
                param.requires_grad_(draw.random() < 0.5)
            next(model.parameters()).requires_grad_(True)
            for micro in range(accumulate):
                model.set_requires_gradient_sync(micro == accumulate - 1)
                model(torch.ones(2, 48)).sum().backward()
            found.append(fullshard.report(model).message_nbytes)
    return found


def test_buffers_outlive_a_window_of_micro_batches() -> None:
    """Nothing is reduced in between, however long it is."""
    with fake_world(4):
        model = nn.Sequential(*(nn.Linear(48, 48) for _ in range(3)))
        for module in (*model, model):
            fully_shard(module)
        found = []
        for micro in range(30):
            model.set_requires_gradient_sync(micro % 10 == 9)
            model(torch.ones(2, 48)).sum().backward()
            found.append(fullshard.report(model).message_nbytes)
        assert found[9] > found[8] and set(found[9:]) == {found[9]}


def test_buffers_of_what_is_frozen_are_freed() -> None:
    """By steps that leave nothing to send at the end of their backward, as most do."""
    with fake_world(4):
        model = nn.Sequential(*(nn.Linear(48, 48) for _ in range(3)))
        for module in (*model, model):
            fully_shard(module)
        found = []
        for step in range(8):
            if step == 5:
                for layer in model:
                    layer.weight.requires_grad_(False)
            model(torch.ones(2, 48)).sum().backward()
            found.append(fullshard.report(model).message_nbytes)
        assert found[4] == found[1] and found[7] < found[4]


@pytest.mark.slow
def test_ways_of_gradients_that_no_step_takes_any_more_are_dropped() -> None:
    """One for each set of trainable parameters; those of the last steps are kept."""

    def alive() -> list[MessageReduce]:
        gc.collect()
        return [found for found in gc.get_objects() if issubclass(type(found), MessageReduce)]

    # Held, not their ids: the ids of objects that are freed meanwhile come again.
    others = alive()

    def channels() -> int:
        return len(alive()) - len(others)

    with fake_world(4):
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))
        fully_shard(model)
        counted = {}
        for number in range(1, 41):
            for bit, param in enumerate(model.parameters()):
                param.requires_grad_(bool(number >> bit & 1))
            model(torch.ones(2, 8)).sum().backward()
            if number in (1, 20, 40):
                counted[number] = channels()
        assert counted[40] == counted[20] > counted[1]


@pytest.mark.sample(1)
@pytest.mark.parametrize("accumulate", [1, 3])
def test_buffers_of_layouts_that_no_step_has_any_more_are_freed(accumulate: int) -> None:
    """Progressive unfreezing, layer drop, adapters that change: the layouts of all steps together were kept for ever
    (280 MiB for a model of 2 MiB after 200 steps)."""
    found = _random_subsets(4, 200, accumulate)
    assert found[-1] <= 2 * found[1] and max(found) <= 2 * max(found[1:10])
