"""One error for a job that ran on several ranks: what each rank raised, or where it stood when time ran out."""

from __future__ import annotations

import threading
import traceback
from dataclasses import dataclass
from typing import Literal

from fullshard.peers.store import frames


@dataclass(frozen=True)
class RankReport:
    """What became of one rank that did not finish well.

    `kind`: "raised" (detail = traceback), "hung" (detail = stacks of all its threads), "died" (the process ended by
    itself; detail = exit status and its last output), "released" (it was waiting for a rank that failed; detail =
    where, if known). `exception` is the exception itself where it could be carried over to the caller.
    """

    rank: int
    kind: Literal["raised", "hung", "died", "released"]
    detail: str
    exception: BaseException | None = None
    at: float = 0.0  # seconds on the machine's monotonic clock; orders the reports, so that the cause comes first


class RanksFailed(Exception):
    """At least one rank of a job failed. The message holds every rank's report; `reports` holds them by rank.

    Both are in the order of events: the first report is the cause, more often than not, and the others its
    consequences.
    """

    def __init__(self, what: str, world: int, reports: list[RankReport]) -> None:
        self.reports = {report.rank: report for report in sorted(reports, key=lambda report: report.at)}
        told = ", then ".join(f"rank {report.rank} {report.kind}" for report in self.reports.values())
        head = f"{what}: {told} (world of {world})"
        parts = [f"--- rank {r.rank} {r.kind} ---\n{r.detail.rstrip()}" for r in self.reports.values()]
        super().__init__("\n".join([head, *parts]))

    def exception(self, rank: int) -> BaseException | None:
        """The exception that `rank` raised, or None if it did not raise (or it could not be carried over)."""
        report = self.reports.get(rank)
        return report.exception if report else None


def format_stacks(thread_ids: set[int] | None = None) -> str:
    """The Python stacks of all threads of this process (or of those given by ident), each under its thread's name."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = []
    for ident, frame in frames().items():
        if thread_ids is None or ident in thread_ids:
            stack = "".join(traceback.format_stack(frame))
            parts.append(f"Thread {names.get(ident, '?')} ({ident}):\n{stack}")
    return "\n".join(parts)
