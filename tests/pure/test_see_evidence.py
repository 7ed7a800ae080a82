"""What `fullshard see` may say of a record without all of it: few steps, some ranks, half a line, a failed step."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fullshard.cli import main
from fullshard.see import causes, page, story
from fullshard.see.record import Detail, Held, Message, RecordError, Run, Step, line, read_run
from tests.harness.records import MS, detail, header, step, two_ranks, write

# ---- stragglers ------------------------------------------------------------------------------------------------------

Late = Callable[[int, int, random.Random], float]


def timed(folder: Path, world: int, steps: int, late: Late, *, hosts: bool = False, first: int = 1) -> Run:
    """Steps of 10 messages, each 5 ms of compute after the one before. `late`: (rank, step, generator) -> milliseconds
    by which the rank sends each message of the step later; all have the message 1 ms after the last has sent it."""
    noise = random.Random(world * steps)
    rows: dict[int, list[Step]] = {rank: [] for rank in range(world)}
    for number in range(first, first + steps):
        at = [0.0] * world
        messages: dict[int, list[Message]] = {rank: [] for rank in range(world)}
        for place in range(10):
            sent = [at[rank] + 5 + late(rank, number, noise) / 10 for rank in range(world)]
            arrival = max(sent) + 1
            for rank in range(world):
                times = [round(t * MS) for t in (sent[rank], sent[rank] + 0.1, arrival, arrival)]
                messages[rank].append(Message("data", place, 1, "unshard", 100, *times))
            at = [max(sent[rank] + 0.1, arrival) for rank in range(world)]
        for rank in range(world):
            begin, end = number * 1000 * MS, number * 1000 * MS + round((max(at) + 2) * MS)
            rows[rank].append(Step(number, begin, end, {}, Detail((), (), tuple(messages[rank]), ())))
    for rank in range(world):
        write(folder / "see", header(rank, world, host=f"host {rank}" if hosts else "here"), rows[rank])
    return read_run(folder)


def alike(size: float) -> Late:
    return lambda rank, number, noise: noise.uniform(0, size)


def one_late(which: int, by: float, size: float) -> Late:
    return lambda rank, number, noise: noise.uniform(0, size) + by * (rank == which)


@pytest.mark.parametrize(("world", "steps"), [(2, 12), (4, 9), (8, 6), (16, 6)])
@pytest.mark.parametrize("hosts", [False, True], ids=["one clock", "clocks of hosts"])
def test_a_straggler_among_noise_is_found_and_sure(world: int, steps: int, hosts: bool, tmp_path: Path) -> None:
    run = timed(tmp_path, world, steps, one_late(world // 2, 30, 25), hosts=hosts)
    (found,) = causes.stragglers(run)
    assert found.rank == world // 2 and found.is_sure and found.worst == found.steps == steps - 1
    assert found.last == 1.0 or found.last > 0.8
    assert f"rank {found.rank}: the others wait " in str(found) and "by chance" in str(found)
    assert f"  straggler: {found}" in story.summary(run, run.shown_step()).splitlines()
    assert f"straggler: {found}" in page.page([run])


@pytest.mark.parametrize("world", [2, 4, 8])
@pytest.mark.parametrize("size", [1.0, 20.0, 60.0])
def test_noise_alone_makes_no_straggler(world: int, size: float, tmp_path: Path) -> None:
    run = timed(tmp_path, world, 20, alike(size))
    assert not [found for found in causes.stragglers(run) if found.is_sure]
    assert "  straggler" not in story.summary(run, run.shown_step())


def test_one_slow_step_is_none_however_slow(tmp_path: Path) -> None:
    """The step that is shown has rank 1 late by two thirds of it; the others do not."""
    run = timed(tmp_path, 2, 12, lambda rank, number, noise: noise.uniform(0, 5) + 100 * (rank == 1 and number == 12))
    assert causes.standings(run, 12)[1].last == 1.0 and causes.stragglers(run) == []
    assert "No rank keeps the others waiting all the time." in page.page([run])


def test_a_rank_that_is_late_in_every_second_step_is_not_called_one(tmp_path: Path) -> None:
    run = timed(tmp_path, 2, 15, lambda rank, number, noise: 30.0 * (rank == number % 2))
    assert not [found for found in causes.stragglers(run) if found.is_sure]


@pytest.mark.parametrize(
    "late",
    [
        lambda rank, number, noise: noise.uniform(0, 5) + 200 * (rank == 3 and number % 5 == 0),
        lambda rank, number, noise: noise.uniform(0, 5) + 40 * (rank == 1 and number < 10),
        lambda rank, number, noise: 0.0,
        lambda rank, number, noise: 40.0 * (rank == noise.randrange(4)),
    ],
    ids=["a hiccup in each fifth step", "slow at first", "equal to the nanosecond", "another one each time"],
)
def test_what_passes_is_no_straggler(late: Late, tmp_path: Path) -> None:
    assert not [found for found in causes.stragglers(timed(tmp_path, 4, 20, late)) if found.is_sure]


def test_the_first_step_and_few_steps_show_little(tmp_path: Path) -> None:
    """Of two ranks one is the slower in any step: a coin toss."""
    late = one_late(1, 30, 1)
    for steps in (1, 2, 3):
        run = timed(tmp_path / f"{steps}", 2, steps, late)
        assert causes.stragglers(run) == [], steps
        assert f"{steps - 1} steps are too few to say whether a rank keeps" in page.page([run])
    (perhaps,) = causes.stragglers(timed(tmp_path / "5", 2, 5, late))
    assert not perhaps.is_sure and perhaps.chance == 2 / 16
    assert "which alike ranks would show with a chance of 12 %: record more steps" in str(perhaps)
    assert "perhaps a straggler: rank 1" in story.summary(read_run(tmp_path / "5"), 5)
    (sure,) = causes.stragglers(timed(tmp_path / "9", 2, 9, late))
    assert sure.is_sure and sure.chance == 2 / 256


def test_only_the_first_step_is_left_out(tmp_path: Path) -> None:
    """It forms groups and allocates; a record that begins later has such a first step too."""
    run = timed(tmp_path, 2, 4, alike(1), first=7)
    assert causes.judged_steps(run) == [8, 9, 10]


# ---- records of some ranks alone -------------------------------------------------------------------------------------


def test_without_the_other_ranks_no_cause_is_named(tmp_path: Path) -> None:
    """Rank 1 was late. Rank 0's record alone cannot know it, and may not say "prefetch deeper"."""
    two_ranks(tmp_path, late=3 * MS)
    (tmp_path / "see" / "from1-rank1.jsonl").unlink()
    run = read_run(tmp_path)
    found = {(item.unit, item.what): item for item in causes.exposures(run, run.ranks[0], 4)}
    assert {item.cause for item in found.values()} == {"unknown"}
    why = "no record here of rank 1, so whether a rank sent its part late is not known"
    assert found[2, "all-gather"].text == f"gathered 2.00 ms before it was needed, took 3.00 ms; {why}"
    assert found[1, "gradients"].text == f"waited for at the end of the backward, took 2.95 ms; {why}"
    told = story.summary(run, 4)
    assert why in told and "prefetch" not in told and "straggler" not in told
    text = page.page([run])
    assert "Not known of rank 1, which" in text and "prefetch deeper" not in text


