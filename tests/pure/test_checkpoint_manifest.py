"""The manifest, values and headers: what is written is read back, and nothing else is accepted."""

from __future__ import annotations

import json
import math
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fullshard.checkpoint.errors import CheckpointDamaged
from fullshard.checkpoint.manifest import (
    FileEntry,
    Manifest,
    TensorEntry,
    ValueEntry,
    data_name,
    decode,
    encode,
    is_file_name,
    parse,
    place_in_name,
    to_bytes,
)
from fullshard.checkpoint.plan import Box, Cut, whole
from fullshard.checkpoint.rules import Held, Listed, Rule, on
from fullshard.checkpoint.safetensors import FilePart, data_header, file_order, save_id_of

SAVE_ID = "0123456789abcdef" * 2


DIGEST = "0123456789abcdef" * 4


def sample() -> Manifest:
    """A sharded tensor in two files, a scalar, an empty one, one of any parts, and values."""
    rule = Rule((2,), (Cut(0),), (0, 1))
    w = TensorEntry(("model", "w.x"), "float32", (3, 2), rule, 0, 0)
    step = TensorEntry(("optimizer", "state", "w.x", "step"), "int64", (), on((0, 1)), 1, 0)
    none = TensorEntry(("empty",), "bfloat16", (0, 4), on((0, 1)), 0, 0)
    parts = Listed((Held(Box((0,), (3,)), (0, 1)), Held(Box((3,), (1,)), (1,))))
    odd = TensorEntry(("odd",), "uint8", (4,), parts, 0, 1)
    values = [ValueEntry(("step",), 7), ValueEntry(("lrs", 0), (0.1, math.inf)), ValueEntry(("d",), {1: [None]})]
    files = (
        FileEntry("data-00000.safetensors", 64 + 16 + 60, 64, 60, DIGEST),
        FileEntry("data-00001.safetensors", 64 + 16 + 60, 64, 60, DIGEST),
        FileEntry("data-00000-001.safetensors", 64 + 3 + 40, 64, 40, DIGEST),
        FileEntry("data-00001-001.safetensors", 64 + 1 + 40, 64, 40, DIGEST),
    )
    entries = {entry.key: entry for entry in (w, step, none, odd)}
    return Manifest(SAVE_ID, 2, "fullshard test", entries, {entry.key: entry for entry in values}, files)


def test_what_is_written_is_read() -> None:
    manifest = sample()
    data = to_bytes(manifest)
    assert parse(data, "here") == manifest
    assert manifest.keys == ["d", "empty", "lrs.0", "model.w.x", "odd", "optimizer.state.w.x.step", "step"]
    assert manifest.nbytes == 36
    assert max(map(len, data.decode().splitlines())) < 300, "a line for each thing"
    parts = {key: [(rank, str(box)) for rank, box in entry.parts()] for key, entry in manifest.tensors.items()}
    assert parts["model.w.x"] == [(0, "[0:2, 0:2]"), (1, "[2:3, 0:2]")]
    assert parts["optimizer.state.w.x.step"] == [(1, "[]")] and parts["empty"] == []
    assert parts["odd"] == [(0, "[0:3]"), (1, "[3:4]")]


def test_many_tensors_are_a_line_each() -> None:
    entries = {f"m.t{n}": TensorEntry(("m", f"t{n}"), "uint8", (0,), on((0,))) for n in range(50)}
    lines = to_bytes(Manifest(SAVE_ID, 1, "test", entries, {}, ())).decode().splitlines()
    assert sum('["t' in line for line in lines) == 50


def test_names_of_files_say_who_wrote_them() -> None:
    for place in ((0, 0), (7, 0), (7, 2), (1_000_000, 0), (12, 1234)):
        assert place_in_name(data_name(*place)) == place
    for name in ("data-7.safetensors", "data-00007-000.safetensors", "data-0000007.safetensors", "x"):
        with pytest.raises(ValueError, match="name of a data file"):
            place_in_name(name)


