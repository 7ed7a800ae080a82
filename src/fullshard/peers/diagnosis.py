"""Finds out from the ranks' records why they wait. One of the ranks that wait in a scope, the leader, reads the records
of all and tells them.

    what is seen                                                    fault
    a record says that its rank failed, or that its process ended   what that rank says
    a process of this machine is gone                               lost
    no new record for the seconds of silence, and on its machine:   lost
        stopped, or used no processor time meanwhile (`witnesses`)
    ranks that wait, each for one of them: the greatest such set    disagree: a proof, none of them can continue
    a rank waits for longer than the process group allows           late: names the absent ranks, and where they are

A record may be stale when it is read. A false proof would require that *all* ranks of a cycle continued without a new
record: if one got its message, another one sent it, and that one's record would show it. So a proof counts once two
readings show the same waits. A rank that reads late itself reports no silence (`Reader.forget`).

It costs the leader one request each second or two. The others spend one of four requests on trying to become it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .scope import Scope
from .store import Host, ranks_of
from .wait import PATIENCE_SECONDS, AnyWatch, Fault, Wait, pace, shown_ranks

# ---- what records show -----------------------------------------------------------------------------------------------

_NOTHING: Mapping[int, tuple[str, int]] = {}
# How many waits an error text names.
_SHOWN = 3


@dataclass(frozen=True)
class Record:
    """The record of one rank. See `Watch.record`."""

    rank: int
    said: Mapping[str, Any]

    @property
    def wait(self) -> Mapping[str, Any] | None:
        """The wait of the rank; None: it is running, as far as is known."""
        found: Mapping[str, Any] | None = self.said.get("wait")
        return found

    @property
    def place(self) -> str:
        """The place in the user's code."""
        at = self.said.get("at") or ""
        return f" ({at})" if at else ""

    @property
    def machine(self) -> str:
        """The machine of its process."""
        return str(self.said["process"]).partition(" ")[0]

    def far(self, scope: str) -> Mapping[str, Any] | None:
        """The progress of the rank in that scope; None: it was never in it."""
        found: Mapping[str, Any] | None = self.said.get("far", {}).get(scope)
        return found

    def waits_in(self, scope: str, epoch: int) -> bool:
        """Whether it waits for other ranks in that scope and epoch."""
        wait = self.wait or {"kind": "", "scope": "", "epoch": 0}
        return wait["kind"] in ("ask", "message", "connect") and (wait["scope"], wait["epoch"]) == (scope, epoch)

    def has_come(self, wait: Mapping[str, Any]) -> bool:
        """Whether it has done its part for `wait` of another rank."""
        if wait["kind"] == "torch":
            issued = self.said.get("torch", {}).get(wait["name"])
            return issued is None or issued >= wait["number"]
        far = self.far(wait["scope"])
        if far is None or far["epoch"] < wait["epoch"]:
            return False
        if far["epoch"] > wait["epoch"]:
            return True
        own = self.wait
        if wait["kind"] == "message":
            return bool(far["issued"].get(wait["name"], -1) >= wait["number"])
        if wait["kind"] == "ask":
            return bool(far["asked"] > wait["number"])
        if wait["kind"] == "meet":
            return own is not None and own["kind"] == "meet" and own["scope"] == wait["scope"]
        return wait["name"] in far["issued"] or (own is not None and own["name"] == wait["name"])


@dataclass
class _Seen:
    """A record that is unchanged since `since`; `used`: the processor time of its process then."""

    text: str
    record: Record
    since: float
    used: int


