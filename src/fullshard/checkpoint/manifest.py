"""The manifest: the contents of a checkpoint, and where they are. JSON, checked on reading, before any allocation.

    {"format": "fullshard-checkpoint", "schema": 1, "save_id": ..., "world": 2, "writer": ..., "block_nbytes": 1048576,
     "tensors": [{"key": "model.weight", "path": ["model", "weight"], "dtype": "float32", "shape": [5, 3],
                  "chunks": [{"offsets": [0, 0], "lengths": [3, 3], "file": 0, "range": [512, 548],
                              "crc32": "1c291ca3"}, ...]}],
     "values":  [{"key": "step", "path": ["step"], "value": 7}],
     "files":   [{"name": "data-00000.safetensors", "nbytes": 548, "header_nbytes": 512, "header_crc32": "0d4b6a1f"}]}

`range` is a range of bytes in the file; `crc32` has 8 digits for each `block_nbytes` of it. Everything that is not a
tensor is a value, and is restored with its type: None, bool, int, finite float, str and list are themselves; every JSON
object is a tag, so nothing is ambiguous:

    {"float": "nan"}                 also "inf", "-inf"
    {"tuple": [1, 2]}
    {"dict": [["lr", 0.1], [3, 1]]}  pairs, because keys need not be strings
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn, TypeAlias, TypeVar

from ..layout import itemsize, known_dtypes
from .errors import CheckpointDamaged
from .plan import Box, KeyPath, TensorSpec, coverage_problem, key_of

Value: TypeAlias = "None | bool | int | float | str | list[Value] | tuple[Value, ...] | dict[object, Value]"
Json: TypeAlias = "None | bool | int | float | str | list[Json] | dict[str, Json]"

FORMAT = "fullshard-checkpoint"
SCHEMA = 1
MANIFEST_NAME = "manifest.json"
# A larger header or manifest is rejected before it is read (the limit of safetensors).
MAX_NBYTES = 100_000_000
# Bytes of a chunk per checksum: the most that a reader of a slice reads in excess at each end.
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
    """A value that is not a tensor."""

    path: KeyPath
    value: Value

    @property
    def key(self) -> str:
        return key_of(self.path)


_Entry = TypeVar("_Entry", TensorEntry, ValueEntry)


class FileEntry(NamedTuple):
    """A data file: `header_nbytes` of header with its CRC-32, then chunks without gaps."""

    name: str
    nbytes: int
    header_nbytes: int
    header_crc: int


class Manifest(NamedTuple):
    """The contents of a checkpoint. `world`: number of ranks that saved; `writer`: the program, for people."""

    save_id: str
    world: int
    writer: str
    tensors: Mapping[str, TensorEntry]
    values: Mapping[str, ValueEntry]
    files: tuple[FileEntry, ...]
    block_nbytes: int = BLOCK_NBYTES

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(entry.nbytes for entry in self.tensors.values())

    @property
    def keys(self) -> list[str]:
        return sorted([*self.tensors, *self.values])


def blocks_of(nbytes: int, block_nbytes: int) -> int:
    """How many checksums cover `nbytes`."""
    return -(-nbytes // block_nbytes)


def is_file_name(name: object) -> bool:
    """Whether a checkpoint may use this file name: it stays in its directory on any system."""
    return isinstance(name, str) and _FILE_NAME.fullmatch(name) is not None and ".." not in name


def is_save_id(text: object) -> bool:
    """32 hexadecimal digits."""
    return isinstance(text, str) and _SAVE_ID.fullmatch(text) is not None


# ---- writing ---------------------------------------------------------------------------------------------------


def to_bytes(manifest: Manifest) -> bytes:
    """The manifest as file contents."""
    tensors = [
        dict(key=key, path=entry.path, dtype=entry.dtype, shape=entry.shape, chunks=list(map(_raw_chunk, entry.chunks)))
        for key, entry in sorted(manifest.tensors.items())
    ]
    values = [
        dict(key=key, path=entry.path, value=encode(entry.value)) for key, entry in sorted(manifest.values.items())
    ]
    files = [
        dict(name=name, nbytes=nbytes, header_nbytes=header, header_crc32=f"{crc:08x}")
        for name, nbytes, header, crc in manifest.files
    ]
    ids = dict(format=FORMAT, schema=SCHEMA, save_id=manifest.save_id)
    head = dict(**ids, world=manifest.world, writer=manifest.writer, block_nbytes=manifest.block_nbytes)
    # One line per tensor, value or file: for grep, and for people.
    lists: dict[str, list[dict[str, Any]]] = {"tensors": tensors, "values": values, "files": files}
    parts = [json.dumps(head)[:-1]]
    for name, items in lists.items():
        lines = ",\n".join(json.dumps(item, separators=(",", ":"), allow_nan=False) for item in items)
        parts.append(f'"{name}": [\n{lines}\n]')
    return (",\n".join(parts) + "}\n").encode()


def _raw_chunk(chunk: Chunk) -> dict[str, Any]:
    crcs = "".join(f"{crc:08x}" for crc in chunk.crcs)
    span = (chunk.start, chunk.start + chunk.nbytes)
    return dict(offsets=chunk.box.offsets, lengths=chunk.box.lengths, file=chunk.file, range=span, crc32=crcs)


# ---- reading ---------------------------------------------------------------------------------------------------


def parse_json(data: bytes, where: str) -> Any:
    """JSON without error-prone features: no duplicate keys, no NaN, no unlimited nesting."""
    try:
        return json.loads(data, object_pairs_hook=_unique, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise CheckpointDamaged(f"{where}: expected JSON written by a save, found: {error}") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("a key twice in one object")
    return made


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text}, which is not JSON")


def parse(data: bytes, where: str) -> Manifest:
    """The manifest that `to_bytes` wrote. `where` is its file, for errors.

    Checks that names stay in the directory and ranges in their files, that chunks fill files without gap or overlap,
    and that they cover each element of a tensor once. Raises `CheckpointDamaged` otherwise.
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
        return _manifest(raw)
    except _Flaw as error:
        raise CheckpointDamaged(f"{where}: {error}") from None
    except RecursionError:
        raise CheckpointDamaged(f"{where}: nested too deeply") from None