def test_a_reader_of_0_2_0_refuses_it_in_one_line_by_its_version() -> None:
    """What its `parse` does before anything else."""
    raw = json.loads(to_bytes(sample()))
    assert raw["format"] == "fullshard-checkpoint" and raw["schema"] == 2 != 1
    assert raw["writer"] == "fullshard test", "which it names"


# ---- each field is proven --------------------------------------------------------------------------------------


def _set(container: Any, key: Any, value: Any) -> None:
    container[key] = value


def _layout(raw: Any, name: str) -> Any:
    numbers = {item[0]: item[1] for group in raw["tensors"] for item in group["of"]}
    return raw["layouts"][numbers[name]]


def _rule(raw: Any, name: str) -> Any:
    return raw["rules"][_layout(raw, name)["rule"]]


EDITS = {
    "a name that leaves": lambda raw: _set(raw["files"][0], 0, "../data"),
    "an absolute name": lambda raw: _set(raw["files"][0], 0, "/etc/passwd"),
    "a name with a NUL": lambda raw: _set(raw["files"][0], 0, "a\0b"),
    "two files of one name": lambda raw: _set(raw["files"][0], 0, "data-00001.safetensors"),
    "a file too few": lambda raw: raw["files"].pop(),
    "a file nobody uses": lambda raw: raw["files"].append(["data-00002.safetensors", 200, 64, 60, DIGEST]),
    "a file of more bytes": lambda raw: _set(raw["files"][0], 1, 200),
    "a header beyond the file": lambda raw: _set(raw["files"][0], 2, 200),
    "a table of nothing": lambda raw: _set(raw["files"][0], 3, 0),
    "a digest too short": lambda raw: _set(raw["files"][0], 4, "00"),
    "a file that is text": lambda raw: _set(raw["files"], 0, "data-00000.safetensors"),
    "a shape that is larger": lambda raw: _set(_layout(raw, "w.x"), "shape", [4, 2]),
    "a shape beyond memory": lambda raw: _set(_layout(raw, "w.x"), "shape", [2**40, 2**40]),
    "a negative size": lambda raw: _set(_layout(raw, "w.x"), "shape", [-3, -2]),
    "a size that is true": lambda raw: _set(_layout(raw, "w.x"), "shape", [3, True]),
    "another dtype": lambda raw: _set(_layout(raw, "w.x"), "dtype", "float64"),
    "no dtype": lambda raw: _set(_layout(raw, "w.x"), "dtype", "object"),
    "a rule that is not there": lambda raw: _set(_layout(raw, "w.x"), "rule", 9),
    "a replica that is not there": lambda raw: _set(_layout(raw, "step"), "replica", 2),
    "a dim that is not there": lambda raw: _set(_rule(raw, "w.x"), "cuts", [[2, 1]]),
    "pieces that nobody made": lambda raw: _set(_rule(raw, "w.x"), "cuts", [[0, 3]]),
    "an axis without a cut": lambda raw: _set(_rule(raw, "w.x"), "sizes", [2, 2]),
    "an axis of nothing": lambda raw: _set(_rule(raw, "w.x"), "sizes", [0]),
    "a rank twice": lambda raw: _set(_rule(raw, "w.x"), "ranks", [1, 1]),
    "a rank beyond the world": lambda raw: _set(_rule(raw, "w.x"), "ranks", {"from": 1, "by": [[2, 1]]}),
    "more ranks than there are": lambda raw: _set(_rule(raw, "w.x"), "ranks", {"from": 0, "by": [[10**12, 1]]}),
    "ranks for half a replica": lambda raw: _set(_rule(raw, "w.x"), "ranks", [0]),
    "overlapping parts": lambda raw: _set(_rule(raw, "odd")["parts"][1], 0, [2]),
    "a part twice": lambda raw: _rule(raw, "odd")["parts"].append(_rule(raw, "odd")["parts"][0]),
    "a part missing": lambda raw: _rule(raw, "odd")["parts"].pop(),
    "a part of nobody": lambda raw: _set(_rule(raw, "odd")["parts"][0], 2, []),
    "a tensor of no layout": lambda raw: _set(raw["tensors"][0]["of"][0], 1, 9),
    "a tensor of no number": lambda raw: _set(raw["tensors"][0]["of"][0], 1, True),
    "a name that is true": lambda raw: _set(raw["tensors"][0]["of"][0], 0, True),
    "a key twice": lambda raw: raw["tensors"].append(raw["tensors"][0]),
    "a tensor that is a value": lambda raw: raw["values"].append({"key": "empty", "path": ["empty"], "value": 1}),
    "a value that is no value": lambda raw: _set(raw["values"][0], "value", {"eval": "1"}),
    "a key that is not its path": lambda raw: _set(raw["values"][0], "key", "x"),
    "an empty path": lambda raw: raw["values"][0].update(path=[], key=""),
    "a field too many": lambda raw: _set(raw, "pickle", "gASV"),
    "a field too few": lambda raw: raw.pop("world"),
    "a world of none": lambda raw: _set(raw, "world", 0),
    "a world beyond all": lambda raw: _set(raw, "world", 1 << 30),
    "blocks of nothing": lambda raw: _set(raw, "block_nbytes", 0),
    "blocks of 24 bytes": lambda raw: _set(raw, "block_nbytes", 24),
    "a save id of another form": lambda raw: _set(raw, "save_id", "../.."),
    "a later schema": lambda raw: _set(raw, "schema", 3),
    "an older schema": lambda raw: _set(raw, "schema", 1),
    "another format": lambda raw: _set(raw, "format", "dcp"),
    "tensors that are a dict": lambda raw: _set(raw, "tensors", {}),
    "a number beyond 64 bits": lambda raw: _set(raw["files"][0], 1, 2**70),
}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS.keys())
def test_an_edited_manifest_is_refused(edit: Any) -> None:
    raw = json.loads(to_bytes(sample()))
    edit(raw)
    with pytest.raises(CheckpointDamaged, match="here"):
        parse(json.dumps(raw).encode(), "here")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"null",
        b"[]",
        b"{",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"format": 1, "format": 2}',
        b'{"world": NaN}',
        b'{"world": 1' + b"0" * 10_000 + b"}",
        b"\x80\x04cos\nsystem\n.",
    ],
)
def test_what_is_no_manifest_is_refused(data: bytes) -> None:
    with pytest.raises(CheckpointDamaged, match="here"):
        parse(data, "here")