class Reader:
    """One rank's observations of the others' records, on its own clock."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._seen: dict[int, _Seen] = {}
        self._stuck: frozenset[tuple[int, float]] = frozenset()

    def forget(self) -> None:
        """This rank was late itself: restart all observations."""
        self._seen.clear()
        self._stuck = frozenset()

    def read(self, texts: Mapping[int, str], now: float) -> dict[int, Record]:
        """The records in `texts`. Mail in place of a record counts as the rank's previous record."""
        found = {}
        for rank, text in texts.items():
            known = self._seen.get(rank)
            if known is None or known.text != text:
                said = json.loads(text) if text else {"mail": []}
                if "mail" not in said:
                    known = _Seen(text, Record(rank, said), now, self._host.condition(said["process"])[1])
                    self._seen[rank] = known
            if known is not None:
                found[rank] = known.record
        return found

    def is_quiet(self, record: Record, seconds: float, now: float) -> bool:
        """Whether its rank gave no sign of life for `seconds`."""
        return now - self._seen[record.rank].since >= seconds

    def condition(self, record: Record, seen: Mapping[int, tuple[str, int]]) -> tuple[str, int]:
        """The condition of its process, seen from this machine, or as a rank of its own machine has `seen` it."""
        here = self._host.condition(record.said["process"])
        return seen.get(record.rank, here) if here[0] == "unknown" else here

    def lost(self, record: Record, silence: float, now: float, told: Mapping[int, tuple[str, int]] = _NOTHING) -> str:
        """The problem with the process of `record`; "" if none. `told`: observations by ranks of other machines."""
        what, used = self.condition(record, told)
        if what == "gone" and "ended" not in record.said:
            return "gave no sign of life since its process has ended"
        seen = self._seen[record.rank]
        seen.used = seen.used or used  # the first known value
        if not silence or now - seen.since < silence:
            return ""
        if what == "exists" and used > seen.used:
            # It computes: a call holds the GIL, nothing is wrong.
            seen.since, seen.used = now, used
            return ""
        how = {"stopped": "it is stopped", "exists": "it exists and does nothing", "gone": "it has ended"}
        return f"gave no sign of life for {silence:g} s: {how.get(what, 'killed, stopped or hanging')}{record.place}"

    def stuck(self, records: Mapping[int, Record], over: Iterable[tuple[str, int]] = ()) -> dict[int, Record]:
        """Ranks that wait for each other, seen twice. `over`: scopes and epochs in which a rank failed."""
        found = stuck(records, over)
        waits = frozenset((rank, record.said["wait"]["since"]) for rank, record in found.items())
        before, self._stuck = self._stuck, waits
        return found if waits and waits == before else {}


def witnesses(quiet: Iterable[Record], others: Iterable[Record]) -> dict[int, int]:
    """Returns for each rank of `quiet` another one on the same machine, which can see its process."""
    machines: dict[str, int] = {}
    for record in others:
        machines.setdefault(record.machine, record.rank)
    return {record.rank: machines[record.machine] for record in quiet if record.machine in machines}


def seen_by(others: Iterable[Record]) -> dict[int, tuple[str, int]]:
    """The conditions of processes that ranks were asked to look at, by rank."""
    told = (item for record in others for item in record.said.get("sees", {}).items())
    return {int(rank): (what, used) for rank, (what, used) in told}


def missing(wait: Mapping[str, Any], records: Mapping[int, Record], own: int) -> list[int]:
    """The ranks that `wait`, of rank `own`, waits for and that have not done their part."""
    others = [rank for rank in ranks_of(wait["ranks"]) if rank != own]
    return [rank for rank in others if rank not in records or not records[rank].has_come(wait)]


def needed(records: Iterable[Record]) -> set[int]:
    """The ranks that any rank waits for, whether or not they have done their part."""
    ranks = {str(wait["ranks"]): wait["ranks"] for record in records if (wait := record.wait) is not None}
    return {rank for its in ranks.values() for rank in ranks_of(its)}


def _alike(wait: Mapping[str, Any]) -> tuple[object, ...]:
    """A key that is equal for equal waits, which nearly all of ten thousand ranks have."""
    name = "" if wait["kind"] == "ask" else wait["name"]
    return wait["kind"], wait["scope"], wait["epoch"], name, wait["number"], str(wait["ranks"])