class _Flaw(Exception):
    """Something in a manifest that no save writes."""


# Every int is from 0 to 2**63; a value is proven by `decode`.
_CHUNK = dict(offsets=[int], lengths=[int], file=int, range=[int], crc32=str)
_SCHEMA: dict[str, Any] = dict(
    dict(format=str, schema=int, save_id=str, world=int, writer=str, block_nbytes=int),
    tensors=[dict(key=str, path=[str | int], dtype=str, shape=[int], chunks=[_CHUNK])],
    values=[dict(key=str, path=[str | int], value=object)],
    files=[dict(name=str, nbytes=int, header_nbytes=int, header_crc32=str)],
)


def _prove_types(raw: Json, schema: Any, what: str) -> None:
    if isinstance(schema, dict):
        if not isinstance(raw, dict) or raw.keys() != schema.keys():
            found = sorted(raw) if isinstance(raw, dict) else type(raw).__name__
            raise _Flaw(f"{what}: expected {', '.join(schema)}, found {str(found)[:200]}")
        for name, inner in schema.items():
            _prove_types(raw[name], inner, name)
    elif isinstance(schema, list):
        if not isinstance(raw, list):
            raise _Flaw(f"{what}: expected a list, found {type(raw).__name__}")
        for item in raw:
            _prove_types(item, schema[0], what)
    elif schema is not object:
        if not isinstance(raw, schema) or isinstance(raw, bool) or (isinstance(raw, int) and not 0 <= raw < _INT64):
            kinds = {int: "a whole number from 0 on", str: "text"}.get(schema, "text or a whole number from 0 on")
            raise _Flaw(f"{what}: expected {kinds}, found {str(raw)[:80]}")


def _manifest(raw: Any) -> Manifest:
    _prove_types(raw, _SCHEMA, "the manifest")
    if raw["format"] != FORMAT:
        raise _Flaw(f"expected format {FORMAT!r}, found {raw['format']!r}")
    if not is_save_id(raw["save_id"]):
        raise _Flaw(f"expected a save id of 32 digits, found {raw['save_id']!r}")
    if raw["world"] < 1:
        raise _Flaw("expected a world of at least 1 rank, found 0")
    block = raw["block_nbytes"]
    if block < 1 or block % 16:
        raise _Flaw(f"block_nbytes: expected a multiple of 16, found {block}")
    files = tuple(_file(item) for item in raw["files"])
    if len({file.name.casefold() for file in files}) != len(files):
        raise _Flaw("two files with the same name")
    tensors = _by_key(_tensor(item, files, block) for item in raw["tensors"])
    values = _by_key(_value(item) for item in raw["values"])
    if both := sorted(tensors.keys() & values.keys()):
        raise _Flaw(f"{both[0]} is a tensor and a value")
    _prove_filled(files, tensors)
    return Manifest(raw["save_id"], raw["world"], raw["writer"], tensors, values, files, block)


def _file(raw: dict[str, Any]) -> FileEntry:
    name, nbytes, header = raw["name"], raw["nbytes"], raw["header_nbytes"]
    if not is_file_name(name):
        raise _Flaw(f"expected the name of a file in the directory, of letters, digits and ._-, found {name!r}")
    if not 8 <= header <= min(nbytes, MAX_NBYTES):
        raise _Flaw(f"{name}: expected a header of 8 to {min(nbytes, MAX_NBYTES)} bytes, found {header}")
    return FileEntry(name, nbytes, header, _crcs(raw["header_crc32"], 1, f"the header of {name}")[0])