def test_a_key_that_is_there_twice_is_refused() -> None:
    """Other readers take the other value."""
    data = to_bytes(sample())
    twice = data.replace(b'"world": 2', b'"world": 2, "world": 2')
    assert twice != data
    with pytest.raises(CheckpointDamaged, match="a key twice"):
        parse(twice, "here")


# ---- schema 1 --------------------------------------------------------------------------------------------------------


def old() -> dict[str, Any]:
    """As 0.2.0 wrote it: a tensor in two files, and a scalar."""

    def chunk(offsets: list[int], lengths: list[int], file: int, start: int, stop: int) -> dict[str, Any]:
        return {"offsets": offsets, "lengths": lengths, "file": file, "range": [start, stop], "crc32": "0000000a"}

    w = [chunk([0, 0], [2, 2], 0, 64, 80), chunk([2, 0], [1, 2], 1, 80, 88)]
    tensors = [
        {"key": "w", "path": ["w"], "dtype": "float32", "shape": [3, 2], "chunks": w},
        {"key": "s", "path": ["s"], "dtype": "int64", "shape": [], "chunks": [chunk([], [], 1, 88, 96)]},
    ]
    files = [
        {"name": "data-00000.safetensors", "nbytes": 80, "header_nbytes": 64, "header_crc32": "ffffffff"},
        {"name": "data-00003.safetensors", "nbytes": 96, "header_nbytes": 80, "header_crc32": "00000000"},
    ]
    head = {"format": "fullshard-checkpoint", "schema": 1, "save_id": SAVE_ID, "world": 4, "writer": "fullshard 0.2.0"}
    values = [{"key": "n", "path": ["n"], "value": 7}]
    return {**head, "block_nbytes": 1 << 20, "tensors": tensors, "values": values, "files": files}


