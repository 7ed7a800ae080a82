"""Tells what became of one setting or one call of the old program: a verdict, the reason, and the new setting. No
torch.

exact          means the same
equivalent     gives the same training; the note says what is done in another way
dropped        has no counterpart and needs none
lossy          loses something that the old setting had
unsupported    has to be changed manually
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

EXACT, EQUIVALENT, DROPPED, LOSSY, UNSUPPORTED = VERDICTS = ("exact", "equivalent", "dropped", "lossy", "unsupported")
GOOD = (EXACT, EQUIVALENT, DROPPED)


class MigrationError(Exception):
    """Input that cannot be read or converted. The text is one line: place, what was found, what was expected."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where in the input. `line` from 1; 0 where the format has no lines for it."""

    file: str
    line: int = 0

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" if self.line else self.file


@dataclass(frozen=True, slots=True)
class Finding:
    """`key`: the old setting, argument or call. `value`: as it was written. `setting`: what takes its place, ""
    for nothing. `default`: the old program did not write it, and its default means something else here."""

    place: Place
    key: str
    value: str
    verdict: str
    reason: str
    setting: str = ""
    default: bool = False

    def __str__(self) -> str:
        old = f"{self.key} = {self.value}" if self.value else self.key
        old += " (default)" if self.default else ""
        new = f" -> {self.setting}" if self.setting else ""
        return f"{self.place}: {self.verdict}: {old}{new}: {self.reason}"


@dataclass(frozen=True)
class Judgement:
    """Everything that was found, and which losses the user accepts."""

    findings: Sequence[Finding]
    accepted: Collection[str] = field(default=())

    @property
    def refused(self) -> list[Finding]:
        """Returns the findings that keep the exit code from being 0."""
        return [each for each in self.findings if each.verdict not in GOOD and each.key not in self.accepted]

    @property
    def exit_code(self) -> int:
        return 1 if self.refused else 0

    def check_accepted(self) -> None:
        """Raises `MigrationError` for an accepted key that no lossy or unsupported finding has."""
        bad = sorted({each.key for each in self.findings if each.verdict not in GOOD})
        for key in self.accepted:
            if key not in bad:
                there = f"there are {', '.join(bad)}" if bad else "nothing is lost"
                raise MigrationError(
                    f"--accept-lossy {key}: expected a key with the verdict lossy or unsupported; {there}"
                )

    def as_json(self) -> dict[str, Any]:
        found = [{**asdict(each), "accepted": each.key in self.accepted} for each in self.findings]
        return {"findings": found, "counts": self.counts, "exit_code": self.exit_code}

    @property
    def counts(self) -> dict[str, int]:
        return {verdict: sum(each.verdict == verdict for each in self.findings) for verdict in VERDICTS}

    def __str__(self) -> str:
        lines = [f"{each} (accepted)" if _is_accepted(each, self.accepted) else str(each) for each in self.findings]
        counts = ", ".join(f"{count} {verdict}" for verdict, count in self.counts.items() if count)
        return "\n".join([*lines, counts or "nothing to convert"])


def _is_accepted(finding: Finding, accepted: Collection[str]) -> bool:
    return finding.verdict not in GOOD and finding.key in accepted


def in_order(findings: Iterable[Finding]) -> list[Finding]:
    """Returns the findings by file and line, each once."""
    return sorted(dict.fromkeys(findings), key=lambda each: (each.place.file, each.place.line))