def _tensor(raw: dict[str, Any], files: Sequence[FileEntry], block_nbytes: int) -> TensorEntry:
    spec = TensorSpec(_path(raw), raw["dtype"], tuple(raw["shape"]))
    if spec.dtype not in known_dtypes():
        raise _Flaw(f"{spec.key}: expected a dtype of torch, found {spec.dtype!r}")
    if spec.nbytes >= _INT64:
        raise _Flaw(f"{spec.key}: shape {spec.shape} is too large")
    chunks = tuple(_chunk(item, spec, files, block_nbytes) for item in raw["chunks"])
    if problem := coverage_problem(spec.shape, [chunk.box for chunk in chunks]):
        raise _Flaw(f"{spec.key} {spec.shape}: {problem}")
    return TensorEntry(*spec, chunks)


def _chunk(raw: dict[str, Any], spec: TensorSpec, files: Sequence[FileEntry], block_nbytes: int) -> Chunk:
    box, file, span = Box(tuple(raw["offsets"]), tuple(raw["lengths"])), raw["file"], raw["range"]
    if len(box.offsets) != len(box.lengths):
        raise _Flaw(f"{spec.key}: offsets {box.offsets} and lengths {box.lengths}")
    if file >= len(files):
        raise _Flaw(f"{spec.key}: file {file} of {len(files)}")
    if len(span) != 2 or not files[file].header_nbytes <= span[0] < span[1] <= files[file].nbytes:
        raise _Flaw(f"{spec.key}: range {span} is not within the data of {files[file].name}")
    nbytes, expected = span[1] - span[0], box.numel * itemsize(spec.dtype)
    if nbytes != expected:
        raise _Flaw(f"{spec.key}: part {box} has {expected} bytes, its range {nbytes}")
    return Chunk(box, file, span[0], nbytes, _crcs(raw["crc32"], blocks_of(nbytes, block_nbytes), spec.key))


def _value(raw: dict[str, Any]) -> ValueEntry:
    path = _path(raw)
    try:
        return ValueEntry(path, decode(raw["value"]))
    except ValueError as error:
        raise _Flaw(f"{key_of(path)}: {error}") from None


def _path(raw: dict[str, Any]) -> KeyPath:
    path = tuple(raw["path"])
    if not path or key_of(path) != raw["key"]:
        raise _Flaw(f"key {raw['key'][:200]!r} is not its path {str(path)[:200]}")
    return path


def _crcs(text: str, count: int, what: str) -> tuple[int, ...]:
    if not re.fullmatch(f"[0-9a-f]{{{8 * count}}}", text, re.ASCII):
        raise _Flaw(f"{what}: expected {count} checksums of 8 digits, found {text[:80]!r}")
    return tuple(int(text[i : i + 8], 16) for i in range(0, len(text), 8))


def _by_key(entries: Iterable[_Entry]) -> dict[str, _Entry]:
    made: dict[str, _Entry] = {}
    for entry in entries:
        if made.setdefault(entry.key, entry) is not entry:
            raise _Flaw(f"{entry.key} twice")
    return made


def _prove_filled(files: Sequence[FileEntry], tensors: Mapping[str, TensorEntry]) -> None:
    chunks = sorted((c.file, c.start, c.start + c.nbytes) for entry in tensors.values() for c in entry.chunks)
    ends = [file.header_nbytes for file in files]
    for file, start, stop in chunks:
        if start != ends[file]:
            raise _Flaw(f"{files[file].name}: chunks leave out bytes {ends[file]} to {start}, or contain them twice")
        ends[file] = stop
    for entry, end in zip(files, ends, strict=True):
        if end != entry.nbytes:
            raise _Flaw(f"{entry.name}: chunks end at byte {end} of {entry.nbytes}")


# ---- values ----------------------------------------------------------------------------------------------------

# No training state nests deeper; it bounds the recursion of readers.
MAX_DEPTH = 32
_KEYS = (str, bool, int, float, type(None), tuple)


def encode(value: object, depth: int = 0) -> Json:
    """`value` as JSON. Raises `TypeError` for anything that needs pickle, `ValueError` for too deep nesting.

    >>> encode({"betas": (0.9, float("inf"))})
    {'dict': [['betas', {'tuple': [0.9, {'float': 'inf'}]}]]}
    """
    if depth > MAX_DEPTH:
        raise ValueError(f"expected at most {MAX_DEPTH} levels of lists and dicts, found more")
    match value:
        case None | bool() | str():
            return value
        case int():
            return int(value)  # a subclass (IntEnum) becomes a plain number
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
    """The encoded value. Raises `ValueError` for JSON that `encode` does not produce."""
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
    """The kind of `value`: values of equal kind may replace each other when state is loaded.

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