def test_schema_1_is_read() -> None:
    found = parse(json.dumps(old()).encode(), "here")
    assert found.schema == 1 and found.world == 4 and found.nbytes == 32
    assert [(file, str(box)) for file, box in found.tensors["w"].parts()] == [(0, "[0:2, 0:2]"), (1, "[2:3, 0:2]")]
    assert found.old_tables[1].find("w[2:3, 0:2]") == (80, 8, (10,)) and found.old_tables[1].find("s") == (88, 8, (10,))
    assert found.numbers() == {(0, 0): 0, (1, 0): 1}


def _w(raw: dict[str, Any]) -> dict[str, Any]:
    return raw["tensors"][0]  # type: ignore[no-any-return]


OLD_EDITS = {
    "a name that leaves": lambda raw: _set(raw["files"][0], "name", "../data"),
    "two names that differ in case": lambda raw: _set(raw["files"][0], "name", "DATA-00003.safetensors"),
    "a file too few": lambda raw: raw["files"].pop(),
    "a shape that is larger": lambda raw: _set(_w(raw), "shape", [4, 2]),
    "no dtype": lambda raw: _set(_w(raw), "dtype", "object"),
    "overlapping chunks": lambda raw: _set(_w(raw)["chunks"][1], "offsets", [1, 0]),
    "a chunk twice": lambda raw: _w(raw)["chunks"].append(_w(raw)["chunks"][0]),
    "a chunk missing": lambda raw: _w(raw)["chunks"].pop(),
    "a chunk in another file": lambda raw: _set(_w(raw)["chunks"][0], "file", 1),
    "a chunk in no file": lambda raw: _set(_w(raw)["chunks"][0], "file", 2),
    "a range in the header": lambda raw: _set(_w(raw)["chunks"][0], "range", [60, 76]),
    "a short range": lambda raw: _set(_w(raw)["chunks"][0], "range", [64, 72]),
    "a range over another": lambda raw: _set(raw["tensors"][1]["chunks"][0], "range", [84, 92]),
    "a checksum too few": lambda raw: _set(_w(raw)["chunks"][0], "crc32", ""),
    "a checksum too many": lambda raw: _set(_w(raw)["chunks"][0], "crc32", "00" * 8),
    "a checksum of letters": lambda raw: _set(_w(raw)["chunks"][0], "crc32", "0000000g"),
    "a key that is not its path": lambda raw: _set(_w(raw), "key", "model.w"),
    "a key twice": lambda raw: raw["tensors"].append(_w(raw)),
}


@pytest.mark.parametrize("edit", OLD_EDITS.values(), ids=OLD_EDITS.keys())
def test_an_edited_manifest_of_schema_1_is_refused(edit: Any) -> None:
    raw = old()
    edit(raw)
    with pytest.raises(CheckpointDamaged, match="here"):
        parse(json.dumps(raw).encode(), "here")


@pytest.mark.parametrize("more", [0, 4])
def test_parts_that_lie_over_each_other_are_refused(more: int) -> None:
    """Also where the last one ends with the file, and where bytes are left."""
    raw = old()
    raw["files"][1]["nbytes"] += more
    if not more:
        raw["tensors"][1]["chunks"][0]["range"] = [80, 88]
        raw["tensors"].append({**raw["tensors"][1], "key": "t", "path": ["t"]})
        raw["tensors"][2]["chunks"] = [{**raw["tensors"][1]["chunks"][0], "range": [88, 96]}]
    with pytest.raises(CheckpointDamaged, match="chunks"):
        parse(json.dumps(raw).encode(), "here")


def test_mutated_manifests_are_refused_or_read_as_themselves() -> None:
    """Bytes changed at random: another error than ours, or a hang, is a hole in the parser."""
    data, draw = to_bytes(sample()), random.Random(0)
    accepted = 0
    for _ in range(2000):
        changed = bytearray(data)
        for _ in range(draw.randint(1, 3)):
            changed[draw.randrange(len(changed))] = draw.choice(b'0123456789-,.:"[]{}aenx\\\0 \xff')
        try:
            accepted += parse(bytes(changed), "here") is not None
        except CheckpointDamaged:
            pass
    assert accepted < 1000, "the digest in the pointer is what refuses these"


