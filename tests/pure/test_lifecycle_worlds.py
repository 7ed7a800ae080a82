"""Small worlds: the reports that modules and autograd would make for a program, fed to the rules. No torch.

A program is a list of `Report`s; `forward`, `backward` and `step` write them from a tree of uses and the traits of the
units. A `World` holds fresh records, feeds them reports, plays the executor as far as the rules depend on it (which
gradients are there), and checks each command as it comes. The other lifecycle tests import from here;
test_lifecycle_programs.py says that these programs are the ones torch's FSDP2 really ran.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import pytest

from fullshard.schedule import Command, CommandChecker, Full, LifecycleError, Owed, Phase, RunRecord, UnitRecord, rules
from fullshard.schedule import Use as RecordedUse

# Commands of ours that torch does not have: kept memory is put aside, gradients are kept, a step ends.
OURS_ALONE = ("shelve", "expose", "accumulate", "finish", "reset")


# Fields of the records that no step writes. Every other one belongs to a step, and has to be gone with it.
RUN_SETTINGS = frozenset({"units", "prefetch_depth", "generation"})
UNIT_SETTINGS = frozenset({"empty", "index", "name", "plan"})


class Report(NamedTuple):
    """An event of the lifecycle with the flags that hold, or one of these:

    compute     the unit's weights are read now
    gradient    a gradient of one of its parameters arrived
    set         the user writes the setting `flags[0]` of the unit (of the run, where it is one of the run's): True, or
                False with "not" behind it
    """

    kind: str
    unit: str = "root"
    flags: tuple[str, ...] = ()


Program = list[Report]


class Use(NamedTuple):
    """One call of a unit, and the calls of other units inside it."""

    unit: str
    inner: tuple[Use, ...] = ()


@dataclass(frozen=True)
class Trait:
    """What is particular about a unit. The defaults are those of a block in the middle of a model."""

    # "all": every parameter gets a gradient; "none": all are frozen; "mixed": some are frozen, all others get one;
    # "some": nothing is frozen, but one parameter is not reached.
    gradients: str = "all"
    # Its inputs require a gradient.
    inputs: bool = True
    # "": none; "whole": in backward its forward is repeated; "cut": repeated until all that is needed is there;
    # "reentrant": first run without grad mode, then repeated before its own backward begins.
    recompute: str = ""
    # The gradients of the inputs are reported before those of the parameters.
    inputs_first: bool = False


PLAIN = Trait()
ROOT = Trait(inputs=False)
Traits = Mapping[str, Trait]


def trait_of(traits: Traits, unit: str) -> Trait:
    return traits.get(unit, ROOT if unit == "root" else PLAIN)


# ---- programs ----------------------------------------------------------------------------------------------


def forward(use: Use, traits: Traits, *, grad: bool = True) -> Iterator[Report]:
    """The reports of one forward."""
    trait = trait_of(traits, use.unit)
    recorded = grad and trait.recompute != "reentrant"
    yield Report("pre_forward", use.unit)
    yield Report("compute", use.unit)
    for inner in use.inner:
        yield from forward(inner, traits, grad=recorded)
        yield Report("compute", use.unit)
    flags = (("inputs",) if recorded and trait.inputs else ()) + (("outputs",) if recorded else ())
    yield Report("post_forward", use.unit, flags)


def _again(use: Use, traits: Traits) -> Iterator[Report]:
    """The reports of a forward that is repeated in backward."""
    trait = trait_of(traits, use.unit)
    yield Report("pre_forward", use.unit, ("in_backward",))
    yield Report("compute", use.unit)
    for inner in use.inner:
        yield from _again(inner, traits)
        yield Report("compute", use.unit)
    if trait.recompute == "cut":
        yield Report("forward_failed", use.unit, ("in_backward",))
    else:
        flags = ("in_backward", *(("inputs",) if trait.inputs else ()), "outputs")
        yield Report("post_forward", use.unit, flags)


def backward(uses: Sequence[Use], traits: Traits, *, reached: frozenset[str] | None = None) -> Iterator[Report]:
    """The reports of one backward of the forwards `uses`, without its end. `reached`: units the loss depends on."""
    last: dict[str, int] = {}
    walked = list(_walk(uses))
    for position, use in enumerate(walked):
        last.setdefault(use.unit, position)
    # A gradient of a parameter is complete after the use that ran first, which backward visits last.
    final = {id(walked[position]) for position in last.values()}
    for use in reversed(uses):
        yield from _backward(use, traits, final, reached)


def _walk(uses: Iterable[Use]) -> Iterator[Use]:
    for use in uses:
        yield use
        yield from _walk(use.inner)


def _backward(use: Use, traits: Traits, final: set[int], reached: frozenset[str] | None) -> Iterator[Report]:
    trait = trait_of(traits, use.unit)
    if reached is not None and use.unit not in reached:
        return
    if trait.recompute == "reentrant":
        yield from _again(use, traits)
    yield Report("pre_backward", use.unit)
    if trait.recompute in ("whole", "cut"):
        yield from _again(use, traits)
    yield Report("compute", use.unit)
    for inner in reversed(use.inner):
        yield from _backward(inner, traits, final, reached)
        yield Report("compute", use.unit)
    end = []
    if trait.gradients != "none" and id(use) in final:
        end.append(Report("gradient", use.unit))
        if trait.gradients != "some":
            end.append(Report("grads_ready", use.unit))
    if trait.inputs:
        end.insert(0 if trait.inputs_first else len(end), Report("inputs_reached", use.unit))
    yield from end


def model(*uses: Use | str) -> Use:
    """The root that calls `uses` one after another."""
    # Every use is an object of its own: `backward` tells them apart by identity.
    return Use("root", tuple(Use(use) if isinstance(use, str) else _copy(use) for use in uses))


def _copy(use: Use) -> Use:
    return Use(use.unit, tuple(map(_copy, use.inner)))


def step(*uses: Use | str, traits: Traits | None = None, reached: frozenset[str] | None = None) -> Program:
    """A forward of the model and its backward."""
    traits, root = traits or {}, model(*uses)
    return [*forward(root, traits), *backward([root], traits, reached=reached), Report("backward_end")]


def evaluation(*uses: Use | str, traits: Traits | None = None) -> Program:
    """A forward of the model that no backward follows."""
    return list(forward(model(*uses), traits or {}, grad=False))


def setting(name: str, value: bool, *units: str) -> Program:
    """The user sets `name` for `units` (of the run, when it is the run's)."""
    return [Report("set", unit, (name,) if value else (name, "not")) for unit in units or ("root",)]


# ---- the world ---------------------------------------------------------------------------------------------


class Uses:
    """Which use an output's hook belongs to: the engine puts it on the hook, here the order of the backwards says so.

    `fifo`: the forward that ran first has its backward first, as in a pipeline; otherwise the one that ran last.
    """

    def __init__(self, *, fifo: bool) -> None:
        self._first = 0 if fifo else -1
        self._waiting: dict[str, list[RecordedUse]] = {}
        self._last: dict[str, RecordedUse | None] = {}

    def forget(self) -> None:
        """The graphs of a failed step are gone."""
        self._waiting.clear()
        self._last.clear()

    def note(self, unit: UnitRecord) -> None:
        """A forward of `unit` ended."""
        waiting = self._waiting.setdefault(unit.name, [])
        # Recomputation is no use of its own, but for one that first ran without gradients (reentrant).
        if unit.sending.open and not unit.sending.begins and unit.sending.open[-1] not in waiting:
            waiting.append(unit.sending.open[-1])

    def take(self, unit: UnitRecord) -> RecordedUse | None:
        """The use whose backward begins; the last one again when there is no other (a graph that was kept)."""
        waiting = self._waiting.get(unit.name)
        if waiting and unit.phase is not Phase.BACKWARD or waiting and unit.name == "root":
            self._last[unit.name] = waiting.pop(self._first)
        return self._last.get(unit.name)


class World:
    """Fresh records of the root and `names`, and what happened to them so far.

    Raises as soon as a command is illegal, or weights are read that are not there.
    """

    def __init__(
        self,
        *names: str,
        reshard: bool | int | None = True,
        depth: int = 0,
        traits: Traits | None = None,
        empty: Iterable[str] = (),
        max_full: int | None = None,
        root_kept: bool = True,
        fifo: bool = False,
    ) -> None:
        """`reshard`, `depth`: as `reshard_after_forward` and `prefetch_depth`. `root_kept`: with `reshard` None the
        root stays full after an evaluation too, as in torch."""
        kept = reshard is False
        self.uses = Uses(fifo=fifo)
        self.units = {
            name: UnitRecord(name, index, reshard_after_forward=not (kept or (reshard is None and name == "root")))
            for index, name in enumerate(("root", *names))
        }
        for name, unit in self.units.items():
            unit.empty = name in set(empty)
            unit.plan.keeps_secondary = reshard is not None and not isinstance(reshard, bool)
            unit.plan.frees_late = trait_of(traits or {}, name).gradients in ("none", "mixed")
            unit.plan.trainable = trait_of(traits or {}, name).gradients != "none"
        self["root"].plan.keeps_in_evaluation = reshard is not None or root_kept
        self.run = RunRecord(list(self.units.values()), prefetch_depth=depth)
        self.checker = CommandChecker(max_full=max_full, stays_full={"root"})
        self.checker.full = dict.fromkeys(self.units, Full.SHARDED)
        # Reports and, behind each, the commands that followed.
        self.log: list[tuple[object, ...]] = []
        self.commands: list[tuple[str, str]] = []
        # Units with a gradient that was not handed over, and units that keep one from an earlier backward.
        self.arrived: set[str] = set()
        self.held: set[str] = set()

    def __getitem__(self, name: str) -> UnitRecord:
        return self.units[name]

    def feed(self, program: Iterable[Report]) -> list[str]:
        """Report all of it; the commands that followed, as text, without those that torch does not have."""
        start = len(self.commands)
        for report in program:
            self._hear(*report)
        return [f"{kind} {unit}" for kind, unit in self.commands[start:] if kind not in OURS_ALONE]

    def report(self, report: Report) -> list[str]:
        """Report one thing; all commands that followed, as text."""
        return [str(command) for command in self._hear(*report)]

    def _hear(self, kind: str, name: str, flags: tuple[str, ...]) -> list[Command]:
        unit = self.units[name]
        if kind == "compute":
            assert unit.full is Full.FULL or unit.empty, f"{name}: weights are read, but they are {unit.full.name}"
            return []
        if kind == "gradient":
            self.arrived.add(name)
            return []
        if kind == "set":
            setattr(unit.plan if hasattr(unit.plan, flags[0]) else self.run.ending, flags[0], "not" not in flags)
            return []
        commands = self._decide(kind, unit, flags)
        self.log.append((kind, name, flags))
        for command in commands:
            self._execute(command.kind, command.unit.name)
        followed = self.checker.full
        for name, unit in self.units.items():
            assert followed[name] is unit.full, f"{name}: {followed[name].name} by commands, {unit.full.name} by record"
        return commands

    def _decide(self, kind: str, unit: UnitRecord, flags: tuple[str, ...]) -> list[Command]:
        run = self.run
        if kind == "post_forward":
            facts = {name: name in flags for name in ("in_backward", "inputs", "outputs", "nested", "more", "opaque")}
            commands = rules.post_forward(run, unit, **facts)
            if "outputs" in flags:
                self.uses.note(unit)
            return commands
        if kind == "pre_backward":
            use, facts = self.uses.take(unit), {name: name in flags for name in ("create_graph", "needed")}
            return rules.pre_backward(run, unit, use=use, **facts)
        if kind == "inputs_reached":
            return rules.inputs_reached(run, unit, present=unit.name in self.arrived)
        present = [u.name in self.arrived or (u.name in self.held and u.plan.sync) for u in run.units]
        if kind == "finalize":
            return rules.finalize(run, unit, present)
        if kind == "backward_end":
            return rules.backward_end(run, unit, present, spent="spent" in flags)
        if kind == "reset":
            self.uses.forget()
        commands = getattr(rules, kind)(run, unit, **dict.fromkeys(flags, True))
        return commands

    def _execute(self, kind: str, name: str) -> None:
        self.log.append((kind, name))
        self.commands.append((kind, name))
        if kind != "finish" or self.run.ending.ends_step:
            # A gather may stay in flight between backwards of one step; the checker cannot know of that.
            self.checker.command(kind, name)
        if kind in ("reduce", "accumulate"):
            self.arrived.discard(name)
            (self.held.discard if kind == "reduce" else self.held.add)(name)
        elif kind in ("finish", "reset"):
            self.arrived.clear()

    @property
    def state(self) -> dict[str, object]:
        """Everything the rules noted, without settings and without the generation."""
        found: dict[str, object] = {f: getattr(self.run, f) for f in RunRecord.__slots__ if f not in RUN_SETTINGS}
        owed, ending = found.pop("owed"), found.pop("ending")
        found |= {f"owed.{f}": getattr(owed, f) for f in Owed.__slots__ if f != "optional"}
        found |= {f"owed.optional.{f}": getattr(owed.optional, f) for f in type(owed.optional).__slots__}
        found |= {f"ending.{f}": getattr(ending, f) for f in ("active", "sent", "waits")}
        for name, unit in self.units.items():
            found |= {f"{name}.{f}": getattr(unit, f) for f in UnitRecord.__slots__ if f not in UNIT_SETTINGS}
            for part in ("pins", "sending"):
                noted = found.pop(f"{name}.{part}")
                found |= {f"{name}.{part}.{f}": getattr(noted, f) for f in type(noted).__slots__}
        return found

    def full(self) -> set[str]:
        """The units that have memory now or will have it when their gather is done."""
        return {name for name, unit in self.units.items() if unit.full is not Full.SHARDED}


# ---- the checks above can fail -----------------------------------------------------------------------------


def test_a_world_notices_weights_that_are_not_there() -> None:
    """The check behind most other tests can fail."""
    world = World("a")
    with pytest.raises(AssertionError, match="a: weights are read, but they are SHARDED"):
        world.feed([Report("pre_forward"), Report("compute", "a")])


def test_a_world_notices_an_illegal_command() -> None:
    """A record that somebody changed behind the rules' back leads to one."""
    world = World("a")
    world.feed([Report("unshard", "a")])
    world["a"].full = Full.FULL
    with pytest.raises(LifecycleError, match="a: reshard needs FULL or SHELVED or SECONDARY, found PENDING"):
        world.feed([Report("reshard", "a")])


def test_a_world_notices_a_change_without_a_command() -> None:
    """The records say what the commands did."""
    world = World("a", "b")
    world["b"].full = Full.FULL
    with pytest.raises(AssertionError, match="b: SHARDED by commands, FULL by record"):
        world.feed([Report("unshard", "a")])
