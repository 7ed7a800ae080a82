"""What a case of the fault matrix is: data. The fault, the program that it strikes, and what must come of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor, nn

from tests.harness.faults import Fault
from tests.threads.programs import Model

# A rank that learns of its peer's failure has this long from the moment it struck.
WITHIN_SECONDS = 5.0
# The process group's own limit: longer than that of every case, so that what is left to it counts as a hang.
GROUP_SECONDS = 90.0


@dataclass(frozen=True)
class Setup:
    """The training that is disturbed: AdamW on `model`, each of its layers a unit; see program.py.

    `options(impl)`: arguments of `fully_shard`. `units`: names of the modules to shard before the root; None: its
    layers. `loss(run, tokens)`: a scalar. `micros`: micro-batches of a step; `hold`: only the last one is reduced.
    `catches`: so many exceptions of steps the program catches; it clears gradients (unless it `keeps` the window) and
    tries that step again. `guard`: forward and backward are inside `fullshard.guard(model)`; with "step" the update is,
    too, inside `fullshard.guard(model, optimizer)`. `finite`: what the check of the gradients does.

    `optimizer(run)`: AdamW of all parameters without it. `schedule(optimizer)`: of its learning rate, stepped after
    each update. `how`: what makes the units. `root`: the module that is sharded last; what is above it no unit has.
    `ignored`: parameters that no unit has, by name. `averaged`: gradients of what no unit has are averaged by hand.
    `group_seconds`: the process group's own limit. `hosted`: rank 0 serves the store, as without a launcher.
    """

    world: int = 2
    steps: int = 3
    model: Callable[[], nn.Module] = Model
    units: tuple[str, ...] | None = None
    options: Callable[[Any], dict[str, Any]] | None = None
    loss: Callable[[Any, Tensor], Tensor] | None = None
    micros: int = 1
    hold: bool = False
    catches: int = 0
    keeps: bool = False
    guard: bool | Literal["step"] = False
    scaler: bool = False
    finite: Literal["", "raise", "skip"] = ""
    clip: bool = False
    recompute: bool = False
    environment: tuple[tuple[str, str], ...] = ()
    optimizer: Callable[[Any], Any] | None = None
    schedule: Callable[[Any], Any] | None = None
    how: Literal["fully_shard", "replicate"] = "fully_shard"
    root: str = ""
    ignored: tuple[str, ...] = ()
    averaged: bool = False
    group_seconds: float = GROUP_SECONDS
    hosted: bool = False


@dataclass(frozen=True)
class Equal:
    """No error, and parameters, buffers and optimizer state on all ranks equal those of another run.

    `to`: "undisturbed", the same program without the faults; or "plain", the same program, with faults of kind "do" on
    all ranks, on one process without sharding. `bound`: of the largest difference, as a part of the tensor's largest
    element; 0 is bitwise.
    """

    to: Literal["undisturbed", "plain"] = "undisturbed"
    bound: float = 0.0


# As in tests/threads/programs.py: float32 sums in another order, behind AdamW.
PLAIN = Equal("plain", bound=2e-5)


@dataclass(frozen=True)
class Raises:
    """The program ends with an error. `error`: a name among those of its class and the class's bases.

    `words`: regular expressions (not case-sensitive), each of which the text has to match: rank, module, fix. `on`: the
    ranks that it is demanded of; "others" are those that no fault strikes. `within`: seconds from the strike.
    """

    error: str
    words: tuple[str, ...]
    on: Literal["all", "others", "struck"] | tuple[int, ...] = "all"
    within: float = WITHIN_SECONDS


@dataclass(frozen=True)
class Recovers:
    """Ranks that no fault strikes get this error, catch it, all try again, and the end is bitwise undisturbed.

    `maybe`: a rank may also be told nothing, where it had nothing to do with what failed.
    """

    error: str
    words: tuple[str, ...]
    within: float = WITHIN_SECONDS
    maybe: bool = False


@dataclass(frozen=True)
class Warns:
    """The result is bitwise undisturbed or not, and some rank warned with these words."""

    words: tuple[str, ...]


Outcome = Equal | Raises | Recovers | Warns


@dataclass(frozen=True)
class Case:
    """`id`: "class/name". `does`: one sentence for the documents.

    `also`: an error that is clear as well, for an implementation that refuses what another one does. `program`: what
    each rank runs, `train` by default. `limit`: seconds after which what still runs is a hang. `deaths`: ranks whose
    process ends by the fault's own hand. `fast`: in the slice of `make test`.
    """

    id: str
    does: str
    expected: Outcome
    faults: tuple[Fault, ...] = ()
    setup: Setup = field(default_factory=Setup)
    program: Callable[[Any], None] | None = None
    also: Raises | None = None
    limit: float = 40.0
    deaths: tuple[int, ...] = ()
    fast: bool = False

    @property
    def group(self) -> str:
        """The class of the case."""
        return self.id.partition("/")[0]

    @property
    def wanted(self) -> str:
        """The verdict that the case has to end with."""
        return "CLEAR" if isinstance(self.expected, Raises | Warns) else "CORRECT"

    @property
    def command(self) -> str:
        return f"python -m tests.faults --case {self.id}"


# A step and an event of it; step -1 is before the first. That of most faults: the second step begins.
Moment = tuple[int, str]
IN_STEP: Moment = (1, "step")


def at(
    step: int,
    event: str,
    action: Callable[[Any], None] | None = None,
    *,
    rank: int | None = None,
    kill: bool = False,
    stall: float = 0.0,
) -> Fault:
    """A fault at (rank, step, event): `action`, a kill, a stall, or else `InjectedFault`. Step -1: before the first."""
    if action is not None:
        return Fault(step, event, rank, "do", action=action)
    if kill:
        return Fault(step, event, rank, "kill")
    return Fault(step, event, rank, "stall", stall) if stall else Fault(step, event, rank)