def stuck(records: Mapping[int, Record], over: Iterable[tuple[str, int]] = ()) -> dict[int, Record]:
    """The greatest set of ranks each of which waits for one of the set: none of them can continue."""
    failed = [one for record in records.values() for one in record.said.get("failed", {}).items()]
    over = {*over, *((scope, said["epoch"]) for scope, said in failed)}
    # A wait for the reason of a closed connection ends by itself.
    waiting = {
        rank: record
        for rank, record in records.items()
        if record.wait is not None and record.said["wait"]["also"] != "closed" and _proves(record, over)
    }
    # Ranks by wait; and for each wait, the absent ranks that wait themselves.
    members: dict[tuple[object, ...], list[int]] = {}
    for rank, record in waiting.items():
        members.setdefault(_kind_of(record), []).append(rank)
    absent = {
        one: waiting.keys() & missing(waiting[ranks[0]].said["wait"], records, -1) for one, ranks in members.items()
    }
    for one, (rank, *_) in members.items():
        if waiting[rank].said["wait"]["also"] == "device":
            # Its host continues and may still do anything except what it has passed: only ranks that wait for something
            # before that stay blocked by it.
            before = {other for other in absent[one] if _is_before(waiting[other], waiting[rank])}
            absent[one] = {other for other in before if rank in absent[_kind_of(waiting[other])]}
    waited_for: dict[int, list[tuple[object, ...]]] = {}
    for one, ranks in absent.items():
        for rank in ranks:
            waited_for.setdefault(rank, []).append(one)
    free: list[int] = []
    changed = list(members)
    while changed or free:
        while changed:
            one = changed.pop()
            if len(absent[one]) <= 1:  # a rank does not wait for itself
                free += [rank for rank in members[one] if absent[one] <= {rank}]
        while free:
            rank = free.pop()
            if waiting.pop(rank, None) is not None:
                for one in waited_for.get(rank, ()):
                    absent[one].discard(rank)
                    changed.append(one)
    return waiting


def _kind_of(record: Record) -> tuple[object, ...]:
    """A key that is equal for ranks with equal waits; a wait of a device belongs to its rank only."""
    wait = record.said["wait"]
    return (*_alike(wait), record.rank if wait["also"] == "device" else -1)


def _is_before(record: Record, passed: Record) -> bool:
    """Whether `record` waits in the same order of messages and questions as `passed`."""
    wait = record.said["wait"]
    return wait["kind"] not in ("torch", "meet") and wait["scope"] == passed.said["wait"]["scope"]


def _proves(record: Record, over: Container[tuple[str, int]]) -> bool:
    """Whether its wait blocks the rank entirely, and is not ended anyway because a rank failed in that epoch."""
    wait = record.said["wait"]
    if record.said.get("beside"):
        return False  # another thread of that rank sends, too
    return wait["kind"] in ("torch", "meet") or (wait["scope"], wait["epoch"]) not in over


def meetings(found: Mapping[int, Record], scope: str) -> dict[str, float]:
    """The start of each meeting of ranks of `found` in that scope, which a fault ends."""
    waits = [(rank, record.wait) for rank, record in found.items() if record.wait is not None]
    return {str(rank): one["since"] for rank, one in waits if (one["kind"], one["scope"]) == ("meet", scope)}


def disagreement(found: Mapping[int, Record], explain: Callable[[Mapping[int, Record]], str | None]) -> str:
    """The error of ranks that wait for each other. `explain`: a better text for questions that have one."""
    better = explain(found)
    if better is not None:
        return better
    alone = {rank: record for rank, record in found.items() if record.said["wait"]["kind"] == "torch"}
    if alone:
        return _alone(alone, found)
    by_what: dict[str, list[int]] = {}
    for rank, record in sorted(found.items()):
        by_what.setdefault(record.said["wait"]["what"], []).append(rank)
    told = " and ".join(f"{shown_ranks(ranks)} waiting in {what}" for what, ranks in list(by_what.items())[:_SHOWN])
    return (
        f"expected all ranks to do the same, found {told}: none of them can continue; make all ranks take the same "
        f"calls in the same order"
    )


