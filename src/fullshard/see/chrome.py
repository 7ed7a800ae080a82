"""A step as a Chrome trace (JSON), for Perfetto (ui.perfetto.dev) and chrome://tracing.

A process for each rank, threads for what runs and for messages, arrows from issue to need, counters of bytes.
"""

from __future__ import annotations

import json
from typing import Any

from .causes import offsets
from .record import KINDS, RankRecord, Run
from .timeline import COMPUTE, Memory, on_device, spans

_RUNS, _COMMANDS, _FIRST_MESSAGES = 1, 2, 3


def chrome_trace(run: Run, number: int) -> str:
    """The trace of step `number` of all ranks. Times are microseconds since the first rank's step began."""
    events: list[dict[str, Any]] = []
    shift = offsets(run, number)
    for rank in run.ranks:
        events += _rank(rank, number, shift[rank.header.rank] or 0)
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, separators=(",", ":"))


def _rank(rank: RankRecord, number: int, shift: int) -> list[dict[str, Any]]:
    step = rank.step(number)
    assert step is not None and step.detail is not None
    pid, detail = rank.header.rank, step.detail
    found = [_named("process_name", pid, 0, f"rank {pid}"), _named("thread_name", pid, _RUNS, "compute and waits")]
    found.append(_named("thread_name", pid, _COMMANDS, "commands"))

    def at(nanoseconds: int) -> float:
        return (nanoseconds + shift) / 1e3

    for span in spans(step):
        unit = rank.name_of(span.unit) if span.unit >= 0 else ""
        name = f"{span.what} {unit}".strip() if span.kind == COMPUTE else f"{span.kind}: {span.what} {unit}".strip()
        found.append(_slice(pid, _RUNS, name, span.kind, at(span.begin), (span.end - span.begin) / 1e3, {}))
    for command in detail.commands:
        told = {"rule": command.rule}
        name = f"{command.kind} {rank.name_of(command.unit)}"
        found.append(
            _slice(pid, _COMMANDS, name, "command", at(command.begin), (command.end - command.begin) / 1e3, told)
        )
    for row, messages in enumerate(rows_of(detail.messages)):
        thread = _FIRST_MESSAGES + row
        found.append(_named("thread_name", pid, thread, "messages" if row == 0 else f"messages {row + 1}"))
        for message in messages:
            end = message.arrived if message.arrived is not None else message.issue
            name = f"{message.purpose} {rank.name_of(message.unit)}" if message.unit >= 0 else message.purpose
            told = {"bytes": str(message.nbytes), "group": message.group, "number": str(message.number)}
            found.append(_slice(pid, thread, name, "message", at(message.issue), (end - message.issue) / 1e3, told))
            if message.need is not None and not on_device(detail):
                flow = {"name": "need", "cat": "need", "pid": pid, "id": f"{pid}.{message.group}.{message.number}"}
                found.append({**flow, "ph": "s", "tid": thread, "ts": at(message.issue)})
                found.append({**flow, "ph": "f", "bp": "e", "tid": _COMMANDS, "ts": at(message.need)})
    for moment, now in Memory(detail):
        sums = {kind: sum(nbytes for (_, k), nbytes in now.items() if k == kind) for kind in KINDS}
        found.append({"name": "bytes", "ph": "C", "pid": pid, "ts": at(moment), "args": sums})
    return found


def rows_of(messages: Any) -> list[list[Any]]:
    """`messages` in as few rows as there are in flight at once: none overlap in a row."""
    rows: list[list[Any]] = []
    ends: list[int] = []
    for message in sorted(messages, key=lambda message: message.issue):
        end = message.arrived if message.arrived is not None else message.issue
        for number, last in enumerate(ends):
            if last <= message.issue:
                rows[number].append(message)
                ends[number] = end
                break
        else:
            rows.append([message])
            ends.append(end)
    return rows


def _named(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}


def _slice(pid: int, tid: int, name: str, kind: str, begin: float, took: float, told: dict[str, str]) -> dict[str, Any]:
    return {"name": name, "cat": kind, "ph": "X", "pid": pid, "tid": tid, "ts": begin, "dur": took, "args": told}
