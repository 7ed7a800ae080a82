"""Figures of committed results: a recorded step, counted bytes, and the fault matrix."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.figures.draw import Picture, bars
from benchmarks.figures.step import newest

ROOT = Path(__file__).parents[2]
MEMORY = ROOT / "benchmarks" / "memory_2026-11-23.md"
RELIABILITY = ROOT / "docs" / "reliability.md"

# ---- the recorded step ---------------------------------------------------------------------------------------

NAMES = {"fsdp2": "torch's FSDP2", "fullshard": "fullshard"}


def _under_way(messages: Sequence[Sequence[Any]], gap: float = 1.0) -> list[tuple[float, float]]:
    """When any message was under way, in milliseconds; shorter gaps between two are left out.

    >>> _under_way([["send", 1.0, 2.0], ["recv", 1.5, 4.0], ["send", 9.0, 9.5]])
    [(1.0, 4.0), (9.0, 9.5)]
    """
    spans: list[tuple[float, float]] = []
    for _, begin, end in sorted(messages, key=lambda message: float(message[1])):
        if spans and begin - spans[-1][1] < gap:
            spans[-1] = (spans[-1][0], max(end, spans[-1][1]))
        else:
            spans.append((begin, end))
    return spans


def overlapping(step: dict[str, Any]) -> int:
    """How many of the computing spans of a step have a message under way, at any moment of them."""
    spans = _under_way(step["messages"])
    return sum(any(start < end and begin < stop for start, stop in spans) for _, begin, end in step["compute"])


def step() -> Picture:
    """A step of both. On a busy machine lengths mean nothing, and are drawn even."""
    read = json.loads(newest().read_text())
    steps: dict[str, dict[str, Any]] = read["steps"]
    about = read["about"]
    busy = about["load"] > about["cores"]
    left, width = 92, 650
    picture = Picture(760, 268, "One training step of torch's FSDP2 and of fullshard, recorded on two CPU ranks")
    picture.text(16, 26, "One training step on two CPU ranks, recorded", bold=True, size=15)
    picture.legend(
        16, 50, [("blue", "forward"), ("purple", "backward"), ("orange", "messages under way"), ("pale", "waiting")]
    )
    longest = max(each["milliseconds"] for each in steps.values())
    y = 70
    for name in ("fsdp2", "fullshard"):
        each = steps[name]
        messages = _under_way(each["messages"])
        instants = sorted(
            {
                0.0,
                each["milliseconds"],
                *(t for span in messages for t in span),
                *(t for _, *span in each["compute"] for t in span),
            }
        )

        def at(moment: float, instants: list[float] = instants) -> float:
            if busy:
                return left + width * instants.index(moment) / (len(instants) - 1)
            return left + width * moment / longest

        picture.text(16, y + 10, NAMES[name], bold=True)
        picture.text(
            left + width,
            y + 10,
            f"{overlapping(each)} of {len(each['compute'])} times a unit computes while messages travel",
            "quiet",
            at="end",
            size=12,
        )
        y += 18
        for lane, words in enumerate(("compute", "messages")):
            picture.text(left - 8, y + 26 * lane + 15, words, "quiet", at="end", size=12)
            picture.box(left, y + 26 * lane, at(each["milliseconds"]) - left, 22, "pale")
        for unit, begin, end in each["compute"]:
            way, label = unit.split(" ", 1)
            room = at(end) - at(begin)
            picture.box(
                at(begin), y, room, 22, "blue" if way == "forward" else "purple", f"{unit}: {end - begin:.1f} ms"
            )
            if room > 10:
                picture.on((at(begin) + at(end)) / 2, y + 15, label[-1] if "block" in label else "h", size=11)
        for begin, end in messages:
            picture.box(at(begin), y + 26, at(end) - at(begin), 22, "orange", f"messages: {end - begin:.1f} ms")
        y += 68
    picture.text(
        16,
        240,
        f"torch {about['torch']}, gloo, {about['date']}: four blocks and a head (h), same values, same instruments.",
        "quiet",
        size=12,
    )
    if busy:
        picture.text(
            16,
            257,
            "The machine was busy, so lengths are drawn even: the picture shows order and overlap, not times.",
            "quiet",
            size=12,
        )
    return picture


# ---- counted bytes -------------------------------------------------------------------------------------------


def memory_peaks() -> Picture:
    """Bytes per element of one block at the peak of each half of a step, mixed precision."""
    text = MEMORY.read_text().split("**mixed precision**")[1].split("**")[0]
    found = re.findall(r"^\| ([^|]+) \| ([\d.]+) \| [\d.]+ \| ([\d.]+) \| [\d.]+ \|$", text, flags=re.M)
    names = {
        "fsdp2": "torch's FSDP2",
        "fsdp1": "FSDP1",
        "NCCL plan": "fullshard",
        "NCCL plan, 1 gP": "with gradients=1 block",
        "NCCL plan, none ahead": "with nothing ahead",
    }
    rows = []
    for name, forward, backward in found:
        if name in names:
            rows.append((f"{names[name]}, forward", [("forward", float(forward))]))
            rows.append((f"{names[name]}, backward", [("backward", float(backward))]))
    return bars(
        "Memory beyond the shards at the peak, counted: bytes per element of one block",
        rows,
        {"forward": "blue", "backward": "purple"},
        unit="bytes",
        left=240,
        note="Mixed precision, 8 ranks, the plan of NCCL, counted on a fake group: benchmarks/memory_2026-11-23.md.",
    )


# ---- the fault matrix ----------------------------------------------------------------------------------------

VERDICTS = {
    "CORRECT": "green",
    "CLEAR": "teal",
    "UNCLEAR": "grey",
    "SILENT": "orange",
    "HANG": "red",
    "CRASH": "purple",
}


def verdicts() -> dict[str, tuple[list[str], list[str]]]:
    """By class of faults: the verdicts of fullshard and of torch, where both are known."""
    rows = re.findall(r"^\| `(\w+)/\w+` \|.*\| (\w+) \| (\w+) \|$", RELIABILITY.read_text(), flags=re.M)
    found: dict[str, tuple[list[str], list[str]]] = {}
    for group, ours, torchs in rows:
        if torchs in VERDICTS:
            mine, theirs = found.setdefault(group, ([], []))
            mine.append(ours)
            theirs.append(torchs)
    return found


def faults() -> Picture:
    rows = []
    for group, (ours, torchs) in verdicts().items():
        for name, found in (("fullshard", ours), ("FSDP2", torchs)):
            rows.append((f"{group}, {name}", [(kind, float(found.count(kind))) for kind in VERDICTS]))
    return bars(
        "What happens after a fault, by class of faults",
        rows,
        VERDICTS,
        unit="cases",
        left=230,
        note="Cases that ran on both, from docs/reliability.md. Only CORRECT and CLEAR are right.",
    )
