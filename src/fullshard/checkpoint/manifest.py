"""The manifest: what is in a checkpoint, and where. JSON, proven when it is read, before anything is allocated.

    {"format": "fullshard-checkpoint", "schema": 1, "save_id": ..., "world": 2, "writer": ..., "block_nbytes": 1048576,
     "tensors": [{"key": "model.weight", "path": ["model", "weight"], "dtype": "float32", "shape": [5, 3],
                  "chunks": [{"offsets": [0, 0], "lengths": [3, 3], "file": 0, "range": [512, 548],
                              "crc32": "1c291ca3"}, ...]}],
     "values":  [{"key": "step", "path": ["step"], "value": 7}],
     "files":   [{"name": "data-00000.safetensors", "nbytes": 548, "header_nbytes": 512, "header_crc32": "0d4b6a1f"}]}

`range` is of bytes in the file; `crc32` has 8 digits for each `block_nbytes` of it. What is no tensor is a value, which
comes back as what it was, types included: None, bool, int, finite float, str and list are themselves; every JSON object
is a tag, so nothing is ambiguous:

    {"float": "nan"}                 also "inf", "-inf"
    {"tuple": [1, 2]}
    {"dict": [["lr", 0.1], [3, 1]]}  pairs, because keys need not be strings
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, NoReturn, TypeAlias

from ..layout import itemsize, known_dtypes
from .errors import CheckpointDamaged
from .plan import Box, KeyPath, TensorSpec, coverage_problem, key_of, whole

Value: TypeAlias = "None | bool | int | float | str | list[Value] | tuple[Value, ...] | dict[object, Value]"
Json: TypeAlias = "None | bool | int | float | str | list[Json] | dict[str, Json]"

FORMAT = "fullshard-checkpoint"
SCHEMA = 1
MANIFEST_NAME = "manifest.json"
# A header or manifest beyond it is refused before it is read (the limit of safetensors).
MAX_NBYTES = 100_000_000
# Of a chunk, for each of its checksums: what a reader of a slice reads too much at each end, at most.
BLOCK_NBYTES = 1 << 20
_INT64 = 1 << 63
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,200}", re.ASCII)
_SAVE_ID = re.compile(r"[0-9a-f]{32}", re.ASCII)


class Chunk(NamedTuple):
    """A part of a tensor: `box` of it, row-major from byte `start` of `files[file]`; a CRC-32 for each block."""

    box: Box
    file: int
    start: int
    nbytes: int
    crcs: tuple[int, ...]


class TensorEntry(NamedTuple):
    """A tensor. `dtype`: torch's name without `torch.`; `chunks` cover `shape`, each element once."""

    path: KeyPath
    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    @property
    def spec(self) -> TensorSpec:
        return TensorSpec(self.path, self.dtype, self.shape)

    @property
    def key(self) -> str:
        return key_of(self.path)

    @property
    def nbytes(self) -> int:
        return self.spec.nbytes


class ValueEntry(NamedTuple):
    """What is no tensor."""

    path: KeyPath
    value: Value

    @property
    def key(self) -> str:
        return key_of(self.path)


class FileEntry(NamedTuple):
    """A data file: `header_nbytes` of header, with its CRC-32, then chunks without a hole."""

    name: str
    nbytes: int
    header_nbytes: int
    header_crc: int


class Manifest(NamedTuple):
    """All that a checkpoint holds. `world`: ranks that saved; `writer`: by what it was written, for people."""

    save_id: str
    world: int
    writer: str
    tensors: Mapping[str, TensorEntry]
    values: Mapping[str, ValueEntry]
    files: tuple[FileEntry, ...]
    block_nbytes: int = BLOCK_NBYTES

    @property
    def nbytes(self) -> int:
        """Of all tensors."""
        return sum(entry.nbytes for entry in self.tensors.values())

    @property
    def keys(self) -> list[str]:
        return sorted([*self.tensors, *self.values])


