"""What `fullshard see` makes of a record: times, bytes, causes, texts and pages, from records made by hand."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from fullshard.cli import main
from fullshard.see import causes, chrome, compare, page, picture, story, timeline
from fullshard.see.record import Event, Level, Message, RecordError, Run, read_run
from tests.harness import records
from tests.harness.records import MS, detail, header, step, two_ranks, write


def run_of(folder: Path, **changes: Any) -> Run:
    return read_run(two_ranks(folder, **changes))


# ---- files -----------------------------------------------------------------------------------------------------------


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    run = run_of(tmp_path / "mine")
    assert (run.name, run.world, run.missing, run.shown_step()) == ("mine", 2, (), 4)
    for number, rank in enumerate(run.ranks):
        assert rank.header == header(number) and rank.ended
        assert [found.number for found in rank.steps] == [1, 2, 3, 4]
        assert rank.steps[1].detail == detail() and rank.steps[0].detail is None
    assert read_run(tmp_path / "mine" / "see").ranks == run.ranks


def test_a_session_that_goes_on_replaces_the_steps_that_it_takes_again(tmp_path: Path) -> None:
    write(tmp_path, header(), [step(1, detail()), step(2), step(3)], ended=False)
    write(tmp_path, header(first_step=3), [step(3, loss=9.0), step(4, detail())])
    (rank,) = read_run(tmp_path).ranks
    assert [(found.number, found.figures["loss"]) for found in rank.steps] == [(1, 2.0), (2, 2.0), (3, 9.0), (4, 2.0)]
    assert rank.steps[0].detail == detail()
    write(tmp_path, header(first_step=3, units=records.UNITS[:2]), [step(3)])
    (rank,) = read_run(tmp_path).ranks
    assert rank.steps[0].detail is None  # its rows are about other units


def test_ranks_whose_files_are_elsewhere_are_named(tmp_path: Path) -> None:
    write(tmp_path, header(1, world=3), [step(1, detail())])
    run = read_run(tmp_path)
    assert run.missing == (0, 2)
    assert "no record here of ranks 0, 2" in page.page([run])
    with pytest.raises(RecordError, match="expected a record of rank 0, found those of 1"):
        run.rank(0)


def _damage(path: Path) -> None:
    lines = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join([lines[0], b"{]", *lines[2:]]))


def _other_version(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b'"version":1', b'"version":7'))


def _other_file(path: Path) -> None:
    path.write_bytes(b'{"step": 1}\n')


def _other_line(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b'"figures":', b'"other":', 1))


def _other_rows(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b'"events":[[', b'"events":[5,['))


BAD = {
    _damage: "found a damaged line 2 of",
    _other_version: "expected version 1 of the record, found 7",
    _other_file: "expected a record of fullshard",
    _other_line: 'expected a line of a record with figures, found none in line 2, {"step": 1, ',
    _other_rows: 'expected a line of a record, found another in line 2: {"step": 1, ',
    lambda path: path.write_bytes(b""): "expected a header in the first line, found an empty file",
    lambda path: path.write_bytes(path.read_bytes()[:99]): "expected a header in the first line, found 99 bytes of it",
    lambda path: path.unlink(): "expected the record of a run",
}


@pytest.mark.parametrize("harm", BAD, ids=lambda harm: BAD[harm][:20])
def test_what_cannot_be_read_is_one_line_and_exit_2(harm: Any, tmp_path: Path, capsys: Any) -> None:
    path = write(tmp_path / "see", header(world=1), [step(1, detail())])
    harm(path)
    page_file = tmp_path / "page.html"
    assert main(["see", str(tmp_path), "--html", str(page_file)]) == 2
    told = capsys.readouterr()
    assert told.out == "" and told.err.count("\n") == 1 and BAD[harm] in told.err
    assert not page_file.exists() and not list(tmp_path.glob(".*"))


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--step", "3"], "expected step 3 recorded in full on all ranks, found 2, 4"),
        (["--rank", "5"], "expected a record of rank 5, found those of 0, 1"),
        (["--unit", "layers.9"], "--unit layers.9: expected a unit of this run, found root, layers.0, layers.1"),
        (["there/is/none"], "expected the record of a run"),
        (["."] * 2, "expected one run or two, found 3"),
    ],
)
def test_what_cannot_be_shown_is_one_line_and_exit_2(words: list[str], told: str, tmp_path: Path, capsys: Any) -> None:
    assert main(["see", str(two_ranks(tmp_path)), *words]) == 2
    found = capsys.readouterr()
    assert found.out == "" and found.err.count("\n") == 1 and told in found.err


# ---- times and bytes -------------------------------------------------------------------------------------------------


def test_spans_fill_the_step_and_have_the_right_owners() -> None:
    found = timeline.spans(step(1, detail()))
    assert found[0].begin == 0 and found[-1].end == 20 * MS
    assert all(before.end == after.begin for before, after in zip(found, found[1:], strict=False))
    took: dict[tuple[str, int, str], float] = {}
    for span in found:
        key = span.kind, span.unit, span.what
        took[key] = round(took.get(key, 0) + (span.end - span.begin) / MS, 3)
    assert took["wait", 1, "unshard"] == 1.8 and took["wait", 2, "unshard"] == 1.0
    assert took["wait", 1, "reduce"] == 2.0
    assert took["compute", 1, "forward"] == 1.9  # 0.9 to 1, and 3.1 to 4.9
    assert took["compute", 2, "forward"] == 1.8  # 6.2 to 8
    assert took["compute", 2, "backward"] == 3.0 and took["compute", 1, "backward"] == 2.7
    assert took["compute", -1, "loss"] == 0.9 and took["compute", -1, "optimizer and the rest"] == 2.9
    shares = timeline.shares(step(1, detail()))
    assert shares.total == 20 * MS
    assert shares.wait == round(4.81 * MS) and shares.other == round(4.3 * MS)


def test_recomputation_is_told_apart() -> None:
    made = detail(
        events=[
            Event(0, "pre_backward", 1, ""),
            Event(1 * MS, "pre_forward", 1, "in_backward"),
            Event(3 * MS, "forward_failed", 1, "in_backward"),
            Event(6 * MS, "backward_end", 0, ""),
        ],
        commands=[],
        messages=[],
    )
    found = [(span.unit, span.what, (span.end - span.begin) // MS) for span in timeline.spans(step(1, made))]
    assert found[:3] == [(1, "backward", 1), (1, "recomputation", 2), (1, "backward", 3)]


def test_on_a_device_spans_are_of_its_clock_and_the_host_is_held_against_it() -> None:
    """The device comes to the third event 5 ms after the host, so it waits for the host before it and not after it."""
    events = [
        Event(0, "pre_forward", 1, "", 0),
        Event(2 * MS, "post_forward", 1, "", 2 * MS),
        Event(3 * MS, "pre_backward", 1, "", 8 * MS),
        Event(4 * MS, "backward_end", 0, "", 12 * MS),
    ]
    message = Message("data", 1, 1, "unshard", 10, 0, 1, None, 2, 3 * MS, 4 * MS)
    made = detail(events=events, commands=[], messages=[message])
    assert message.exposed == MS
    assert timeline.host_bound(made) == 2 * MS
    shares = timeline.shares(step(1, made))
    assert (shares.wait, shares.host, shares.total) == (MS, 2 * MS, 12 * MS)


def test_the_peak_is_when_most_is_held_and_by_whom() -> None:
    at, nbytes, holders = timeline.Memory(detail()).peak()
    assert (at, nbytes) == (3 * MS, 1200)
    assert sorted(holders[:2]) == [(1, "full", 400), (2, "full", 400)] and len(holders) == 4


# ---- causes ----------------------------------------------------------------------------------------------------------


def test_each_wait_has_its_cause(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    found = causes.exposures(run, run.ranks[0], 4)
    assert [(item.unit, item.what, item.phase, item.nanoseconds / MS, item.cause) for item in found] == [
        (1, "gradients", "backward", 2.0, "end"),
        (1, "all-gather", "forward", 1.8, "first"),
        (2, "all-gather", "forward", 1.0, "lead"),
    ]
    assert "gathered 2.00 ms before it was needed, took 3.00 ms: prefetch deeper" in found[2].text


def test_a_wait_for_a_late_rank_is_put_down_to_it(tmp_path: Path) -> None:
    run = run_of(tmp_path, late=3 * MS)
    of_first = {(item.unit, item.what): item for item in causes.exposures(run, run.ranks[0], 4)}
    assert of_first[1, "gradients"].cause == "peer" and "rank 1 sent its part 2.05 ms" in of_first[1, "gradients"].text
    assert all(item.cause != "peer" for item in causes.exposures(run, run.ranks[1], 4))
    standings = causes.standings(run, 4)
    assert [(each.last, each.late) for each in standings] == [(0.0, 0), (1.0, 3 * MS)]


def _with(number: int, **changes: Any) -> list[Message]:
    return [m._replace(**changes) if m.number == number else m for m in detail().messages]


@pytest.mark.parametrize(
    ("changes", "unit", "cause"),
    [
        ({"messages": [m._replace(arrival=(m.need or 0) - 1) for m in detail().messages]}, 2, "here"),
        # Behind a message of layers.0 that is there at 5.5.
        ({"messages": _with(1, arrival=round(5.5 * MS))}, 2, "queue"),
        (
            {"commands": [c._replace(rule="R16") for c in detail().commands], "messages": _with(2, need=3 * MS)},
            2,
            "first",
        ),
        (
            {
                "commands": [c._replace(rule="R16", begin=5 * MS) if c.unit == 2 else c for c in detail().commands],
                "messages": _with(2, issue=5 * MS),
            },
            2,
            "unplanned",
        ),
        ({"commands": [c._replace(kind="reduce") if c.kind == "finish" else c for c in detail().commands]}, 1, "limit"),
        ({"messages": _with(2, unit=-1, purpose="the gradient norm")}, -1, "small"),
    ],
    ids=["here", "queue", "first", "unplanned", "limit", "small"],
)
def test_other_causes(changes: Any, unit: int, cause: str, tmp_path: Path) -> None:
    run = run_of(tmp_path, **changes)
    found = [item.cause for item in causes.exposures(run, run.ranks[0], 4) if item.unit == unit]
    assert cause in found


def test_clocks_of_two_hosts_are_put_together_by_messages(tmp_path: Path) -> None:
    """Rank 1's clock is an hour ahead; its step begins 7 ms before that of rank 0."""
    folder = tmp_path / "see"
    write(folder, header(0), [step(4, detail())])
    shifted = tuple(
        m._replace(**{name: getattr(m, name) + 7 * MS for name in ("issue", "need", "arrival", "ready")})
        for m in detail().messages
    )
    away = step(4, replace(detail(), messages=shifted), begin=3_600_000 * MS)
    write(folder, header(1, host="there"), [away])
    assert causes.offsets(read_run(tmp_path), 4) == {0: 0, 1: -7 * MS}