def test_what_a_rank_knows_by_itself_is_still_said(tmp_path: Path) -> None:
    """A message that had arrived before it was needed, and one for which a rank with a record was late."""
    arrived = [m._replace(arrival=(m.need or 0) - 1) for m in detail().messages]
    write(tmp_path / "a" / "see", header(), [step(4, detail(messages=arrived))])
    run = read_run(tmp_path / "a")
    assert {item.cause for item in causes.exposures(run, run.ranks[0], 4)} == {"here"}
    two_ranks(tmp_path / "b", late=3 * MS)
    for rank in range(2):
        path = tmp_path / "b" / "see" / f"from1-rank{rank}.jsonl"
        path.write_bytes(path.read_bytes().replace(b'"world":2', b'"world":3'))
    run = read_run(tmp_path / "b")
    assert run.missing == (2,)
    found = {item.unit: item for item in causes.exposures(run, run.ranks[0], 4) if item.what == "gradients"}
    assert found[1].cause == "peer" and "rank 1 sent its part" in found[1].text


def test_a_world_of_one_knows_all(tmp_path: Path) -> None:
    write(tmp_path / "see", header(world=1), [step(4, detail())])
    run = read_run(tmp_path)
    assert "unknown" not in {item.cause for item in causes.exposures(run, run.ranks[0], 4)}


def test_clocks_that_cannot_be_put_together_are_said(tmp_path: Path) -> None:
    """Two hosts without a message whose arrival both have."""
    write(tmp_path / "see", header(0), [step(4, detail())])
    none = replace(detail(), messages=tuple(m._replace(group="other") for m in detail().messages))
    write(tmp_path / "see", header(1, host="there"), [step(4, none)])
    run = read_run(tmp_path)
    assert causes.offsets(run, 4) == {0: 0, 1: None}
    (text,) = {item.text.partition("; ")[2] for item in causes.exposures(run, run.ranks[0], 4)}
    assert text.startswith("the clock of rank 1 cannot be put beside the others")
    assert main(["see", str(tmp_path), "--perfetto", str(tmp_path / "trace.json")]) == 0


