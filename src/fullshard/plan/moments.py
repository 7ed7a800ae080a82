"""The moments of a step of which the units alone are known: an empty tape, without activations and optimizer.

`fullshard.report` shows the largest one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from ..schedule import UnitRecord
from .account import KINDS
from .machine import PROFILES
from .simulation import Simulation
from .spans import Event, Span, Step, Work
from .strategy import Limits, Strategy, Unit

# A device, which keeps no buffers. Times are not asked for.
_HARDWARE = replace(PROFILES["cpu"], blocking=False)


class Place(NamedTuple):
    """Where a unit runs: `inside` the forward of which other unit (its position), or -1. `early`: the share of its
    gradients that come before those of the units inside it, of parameters that are used after these."""

    inside: int = -1
    early: float = 0.0


class Peak(NamedTuple):
    """The largest moment of a step: its phase (`backward layers.3`), and (kind, unit, bytes), in the order of `KINDS`;
    and `leaving`: bytes that a host sends to others in the step."""

    phase: str
    terms: tuple[tuple[str, str, int], ...]
    leaving: int = 0


def empty_step(units: Sequence[Unit], places: Sequence[Place]) -> Step:
    """The events of a forward and backward of `units`, which are in the order in which their forwards begin; with
    gradients, and without activations."""
    spans: list[Span] = []

    def note(kind: str, unit: int, share: float = 0.0) -> None:
        nbytes = share * units[unit].gradient_nbytes if unit >= 0 else 0.0
        made = ((unit, nbytes),) if nbytes else ()
        spans.append(Span(Event(kind, unit), Work(), 0.0, 0.0, gradients=made, ready=1.0))

    def inner(unit: int) -> list[int]:
        return [i for i, place in enumerate(places) if place.inside == unit]

    def forward(unit: int) -> None:
        note("pre_forward", unit)
        for other in inner(unit):
            forward(other)
        note("post_forward", unit)

    def backward(unit: int) -> None:
        early = places[unit].early
        note("pre_backward", unit, early)
        for other in reversed(inner(unit)):
            backward(other)
        note("gradients", unit, 1.0 - early)
        if units[unit].trainable:
            note("grads_ready", unit)
        note("inputs_reached", unit)

    outermost = inner(-1)
    for unit in outermost:
        forward(unit)
    note("loss", -1)
    for unit in reversed(outermost):
        backward(unit)
    return Step(tuple(spans), (), 0.0, 1.0)


def largest(
    units: Sequence[Unit],
    places: Sequence[Place],
    limits: Limits,
    records: Sequence[UnitRecord] | None = None,
) -> Peak:
    """The largest moment of a steady step of `units`: of the last two backwards of a window where they hold gradients.
    Buffers of messages are counted while they are in use."""
    if not any(unit.groups for unit in units):
        return Peak("never", ())
    holds = any(unit.holds_gradients for unit in units)
    strategy = Strategy(ranks=2, accumulate=2 if holds else 1, optimizer="none")
    simulation = Simulation(units, strategy, _HARDWARE, limits=limits, records=records)
    simulation.run(empty_step(units, places))
    order = {unit.shape.title: place for place, unit in enumerate(units)}
    terms = sorted(simulation.bytes.at_most, key=lambda term: (KINDS.index(term[0]), order[term[1]]))
    return Peak(
        simulation.found.peak.phase,
        tuple((kind, name, round(nbytes)) for kind, name, nbytes in terms),
        round(sum(traffic.leaving for traffic in simulation.found.traffic.values())),
    )