# ---- texts and pages -------------------------------------------------------------------------------------------------


def test_a_units_story_has_every_command_and_the_rule_behind_it(tmp_path: Path, capsys: Any) -> None:
    assert main(["see", str(two_ranks(tmp_path)), "--unit", "layers.1"]) == 0
    told = capsys.readouterr().out
    rows = [line for line in told.splitlines() if re.match(r"\s*\d+\.\d{3} ", line)]
    assert [row.split()[3] for row in rows] == ["unshard", "wait", "reduce"]
    assert "pre_forward layers.0" in rows[0] and "R3" in rows[0] and "200 B, needed 2.00 ms later" in rows[0]
    assert "waits 1.00 ms" in rows[1]
    assert "R3: Prefetches are issued before the compute that hides them" in told


def test_every_rule_has_a_text() -> None:
    source = Path(story.rules.__file__).read_text()
    numbers = set(re.findall(r'"(R\d+)"', source))
    assert len(numbers) > 15 and numbers <= story.rule_texts().keys()
    assert all(len(text) > 20 and not text.startswith("[") for text in story.rule_texts().values())


def test_the_trace_is_a_chrome_trace(tmp_path: Path, capsys: Any) -> None:
    target = tmp_path / "trace.json"
    assert main(["see", str(two_ranks(tmp_path)), "--perfetto", str(target)]) == 0
    events = json.loads(target.read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1}
    slices = [event for event in events if event["ph"] == "X" and event["pid"] == 0]
    named = {event["name"] for event in slices}
    assert {
        "unshard layers.1",
        "wait layers.1",
        "forward layers.1",
        "backward layers.0",
        "wait: reduce layers.0",
    } <= named
    assert all(event["dur"] >= 0 and event["ts"] >= 0 for event in slices)
    starts = {event["id"] for event in events if event["ph"] == "s"}
    assert starts == {event["id"] for event in events if event["ph"] == "f"} and len(starts) == 8
    (peak,) = {max(sum(e["args"].values()) for e in events if e["ph"] == "C" and e["pid"] == pid) for pid in (0, 1)}
    assert peak == 1200


