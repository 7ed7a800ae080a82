"""What a rank trains, told to those who wait for it in vain: ranks whose meshes are of other ranks never meet.

Of four ranks two give a model the mesh of one axis, two that of the other. Then rank 0 asks the ranks {0, 2} and rank 2
those of {2, 3}; 2 and 3 agree and train, and rank 0 would wait as long as they do. Both ends are alive, and no message
of the one is of a kind that the other would see.

    rank 0   waits for a second in the question of a root that forms, and *knocks* at the others
    rank 2   *answers* at its next sign of life: the roots that it has, and the meshes of what has not run yet
    rank 0   finds that the same root is there, on another mesh: tells the ranks of its own, *accuses* rank 2, raises
    rank 2   hears it at its next sign of life, and tells the ranks of its mesh: these raise as well

Nothing is sent while nobody waits: a knock is a number in the key of the sign of life, which the answering rank adds to
anyway. The answer is of that moment, so nothing of an earlier model or process group is in it.

What is *the same root*, so that ranks that rightly differ are not accused (pipeline stages, experts, teacher and
student, other numbers of models): equal structure and equal initial values, the same number among roots of that
structure; and the other rank has nothing on the mesh of the waiting one that did not run yet. In doubt one waits.
"""

from __future__ import annotations

import json
import threading
import time
import weakref
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .errors import RanksDisagree, shown_ranks
from .faults import TEXT_CHARACTERS, Fault

if TYPE_CHECKING:
    from .control import Control
    from .domain import Domain

Ranks = tuple[int, ...]

# Who waits on knocks again after so long, then after twice that, and at last after so long.
_FIRST_SECONDS, _MOST_SECONDS = 1.0, 30.0
# At so many ranks at a time: each of those who wait begins at its own neighbour.
_KNOCKS = 8

FORMING, FORMED, FAILED = "forming", "formed", "failed"


@dataclass(eq=False)
class Entry:
    """A root of this rank. `structure`: equal on ranks that have the same model, whatever their meshes; `values`:
    likewise, "" where not all are known; `scopes`: its meshes, by their ranks, as a text names them."""

    owner: weakref.ref[object]
    name: str
    structure: str
    values: str
    scopes: Mapping[Ranks, str]
    # Which of the roots of this structure that ever formed here; and which attempt at it.
    ordinal: int
    attempt: int
    state: str = FORMING
    # Who waited for it on another mesh, and what that rank says.
    accused: tuple[int, str] | None = None


class Roster:
    """The roots of one rank. `begin` and what follows are of its main thread, `answer` of the one that gives signs of
    life."""

    def __init__(self, control: Control) -> None:
        self._control = weakref.ref(control)
        self.store, self.rank = control.store, control.rank
        self._entries: list[Entry] = []
        # By structure: roots that formed, and attempts at the next one that failed.
        self._formed: Counter[str] = Counter()
        self._failed: Counter[str] = Counter()
        # Of what is no part of a root yet, the ranks of its meshes.
        self._awaited: weakref.WeakKeyDictionary[object, frozenset[Ranks]] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()

    # ---- what this rank has --------------------------------------------------------------------------------

    def expect(self, owner: object, scopes: Iterable[Ranks]) -> None:
        """`owner` will be a part of a root, with parameters on meshes of these ranks."""
        with self._lock:
            self._awaited[owner] = frozenset(scopes)

    def begin(self, owner: object, name: str, structure: str, values: str, scopes: Mapping[Ranks, str]) -> Entry:
        """A root of these meshes forms; `owner` lives as long as it may."""
        kept, ordinal = [], 0
        for entry in self._entries:
            if entry.owner() is owner and (entry.structure == structure or entry.state != FORMED):
                # Once more: what follows its agreement failed, or this did.
                ordinal = entry.ordinal if entry.state == FORMED else ordinal
            elif entry.owner() is not None:
                kept.append(entry)
        ordinal = ordinal or self._formed[structure] + 1
        entry = Entry(weakref.ref(owner), name, structure, values, scopes, ordinal, self._failed[structure] + 1)
        self._entries = [*kept, entry]
        return entry

    def end(self, entry: Entry, parts: Iterable[object] = ()) -> None:
        """It formed, out of `parts`, which were expected."""
        entry.state = FORMED
        self._formed[entry.structure] = max(self._formed[entry.structure], entry.ordinal)
        del self._failed[entry.structure]
        with self._lock:
            for part in parts:
                self._awaited.pop(part, None)
        self._spread(entry)

    def fail(self, entry: Entry) -> None:
        """It did not."""
        entry.state = FAILED
        self._failed[entry.structure] += 1

    # ---- told to others ------------------------------------------------------------------------------------

    def answer(self, knocks: int) -> None:
        """Somebody knocked, `knocks` times in all: hear what is said of this rank, and say what it has."""
        key = f"fullshard/accused/{self.rank}"
        if self.store.check([key]):
            accusation = json.loads(self.store.get(key))
            self.store.delete_key(key)
            self._hear(**accusation)
        with self._lock:
            awaited = sorted(set().union(*self._awaited.values()))
        roots = [
            {
                "structure": entry.structure,
                "values": entry.values,
                "ordinal": entry.ordinal,
                "attempt": entry.attempt,
                "state": entry.state,
                # Not if it failed since: its ranks may be about to build something else.
                "runs": entry.state == FORMED and not any(domain.must_meet for domain in self._domains(entry)),
                "scopes": list(entry.scopes.items()),
            }
            for entry in self._entries
            if entry.owner() is not None
        ]
        self.store.set(
            f"fullshard/roots/{self.rank}", json.dumps({"knocks": knocks, "roots": roots, "awaited": awaited})
        )

    def _domains(self, entry: Entry) -> list[Domain]:
        control = self._control()
        known = {} if control is None else control.domains
        return [known[ranks] for ranks in entry.scopes if ranks in known]

    def _hear(self, rank: int, ranks: Sequence[int], epoch: int, structure: str, ordinal: int, text: str) -> None:
        """Rank `rank` waited on the mesh of `ranks` for that root of this rank, which is on another one."""
        control = self._control()
        if control is None:
            return
        # It will meet this rank there, should both try again. Behind each other: the main thread may make the domain.
        if epoch == 0:
            control.accused.add(tuple(ranks))
        there = control.domains.get(tuple(ranks))
        if there is not None and there.epoch == epoch:
            there.must_meet = True
        for entry in self._entries:
            if (entry.structure, entry.ordinal) == (structure, ordinal) and entry.owner() is not None:
                entry.accused = rank, text
                self._spread(entry)

    def _spread(self, entry: Entry) -> None:
        """What an accused root that runs has to be told. One that forms waits itself: `Absence`."""
        if entry.state != FORMED or entry.accused is None:
            return
        rank, text = entry.accused
        for domain in self._domains(entry):
            # Its ranks find it when they wait, and this one at its next forward, too.
            domain.accusation = Fault(rank, "disagree", text)
            domain.publish("disagree", text, rank=rank)