# ---- half a last line ------------------------------------------------------------------------------------------------


@pytest.mark.sample(1)
@pytest.mark.parametrize("ended", [True, False], ids=["in the end", "in a step"])
def test_a_record_cut_at_any_byte_of_its_last_line_shows_what_is_whole(ended: bool, tmp_path: Path) -> None:
    path = write(tmp_path / "see", header(world=1), [step(1), step(2), step(3, detail())], ended=ended)
    content = path.read_bytes()
    begin = content.rstrip(b"\n").rfind(b"\n") + 1
    lost = [] if ended else [3]
    for end in range(begin, len(content) + 1):
        path.write_bytes(content[:end])
        (rank,) = read_run(tmp_path).ranks
        whole = end >= len(content) - 1  # all but the end of the line
        assert [s.number for s in rank.steps] == ([1, 2, 3] if whole else [n for n in (1, 2, 3) if n not in lost])
        assert rank.ended == (whole and ended)
        if begin < end < len(content) - 1:
            (said,) = rank.cut
            assert (
                f"the last line of from1-rank0.jsonl, line {5 if ended else 4}, was cut off after {end - begin}" in said
            )
        else:
            assert rank.cut == ()


def test_a_cut_is_said_on_the_terminal_and_on_the_page(tmp_path: Path, capsys: Any) -> None:
    path = write(tmp_path / "see", header(world=1), [step(n, detail()) for n in (1, 2)], ended=False)
    path.write_bytes(path.read_bytes()[:-40] + b"\0" * 40)  # as a file system leaves it after a loss of power
    target = tmp_path / "page.html"
    assert main(["see", str(tmp_path), "--html", str(target)]) == 0
    told = capsys.readouterr().out
    assert ": step 1 took" in told and "was cut off after" in told and "has no end: it runs, or was killed" in told
    assert "was cut off after" in target.read_text()
    assert main(["see", str(tmp_path), "--unit", "layers.0"]) == 0


@pytest.mark.parametrize(
    "harm",
    [
        lambda content: content + b"\n\n",
        lambda content: content.replace(b"\n", b"\n\n"),
        lambda content: content.replace(b"\n", b"\r\n"),
        lambda content: content + b'{"step": 99',
        lambda content: content + b" ",
    ],
    ids=[
        "blank lines at the end",
        "blank lines between",
        "ends of lines as Windows has them",
        "half a step",
        "a blank",
    ],
)
def test_what_copies_and_editors_leave_is_read(harm: Callable[[bytes], bytes], tmp_path: Path) -> None:
    two_ranks(tmp_path)
    path = tmp_path / "see" / "from1-rank1.jsonl"
    whole = read_run(tmp_path).ranks[1]
    path.write_bytes(harm(path.read_bytes()))
    assert read_run(tmp_path).ranks[1].steps == whole.steps


def test_ranks_without_a_step_in_full_are_named(tmp_path: Path, capsys: Any) -> None:
    """Of rank 1 a first half is there, and without it rank 0 can be seen."""
    two_ranks(tmp_path)
    path = tmp_path / "see" / "from1-rank1.jsonl"
    content = path.read_bytes()
    path.write_bytes(content[: content.index(b'"detail"') + 20])
    assert main(["see", str(tmp_path)]) == 2
    assert "found none; none of rank 1: without the files of these the others are shown" in capsys.readouterr().err
    path.unlink()
    assert main(["see", str(tmp_path)]) == 0


def test_a_rank_without_a_whole_header_is_missing(tmp_path: Path, capsys: Any) -> None:
    two_ranks(tmp_path)
    path = tmp_path / "see" / "from1-rank1.jsonl"
    for content, said in ((b"", "found an empty file"), (path.read_bytes()[:50], "found 50 bytes of it")):
        path.write_bytes(content)
        run = read_run(tmp_path)
        assert run.missing == (1,) and said in run.unread[0]
        assert main(["see", str(tmp_path)]) == 0
        assert said in capsys.readouterr().out


def test_a_session_that_was_cut_is_continued(tmp_path: Path) -> None:
    path = write(tmp_path, header(world=1), [step(1), step(2), step(3, detail())], ended=False)
    path.write_bytes(path.read_bytes()[:-9])
    write(tmp_path, header(world=1, first_step=3), [step(3, detail()), step(4)])
    (rank,) = read_run(tmp_path).ranks
    assert [each.number for each in rank.steps] == [1, 2, 3, 4] and len(rank.cut) == 1


# ---- failed steps ----------------------------------------------------------------------------------------------------

