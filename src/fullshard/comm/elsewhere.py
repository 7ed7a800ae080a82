"""A rank that is alone in a collective of torch's own, which no line of ours (lines.py) and no order of messages sees.

`p.grad.full_tensor()`, `dist.all_reduce(loss)` or `dist.barrier()` under `if rank == 0:` go over the user's process
groups. The rank waits there for the others; these go on to the next forward and wait for its messages. Its process
gives signs of life, so both would wait for the time limit of the process group.

* The monitor of each process looks where the thread that runs the model is. Where that has been inside of one
  collective of torch's for two beats, it publishes a `Place`: the user's line, the collective (its process group and
  its number there), the ranks without which it cannot end, and how far this rank had come in each domain. It takes it
  back when the thread has gone on.
* A rank that has waited in vain for a second, and does nothing else meanwhile, reads the places of the ranks that it
  waits for. It names one where all of this holds, so that neither of both can ever go on:
      that rank has not sent what this one waits for,
      the collective that it is in needs this rank,
      this rank has issued fewer collectives over that process group.

The numbers are those of torch's flight recorder. They count collectives and not messages between two ranks (the
counter of the process group has both), so all ranks have the same ones in a correct program, pipelines included. What
this rank issued before and did not wait for is counted: a peer that waits in it for a third rank is not accused.
One thread of a rank is looked at: where ranks take part in one collective with a main thread here and with another
thread there, the numbers prove nothing, and nobody should do that.

Nothing is wrapped, and nothing is done in the main thread. What is not seen: `work.wait()` of an asynchronous
collective, `send` and `recv`, the making of a group, collectives of NCCL (the host does not wait in most of them), a
process with TORCH_FR_BUFFER_SIZE=0.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from .._torch_compat import Recorded, issued_at_most, issued_collectives, known_groups
from .errors import shown_ranks
from .faults import Fault

if TYPE_CHECKING:
    from .control import Control
    from .domain import Domain
    from .lines import Sent

_log = logging.getLogger("fullshard")

_TORCH = os.path.dirname(torch.__file__) + os.sep
_OWN = os.path.dirname(os.path.dirname(__file__)) + os.sep
_C10D = os.path.join(_TORCH, "distributed", "distributed_c10d.py")
_FUNCTIONAL = os.path.join(_TORCH, "distributed", "_functional_collectives.py")
# Between a wait of `_FUNCTIONAL` and C++: the calling of operators.
_OPERATORS = (os.path.join(_TORCH, "_ops.py"), os.path.join(_TORCH, "_library") + os.sep)
# What blocks in `_C10D` and is one collective.
_CALLS = frozenset(
    ("all_reduce", "all_reduce_coalesced", "all_gather", "all_gather_into_tensor", "all_gather_coalesced")
    + ("reduce_scatter", "reduce_scatter_tensor", "all_to_all", "all_to_all_single", "barrier")
    + ("broadcast", "scatter", "reduce", "gather")
)
# Methods of AsyncCollectiveTensor.
_OF_RESULTS = ("wait", "trigger_wait")
# By the recorder's names. Of the first ones every rank needs all others.
_OF_ALL = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")
# Everybody needs the root, but not the root everybody: it may have sent, and gone on.
_FROM_ROOT = ("broadcast", "scatter")
# The root needs everybody.
_TO_ROOT = ("reduce", "gather")
# Names of decorators' functions: not what the user called.
_WRAPPERS = ("wrapper", "_no_grad_wrapper", "decorate_context", "inner", "_fn", "apply", "__call__")
# A collective that the recorder does not show at first is looked for so often.
_TRIES = 4


@dataclass(frozen=True)
class Place:
    """Where a rank waits. `call`: what the user called; `line`: where. `group`, `ranks` (of the default group) and
    `number`: of the collective. `needs`: ranks without which it does not end. `far`: by prefix of a domain, how far the
    rank was in it (`Domain.far`)."""

    rank: int
    call: str
    line: str
    group: str
    ranks: list[int]
    number: int
    needs: list[int]
    far: dict[str, dict[str, Any]]


class Lookout:
    """What the monitor of a process does about the thread that runs the model."""

    def __init__(self, control: Control) -> None:
        self._control = control
        self._seen: object = None
        self._tries = 0
        self._told: Place | None = None
        self._warned = False

    def look(self, thread: int) -> None:
        """Once for each beat: publish where `thread` is, or take it back."""
        seen = _sight(thread)
        if seen is None or seen != self._seen:
            self._seen, self._tries, self._warned = seen, _TRIES, False
            if self._told is not None:
                self._told = None
                self._control.store.set(_key(self._control.rank), "")
        elif self._told is not None:
            self._warn(self._told)
        elif self._tries:
            self._tries -= 1
            place = _place(thread, self._control)
            if place is not None and _sight(thread) == seen:
                self._told = place
                self._control.store.set(_key(self._control.rank), json.dumps(asdict(place)))

    def _warn(self, place: Place) -> None:
        """Say in this process, too, why it hangs: its wait ends with the connections of the user's group alone."""
        if self._warned:
            return
        for domain in list(self._control.domains.values()):
            for fault in domain.faults():
                if fault.kind == "disagree" and place.line in fault.text:
                    self._warned = True
                    _log.error("rank %d waits in %s (%s) for ever: %s", place.rank, place.call, place.line, fault.text)
                    return


