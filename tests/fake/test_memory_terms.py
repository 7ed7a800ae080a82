"""The moments of the planner's simulation against bytes counted on the engine: shards, full parameters, buffers.

What is simulated is made from the plain model's shapes and from dtypes, knowing nothing of the engine's objects.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from fullshard import MixedPrecisionPolicy, fully_shard, report
from fullshard.engine import Unit, unit_of
from fullshard.layout import (
    FlatLayout,
    ShardLayout,
    UnitMemory,
    align_numel,
    direct_indices,
    plan_gather,
    secondary_layout,
)
from fullshard.plan import Strategy
from fullshard.plan.description import Parameter, UnitShape
from fullshard.plan.machine import PROFILES
from fullshard.plan.moments import Place, empty_step
from fullshard.plan.simulation import Simulation
from fullshard.plan.strategy import Group, Limits
from fullshard.plan.strategy import Unit as Planned
from fullshard.policy import use_options
from fullshard.schedule import Command, UnitRecord
from tests.harness.fake import fake_world
from tests.harness.models import BY_NAME, Case


def _single_weights() -> nn.Module:
    """Units of one parameter each, which are gathered straight into place. The root has the first module."""
    return nn.Sequential(nn.Linear(6, 6), *(nn.Linear(6, 6, bias=False) for _ in range(3)))


class _FewRows(nn.Module):
    """Dims of one to four, down to one element."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(1))
        self.first = nn.Linear(4, 3)
        self.narrow = nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.narrow(torch.tanh(self.first(x * self.gain)))


CASES = {name: BY_NAME[name] for name in ("uneven_mlp", "residual", "one_unit", "transformer", "tied")} | {
    "single_weights": Case("single_weights", _single_weights, ("1", "2", "3"), (6,), (6,)),
    "few_rows": Case("few_rows", _FewRows, ("first", "narrow"), (4,), (1,)),
}
POLICIES = {
    "float32": (MixedPrecisionPolicy(), (4, 4, 4)),
    "bf16 compute": (MixedPrecisionPolicy(torch.bfloat16, torch.float32), (4, 2, 2)),
    "bf16 reduce": (MixedPrecisionPolicy(None, torch.bfloat16), (4, 4, 2)),
}


@dataclass(frozen=True)
class Setting:
    world: int
    policy: str = "float32"
    # An integer: that many ranks keep a unit between forward and backward.
    reshard: bool | int | None = None
    prefetch_depth: int = 1
    reductions_in_flight: int = 2
    communication: str = "auto"
    # Every parameter is cut along its last dim, not the first.
    last_dim: bool = False
    # `world` ranks share, and so many times as many there are.
    replicas: int = 1
    # Of gathers ahead, in the place of `prefetch_depth`.
    prefetch_nbytes: int | None = None


SETTINGS = [
    Setting(1),
    Setting(1, "bf16 compute"),
    Setting(2),
    Setting(2, "bf16 compute", reshard=True),
    Setting(2, "bf16 reduce", reshard=False, reductions_in_flight=1),
    Setting(2, prefetch_depth=0, communication="torch"),
    Setting(8, "bf16 compute", prefetch_depth=2, reductions_in_flight=3),
    Setting(8, reshard=True, prefetch_depth=3, reductions_in_flight=1),
    Setting(64, "bf16 compute"),
    Setting(64, reshard=False),
    Setting(1, "bf16 compute", last_dim=True),
    Setting(2, "bf16 reduce", last_dim=True),
    Setting(8, "bf16 compute", prefetch_depth=2, communication="torch", last_dim=True),
    Setting(64, reshard=False, reductions_in_flight=1, last_dim=True),
    Setting(2, replicas=2),
    Setting(8, "bf16 compute", reductions_in_flight=1, replicas=8),
    Setting(2, "bf16 reduce", communication="torch", reductions_in_flight=1, replicas=3),
    Setting(1, "bf16 compute", replicas=4),
    Setting(1, "bf16 reduce", reductions_in_flight=1, replicas=2),
    Setting(8, reshard=2),
    Setting(8, "bf16 compute", reshard=4, prefetch_depth=2),
    Setting(4, "bf16 reduce", reshard=2, reductions_in_flight=1, communication="torch"),
    Setting(64, "bf16 compute", reshard=8, last_dim=True),
    Setting(4, "bf16 compute", reshard=2, replicas=3),
    Setting(6, reshard=3, prefetch_depth=0),
    Setting(2, prefetch_nbytes=0),
    Setting(8, "bf16 compute", prefetch_nbytes=500, reshard=True),
    Setting(4, prefetch_nbytes=1200),
    Setting(2, "bf16 reduce", prefetch_nbytes=1 << 20),
]