HELD = [[1, "full", 400 << 20], [2, "gradients", 90 << 20], [-1, "staging", 7 << 20], [1, "shards", 3 << 20]]
OUT = "CUDA out of memory. Tried to allocate 20.00 MiB. (OutOfMemoryError)"


def failing(folder: Path, numbers: dict[int, Detail | None], *, world: int = 1, memory: Any = None) -> Path:
    """A record whose last step failed. `numbers`: its steps, in full or not."""
    last = max(numbers)
    for rank in range(world):
        path = write(folder / "see", header(rank, world), [], ended=False)
        lines = [path.read_bytes()]
        for number, made in numbers.items():
            each = step(number, made)
            fields: dict[str, Any] = {"step": number, "begin": each.begin, "end": each.end, "figures": {}}
            if number == last:
                fields |= {"failed": OUT, "held": HELD, "memory": memory or {"resident": 5 << 30}}
            if made is not None:
                fields["detail"] = vars(made)
            lines.append(line(fields))
        path.write_bytes(b"".join([*lines, line({"ended": True})]))
    return folder


def test_a_failed_step_has_its_bytes(tmp_path: Path, capsys: Any) -> None:
    """The step was not recorded in full, as most are."""
    target = tmp_path / "page.html"
    assert main(["see", str(failing(tmp_path / "mine", {1: detail(), 57: None})), "--html", str(target)]) == 0
    told = capsys.readouterr().out
    held = "held by the library then: 500.0 MiB (full 400.0 MiB, gradients 90.0 MiB, staging 7.0 MiB, shards 3.0 MiB)"
    assert "mine: step 1 took 20.0 ms" in told and f"mine: step 57 failed on rank 0: {OUT}\n  {held}\n" in told
    assert "the largest: full of layers.0 400.0 MiB; gradients of layers.1 90.0 MiB; staging 7.0 MiB" in told
    assert "the process in all: 5.0 GiB resident" in told
    assert f"rank 0, step 57: {OUT}<br>{held}" in target.read_text()
    assert read_run(tmp_path / "mine").ranks[0].steps[1].held[0] == Held(1, "full", 400 << 20)


def test_beside_the_library_is_what_the_allocator_has_more(tmp_path: Path) -> None:
    memory = {"allocated": 70 << 30, "reserved": 78 << 30, "free": 1 << 30, "total": 80 << 30}
    run = read_run(failing(tmp_path, {1: detail(), 2: None}, memory=memory))
    lines = story.held_at_failure(run.ranks[0], run.ranks[0].steps[1])
    assert lines[-1] == (
        "the device's allocator: 70.0 GiB allocated, of these 69.5 GiB beside the library (activations, the program's "
        "own), 78.0 GiB reserved; the device has 1.0 GiB free of 80.0 GiB"
    )


def test_a_run_that_fails_in_its_first_step_is_shown(tmp_path: Path, capsys: Any) -> None:
    """The only step is the one that failed: it is drawn as far as it came."""
    half = detail(events=detail().events[:5], commands=detail().commands[:4], messages=detail().messages[:2])
    target = tmp_path / "page.html"
    assert main(["see", str(failing(tmp_path, {1: half}, world=2)), "--html", str(target)]) == 0
    told = capsys.readouterr().out
    assert "step 1 failed after 20.0 ms" in told and OUT in told
    assert 'class="lanes"' in target.read_text()


def test_where_no_step_can_be_drawn_the_failure_is_said(tmp_path: Path, capsys: Any) -> None:
    assert main(["see", str(failing(tmp_path, {1: None}))]) == 2
    told = capsys.readouterr()
    assert OUT in told.out and "held by the library then: 500.0 MiB" in told.out
    assert told.err.count("\n") == 1 and "expected a step recorded in full on all ranks, found none" in told.err


def test_a_failed_step_can_be_asked_for(tmp_path: Path) -> None:
    run = read_run(failing(tmp_path, {1: detail(), 2: detail()}))
    assert run.shown_step() == 1 and run.shown_step(2) == 2 and run.common() == [1] and run.common(failed=True) == [2]
    with pytest.raises(RecordError, match="found 1, 2"):
        run.shown_step(3)


def test_a_file_that_cannot_be_written_is_a_message(tmp_path: Path, capsys: Any) -> None:
    two_ranks(tmp_path)
    assert main(["see", str(tmp_path), "--html", str(tmp_path / "none" / "page.html")]) == 2
    told = capsys.readouterr().err
    assert "No such file or directory" in told and "Errno" not in told and "[" not in told
    (tmp_path / "folder").mkdir()
    for target in ("none/page.html", "folder"):
        assert main(["see", str(tmp_path), "--html", str(tmp_path / target)]) == 2
        assert capsys.readouterr().err.startswith(f"fullshard see: {tmp_path / target}: ")
