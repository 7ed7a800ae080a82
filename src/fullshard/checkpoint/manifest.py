"""The manifest: the contents of a checkpoint, and where they are. JSON, checked on reading, before any allocation.

    {"format": "fullshard-checkpoint", "schema": 2, "save_id": ..., "world": 2, "writer": ..., "block_nbytes": 1048576,
     "rules":   [{"sizes": [2], "cuts": [[0, 1]], "ranks": {"from": 0, "by": [[2, 1]]}}],
     "layouts": [{"dtype": "float32", "shape": [5, 3], "rule": 0, "replica": 0, "volume": 0}],
     "tensors": [{"in": ["model"], "of": [["weight", 0]]}],
     "values":  [{"key": "step", "path": ["step"], "value": 7}],
     "files":   [["data-00000.safetensors", 548, 448, 64, "1c29..."], ...]}

`model.weight` has layout 0; that is cut by rule 0 (`rules`): dim 0 over 2 ranks. Who wrote which part, and to which
file, follows from the numbers: part p is in the file of `volume` of the rank `ranks[replica * parts + p]`. A file has a
name, its bytes, those of its header and of its table (`table`), and the SHA-256 of the table, which has the checksums.
So the manifest grows with tensors and with files, and not with their product.

Schema 1 has a list of parts for each tensor, with their checksums, instead of rules, layouts and tables. It is read.

Everything that is not a tensor is a value, and is restored with its type: None, bool, int, finite float, str and list
are themselves; every JSON object is a tag, so nothing is ambiguous:

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
from .plan import Box, KeyPath, TensorSpec, coverage_problem, key_of, uncollected, whole
from .rules import Held, Layout, Listed, from_json, to_json
from .safetensors import name_of
from .table import OldTable, Place

Value: TypeAlias = "None | bool | int | float | str | list[Value] | tuple[Value, ...] | dict[object, Value]"
Json: TypeAlias = "None | bool | int | float | str | list[Json] | dict[str, Json]"

FORMAT = "fullshard-checkpoint"
SCHEMA = 2
_SCHEMAS = (1, 2)
MANIFEST_NAME = "manifest.json"
# A larger header or manifest is rejected before it is read (the limit of safetensors).
MAX_NBYTES = 100_000_000
# Bytes of a chunk per checksum: the most that a reader of a slice reads in excess at each end.
BLOCK_NBYTES = 1 << 20
_INT64 = 1 << 63
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,200}", re.ASCII)
_SAVE_ID = re.compile(r"[0-9a-f]{32}", re.ASCII)
_DATA_NAME = re.compile(r"data-([0-9]{5,7})(?:-([0-9]{3,5}))?\.safetensors", re.ASCII)
# More ranks than that did not save it: it bounds what a rule may expand to.
_MAX_WORLD = 1 << 20


class TensorEntry(NamedTuple):
    """A tensor. `dtype`: torch's name without `torch.`; `rule`: its parts and the ranks that held them, of which
    `replica` wrote them to its files of `volume`. In schema 1 the number of the file is that of the rank."""

    path: KeyPath
    dtype: str
    shape: tuple[int, ...]
    rule: Layout = Listed(())
    replica: int = 0
    volume: int = 0

    @property
    def spec(self) -> TensorSpec:
        return TensorSpec(self.path, self.dtype, self.shape)

    @property
    def key(self) -> str:
        return key_of(self.path)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * itemsize(self.dtype)

    def parts(self, wanted: Box | None = None) -> list[tuple[int, Box]]:
        """The parts that have elements in `wanted` (default: all), each with the rank that wrote it."""
        found = self.rule.overlapping(self.shape, whole(self.shape) if wanted is None else wanted)
        return [(self.rule.writer(part, self.replica), box) for part, box in found]


class ValueEntry(NamedTuple):
    """A value that is not a tensor."""

    path: KeyPath
    value: Value

    @property
    def key(self) -> str:
        return key_of(self.path)


_Entry = TypeVar("_Entry", TensorEntry, ValueEntry)


class FileEntry(NamedTuple):
    """A data file: header, parts without gaps, table. `digest`: SHA-256 of the table; in schema 1, which has no tables
    in files, the CRC-32 of the header."""

    name: str
    nbytes: int
    header_nbytes: int
    table_nbytes: int
    digest: str

    @property
    def data_nbytes(self) -> int:
        return self.nbytes - self.header_nbytes - self.table_nbytes


class Manifest(NamedTuple):
    """The contents of a checkpoint. `world`: number of ranks that saved; `writer`: the program, for people;
    `old_tables`: of schema 1, by number of the file."""

    save_id: str
    world: int
    writer: str
    tensors: Mapping[str, TensorEntry]
    values: Mapping[str, ValueEntry]
    files: tuple[FileEntry, ...]
    block_nbytes: int = BLOCK_NBYTES
    schema: int = SCHEMA
    old_tables: tuple[OldTable, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(entry.nbytes for entry in self.tensors.values())

    @property
    def keys(self) -> list[str]:
        return sorted([*self.tensors, *self.values])

    def numbers(self) -> dict[tuple[int, int], int]:
        """The number of the file of each (rank, volume)."""
        if self.schema == 1:
            return {(number, 0): number for number in range(len(self.files))}
        return {place_in_name(file.name): number for number, file in enumerate(self.files)}


def data_name(rank: int, volume: int) -> str:
    """The file of a rank for a volume.

    >>> data_name(7, 0), data_name(7, 2)
    ('data-00007.safetensors', 'data-00007-002.safetensors')
    """
    return f"data-{rank:05d}{f'-{volume:03d}' if volume else ''}.safetensors"


def place_in_name(name: str) -> tuple[int, int]:
    """(rank, volume) of `data_name`. Raises `ValueError` for another name."""
    found = _DATA_NAME.fullmatch(name)
    place = (int(found[1]), int(found[2] or 0)) if found else (0, 0)
    if data_name(*place) != name:
        raise ValueError(f"{name!r}: expected the name of a data file, data-<rank>.safetensors")
    return place


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


@uncollected()
def to_bytes(manifest: Manifest) -> bytes:
    """The manifest as file contents, of the newest schema."""
    ids = dict(format=FORMAT, schema=SCHEMA, save_id=manifest.save_id)
    head = dict(**ids, world=manifest.world, writer=manifest.writer, block_nbytes=manifest.block_nbytes)
    tables = tables_to_json(manifest.tensors.values())
    values = [
        dict(key=key, path=entry.path, value=encode(entry.value)) for key, entry in sorted(manifest.values.items())
    ]
    # One line per rule, layout, group of tensors, value or file: for grep, and for people.
    parts = [json.dumps(head)[:-1]]
    for name in ("rules", "layouts"):
        parts.append(_lines(name, map(_line, tables[name])))
    parts.append(_lines("tensors", map(_group_line, tables["tensors"])))
    parts.append(_lines("values", map(_line, values)))
    parts.append(_lines("files", map(_line, manifest.files)))
    return (",\n".join(parts) + "}\n").encode()


def _line(item: Any) -> str:
    return json.dumps(item, separators=(",", ":"), allow_nan=False)


def _group_line(group: dict[str, Any]) -> str:
    """Tensors of one parent: few on a line, of many each on its own."""
    separator = "," if len(group["of"]) <= 8 else ",\n "
    return f'{{"in":{_line(group["in"])},"of":[{separator.join(map(_line, group["of"]))}]}}'


def _lines(name: str, lines: Iterable[str]) -> str:
    return f'"{name}": [\n' + ",\n".join(lines) + "\n]"


def tables_to_json(entries: Iterable[TensorEntry]) -> dict[str, Any]:
    """Tensors as JSON: rules, layouts, and the names of tensors by what is in front of them."""
    rules, layouts = dict[Layout, int](), dict[tuple[Any, ...], int]()
    groups = dict[KeyPath, list[tuple[str | int, int]]]()
    for entry in entries:
        rule = rules.setdefault(entry.rule, len(rules))
        layout = layouts.setdefault((entry.dtype, entry.shape, rule, entry.replica, entry.volume), len(layouts))
        groups.setdefault(entry.path[:-1], []).append((entry.path[-1], layout))
    named = [
        dict(dtype=dtype, shape=shape, rule=rule, replica=replica, volume=volume)
        for dtype, shape, rule, replica, volume in layouts
    ]
    tensors = [{"in": parent, "of": names} for parent, names in groups.items()]
    return {"rules": [to_json(rule) for rule in rules], "layouts": named, "tensors": tensors}


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


@uncollected()
def parse(data: bytes, where: str) -> Manifest:
    """The manifest that `to_bytes` wrote, or one of schema 1. `where` is its file, for errors.

    Checks that names stay in the directory, that parts cover each element of a tensor once, and that files have as many
    bytes as tensors do. Raises `CheckpointDamaged` otherwise.
    """
    if len(data) > MAX_NBYTES:
        raise CheckpointDamaged(f"{where}: expected at most {MAX_NBYTES} bytes, found {len(data)}")
    raw = parse_json(data, where)
    if isinstance(raw, dict) and raw.get("format") == FORMAT and raw.get("schema") not in _SCHEMAS:
        raise CheckpointDamaged(
            f"{where}: expected schema 1 or 2, found {raw.get('schema')!r}; read it with the version of fullshard "
            f"that wrote it ({str(raw.get('writer'))[:80]})"
        )
    try:
        return _manifest(raw)
    except _Flaw as error:
        raise CheckpointDamaged(f"{where}: {error}") from None
    except RecursionError:
        raise CheckpointDamaged(f"{where}: nested too deeply") from None


class _Flaw(Exception):
    """A flaw: a manifest that no save writes."""


# Every int is from 0 to 2**63; a value is proven by `decode`, a rule by `rules.from_json`.
_IDS = dict(format=str, schema=int, save_id=str, world=int, writer=str, block_nbytes=int)
_VALUES = [dict(key=str, path=[str | int], value=object)]
_SCHEMA_2: dict[str, Any] = dict(_IDS, rules=[object], layouts=object, tensors=object, values=_VALUES, files=[object])
_LAYOUTS = [dict(dtype=str, shape=[int], rule=int, replica=int, volume=int)]
_TENSORS = [{"in": [str | int], "of": [object]}]
_CHUNK = dict(offsets=[int], lengths=[int], file=int, range=[int], crc32=str)
_SCHEMA_1: dict[str, Any] = dict(
    _IDS,
    tensors=[dict(key=str, path=[str | int], dtype=str, shape=[int], chunks=[_CHUNK])],
    values=_VALUES,
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
    old = isinstance(raw, dict) and raw.get("schema") == 1
    _prove_types(raw, _SCHEMA_1 if old else _SCHEMA_2, "the manifest")
    if raw["format"] != FORMAT:
        raise _Flaw(f"expected format {FORMAT!r}, found {raw['format']!r}")
    if not is_save_id(raw["save_id"]):
        raise _Flaw(f"expected a save id of 32 digits, found {raw['save_id']!r}")
    if not 1 <= raw["world"] <= _MAX_WORLD:
        raise _Flaw(f"expected a world of 1 to {_MAX_WORLD} ranks, found {raw['world']}")
    block = raw["block_nbytes"]
    if block < 1 or block % 16:
        raise _Flaw(f"block_nbytes: expected a multiple of 16, found {block}")
    files = tuple(map(_old_file if old else _file, raw["files"]))
    if len({file.name.casefold() for file in files}) != len(files):
        raise _Flaw("two files with the same name")
    tables: tuple[OldTable, ...] = ()
    if old:
        tensors, tables = _old_tensors(raw["tensors"], files, block)
    else:
        try:
            tensors = tables_from_json(raw, raw["world"])
        except ValueError as error:
            raise _Flaw(str(error)) from None
    values = _by_key(_value(item) for item in raw["values"])
    if both := sorted(tensors.keys() & values.keys()):
        raise _Flaw(f"{both[0]} is a tensor and a value")
    stored, there = sum(entry.nbytes for entry in tensors.values()), sum(file.data_nbytes for file in files)
    if stored != there:
        raise _Flaw(f"expected files of {stored} bytes, as many as tensors have, found {there}")
    return Manifest(raw["save_id"], raw["world"], raw["writer"], tensors, values, files, block, raw["schema"], tables)


def _file(raw: Any) -> FileEntry:
    match raw:
        case [str(name), nbytes, header, table, str(digest)] if {*map(type, raw[1:4])} == {int}:
            pass
        case _:
            raise _Flaw(f"expected a file's name, bytes and digest, found {str(raw)[:120]}")
    try:
        place_in_name(name)
    except ValueError as error:
        raise _Flaw(str(error)) from None
    if not (0 < table < _INT64 and 0 < nbytes < _INT64 and 8 <= header <= min(nbytes - table, MAX_NBYTES)):
        raise _Flaw(f"{name}: expected a header and a table in {nbytes} bytes, found {header} and {table}")
    if table > MAX_NBYTES or not re.fullmatch("[0-9a-f]{64}", digest, re.ASCII):
        raise _Flaw(f"{name}: expected a table of at most {MAX_NBYTES} bytes with its digest, found {table}")
    return FileEntry(name, nbytes, header, table, digest)


def tables_from_json(raw: Mapping[str, Any], world: int) -> dict[str, TensorEntry]:
    """The tensors that `tables_to_json` wrote, of a save of `world` ranks. Raises `ValueError` for anything else."""
    try:
        _prove_types(raw["layouts"], _LAYOUTS, "layouts")
        _prove_types(raw["tensors"], _TENSORS, "tensors")
    except _Flaw as error:
        raise ValueError(str(error)) from None
    rules = [from_json(rule, world) for rule in raw["rules"]]
    layouts = [_layout(one, rules, world) for one in raw["layouts"]]
    found: dict[str, TensorEntry] = {}
    for group in raw["tensors"]:
        parent = tuple(group["in"])
        for item in group["of"]:
            match item:
                case [name, number] if type(name) in (str, int) and type(number) is int and -1 < number < len(layouts):
                    entry = TensorEntry((*parent, name), *layouts[number])
                case _:
                    raise ValueError(f"{key_of(parent)}: expected a name and the number of a layout, found {item!r}")
            if found.setdefault(entry.key, entry) is not entry:
                raise ValueError(f"{entry.key} twice")
    return found


def _layout(raw: dict[str, Any], rules: Sequence[Layout], world: int) -> tuple[Any, ...]:
    dtype, shape, what = raw["dtype"], tuple(raw["shape"]), f"layout {raw}"
    _prove_spec(TensorSpec(("layout",), dtype, shape))
    if raw["rule"] >= len(rules):
        raise ValueError(f"{what}: rule {raw['rule']} of {len(rules)}")
    rule = rules[raw["rule"]]
    if problem := rule.problem(shape, world):
        raise ValueError(f"{what}: {problem}")
    if raw["replica"] >= rule.num_replicas:
        raise ValueError(f"{what}: replica {raw['replica']} of {rule.num_replicas}")
    return dtype, shape, rule, raw["replica"], raw["volume"]


def _prove_spec(spec: TensorSpec) -> None:
    if spec.dtype not in known_dtypes():
        raise ValueError(f"{spec.key}: expected a dtype of torch, found {spec.dtype!r}")
    if spec.nbytes >= _INT64:
        raise ValueError(f"{spec.key}: shape {spec.shape} is too large")


# ---- schema 1 --------------------------------------------------------------------------------------------------------


class _Chunk(NamedTuple):
    box: Box
    file: int
    place: Place


def _old_file(raw: dict[str, Any]) -> FileEntry:
    name, nbytes, header = raw["name"], raw["nbytes"], raw["header_nbytes"]
    if not is_file_name(name):
        raise _Flaw(f"expected the name of a file in the directory, of letters, digits and ._-, found {name!r}")
    if not 8 <= header <= min(nbytes, MAX_NBYTES):
        raise _Flaw(f"{name}: expected a header of 8 to {min(nbytes, MAX_NBYTES)} bytes, found {header}")
    _crcs(raw["header_crc32"], 1, f"the header of {name}")
    return FileEntry(name, nbytes, header, 0, raw["header_crc32"])


def _old_tensors(
    raw: list[dict[str, Any]], files: Sequence[FileEntry], block_nbytes: int
) -> tuple[dict[str, TensorEntry], tuple[OldTable, ...]]:
    places: list[dict[str, Place]] = [{} for _ in files]
    chunks = list[_Chunk]()
    entries = list[TensorEntry]()
    for item in raw:
        spec = TensorSpec(_path(item), item["dtype"], tuple(item["shape"]))
        try:
            _prove_spec(spec)
        except ValueError as error:
            raise _Flaw(str(error)) from None
        mine = sorted(_chunk(chunk, spec, files, block_nbytes) for chunk in item["chunks"])
        if problem := coverage_problem(spec.shape, [chunk.box for chunk in mine]):
            raise _Flaw(f"{spec.key} {spec.shape}: {problem}")
        for chunk in mine:
            places[chunk.file][name_of(spec.key, spec.shape, chunk.box)] = chunk.place
        chunks += mine
        entries.append(TensorEntry(*spec, Listed(tuple(Held(chunk.box, (chunk.file,)) for chunk in mine))))
    _prove_filled(files, chunks)
    tables = tuple(
        OldTable(int(file.digest, 16), file.header_nbytes, found) for file, found in zip(files, places, strict=True)
    )
    return _by_key(entries), tables


def _chunk(raw: dict[str, Any], spec: TensorSpec, files: Sequence[FileEntry], block_nbytes: int) -> _Chunk:
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
    crcs = _crcs(raw["crc32"], blocks_of(nbytes, block_nbytes), spec.key)
    return _Chunk(box, file, Place(span[0], nbytes, crcs))


def _prove_filled(files: Sequence[FileEntry], chunks: Iterable[_Chunk]) -> None:
    ends = [file.header_nbytes for file in files]
    for file, start, nbytes in sorted((c.file, c.place.start, c.place.nbytes) for c in chunks):
        if start != ends[file]:
            raise _Flaw(f"{files[file].name}: chunks leave out bytes {ends[file]} to {start}, or contain them twice")
        ends[file] = start + nbytes
    for entry, end in zip(files, ends, strict=True):
        if end != entry.nbytes:
            raise _Flaw(f"{entry.name}: chunks end at byte {end} of {entry.nbytes}")


# ---- parts of both ---------------------------------------------------------------------------------------------------


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