def test_messages_share_rows_only_if_they_do_not_overlap() -> None:
    rows = chrome.rows_of(detail().messages)
    assert [[message.number for message in row] for row in rows] == [[1, 2, 3, 4]]
    rows = chrome.rows_of(_with(1, arrival=round(5.5 * MS)))
    assert [[message.number for message in row] for row in rows] == [[1, 3, 4], [2]]


def test_the_picture_is_one_svg_of_all_three_drawings(tmp_path: Path) -> None:
    target = tmp_path / "step.svg"
    assert main(["see", str(two_ranks(tmp_path)), "--svg", str(target)]) == 0
    root = ElementTree.fromstring(target.read_text())
    inner = root.findall("{http://www.w3.org/2000/svg}svg")
    assert [each.get("class") for each in inner] == ["lanes", "memory", "units", "key"]
    tops = [float(each.get("y", "")) for each in inner]
    assert tops == sorted(set(tops)) and float(root.get("viewBox", "").split()[3]) > tops[-1]


class _Document(HTMLParser):
    """Elements by name, with their attributes; checks that every element that has to be closed is."""

    VOID = ("meta", "br")
    # Their end may be left out.
    OPTIONAL = ("html", "p")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        assert [name for name in self._open if name not in self.OPTIONAL] == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    def all(self, tag: str, **wanted: str) -> list[dict[str, str | None]]:
        return [
            attrs
            for name, attrs in self.elements
            if name == tag and all(attrs.get(key.rstrip("_")) == value for key, value in wanted.items())
        ]