def blocks_of(nbytes: int, block_nbytes: int) -> int:
    """How many checksums `nbytes` have."""
    return -(-nbytes // block_nbytes)


def is_file_name(name: object) -> bool:
    """Whether a checkpoint may name a file so: nothing that leaves its directory, on any system."""
    return isinstance(name, str) and _FILE_NAME.fullmatch(name) is not None and ".." not in name


def is_save_id(text: object) -> bool:
    """32 hexadecimal digits."""
    return isinstance(text, str) and _SAVE_ID.fullmatch(text) is not None


# ---- writing ---------------------------------------------------------------------------------------------------


def to_bytes(manifest: Manifest) -> bytes:
    """As it is written to the file."""
    tensors = [
        {
            "key": key,
            "path": list(entry.path),
            "dtype": entry.dtype,
            "shape": list(entry.shape),
            "chunks": [
                {
                    "offsets": list(chunk.box.offsets),
                    "lengths": list(chunk.box.lengths),
                    "file": chunk.file,
                    "range": [chunk.start, chunk.start + chunk.nbytes],
                    "crc32": "".join(f"{crc:08x}" for crc in chunk.crcs),
                }
                for chunk in entry.chunks
            ],
        }
        for key, entry in sorted(manifest.tensors.items())
    ]
    values = [
        {"key": key, "path": list(entry.path), "value": encode(entry.value)}
        for key, entry in sorted(manifest.values.items())
    ]
    files = [
        {
            "name": file.name,
            "nbytes": file.nbytes,
            "header_nbytes": file.header_nbytes,
            "header_crc32": f"{file.header_crc:08x}",
        }
        for file in manifest.files
    ]
    head = {
        "format": FORMAT,
        "schema": SCHEMA,
        "save_id": manifest.save_id,
        "world": manifest.world,
        "writer": manifest.writer,
        "block_nbytes": manifest.block_nbytes,
    }
    # A tensor, value or file a line: for grep, and for people.
    lists: dict[str, list[dict[str, Any]]] = {"tensors": tensors, "values": values, "files": files}
    parts = [json.dumps(head)[:-1]]
    for name, items in lists.items():
        lines = ",\n".join(json.dumps(item, separators=(",", ":"), allow_nan=False) for item in items)
        parts.append(f'"{name}": [\n{lines}\n]')
    return (",\n".join(parts) + "}\n").encode()


# ---- reading ---------------------------------------------------------------------------------------------------


def parse_json(data: bytes, where: str) -> Any:
    """JSON without what invites mistakes: no key twice, no NaN, no nesting without end."""
    try:
        return json.loads(data, object_pairs_hook=_unique, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise CheckpointDamaged(f"{where}: expected JSON as a save writes it, found: {error}") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("a key twice in one object")
    return made


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text}, which is no JSON")


def parse(data: bytes, where: str) -> Manifest:
    """The manifest that `to_bytes` wrote. `where` is its file, for errors.

    Proves that names stay in the directory, ranges in their files, that chunks fill files without hole or overlap and
    tensors completely, each element once. Raises `CheckpointDamaged` where one of it does not hold.
    """
    if len(data) > MAX_NBYTES:
        raise CheckpointDamaged(f"{where}: expected at most {MAX_NBYTES} bytes, found {len(data)}")
    raw = parse_json(data, where)
    if isinstance(raw, dict) and raw.get("format") == FORMAT and raw.get("schema") != SCHEMA:
        raise CheckpointDamaged(
            f"{where}: expected schema {SCHEMA}, found {raw.get('schema')!r}; read it with the version of fullshard "
            f"that wrote it ({str(raw.get('writer'))[:80]})"
        )
    try:
        return _Reader().manifest(raw)
    except _Wrong as error:
        raise CheckpointDamaged(f"{where}: {error}") from None
    except RecursionError:
        raise CheckpointDamaged(f"{where}: nested too deep") from None


class _Wrong(Exception):
    """Something in a manifest that no save writes."""


class _Reader:
    """Builds the dataclasses from JSON, and proves each field while it does."""

    def manifest(self, raw: Json) -> Manifest:
        names = ("format", "schema", "save_id", "world", "writer", "block_nbytes", "tensors", "values", "files")
        fields = self.fields(raw, names, "the manifest")
        if fields["format"] != FORMAT:
            raise _Wrong(f"expected format {FORMAT!r}, found {fields['format']!r}")
        if not is_save_id(fields["save_id"]):
            raise _Wrong(f"expected a save id of 32 digits, found {fields['save_id']!r}")
        self.block_nbytes = self.number(fields["block_nbytes"], "block_nbytes", 1)
        if self.block_nbytes % 16:
            raise _Wrong(f"block_nbytes: expected a multiple of 16, found {self.block_nbytes}")
        self.files = [self.file(item) for item in self.items(fields["files"], "files")]
        if len({file.name.casefold() for file in self.files}) != len(self.files):
            raise _Wrong("two files of one name")
        # What lies in each file: (start, stop).
        self.spans: list[list[tuple[int, int]]] = [[] for _ in self.files]
        tensors = self.unique([self.tensor(item) for item in self.items(fields["tensors"], "tensors")])
        values = self.unique([self.value(item) for item in self.items(fields["values"], "values")])
        if both := sorted(tensors.keys() & values.keys()):
            raise _Wrong(f"{both[0]} is a tensor and a value")
        self.prove_filled()
        world, writer = self.number(fields["world"], "world", 1), self.text(fields["writer"], "writer")
        save_id = self.text(fields["save_id"], "save_id")
        return Manifest(save_id, world, writer, tensors, values, tuple(self.files), self.block_nbytes)

    def file(self, raw: Json) -> FileEntry:
        fields = self.fields(raw, ("name", "nbytes", "header_nbytes", "header_crc32"), "a file")
        name = fields["name"]
        if not is_file_name(name):
            raise _Wrong(f"expected the name of a file in the directory, of letters, digits and ._-, found {name!r}")
        header = self.number(fields["header_nbytes"], "header_nbytes", 8)
        if header > MAX_NBYTES:
            raise _Wrong(f"{name}: expected a header of at most {MAX_NBYTES} bytes, found {header}")
        (crc,) = self.crcs(fields["header_crc32"], 1, f"the header of {name}")
        return FileEntry(str(name), self.number(fields["nbytes"], "nbytes", header), header, crc)

    def tensor(self, raw: Json) -> TensorEntry:
        fields = self.fields(raw, ("key", "path", "dtype", "shape", "chunks"), "a tensor")
        path = self.path(fields)
        key, dtype = key_of(path), fields["dtype"]
        if dtype not in known_dtypes():
            raise _Wrong(f"{key}: expected a dtype of torch, found {dtype!r}")
        shape = self.numbers(fields["shape"], f"the shape of {key}")
        if whole(shape).numel * itemsize(str(dtype)) >= _INT64:
            raise _Wrong(f"{key}: shape {shape} is larger than any memory")
        chunks = tuple(
            self.chunk(item, key, itemsize(str(dtype))) for item in self.items(fields["chunks"], f"chunks of {key}")
        )
        if problem := coverage_problem(shape, [chunk.box for chunk in chunks]):
            raise _Wrong(f"{key} {shape}: {problem}")
        return TensorEntry(path, str(dtype), shape, chunks)

    def chunk(self, raw: Json, key: str, size: int) -> Chunk:
        fields = self.fields(raw, ("offsets", "lengths", "file", "range", "crc32"), f"a chunk of {key}")
        offsets, lengths = self.numbers(fields["offsets"], key), self.numbers(fields["lengths"], key)
        if len(offsets) != len(lengths):
            raise _Wrong(f"{key}: offsets {offsets} and lengths {lengths}")
        box = Box(offsets, lengths)
        file = self.number(fields["file"], f"file of {key}", 0)
        if file >= len(self.files):
            raise _Wrong(f"{key}: file {file} of {len(self.files)}")
        span = self.numbers(fields["range"], f"the range of {key}")
        entry = self.files[file]
        if len(span) != 2 or not entry.header_nbytes <= span[0] < span[1] <= entry.nbytes:
            raise _Wrong(f"{key}: range {span} is not within the data of {entry.name}")
        start, nbytes = span[0], span[1] - span[0]
        if nbytes != box.numel * size:
            raise _Wrong(f"{key}: part {box} has {box.numel * size} bytes, its range {nbytes}")
        self.spans[file].append((span[0], span[1]))
        return Chunk(box, file, start, nbytes, self.crcs(fields["crc32"], blocks_of(nbytes, self.block_nbytes), key))

    def value(self, raw: Json) -> ValueEntry:
        fields = self.fields(raw, ("key", "path", "value"), "a value")
        path = self.path(fields)
        try:
            return ValueEntry(path, decode(fields["value"]))
        except ValueError as error:
            raise _Wrong(f"{key_of(path)}: {error}") from None

    def prove_filled(self) -> None:
        for entry, spans in zip(self.files, self.spans, strict=True):
            end = entry.header_nbytes
            for start, stop in sorted(spans):
                if start != end:
                    raise _Wrong(f"{entry.name}: chunks leave bytes {end} to {start} out, or have them twice")
                end = stop
            if end != entry.nbytes:
                raise _Wrong(f"{entry.name}: chunks end at byte {end} of {entry.nbytes}")

    # ---- fields ----------------------------------------------------------------------------------------------

    def fields(self, raw: Json, names: Sequence[str], what: str) -> dict[str, Json]:
        if not isinstance(raw, dict) or raw.keys() != set(names):
            found = sorted(raw) if isinstance(raw, dict) else type(raw).__name__
            raise _Wrong(f"{what}: expected {', '.join(names)}, found {str(found)[:200]}")
        return raw

    def path(self, fields: dict[str, Json]) -> KeyPath:
        raw = self.items(fields["path"], "path")
        path = tuple(part if isinstance(part, str) else self.number(part, "a position in a list", 0) for part in raw)
        if not path or key_of(path) != fields["key"]:
            raise _Wrong(f"key {str(fields['key'])[:200]!r} is not its path {str(path)[:200]}")
        return path

    def items(self, raw: Json, what: str) -> list[Json]:
        if not isinstance(raw, list):
            raise _Wrong(f"{what}: expected a list, found {type(raw).__name__}")
        return raw

    def text(self, raw: Json, what: str) -> str:
        if not isinstance(raw, str):
            raise _Wrong(f"{what}: expected text, found {type(raw).__name__}")
        return raw

    def number(self, raw: Json, what: str, least: int) -> int:
        if isinstance(raw, bool) or not isinstance(raw, int) or not least <= raw < _INT64:
            raise _Wrong(f"{what}: expected a whole number from {least} on, found {str(raw)[:80]}")
        return raw

    def numbers(self, raw: Json, what: str) -> tuple[int, ...]:
        return tuple(self.number(item, what, 0) for item in self.items(raw, what))

    def crcs(self, raw: Json, count: int, what: str) -> tuple[int, ...]:
        if not isinstance(raw, str) or not re.fullmatch(f"[0-9a-f]{{{8 * count}}}", raw, re.ASCII):
            raise _Wrong(f"{what}: expected {count} checksums of 8 digits, found {str(raw)[:80]!r}")
        return tuple(int(raw[i : i + 8], 16) for i in range(0, len(raw), 8))

    def unique(self, entries: Sequence[Any]) -> dict[str, Any]:
        made = {entry.key: entry for entry in entries}
        if len(made) != len(entries):
            raise _Wrong("a key twice")
        return made


# ---- values ----------------------------------------------------------------------------------------------------

# Deeper nesting is no state of a training; it bounds the recursion of whoever reads.
MAX_DEPTH = 32
_KEYS = (str, bool, int, float, type(None), tuple)


def encode(value: object, depth: int = 0) -> Json:
    """`value` as JSON. Raises `TypeError` for what only a pickle could hold, `ValueError` for what is nested too deep.

    >>> encode({"betas": (0.9, float("inf"))})
    {'dict': [['betas', {'tuple': [0.9, {'float': 'inf'}]}]]}
    """
    if depth > MAX_DEPTH:
        raise ValueError(f"expected at most {MAX_DEPTH} levels of lists and dicts, found more")
    match value:
        case None | bool() | str():
            return value
        case int():
            return int(value)  # a subclass (IntEnum) would come back as the number as well
        case float():
            return float(value) if math.isfinite(value) else {"float": repr(float(value))}
        case list():
            return [encode(item, depth + 1) for item in value]
        case tuple():
            return {"tuple": [encode(item, depth + 1) for item in value]}
        case Mapping():
            for key in value:
                if not isinstance(key, _KEYS):
                    raise TypeError(f"expected keys of str, int, float, bool, None or tuples of them, found {key!r}")
            return {"dict": [[encode(k, depth + 1), encode(v, depth + 1)] for k, v in value.items()]}
    kind = type(value).__qualname__
    raise TypeError(f"expected a tensor, or None, bool, int, float, str, list, tuple or dict, found {kind}")


def decode(value: Json, depth: int = 0) -> Value:
    """What was encoded. Raises `ValueError` for JSON that `encode` does not make."""
    if depth > MAX_DEPTH:
        raise ValueError(f"more than {MAX_DEPTH} levels of lists and dicts")
    match value:
        case None | bool() | int() | str():
            return value
        case float() if math.isfinite(value):
            return value
        case list():
            return [decode(item, depth + 1) for item in value]
        case {"float": ("nan" | "inf" | "-inf") as text, **rest} if not rest:
            return float(text)
        case {"tuple": list(items), **rest} if not rest:
            return tuple(decode(item, depth + 1) for item in items)
        case {"dict": list(pairs), **rest} if not rest:
            return _decode_dict(pairs, depth)
    raise ValueError(f"a value that no save writes: {str(value)[:80]}")


def _decode_dict(pairs: list[Json], depth: int) -> dict[object, Value]:
    made: dict[object, Value] = {}
    for pair in pairs:
        if not isinstance(pair, list) or len(pair) != 2:
            raise ValueError(f"expected a pair of key and value, found {str(pair)[:80]}")
        key = decode(pair[0], depth + 1)
        try:
            known = key in made
        except TypeError:
            known = True
        if known:
            raise ValueError(f"a key twice, or one that cannot be a key: {str(pair[0])[:80]}")
        made[key] = decode(pair[1], depth + 1)
    return made


def kind_of(value: object) -> str:
    """What values of equal kind may take the place of each other when state is loaded.

    >>> kind_of(0) == kind_of(0.5), kind_of([1]) == kind_of((1,)), kind_of("0") == kind_of(0)
    (True, True, False)
    """
    match value:
        case None:
            return "None"
        case bool() | int() | float():
            return "number"
        case str():
            return "str"
        case list() | tuple():
            return "sequence"
    return "dict"