def _alone(alone: Mapping[int, Record], found: Mapping[int, Record]) -> str:
    first = next(iter(alone.values()))
    wait = first.said["wait"]
    ranks = [
        rank
        for rank, record in alone.items()
        if all(record.said["wait"][key] == wait[key] for key in ("name", "number"))
    ]
    needed = ranks_of(wait["ranks"])
    others = [record for rank, record in found.items() if rank not in alone]
    others.sort(key=lambda record: (record.rank not in needed, record.rank))
    needs = shown_ranks(needed)
    waits = f"{shown_ranks([others[0].rank])} waits in {others[0].said['wait']['what']}" if others else "others wait"
    return (
        f"expected all ranks to take the same calls, found {shown_ranks(ranks)} in {wait['what']}{first.place}, which "
        f"needs {needs}, while {waits}: neither can continue; let {needs} make that call at the same place, or none of "
        f"them (not under `if rank == ...`)"
    )


def late(wait: Mapping[str, Any], records: Mapping[int, Record], own: int, seconds: float) -> Fault:
    """The fault for a wait that reached the time limit of the process group."""
    absent = missing(wait, records, own) or [rank for rank in ranks_of(wait["ranks"]) if rank != own] or [own]
    told = [_whereabouts(rank, records.get(rank)) for rank in absent[:_SHOWN]]
    more = f" and {len(absent) - _SHOWN} more" if len(absent) > _SHOWN else ""
    others = f"; nor did {', '.join(told[1:])}{more}" if len(told) > 1 else ""
    text = (
        f"did not come to {wait['what']} for {seconds:.0f} s, the time limit of the process group: it is "
        f"{told[0]}{others}"
    )
    return Fault(absent[0], "late", text, wait["scope"], wait["epoch"], meets=meetings(records, wait["scope"]))


def _whereabouts(rank: int, record: Record | None) -> str:
    if record is None:
        return f"rank {rank}, which has not begun to train"
    if record.wait is not None:
        return f"rank {rank} in {record.wait['what']}{record.place}"
    doing = record.said.get("doing") or "no call of fullshard's"
    return f"rank {rank} in {doing}{record.place}"


def published(records: Iterable[Record], scope: str, epoch: int) -> list[Fault]:
    """The faults that ranks of `scope` report of themselves, in its `epoch`."""
    found = []
    for record in records:
        said = record.said.get("failed", {}).get(scope)
        if said is not None:
            found.append(Fault(**said))
        if "ended" in record.said:
            # A rank that was never in the scope will not come either.
            far = record.far(scope) or {"epoch": epoch, "issued": {}, "asked": 0}
            found.append(_fault(record, "ended", record.said["ended"], scope, **far))
    return [fault for fault in found if fault.epoch == epoch]


def _fault(record: Record, kind: str, text: str, scope: str, **more: Any) -> Fault:
    said = record.said
    return Fault(record.rank, kind, text, scope, step=said.get("step", -1), doing=said.get("doing", ""), **more)


# ---- leader ----------------------------------------------------------------------------------------------------------

# A waiting rank tries to become the leader with one of so many requests.
_CLAIM_EACH = 4
_CLAIMING = 250