def test_the_page_has_all_parts_and_needs_no_other_file(tmp_path: Path, capsys: Any) -> None:
    target = tmp_path / "page.html"
    assert main(["see", str(two_ranks(tmp_path / "a<b", late=3 * MS)), "--html", str(target)]) == 0
    assert "host-bound: " in capsys.readouterr().out
    text = target.read_text()
    found = _Document(text)
    for attribute in ("src", "href", "action", "data"):
        assert not [tag for tag, attrs in found.elements if attribute in attrs], attribute
    assert not re.search(r"url\(|@import|fetch\(|XMLHttpRequest|https?://(?!www\.w3\.org/2000/svg)", text)
    sections = {(each["data-step"], each["data-rank"]) for each in found.all("section", class_="shown")}
    assert sections == {(step, rank) for step in "24" for rank in "01"}
    for kind in ("lanes", "memory", "units"):
        assert len(found.all("svg", class_=kind)) == 4
    assert len(found.all("rect", class_="message")) == 16 and len(found.all("path", class_="need")) == 16
    assert len(found.all("polyline", class_="curve")) == 4  # loss, norm, and the times of two ranks
    told = " ".join(found.text)
    for words in (
        "a<b",
        "Where the time of step 4 went",
        "exposed messages",
        "host-bound",
        "Checkpoints",
        "Ranks in step",
    ):
        assert words in told, words
    assert "rank 1 sent its part" in told


