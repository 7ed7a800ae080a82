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
    Chunk,
    FileEntry,
    Manifest,
    TensorEntry,
    ValueEntry,
    decode,
    encode,
    is_file_name,
    parse,
    to_bytes,
)
from fullshard.checkpoint.plan import Box, whole
from fullshard.checkpoint.safetensors import FilePart, data_header, file_order, save_id_of

SAVE_ID = "0123456789abcdef" * 2


def sample() -> Manifest:
    """A sharded tensor in two files, a scalar, an empty one, and values."""
    w = TensorEntry(
        ("model", "w.x"),
        "float32",
        (3, 2),
        (Chunk(Box((0, 0), (2, 2)), 0, 64, 16, (1,)), Chunk(Box((2, 0), (1, 2)), 1, 80, 8, (2,))),
    )
    step = TensorEntry(("optimizer", "state", "w.x", "step"), "int64", (), (Chunk(whole(()), 1, 88, 8, (3,)),))
    none = TensorEntry(("empty",), "bfloat16", (0, 4), ())
    values = [ValueEntry(("step",), 7), ValueEntry(("lrs", 0), (0.1, math.inf)), ValueEntry(("d",), {1: [None]})]
    return Manifest(
        SAVE_ID,
        2,
        "fullshard test",
        {entry.key: entry for entry in (w, step, none)},
        {entry.key: entry for entry in values},
        (FileEntry("data-00000.safetensors", 80, 64, 0xFFFFFFFF), FileEntry("data-00001.safetensors", 96, 80, 0)),
    )


def test_what_is_written_is_read() -> None:
    manifest = sample()
    data = to_bytes(manifest)
    assert parse(data, "here") == manifest
    assert manifest.keys == ["d", "empty", "lrs.0", "model.w.x", "optimizer.state.w.x.step", "step"]
    assert manifest.nbytes == 32
    assert max(map(len, data.decode().splitlines())) < 300, "a line for each tensor"


# ---- each field is proven --------------------------------------------------------------------------------------


def _w(raw: dict[str, Any]) -> dict[str, Any]:
    return next(item for item in raw["tensors"] if item["key"] == "model.w.x")


def _set(container: Any, key: Any, value: Any) -> None:
    container[key] = value


EDITS = {
    "a name that leaves": lambda raw: _set(raw["files"][0], "name", "../data"),
    "an absolute name": lambda raw: _set(raw["files"][0], "name", "/etc/passwd"),
    "a name with a NUL": lambda raw: _set(raw["files"][0], "name", "a\0b"),
    "two names that differ in case": lambda raw: _set(raw["files"][0], "name", "DATA-00001.safetensors"),
    "a file too few": lambda raw: raw["files"].pop(),
    "a file nobody uses": lambda raw: raw["files"].append(
        {"name": "x", "nbytes": 99, "header_nbytes": 8, "header_crc32": "00000000"}
    ),
    "a shape that is larger": lambda raw: _set(_w(raw), "shape", [4, 2]),
    "a shape beyond memory": lambda raw: _set(_w(raw), "shape", [2**40, 2**40]),
    "a negative size": lambda raw: _set(_w(raw), "shape", [-3, -2]),
    "a size that is true": lambda raw: _set(_w(raw), "shape", [3, True]),
    "another dtype": lambda raw: _set(_w(raw), "dtype", "float64"),
    "no dtype": lambda raw: _set(_w(raw), "dtype", "object"),
    "overlapping chunks": lambda raw: _set(_w(raw)["chunks"][1], "offsets", [1, 0]),
    "a chunk twice": lambda raw: _w(raw)["chunks"].append(_w(raw)["chunks"][0]),
    "a chunk missing": lambda raw: _w(raw)["chunks"].pop(),
    "a chunk in another file": lambda raw: _set(_w(raw)["chunks"][0], "file", 1),
    "a chunk in no file": lambda raw: _set(_w(raw)["chunks"][0], "file", 2),
    "a range in the header": lambda raw: _set(_w(raw)["chunks"][0], "range", [60, 76]),
    "a range behind the end": lambda raw: _set(_w(raw)["chunks"][0], "range", [72, 88]),
    "a short range": lambda raw: _set(_w(raw)["chunks"][0], "range", [64, 72]),
    "a checksum too few": lambda raw: _set(_w(raw)["chunks"][0], "crc32", ""),
    "a checksum too many": lambda raw: _set(_w(raw)["chunks"][0], "crc32", "00" * 8),
    "a checksum of letters": lambda raw: _set(_w(raw)["chunks"][0], "crc32", "0000000g"),
    "a key that is not its path": lambda raw: _set(_w(raw), "key", "model.w"),
    "an empty path": lambda raw: _w(raw).update(path=[], key=""),
    "a key twice": lambda raw: raw["tensors"].append(_w(raw)),
    "a tensor that is a value": lambda raw: raw["values"].append({"key": "empty", "path": ["empty"], "value": 1}),
    "a value that is no value": lambda raw: _set(raw["values"][0], "value", {"eval": "1"}),
    "a field too many": lambda raw: _set(raw, "pickle", "gASV"),
    "a field too few": lambda raw: raw.pop("world"),
    "a world of none": lambda raw: _set(raw, "world", 0),
    "blocks of nothing": lambda raw: _set(raw, "block_nbytes", 0),
    "blocks of 24 bytes": lambda raw: _set(raw, "block_nbytes", 24),
    "a save id of another form": lambda raw: _set(raw, "save_id", "../.."),
    "another schema": lambda raw: _set(raw, "schema", 2),
    "another format": lambda raw: _set(raw, "format", "dcp"),
    "tensors that are a dict": lambda raw: _set(raw, "tensors", {}),
    "a number beyond 64 bits": lambda raw: _set(raw["files"][0], "nbytes", 2**70),
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


def test_parts_that_lie_over_each_other_are_refused() -> None:
    """Also where the last one ends with the file."""

    def tensor(name: str, start: int) -> TensorEntry:
        return TensorEntry((name,), "uint8", (16,), (Chunk(whole((16,)), 0, start, 16, (0,)),))

    entries = {"a": tensor("a", 64), "b": tensor("b", 72)}
    with pytest.raises(CheckpointDamaged, match="contain them twice"):
        parse(to_bytes(Manifest("a" * 32, 1, "test", entries, {}, (FileEntry("f", 88, 64, 0),))), "here")


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
    head = data_header([parts[i] for i in order], SAVE_ID, "data-00000.safetensors")
    assert len(head) % 8 == 0 and int.from_bytes(head[:8], "little") == len(head) - 8
    found = json.loads(head[8:])
    assert found["w[2:4, 0:2]"] == {"dtype": "F32", "shape": [2, 2], "data_offsets": [16, 32]}
    assert found["z"] == {"dtype": "U8", "shape": [2, 8], "data_offsets": [0, 16]}, "as bytes: not of the format"
    assert save_id_of(head) == SAVE_ID and save_id_of(b"x" * 20) is None


def test_two_parts_of_one_name_are_refused() -> None:
    part = FilePart("w[0:1]", "bool", 1, (1,), whole((1,)))
    with pytest.raises(ValueError, match="names that differ"):
        data_header([part, FilePart("w", "bool", 1, (2,), Box((0,), (1,)))], SAVE_ID, "f")
    with pytest.raises(ValueError, match="__metadata__"):
        data_header([part._replace(key="__metadata__")], SAVE_ID, "f")