class Leader:
    """Reads the records of scopes that this rank leads, and claims leadership. Held by its `Watch`."""

    def __init__(self, watch: AnyWatch) -> None:
        self._watch = watch
        self._records, self._host = watch.records, watch.host
        self._reader = Reader(watch.host)
        # The scopes that this rank leads, by name.
        self.leads: dict[str, Scope] = {}
        self._read = 0.0
        self._idle_reads = 0
        # Ranks known to have a record.
        self._joined: frozenset[int] = frozenset()
        # The faults that were already delivered.
        self._told: set[tuple[object, ...]] = set()
        # The ranks that waited in each scope at the last reading although a fault was delivered.
        self._still: dict[str, set[int]] = {}
        # The wait for which this rank last tried to become leader; and when it replaced a dead leader.
        self._claimed_for: object = None
        self._requests = 0
        self._takeovers: dict[str, int] = {}

    def forget(self) -> None:
        """This rank was late itself: discard its observations of the others."""
        self._reader.forget()

    def claims(self, wait: Wait, is_told: bool) -> bool:
        """Whether the next request tries to become the leader. Not before the record reports `wait`."""
        self._requests += 1
        if wait.scope is None or wait.scope.name in self.leads or not is_told:
            return False
        if self._claimed_for is not wait:
            self._claimed_for, self._requests = wait, 0
        # With very many ranks a few claim at a time, and the others fetch their mail.
        each = max(_CLAIM_EACH, len(wait.scope.ranks) // _CLAIMING)
        turn = self._watch.rank % each if each > _CLAIM_EACH else 0
        return self._requests % each == turn

    def claim(self, wait: Wait, now: float) -> None:
        """Become the leader of the scope in which this rank waits, unless another rank is."""
        scope = wait.scope
        assert isinstance(scope, Scope)
        key = f"{scope.base}/reader"
        holder = self._records.claim(key)
        # A dead leader reads nothing: a rank that has waited for so long takes its place.
        patience = self._watch.settings.silence_seconds + self._watch.settings.beat_seconds
        if holder != str(self._watch.rank) and self._watch.settings.silence_seconds and now - wait.since > patience:
            turn = int((now - wait.since) / patience)
            if self._takeovers.get(key, 0) < turn:
                self._takeovers[key] = turn
                holder = self._records.claim(key, holder)
        if now - wait.since > self._watch.settings.limit_seconds:
            # The leader may have begun to wait later, so one of the ranks over the time limit reads as well.
            holder = self._records.claim(f"{scope.base}/late")
        if holder == str(self._watch.rank):
            self.leads[scope.name] = scope
            self._idle_reads = 0
            self._read = 0.0

    def read(self, own: Wait | None, now: float) -> None:
        """Read the records of the scopes that this rank leads, if it is time; `own`: this rank's own wait."""
        if self.leads and now - self._read >= self._reading_seconds():
            self._read = now
            for scope in list(self.leads.values()):
                self._lead(scope, own, now)

    def _reading_seconds(self) -> float:
        ranks = max(len(scope.ranks) for scope in self.leads.values())
        return 0.5 if ranks <= 8 else max(1.0, pace(ranks) / 2)

    def _lead(self, scope: Scope, own: Wait | None, now: float) -> None:
        """Read the records of `scope`, and tell its ranks what they show."""
        everyone = frozenset(scope.ranks)
        if not self._joined >= everyone:
            self._joined = self._records.joined()
        wanted = everyone & self._joined
        records = self._reader.read(self._records.of(sorted(wanted)), now)
        # Also the ranks that they wait for, transitively, on any mesh.
        while more := needed(records.values()) - wanted:
            if not self._joined >= more:
                self._joined = self._records.joined()
            records |= self._reader.read(self._records.of(sorted(more & self._joined)), now)
            wanted |= more
        waiting = [rank for rank in scope.ranks if rank in records and records[rank].wait is not None]
        if not waiting and (own is None or own.scope is not scope):
            self._idle_reads += 1
            if self._idle_reads > 2:
                del self.leads[scope.name]
                self._records.release(f"{scope.base}/reader")
            return
        self._idle_reads = 0
        own_records = [records[rank] for rank in scope.ranks if rank in records]
        for fault in published(own_records, scope.name, scope.epoch):
            self._deliver(scope, fault, now)
        closed = own is not None and own.also == "closed"
        silence = self._watch.settings.silence_seconds
        if closed and silence:
            silence = min(silence, self._watch.settings.beat_seconds + PATIENCE_SECONDS)
        seen = self._seen_elsewhere(own_records, silence, now)
        for record in own_records:
            if record.rank != self._watch.rank and (text := self._reader.lost(record, silence, now, seen)):
                gone, meets = self._reader.condition(record, seen)[0] == "gone", meetings(records, scope.name)
                fault = _fault(record, "lost", text, scope.name, epoch=scope.epoch, meets=meets, gone=gone)
                self._deliver(scope, fault, now)
        told = scope.causes()
        if told:
            # Ranks that still wait there have not read it, or another message overwrote it.
            still = {rank for rank in waiting if records[rank].waits_in(scope.name, scope.epoch)}
            if again := still & self._still.get(scope.name, set()):
                self._watch.tell(again, scope.telling(told[-1]))
            self._still[scope.name] = still
        over = {(one.name, one.epoch) for one in list(self._watch.scopes.values()) if one.causes()}
        stuck = self._reader.stuck(records, over)
        # Only once, but ranks that raised because of it and meet may wait for each other again.
        if stuck and (meetings(stuck, scope.name) or not any(fault.is_found for fault in scope.causes())):
            self._disagree(stuck, now)
        limit = self._watch.settings.limit_seconds
        if wanted - records.keys():
            limit += self._watch.settings.beat_seconds  # mail replaced a record: a new one comes by then
        if own is not None and own.scope is scope and now - own.since > limit:
            self._deliver(scope, late(own.told(), records, self._watch.rank, now - own.since), now)

    def _seen_elsewhere(self, records: Sequence[Record], silence: float, now: float) -> Mapping[int, tuple[str, int]]:
        """The state of quiet processes on other machines, as ranks there report it; asks those ranks."""
        quiet = [record for record in records if silence and self._reader.is_quiet(record, silence / 2, now)]
        if not quiet:
            return {}
        others = [record for record in records if record not in quiet]
        seen = seen_by(others)
        asked: dict[int, list[Fault]] = {}
        for rank, witness in witnesses(quiet, others).items():
            process = str(next(record for record in quiet if record.rank == rank).said["process"])
            if rank not in seen and self._host.condition(process)[0] == "unknown":
                asked.setdefault(witness, []).append(Fault(rank, "look", process))
        for witness, looks in asked.items():
            self._watch.ask(witness, looks)
        return seen

    def _disagree(self, found: Mapping[int, Record], now: float) -> None:
        """Tell all scopes in which a rank of `found` waits."""
        text = disagreement(found, self._explained)
        first = min(found)
        told: dict[tuple[str, int], list[int]] = {}
        for rank, record in found.items():
            wait = record.said["wait"]
            told.setdefault((wait["scope"], wait["epoch"]), []).extend(
                ranks_of(wait["ranks"]) if wait["kind"] == "torch" else [rank]
            )
        by_name = {scope.name: scope for scope in list(self._watch.scopes.values())}
        for (name, epoch), ranks in told.items():
            fault = Fault(first, "disagree", text, name, epoch, meets=meetings(found, name))
            scope = by_name.get(name)
            if scope is not None and scope.epoch == epoch:
                self._deliver(scope, fault, now)
            else:
                self._watch.tell(ranks, [fault])

    def _explained(self, found: Mapping[int, Record]) -> str | None:
        """The question's own explanation of why some ranks ask it while others wait elsewhere."""
        for _, record in sorted(found.items()):
            wait = record.said["wait"]
            scopes: list[Scope] = list(self._watch.scopes.values())
            for scope in scopes:
                explain = scope.explained_by.get(wait["name"]) if wait["kind"] == "ask" else None
                if explain is None or scope.name != wait["scope"]:
                    continue
                asking = [
                    other
                    for other, its in sorted(found.items())
                    if its.said["wait"]["kind"] == "ask" and its.said["wait"]["also"] == wait["also"]
                ]
                others = [other for other in sorted(found) if other not in asking]
                if others:
                    return explain(wait["also"], asking, others[0], found[others[0]].said["wait"]["what"])
        return None

    def _deliver(self, scope: Scope, fault: Fault, now: float) -> None:
        said = (fault.attempts, fault.vague, *sorted(fault.meets.items()))
        known = (fault.rank, fault.kind, fault.scope, fault.epoch, *said)
        if known not in self._told:
            self._told.add(known)
            scope.note_fault(fault, now)
            self._watch.tell(scope.ranks, scope.telling(fault))
            self._watch.end_waits(now)