def test_two_runs_are_shown_beside_each_other_with_what_changed(tmp_path: Path, capsys: Any) -> None:
    slow = detail(levels=[*detail().levels, Level(16 * MS, 1, "full", 4000)])
    first, second = two_ranks(tmp_path / "first"), tmp_path / "second"
    for rank in range(2):
        head = header(rank, options={"prefetch_depth": 2})
        write(second / "see", head, [replace(step(n, slow, loss=3.0 / n), end=step(n).end + 9 * MS) for n in (2, 4)])
    found = {change.what: change for change in compare.changes(read_run(first), read_run(second))}
    assert found["prefetch_depth"][1:4] == ("1", "2", "differs")
    assert found["median step"][1:4] == ("20.0 ms", "29.0 ms", "+45.0 %") and found["median step"].worse
    assert found["step 4: peak of what the library holds"].after == "4.3 KiB"
    assert found["loss of step 4"][1:4] == ("0.5", "0.75", "+0.25")
    assert "ranks" not in found
    target = tmp_path / "both.html"
    assert main(["see", str(first), str(second), "--html", str(target)]) == 0
    document = _Document(target.read_text())
    assert {each["data-run"] for each in document.all("section", class_="shown")} == {"0", "1"}
    assert len(document.all("table", class_="changes")) == 1
    assert [each["href"] for each in document.all("a")] == ["#run0", "#run1"]
    # Both in one picture (loss, norm, time), then each by itself with a time for each of two ranks.
    drawn = [document.all(shape, class_="curve") for shape in ("polyline", "circle")]
    assert sum(map(len, drawn)) == 2 * 3 + 2 * (2 + 2)
    assert "A: first" in document.text and "B: second" in document.text
    assert capsys.readouterr().out.count(": step 4 took") == 2
    # Of its own name, so that the page of the first alone stays.
    assert main(["see", str(first)]) == 0 == main(["see", str(first), str(second)])
    folder = first / "see"
    assert "compared.html" in capsys.readouterr().out and (folder / "compared.html").read_text() == target.read_text()
    assert (folder / "see.html").read_text() != target.read_text()


def test_units_that_differ_alike_are_one_line(tmp_path: Path) -> None:
    runs = [two_ranks(tmp_path / "first"), tmp_path / "second"]
    units = header().units
    kept = [unit if unit.name == "root" else replace(unit, reshard_after_forward=False) for unit in units]
    other = tuple(replace(unit, dtypes="float32 bfloat16 float32") for unit in kept)
    write(runs[1] / "see", header(world=1, units=other), [step(n, detail()) for n in (2, 4)])
    found = {change.what: change for change in compare.changes(*map(read_run, runs))}
    alike = found["dtypes (stored, computed, reduced) of layers.0, layers.1"]
    assert (alike.before, alike.after) == (units[1].dtypes, "float32 bfloat16 float32")
    assert found["reshard_after_forward of layers.0, layers.1"].after == "False"
    assert sum("reshard_after_forward" in what for what in found) == 1


def test_bytes_are_drawn_to_the_end_of_the_step_on_a_longer_axis(tmp_path: Path) -> None:
    run = read_run(two_ranks(tmp_path / "one"))
    rank, shown = run.ranks[0], run.ranks[0].steps[3]
    end = picture.Axis(2 * shown.nanoseconds).x(shown.nanoseconds)
    for text in (
        picture.bytes_by_kind(rank, shown, end=2 * shown.nanoseconds),
        picture.bytes_by_unit(rank, shown, 2 * shown.nanoseconds),
    ):
        areas = [corner.split(",")[0] for points in re.findall(r'points="([^"]*)"', text) for corner in points.split()]
        boxes = re.findall(r'class="bytes"[^>]*', text)
        reached = [float(x) for x in areas]
        for box in boxes:
            x, width = (re.search(rf'\b{name}="([0-9.]+)"', box) for name in ("x", "width"))
            if x is not None and width is not None:
                reached.append(float(x[1]) + float(width[1]))
        assert reached and max(reached) <= end + 0.2


def test_a_run_without_a_message_or_a_finite_loss_has_a_page(tmp_path: Path) -> None:
    alone = detail(messages=[], commands=[])
    write(tmp_path, header(world=1), [step(1, alone, loss=None)], ended=False)
    text = page.page([read_run(tmp_path)])
    assert "No message was waited for" in text and "not finite in step 1" in text and "has no end" in text
