"""The leader: one of the ranks that wait in a scope reads the records of all, and tells them why they wait
(diagnosis.py interprets the records).

It costs the leader one request each second or two. The others spend one of four requests on trying to become it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from . import diagnosis
from .diagnosis import Reader, Record
from .errors import Fault
from .scope import Scope
from .store import ranks_of
from .wait import PATIENCE_SECONDS, AnyWatch, Wait, pace

# A waiting rank tries to become the leader with one of so many requests.
_CLAIM_EACH = 4
_CLAIMING = 250


class _Watch(AnyWatch, Protocol):
    """`AnyWatch` with the attributes that its leader needs."""

    scopes: dict[tuple[tuple[int, ...], str], Scope]
    lately: list[Fault]

    def end_waits(self, now: float) -> None: ...


class Leader:
    """Reads the records of scopes that this rank leads, and claims leadership. Held by its `Watch`."""

    def __init__(self, watch: _Watch) -> None:
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
        # By scope: the ranks that waited there at the last reading although a fault was delivered.
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
        while more := diagnosis.needed(records.values()) - wanted:
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
        for fault in diagnosis.published(own_records, scope.name, scope.epoch):
            self._deliver(scope, fault, now)
        closed = own is not None and own.also == "closed"
        silence = self._watch.settings.silence_seconds
        if closed and silence:
            silence = min(silence, self._watch.settings.beat_seconds + PATIENCE_SECONDS)
        seen = self._seen_elsewhere(own_records, silence, now)
        for record in own_records:
            if record.rank != self._watch.rank and (text := self._reader.lost(record, silence, now, seen)):
                gone = self._reader.condition(record, seen)[0] == "gone"
                self._deliver(scope, self._found(scope, record, text, records, gone), now)
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
        if stuck and (diagnosis.meetings(stuck, scope.name) or not any(fault.is_found for fault in scope.causes())):
            self._disagree(stuck, now)
        limit = self._watch.settings.limit_seconds
        if wanted - records.keys():
            limit += self._watch.settings.beat_seconds  # mail replaced a record: a new one comes by then
        if own is not None and own.scope is scope and now - own.since > limit:
            self._deliver(scope, diagnosis.late(own.told(), records, self._watch.rank, now - own.since), now)

    def _seen_elsewhere(self, records: Sequence[Record], silence: float, now: float) -> Mapping[int, tuple[str, int]]:
        """The state of quiet processes on other machines, as ranks there report it; asks those ranks."""
        quiet = [record for record in records if silence and self._reader.is_quiet(record, silence / 2, now)]
        if not quiet:
            return {}
        others = [record for record in records if record not in quiet]
        seen = diagnosis.seen_by(others)
        asked: dict[int, list[Fault]] = {}
        for rank, witness in diagnosis.witnesses(quiet, others).items():
            process = str(next(record for record in quiet if record.rank == rank).said["process"])
            if rank not in seen and self._host.condition(process)[0] == "unknown":
                asked.setdefault(witness, []).append(Fault(rank, "look", process))
        for witness, looks in asked.items():
            self._records.tell([witness], [one.dumps() for one in (*self._watch.lately, *looks)])
        return seen

    def _found(self, scope: Scope, record: Record, text: str, records: Mapping[int, Record], gone: bool) -> Fault:
        step, doing = record.said.get("step", -1), record.said.get("doing", "")
        meets = diagnosis.meetings(records, scope.name)
        return Fault(record.rank, "lost", text, scope.name, scope.epoch, step, doing, meets=meets, gone=gone)

    def _disagree(self, found: Mapping[int, Record], now: float) -> None:
        """Tell all scopes in which a rank of `found` waits."""
        text = diagnosis.disagreement(found, self._explained)
        first = min(found)
        told: dict[tuple[str, int], list[int]] = {}
        for rank, record in found.items():
            wait = record.said["wait"]
            told.setdefault((wait["scope"], wait["epoch"]), []).extend(
                ranks_of(wait["ranks"]) if wait["kind"] == "torch" else [rank]
            )
        by_name = {scope.name: scope for scope in list(self._watch.scopes.values())}
        for (name, epoch), ranks in told.items():
            fault = Fault(first, "disagree", text, name, epoch, meets=diagnosis.meetings(found, name))
            scope = by_name.get(name)
            if scope is not None and scope.epoch == epoch:
                self._deliver(scope, fault, now)
            else:
                self._watch.tell(ranks, [fault])

    def _explained(self, found: Mapping[int, Record]) -> str | None:
        """The question's own explanation of why some ranks ask it while others wait elsewhere."""
        for _, record in sorted(found.items()):
            wait = record.said["wait"]
            for scope in list(self._watch.scopes.values()):
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
                    return explain(wait["also"], asking, others[0])
        return None

    def _deliver(self, scope: Scope, fault: Fault, now: float) -> None:
        said = (fault.attempts, fault.vague, *sorted(fault.meets.items()))
        known = (fault.rank, fault.kind, fault.scope, fault.epoch, *said)
        if known not in self._told:
            self._told.add(known)
            scope.hear(fault, now)
            self._watch.tell(scope.ranks, scope.telling(fault))
            self._watch.end_waits(now)