# ---- names -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        "../a",
        "a/b",
        "/a",
        "a\\..\\b",
        "a\0",
        "a..b",
        "C:a",
        "a\n",
        ".hidden",
        "-rf",
        "é",
        "a" * 202,
        7,
        None,
    ],
)
def test_names_that_leave_the_directory_are_refused(name: object) -> None:
    assert not is_file_name(name)


def test_names_of_files_are_accepted() -> None:
    assert all(map(is_file_name, ["data-00000.safetensors", "a", "CURRENT", "g000001-00ff", "a" * 201]))


# ---- values ----------------------------------------------------------------------------------------------------

keys = st.one_of(st.text(), st.integers(), st.booleans(), st.none(), st.tuples(st.integers(), st.text()))
values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text()),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.lists(inner, max_size=4).map(tuple), st.dictionaries(keys, inner, max_size=4)
    ),
    max_leaves=12,
)


@given(values)
def test_values_come_back_as_what_they_were(value: object) -> None:
    assert repr(decode(json.loads(json.dumps(encode(value), allow_nan=False)))) == repr(value), "types and NaN, too"


@pytest.mark.parametrize("value", [object(), b"bytes", {1, 2}, 1j, [object()], {"a": (1, {2: set()})}, {b"k": 1}])
def test_what_only_a_pickle_could_hold_is_refused(value: object) -> None:
    with pytest.raises(TypeError, match="expected"):
        encode(value)


def test_what_is_nested_without_end_is_refused() -> None:
    circular: list[object] = []
    circular.append(circular)
    with pytest.raises(ValueError, match="levels"):
        encode(circular)


@pytest.mark.parametrize(
    "value",
    [
        {},
        {"float": "1.0"},
        {"float": "nan", "x": 1},
        {"tuple": 3},
        {"dict": [[1]]},
        {"dict": [["a", 1], ["a", 2]]},
        {"dict": [[[], 1]]},
        {"__class__": "os.system"},
    ],
)
def test_json_that_no_save_writes_is_refused(value: Any) -> None:
    with pytest.raises(ValueError):
        decode(value)


# ---- headers ---------------------------------------------------------------------------------------------------


def test_headers_are_those_of_safetensors() -> None:
    parts = [
        FilePart("b", "bool", 1, (3,), whole((3,))),
        FilePart("w", "float32", 4, (4, 2), Box((2, 0), (2, 2))),
        FilePart("z", "complex64", 8, (2,), whole((2,))),
    ]
    order = file_order(parts)
    assert [parts[i].key for i in order] == ["z", "w", "b"], "large elements first: all begin where their dtype may"
    head = data_header([parts[i] for i in order], SAVE_ID, "data-00000.safetensors", 76)
    assert len(head) % 8 == 0 and int.from_bytes(head[:8], "little") == len(head) - 8
    found = json.loads(head[8:])
    assert found["w[2:4, 0:2]"] == {"dtype": "F32", "shape": [2, 2], "data_offsets": [16, 32]}
    assert found["__fullshard_table__"] == {"dtype": "U8", "shape": [76], "data_offsets": [35, 111]}
    assert found["z"] == {"dtype": "U8", "shape": [2, 8], "data_offsets": [0, 16]}, "as bytes: not of the format"
    assert save_id_of(head) == SAVE_ID and save_id_of(b"x" * 20) is None


def test_two_parts_of_one_name_are_refused() -> None:
    part = FilePart("w[0:1]", "bool", 1, (1,), whole((1,)))
    with pytest.raises(ValueError, match="names that differ"):
        data_header([part, FilePart("w", "bool", 1, (2,), Box((0,), (1,)))], SAVE_ID, "f", 9)
    with pytest.raises(ValueError, match="__metadata__"):
        data_header([part._replace(key="__metadata__")], SAVE_ID, "f", 9)
