"""Shows what the checks found, as a table for the terminal and as JSON."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from .checks import ADVICE, CHECKS, ERROR, WARNING, Check, Found, messages, rough, seconds
from .facts import Facts

# With the exit code of the worst finding.
SEVERITIES = {ERROR: 2, WARNING: 1, ADVICE: 0}


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong. `check`: its name in docs/doctor.md; `severity`: "error", "warning" or "advice"."""

    severity: str
    check: str
    what: str
    why: str
    fix: str


@dataclass(frozen=True)
class Diagnosis:
    """The findings, the worst first, and the facts that they come from."""

    findings: tuple[Finding, ...]
    facts: Facts

    @property
    def exit_code(self) -> int:
        return max((SEVERITIES[finding.severity] for finding in self.findings), default=0)

    def as_json(self, entry: str) -> dict[str, Any]:
        """Returns what `fullshard doctor --json` prints."""
        facts, found = self.facts, self.facts.measured
        return {
            "entry": entry,
            "world": facts.world,
            "replicas": facts.replicas,
            "findings": [dataclasses.asdict(finding) for finding in self.findings],
            "machine": dataclasses.asdict(facts.machine) | {"backends": sorted(facts.machine.backends)},
            "checkpoints": dataclasses.asdict(facts.folder) if facts.folder else None,
            "measured": dataclasses.asdict(found) | {"messages": messages(facts) or None},
            "exit_code": self.exit_code,
        }

    def __str__(self) -> str:
        lines = []
        for finding in self.findings:
            lines.append(f"{finding.severity:<7}  {finding.check}: {finding.what}")
            lines += [f"         why: {finding.why}", f"         fix: {finding.fix}"]
        counts = {name: sum(finding.severity == name for finding in self.findings) for name in SEVERITIES}
        total = ", ".join(f"{n} {name}{'s' * (n != 1 and name != ADVICE)}" for name, n in counts.items())
        return "\n".join([*lines, *self._figures(), f"{len(CHECKS)} checks for {self.facts.world} ranks: {total}"])

    def _figures(self) -> list[str]:
        found = self.facts.measured
        lines = []
        if found.step is not None:
            lines.append(f"forward and backward of the plain model on this CPU: about {seconds(found.step)}")
        if found.host is not None:
            lines.append(f"what a unit adds on the host, without messages: about {seconds(found.host)}")
        for axis in found.axes:
            lines.append(
                f"axis {axis.name}, {axis.ranks} processes here: all-gather about {rough(axis.all_gather)}, "
                f"reduce-scatter about {rough(axis.reduce_scatter)}"
            )
        if needed := messages(self.facts):
            lines.append(f"messages of a step at this bandwidth: about {seconds(needed)}")
        return [*lines, *(f"not measured: {what}" for what in found.skipped)]


def _finding(check: Check, found: str | Found) -> Finding:
    what, fix = (found, check.fix) if isinstance(found, str) else found
    return Finding(check.severity, check.name, what, check.why, fix)


def diagnose(facts: Facts) -> Diagnosis:
    """Let every check of the table read `facts`."""
    found = [_finding(check, what) for check in CHECKS for what in check.find(facts)]
    order = list(SEVERITIES)
    return Diagnosis(tuple(sorted(found, key=lambda finding: order.index(finding.severity))), facts)