def _units(case: Case, setting: Setting) -> list[Planned]:
    """The root, then the other units in the order in which they run."""
    _, (storage, compute, wire) = POLICIES[setting.policy]
    model = case.build()
    seen: set[int] = set()
    by_unit: dict[str, dict[str, tuple[int, ...]]] = {name: {} for name in ("", *case.units)}
    for name, parameter in model.named_parameters():
        owner = max((u for u in by_unit if not u or name.startswith(u + ".")), key=len)
        if id(parameter) not in seen:
            by_unit[owner][name.removeprefix(owner + ".") if owner else name] = tuple(parameter.shape)
        seen.add(id(parameter))
    units = []
    for name, shapes in by_unit.items():
        parameters = tuple(Parameter(each, shape, "float32") for each, shape in shapes.items())
        degree = setting.reshard if isinstance(setting.reshard, int) and setting.reshard > 1 else 0
        reshard = setting.reshard is not False if name else setting.reshard not in (None, False)
        groups = (_group(name or "root", parameters, setting, degree, storage, compute, wire),) if shapes else ()
        units.append(Planned(UnitShape(name, "", parameters), groups, not reshard, degree))
    return units


def _group(
    name: str, parameters: Sequence[Parameter], setting: Setting, degree: int, storage: int, compute: int, wire: int
) -> Group:
    layouts = [ShardLayout(p.shape, -1 if setting.last_dim else 0, setting.world) for p in parameters]
    pack = FlatLayout.build(
        layouts,
        align_numel([storage, compute, wire]),
        first=direct_indices(layouts, compute, backend="fake", direct_threshold_nbytes=1 << 20),
        names=[p.name for p in parameters],
        full_align_numel=align_numel([storage, compute, wire]) if setting.world == 1 else None,
    )
    plan = plan_gather(pack, compute, backend="fake", direct_threshold_nbytes=1 << 20)
    memory = UnitMemory(
        name,
        pack,
        plan,
        storage,
        compute,
        # One reduce-scatter is made of the reduce dtype, which only "bf16 reduce" narrows.
        wire if setting.communication != "torch" else (2 if setting.policy == "bf16 reduce" else 4),
        exchanges=setting.communication != "torch",
        replicas=setting.replicas,
        sum_itemsize=2
        if setting.policy == "bf16 reduce" and (setting.communication == "torch" or setting.world == 1)
        else 4,
        kept=secondary_layout(pack, plan.direct, degree) if degree else None,
    )
    return Group(memory, replace(memory, kept=None), tuple(parameters), 0, tuple(p.name for p in parameters))


class _Live(NamedTuple):
    """Bytes that are allocated: of full parameters, and of the parts of an integer reshard."""

    full: int
    kept: int


class _Simulated(Simulation):
    """Bytes when a unit begins its forward, has copied the part that it keeps, and is freed in backward; and those of
    messages among replicas when the gradients of a unit are ready."""

    def __init__(self, units: Sequence[Planned], setting: Setting) -> None:
        limits = Limits(setting.prefetch_depth, setting.prefetch_nbytes, setting.reductions_in_flight)
        super().__init__(units, Strategy(ranks=2, optimizer="none"), PROFILES["cpu"], limits=limits)
        self.forward: dict[str, _Live] = {}
        self.resharding: dict[str, _Live] = {}
        self.backward: dict[str, _Live] = {}
        self.under_way: dict[str, int] = {}
        self.run(empty_step(units, [Place(-1), *(Place(0) for _ in units[1:])]))

    def live(self) -> _Live:
        return _Live(int(self.bytes.kinds["full parameters"]), int(self.bytes.kinds["kept parts"]))

    def _event(self, kind: str, record: UnitRecord, use: int) -> None:
        super()._event(kind, record, use)
        if kind == "pre_forward":
            self.forward[record.name] = self.live()

    def _reshard_secondary(self, unit: Planned, record: UnitRecord) -> None:
        full, kept = self.live()
        own = sum(group.memory.kept_nbytes for group in unit.groups)
        self.resharding[record.name] = _Live(full, kept + own)
        super()._reshard_secondary(unit, record)

    def _reshard(self, unit: Planned, record: UnitRecord) -> None:
        if self.schedule.in_backward:
            self.backward[record.name] = self.live()
        super()._reshard(unit, record)

    def _reduce(self, unit: Planned, record: UnitRecord) -> None:
        flights = self.reductions.replicating
        self.under_way[record.name] = sum(int(f.cast) for f in flights if f.group.memory.pack.world > 1)
        super()._reduce(unit, record)

    @property
    def shards(self) -> int:
        return int(self.bytes.kinds["parameters"])

    @property
    def buffers(self) -> int:
        """Those that are kept from step to step."""
        return sum(int(n) for (_, name), n in self.bytes.there.items() if name == "kept from step to step")


