"""The tables of data files: what is written is found by its name, and nothing else is read."""

from __future__ import annotations

import random

import pytest

from fullshard.checkpoint.errors import CheckpointDamaged
from fullshard.checkpoint.table import OldTable, Place, Table, nbytes_of

BLOCK = 16


def sample() -> tuple[Table, dict[str, Place]]:
    """Parts of no whole block, of one, of several; their checksums are numbers."""
    sizes, starts, crcs, places = [40, 16, 1, 33], [64], list[int](), dict[str, Place]()
    for number, size in enumerate(sizes):
        mine = [100 * number + block for block in range(-(-size // BLOCK))]
        places[f"part{number}"] = Place(starts[-1], size, mine)
        starts.append(starts[-1] + size)
        crcs += mine
    return Table.of(0xFFFFFFFF, list(places), starts, crcs, BLOCK), places


def test_parts_are_found_by_their_names() -> None:
    table, places = sample()
    data = table.to_bytes()
    assert len(data) == nbytes_of([40, 16, 1, 33], BLOCK)
    for found in (table, Table.parse(data, BLOCK, "here")):
        for name, place in places.items():
            there = found.find(name)
            assert there is not None and (there.start, there.nbytes, list(there.crcs)) == place
        assert found.find("part4") is None and len(found) == 4
        assert (found.start, found.end, found.header_crc) == (64, 154, 0xFFFFFFFF)
        assert [place.start for place in found.places()] == [64, 104, 120, 121]


def test_an_empty_table_has_its_end() -> None:
    table = Table.parse(Table.of(7, [], [64], [], BLOCK).to_bytes(), BLOCK, "here")
    assert len(table) == 0 and table.end == 64 and table.find("") is None


def test_numbers_are_little_endian_whatever_the_machine_is() -> None:
    data = Table.of(0x01020304, ["a"], [8, 9], [0x0A0B0C0D], BLOCK).to_bytes()
    assert data[:8] == bytes([4, 3, 2, 1, 1, 0, 0, 0]) and data[-4:] == bytes([0x0D, 0x0C, 0x0B, 0x0A])
    assert data[20:28] == bytes([8, *[0] * 7])


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data[:-1],
        lambda data: data[:4],
        lambda data: b"",
        lambda data: data + b"1234",
        lambda data: data[:4] + bytes([255] * 4) + data[8:],
        lambda data: data[:4] + bytes(4) + data[8:],
        lambda data: data[:8] + data[16:24] + data[8:16] + data[24:],
        lambda data: data[:40] + data[44:48] + data[44:],
        lambda data: data[:56] + bytes(8) + data[64:],
    ],
    ids=["cut", "no count", "nothing", "longer", "huge count", "no parts", "order", "a part twice", "back"],
)
def test_a_table_that_no_save_writes_is_refused(change: object) -> None:
    data = change(sample()[0].to_bytes())  # type: ignore[operator]
    with pytest.raises(CheckpointDamaged, match="here: expected"):
        Table.parse(data, BLOCK, "here")


def test_random_bytes_are_refused_or_a_table() -> None:
    data, draw = sample()[0].to_bytes(), random.Random(0)
    for _ in range(2000):
        changed = bytearray(data)
        changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
        try:
            Table.parse(bytes(changed), BLOCK, "here")
        except CheckpointDamaged:
            pass


def test_a_file_of_schema_1_has_the_same_questions_answered() -> None:
    table = OldTable(5, 64, {"a": Place(64, 8, (1,)), "b": Place(72, 4, (2,))})
    assert table.find("b") == (72, 4, (2,)) and table.find("c") is None
    assert (table.start, table.end, len(table)) == (64, 76, 2)
    assert OldTable(5, 64, {}).end == 64
