"""The verdict on a case, computed from what its ranks report and from the run that it is compared with."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

import torch

from tests.faults.cases import Case, Equal, Raises, Recovers, Warns
from tests.faults.ranks import Caught, Report

State = dict[str, torch.Tensor]
Kind = Literal["CORRECT", "CLEAR", "UNCLEAR", "SILENT", "HANG", "CRASH"]
KINDS: tuple[Kind, ...] = ("CORRECT", "CLEAR", "UNCLEAR", "SILENT", "HANG", "CRASH")


@dataclass(frozen=True)
class Verdict:
    """CORRECT: the result is right. CLEAR: the demanded error. UNCLEAR: an error without what the case demands. SILENT:
    no error, and the result differs. HANG: past its bound. CRASH: a process died, and not by the fault."""

    kind: Kind
    why: str


def judge(case: Case, reports: list[Report], reference: State | None) -> Verdict:
    """`reference`: what the run that the case is compared with ended with."""
    for report in reports:
        if report.ended == "died" and report.rank not in case.deaths:
            end = f"signal {-report.code}" if report.code < 0 else f"exit status {report.code}"
            return Verdict("CRASH", f"rank {report.rank} ended by {end}: {_tail(report.output)}")
    hung = [r.rank for r in reports if r.ended == "hung" and r.rank not in case.deaths]
    if hung:
        return Verdict("HANG", f"rank {', '.join(map(str, hung))} still ran after {case.limit:g} s")
    alive = [report for report in reports if report.rank not in case.deaths]
    struck = max((moment for report in reports for moment, _ in report.strikes), default=None)
    if isinstance(case.expected, Raises):
        return _demanded(case.expected, alive, reference, struck)
    raised = [report for report in alive if report.ended == "raised"]
    if raised:
        if case.also is not None:
            return _demanded(case.also, alive, reference, struck)
        return Verdict("UNCLEAR", _quote(raised[0].rank, raised[0].error))
    if isinstance(case.expected, Recovers):
        found = _peers(case.expected, alive, struck)
        if found is not None:
            return found
    bound = case.expected.bound if isinstance(case.expected, Equal) else 0.0
    difference = _difference(alive, reference, bound)
    if isinstance(case.expected, Warns):
        texts = "\n".join(text for report in alive for text in report.warned)
        if all(re.search(word, texts, re.I) for word in case.expected.words):
            return Verdict("CLEAR", "warned")
        return Verdict("SILENT", "no such warning") if difference else Verdict("CORRECT", "equal")
    return Verdict("SILENT", difference) if difference else Verdict("CORRECT", "equal")


def _demanded(wanted: Raises, alive: list[Report], reference: State | None, struck: float | None) -> Verdict:
    struck_ranks = {report.rank for report in alive if report.strikes}
    if wanted.on == "all":
        ranks = {report.rank for report in alive}
    elif wanted.on == "others":
        ranks = {report.rank for report in alive} - struck_ranks
    else:
        ranks = struck_ranks if wanted.on == "struck" else set(wanted.on)
    judged = [report for report in alive if report.rank in ranks]
    if not any(report.ended == "raised" for report in judged):
        difference = _difference(alive, reference, 0.0)
        others = [report for report in alive if report.ended == "raised"]
        if others:
            return Verdict("UNCLEAR", f"rank {judged[0].rank} raised nothing" if judged else "no rank was left")
        return Verdict("SILENT", difference) if difference else Verdict("CORRECT", "no error, and an equal result")
    for report in judged:
        if report.error is None:
            return Verdict("UNCLEAR", f"rank {report.rank} raised nothing")
        missing = _missing(report.error, wanted.error, wanted.words)
        if missing:
            return Verdict("UNCLEAR", f"{missing}: {_quote(report.rank, report.error)}")
        if struck is not None and report.error.at - struck > wanted.within:
            late = report.error.at - struck
            return Verdict("HANG", f"rank {report.rank} raised after {late:.1f} s, {wanted.within:g} s are allowed")
    return Verdict("CLEAR", _quote(judged[0].rank, judged[0].error))


def _peers(wanted: Recovers, alive: list[Report], struck: float | None) -> Verdict | None:
    for report in alive:
        if report.strikes:
            continue
        if not report.caught and wanted.maybe:
            continue
        if not report.caught:
            return Verdict("UNCLEAR", f"rank {report.rank} was told nothing")
        missing = _missing(report.caught[0], wanted.error, wanted.words)
        if missing:
            return Verdict("UNCLEAR", f"{missing}: {_quote(report.rank, report.caught[0])}")
        if struck is not None and report.caught[0].at - struck > wanted.within:
            return Verdict("HANG", f"rank {report.rank} was told after {report.caught[0].at - struck:.1f} s")
    return None


def _missing(error: Caught, kind: str, words: tuple[str, ...]) -> str:
    if kind not in error.kinds:
        return f"expected {kind}, found {error.kinds[0]}"
    for word in words:
        if not re.search(word, error.text, re.I):
            return f"the text says nothing of {word!r}"
    return ""


def _difference(reports: list[Report], reference: State | None, bound: float) -> str:
    """The first difference of some rank's end from the reference; empty if there is none."""
    if reference is None:
        return "there is nothing to compare with"
    for report in reports:
        if report.state is None:
            return f"rank {report.rank} has no result"
        if report.state.keys() != reference.keys():
            odd = sorted(report.state.keys() ^ reference.keys())
            return f"rank {report.rank}: {odd[0]} is not in both"
        for name, wanted in reference.items():
            found = report.state[name]
            if found.shape != wanted.shape or found.dtype != wanted.dtype:
                return f"rank {report.rank}: {name} is {tuple(found.shape)} {found.dtype}"
            if bound == 0.0:
                if not torch.equal(_bits(found), _bits(wanted)):
                    return f"rank {report.rank}: {name} differs by {_largest(found, wanted):.2g}"
            elif not _largest(found, wanted) <= bound * float(wanted.double().abs().max()) + 1e-7:
                return f"rank {report.rank}: {name} differs by {_largest(found, wanted):.2g}"
    return ""


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


def _largest(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).abs().max()) if a.numel() else 0.0


def _quote(rank: int, error: Caught | None) -> str:
    if error is None:
        return ""
    return f"rank {rank}: {error.kinds[0]}: {' '.join(error.text.split())[:300]}"


def _tail(output: str) -> str:
    lines = [line for line in output.splitlines() if line.strip()]
    return " / ".join(lines[-2:])[-300:]