class _Counted:
    """What is allocated whenever a unit begins its forward, has copied the part that it keeps, and is freed in
    backward."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.forward: dict[str, _Live] = {}
        self.resharding: dict[str, _Live] = {}
        self.backward: dict[str, _Live] = {}
        # Messages under way that follow another one, when the gradients of a unit are ready.
        self.under_way: dict[str, int] = {}
        self.in_backward = False
        for name, module in model.named_modules():
            if unit_of(module) is not None:
                module.register_forward_pre_hook(self._noting(name or "root"))

    def live(self) -> _Live:
        infos = report(self.model).units
        return _Live(sum(i.full_nbytes_live for i in infos), sum(i.kept_nbytes_live for i in infos))

    def _noting(self, name: str) -> Any:
        def note(*_: Any) -> None:
            self.forward[name] = self.live()

        return note

    def listen(self) -> None:
        root = _unit(self.model).root
        assert root is not None
        root.executor.listeners.append(self._command)
        for unit in root.units:
            for part in [] if unit.channels.secondary is None else unit.channels.secondary.parts:
                if part is not None:
                    part.show = self._showing(unit.record.name, part.show)  # type: ignore[method-assign]

    def _showing(self, name: str, show: Callable[[], None]) -> Callable[[], None]:
        # Between the copy of the part and the release of the full parameters.
        def note() -> None:
            self.resharding[name] = self.live()
            show()

        return note

    def _command(self, command: Command) -> None:
        # Listeners are called before the command is done: all gradients of the unit are there, and its weights.
        if self.in_backward and command.kind == "reshard":
            self.backward[command.unit.name] = self.live()
        root = _unit(self.model).root
        assert root is not None
        if self.in_backward and command.kind == "reduce":
            self.under_way[command.unit.name] = root.executor.replicating_nbytes


def _unit(module: nn.Module) -> Unit:
    unit = unit_of(module)
    assert unit is not None
    return unit


def _run(case: Case, setting: Setting) -> tuple[_Counted, int, int]:
    """Three steps; the counts of the last, bytes of the shards, and bytes of the kept message buffers."""
    policy, _ = POLICIES[setting.policy]
    model = case.build()
    options: dict[str, Any] = {"shard_placement_fn": lambda parameter: Shard(-1)} if setting.last_dim else {}
    if setting.replicas > 1:
        axes = (setting.replicas, setting.world)
        options["mesh"] = init_device_mesh("cpu", axes, mesh_dim_names=("replicate", "shard"))
    case.shard(model, fully_shard, mp_policy=policy, reshard_after_forward=setting.reshard, **options)
    model.set_memory_budget(prefetch=setting.prefetch_nbytes)
    counted = _Counted(model)
    for step in range(3):
        loss = case.loss(_Float32(model), case.batch(step))
        if step == 0:
            counted.listen()
        counted.in_backward = True
        loss.backward()
        counted.in_backward = False
        model.zero_grad()
    assert counted.live() == _Live(0, 0)
    groups = [group for module in model.modules() if (unit := unit_of(module)) for group in unit.groups]
    root = _unit(model).root
    assert root is not None
    return counted, sum(group.flat.nbytes for group in groups), root.shared.pool.nbytes


class _Float32(nn.Module):
    """Outputs in float32, as the loss wants them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x).float()


@pytest.mark.sample(8)
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_the_simulation_has_what_is_counted(name: str, setting: Setting) -> None:
    case = CASES[name]
    options = {
        "prefetch_depth": setting.prefetch_depth,
        "reductions_in_flight": setting.reductions_in_flight,
        "communication": setting.communication,
    }
    with fake_world(setting.world * setting.replicas), use_options(**options):
        counted, shards, buffers = _run(case, setting)
    units = _units(case, setting)
    simulated = _Simulated(units, setting)
    assert shards == simulated.shards
    for unit in (unit for unit in units if unit.groups):
        title = unit.shape.title
        assert counted.forward[title] == simulated.forward[title], f"forward of {title}"
        assert counted.resharding.get(title) == simulated.resharding.get(title), f"resharding of {title}"
        if setting.world > 1 or any(group.memory.full_nbytes for group in unit.groups):
            assert counted.backward[title] == simulated.backward[title], f"backward of {title}"
        assert counted.under_way[title] == simulated.under_way[title], f"backward of {title}"
    assert buffers == simulated.buffers


@pytest.mark.sample(8)
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_a_root_whose_gradients_come_first_needs_no_more_than_the_simulation_has(setting: Setting) -> None:
    """Its own parameters are used last, so it is freed first; the simulation keeps it to the end."""
    case = BY_NAME["tiny_dims"]
    with fake_world(setting.world * setting.replicas):
        counted, shards, _ = _run(case, setting)
    simulated = _Simulated(_units(case, setting), replace(setting, prefetch_depth=1, reductions_in_flight=2))
    assert shards == simulated.shards
    assert counted.forward["root"] == simulated.forward["root"]
    found, expected = (
        [*each.forward.values(), *each.resharding.values(), *each.backward.values()] for each in (counted, simulated)
    )
    assert max(map(sum, found)) <= max(map(sum, expected))


def test_the_expectation_is_not_trivial() -> None:
    """In the settings above every kind of bytes is there somewhere."""
    units = [unit for s in SETTINGS for case in CASES.values() for unit in _units(case, s)]
    groups = [group.memory for unit in units for group in unit.groups]
    for kind in ("full", "arriving", "staging", "send", "receive", "replicating", "kept", "secondary_staging"):
        sizes = {getattr(memory, f"{kind}_nbytes") for memory in groups}
        assert len(sizes) > 3, kind