def find(domain: Domain, what: str, withholds: Callable[[int, dict[str, Any]], bool]) -> Fault | None:
    """Why this rank, which only waits for `what`, waits in vain: a peer is in a collective that needs this rank.

    `withholds(rank, far)`: whether `rank`, having come so far in this domain, has not done what is waited for.
    """
    found: dict[tuple[str, int], list[Place]] = {}
    for rank in domain.ranks:
        place = _read(domain.control, rank) if rank != domain.rank else None
        if place is None or domain.rank not in place.needs or domain.prefix not in place.far:
            continue
        far = place.far[domain.prefix]
        if far["epoch"] == domain.epoch and withholds(rank, far):
            found.setdefault((place.group, place.number), []).append(place)
    issued = issued_collectives() if found else []
    for places in found.values():
        if _is_behind(places[0], issued):
            return Fault(domain.rank, "disagree", _text(domain.rank, what, places), domain.step())
    return None


def find_for(domain: Domain, doing: str, sent: Sent) -> Fault | None:
    """`find` for a rank that waits for the message `sent`, in `doing`."""
    line = sent.line
    if sent is not domain.waiting:
        return None  # a device waits for it: the host goes on, and may come to anything
    return find(
        domain,
        doing or line.name,
        lambda rank, far: rank in line.ranks and far["issued"].get(line.name, 0) < sent.number,
    )


def _key(rank: int) -> str:
    return f"fullshard/elsewhere/{rank}"


def _read(control: Control, rank: int) -> Place | None:
    key = _key(rank)
    told = control.store.get(key) if control.store.check([key]) else b""
    return Place(**json.loads(told)) if told else None


def _is_behind(place: Place, issued: list[Recorded]) -> bool:
    """Whether this rank has not issued the collective that `place` is in."""
    group = known_groups().get(place.group)
    if group is None or dist.get_process_group_ranks(group) != place.ranks:
        return False
    # The recorder may have dropped them, or hold those of a group of that name which was destroyed. The counter is
    # never less than what was issued.
    recorded = [one.number for one in issued if one.group == place.group]
    return min([issued_at_most(group), *recorded[-1:]]) < place.number


def _text(here: int, what: str, places: list[Place]) -> str:
    place, ranks = places[0], shown_ranks([place.rank for place in places])
    return (
        f"expected all ranks to take the same calls, found {ranks} in {place.call} ({place.line}), which needs "
        f"{shown_ranks(place.ranks)}, while rank {here} waits for {ranks} in {what}: neither can go on; let "
        f"{shown_ranks(place.ranks)} make that call at the same place, or none of them (not under `if rank == ...`)"
    )


# ---- where a thread is -------------------------------------------------------------------------------------


def _waits(thread: int) -> FrameType | None:
    """The frame of the wait for a collective of torch's that `thread` is in; None where it is anywhere else."""
    frame = sys._current_frames().get(thread)
    while frame is not None and frame.f_code.co_filename.startswith(_OPERATORS):
        frame = frame.f_back
    if frame is None:
        return None
    code: CodeType = frame.f_code
    if code.co_filename == _C10D:
        return frame if code.co_name in _CALLS else None
    by = frame.f_back.f_code if frame.f_back is not None else None
    # Only results of collectives are tensors of that class; `wait_tensor` by itself may be for a message of one rank.
    is_wait = code.co_filename == _FUNCTIONAL and code.co_name == "wait_tensor"
    is_wait = is_wait and by is not None and by.co_filename == _FUNCTIONAL and by.co_name in _OF_RESULTS
    return frame if is_wait else None


def _sight(thread: int) -> object:
    """What stays equal as long as `thread` waits for one collective; None where it does not."""
    frame = _waits(thread)
    if frame is None:
        return None
    # Another call from the same line has issued another one. No reference to the frame is kept: it holds tensors.
    return id(frame), frame.f_lasti, [issued_at_most(group) for group in known_groups().values()]


def _place(thread: int, control: Control) -> Place | None:
    """Where `thread`, which has waited for a while, waits; None where that is not certain."""
    groups = known_groups()
    under_way = [
        one for one in issued_collectives() if one.thread == thread and not one.is_over and one.group in groups
    ]
    frame = _waits(thread)
    if frame is None:
        return None
    root: int | None = None
    if frame.f_code.co_filename == _C10D:
        told = frame.f_locals
        if told.get("async_op"):
            return None  # not a wait
        group = told.get("group") or dist.group.WORLD
        under_way = [one for one in under_way if groups[one.group] is group][-1:]
        root = told.get("group_src", told.get("group_dst"))
    if len({one.group for one in under_way}) != 1:
        return None  # which of them it waits for cannot be told
    # Of several of one group it may wait for any: who has not come to the first has come to none.
    collective = under_way[0]
    ranks = dist.get_process_group_ranks(groups[collective.group])
    needs, *more = (_needs(one.call, control.rank, ranks, None if root is None else ranks[root]) for one in under_way)
    if any(other != needs for other in more):
        return None
    call, line = _called(frame)
    far = {domain.prefix: domain.far for domain in list(control.domains.values())}
    return Place(control.rank, call, line, collective.group, ranks, collective.number, needs, far)


def _needs(call: str, rank: int, ranks: list[int], root: int | None) -> list[int]:
    """The other ranks without which `rank` does not come out of this collective."""
    others = [other for other in ranks if other != rank]
    if call in _OF_ALL or len(others) == 1 or (call in _TO_ROOT and rank == root):
        return others
    return [root] if call in _FROM_ROOT and root is not None and root != rank else []


def _called(frame: FrameType) -> tuple[str, str]:
    """The function of torch's (or ours) that the user called, and the line of the user's that did."""
    call, at = frame.f_code.co_name, frame.f_back
    while at is not None and at.f_code.co_filename.startswith((_TORCH, _OWN)):
        if at.f_code.co_name not in _WRAPPERS:
            call = at.f_code.co_name
        at = at.f_back
    if at is None:
        return call, "a line that is not known"
    return call, f"{at.f_code.co_filename}:{at.f_lineno} in {at.f_code.co_name}"