class Absence:
    """Why those who do not come to `domain`, while `entry` forms, will not. To be called now and then while one waits;
    raises `RanksDisagree` when some of them have the same root on another mesh."""

    def __init__(self, control: Control, entry: Entry, domain: Domain) -> None:
        self._control, self._entry, self._domain = control, entry, domain
        place = domain.ranks.index(domain.rank)
        self._others = [*domain.ranks[place + 1 :], *domain.ranks[:place]]
        # Of those who did not answer yet, the number of the knock.
        self._knocked: dict[int, int] = {}
        self._pause, self._next = _FIRST_SECONDS, 0.0
        self._has_looked = False

    def __call__(self) -> None:
        found: dict[str, list[int]] = {}
        for rank, number in list(self._knocked.items()):
            told = self._answer(rank, number)
            if told is None:
                continue
            del self._knocked[rank]
            meshes = elsewhere(told, self._entry, self._domain.ranks)
            if meshes:
                found.setdefault(meshes, []).append(rank)
        if found:
            self._refuse(found)
        if self._entry.accused is not None:
            # Once more before that: whom this rank waits for in vain has to hear of it, too.
            if self._has_looked:
                rank, text = self._entry.accused
                self._domain.publish("disagree", text, rank=rank)
                raise RanksDisagree(text, what=f"{self._entry.name} mesh")
            self._has_looked = True
        if time.monotonic() >= self._next:
            self._next, self._pause = time.monotonic() + self._pause, min(2 * self._pause, _MOST_SECONDS)
            for rank in self._others[:_KNOCKS]:
                if rank not in self._knocked:
                    self._knocked[rank] = self._control.knock(rank)
            self._others = [*self._others[_KNOCKS:], *self._others[:_KNOCKS]]

    def _answer(self, rank: int, number: int) -> dict[str, Any] | None:
        key = f"fullshard/roots/{rank}"
        if not self._control.store.check([key]):
            return None
        told: dict[str, Any] = json.loads(self._control.store.get(key))
        return told if told["knocks"] >= number else None

    def _refuse(self, found: Mapping[str, Sequence[int]]) -> None:
        entry, domain = self._entry, self._domain
        by_rank = {rank: meshes for meshes, ranks in found.items() for rank in ranks}
        by_rank[domain.rank] = entry.scopes[domain.ranks]
        there = " and ".join(f"{meshes} on {shown_ranks(ranks)}" for meshes, ranks in found.items())
        text = (
            f"{entry.name}: expected the same mesh on every rank, found {by_rank[domain.rank]} on rank {domain.rank} "
            f"and {there}, so that they never meet; give fully_shard the same mesh, and the same axis of it, on all "
            f"ranks of {list(domain.ranks)} (FULLSHARD_AGREE=none, where these are different models: compare nothing)"
        )[:TEXT_CHARACTERS]
        domain.publish("disagree", text)
        said = {"rank": domain.rank, "ranks": domain.ranks, "epoch": domain.epoch, "text": text}
        said |= {"structure": entry.structure, "ordinal": entry.ordinal}
        for ranks in found.values():
            for rank in ranks:
                self._control.store.set(f"fullshard/accused/{rank}", json.dumps(said))
                self._control.knock(rank)
        raise RanksDisagree(text, what=f"{entry.name} mesh", by_rank=dict(sorted(by_rank.items())))


def elsewhere(told: Mapping[str, Any], entry: Entry, ranks: Ranks) -> str:
    """The meshes on which a rank, by its answer `told`, has the root `entry` of this one, which waits for it on the
    mesh of `ranks`; "" where it may still come there.

    It may when it has something on that mesh that did not run yet, or is about to compare it.
    """
    same = None
    if list(ranks) in told["awaited"]:
        return ""
    for root in told["roots"]:
        is_there = any(scope == list(ranks) for scope, _ in root["scopes"])
        if is_there and root["state"] == FORMING:
            return ""
        if (root["structure"], root["ordinal"]) == (entry.structure, entry.ordinal):
            same = root if not is_there else None
            if is_there:
                return ""
    if same is None or (same["values"] and entry.values and same["values"] != entry.values):
        return ""
    # What failed there in an earlier attempt than ours may have been mended since, as ours may have been.
    if not same["runs"] and same["attempt"] < entry.attempt:
        return ""
    return " and ".join(text for _, text in same["scopes"])
