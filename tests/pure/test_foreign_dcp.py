"""DCP directories read without unpickling: values, damage, hostile files, and formats that are refused."""

from __future__ import annotations

import pickle
import random
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from fullshard.checkpoint.errors import CheckpointDamaged, CheckpointError
from fullshard.checkpoint.formats import FlatParameterCheckpoint, ShardedTensorCheckpoint
from fullshard.checkpoint.formats.convert import RefusedCheckpoint, UnknownCheckpoint, detect
from fullshard.checkpoint.formats.dcp import DcpSource, NotDcp, index_of
from fullshard.checkpoint.formats.pickle_tree import PickleRefused
from fullshard.checkpoint.plan import Box
from tests.harness.behaviours import behaviour


def _state() -> dict[str, Any]:
    draw = torch.Generator().manual_seed(0)
    return {
        "model": {
            "w": torch.randn(7, 3, generator=draw).bfloat16(),
            "turned": torch.randn(6, 4, generator=draw).t(),
            "sliced": torch.randn(6, 4, generator=draw)[1:5, 1:3],
            "scalar": torch.tensor(3.0, dtype=torch.float64),
            "empty": torch.empty(0, 3),
            "eight": torch.randn(4, generator=draw).to(torch.float8_e4m3fn),
            "counts": torch.arange(4).to(torch.uint16),
            "parameter": torch.nn.Parameter(torch.randn(2, generator=draw)),
        },
        "optim": {"param_groups": [{"lr": 0.1, "betas": (0.9, 0.99), "params": ["w"]}], "step": 7, "none": None},
        "rng": torch.arange(5, dtype=torch.uint8),
    }


def _save(state: dict[str, Any], folder: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no process group
        dcp.save(state, checkpoint_id=folder)
    return folder


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _save(_state(), tmp_path_factory.mktemp("dcp") / "step-10")


def _tensors(value: Any, prefix: str = "") -> dict[str, Tensor]:
    if isinstance(value, Tensor):
        return {prefix: value.detach()}
    if isinstance(value, dict):
        return {k: v for key, item in value.items() for k, v in _tensors(item, f"{prefix}.{key}".strip(".")).items()}
    return {}


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def test_tensors_and_values_are_those_that_were_saved(saved: Path) -> None:
    with DcpSource(saved) as source:
        expected = _tensors(_state())
        assert set(source.tensors) == set(expected)
        for key, tensor in expected.items():
            found = source.read(key)
            assert found.dtype == tensor.dtype and found.shape == tensor.shape
            assert torch.equal(_bits(found), _bits(tensor)), key
        values = {key: source.value(key) for key in source.values}
        assert values == {
            "optim.param_groups.0.lr": 0.1,
            "optim.param_groups.0.betas": (0.9, 0.99),
            "optim.param_groups.0.params": ["w"],
            "optim.step": 7,
            "optim.none": None,
        }
        assert source.values["optim.param_groups.0.lr"] == ("optim", "param_groups", 0, "lr")
        assert source.verify() == ["`.metadata` itself has no checksum"]


def test_any_part_of_a_tensor_can_be_read(saved: Path) -> None:
    with DcpSource(saved) as source:
        for key in ("model.w", "model.turned", "model.sliced"):
            tensor = _tensors(_state())[key]
            for a in range(tensor.shape[0]):
                for n in range(tensor.shape[0] - a + 1):
                    found = source.read(key, Box((a, 1), (n, 2 if tensor.shape[1] > 2 else 1)))
                    assert torch.equal(found, tensor[a : a + n, 1 : 1 + found.shape[1]])


def test_a_path_is_found_to_be_what_it_is(saved: Path, tmp_path: Path) -> None:
    assert detect(saved).kind == "dcp" and detect(saved / ".metadata").path == saved
    # torchtitan's and Composer's folders of steps: the newest, by number.
    for name in ("step-9", "step-10", "step-100"):
        shutil.copytree(saved, tmp_path / "titan" / name)
    found = detect(tmp_path / "titan")
    assert found.path.name == "step-100" and "newest of 3" in found.says
    for name in ("ep0-ba90", "ep1-ba100"):
        shutil.copytree(saved, tmp_path / "composer" / name)
    assert detect(tmp_path / "composer").path.name == "ep1-ba100"
    # A save that never came to its end is not the newest.
    (tmp_path / "titan" / "step-100" / ".metadata").unlink()
    assert detect(tmp_path / "titan").path.name == "step-10"
    with pytest.raises(UnknownCheckpoint, match="the save never completed"):
        detect(tmp_path / "titan" / "step-100")
    with pytest.raises(UnknownCheckpoint, match="no such file or folder"):
        detect(tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UnknownCheckpoint, match="found nothing"):
        detect(tmp_path / "empty")
    (tmp_path / "ranks").mkdir()
    for rank in range(2):
        (tmp_path / "ranks" / f"__{rank}.metadata").touch()
    with pytest.raises(RefusedCheckpoint, match="each rank saved by itself"):
        detect(tmp_path / "ranks")


# ---- damage ----------------------------------------------------------------------------------------------------


def _all(folder: Path) -> dict[str, Any]:
    with DcpSource(folder) as source:
        return {key: source.read(key) for key in source.tensors} | {key: source.value(key) for key in source.values}


def _same(found: dict[str, Any], expected: dict[str, Any]) -> bool:
    if found.keys() != expected.keys():
        return False
    return all(
        torch.equal(_bits(value), _bits(expected[key])) and value.shape == expected[key].shape
        if isinstance(value, Tensor)
        else value == expected[key]
        for key, value in found.items()
    )


def _damaged(folder: Path, count: int) -> int:
    """Flip bits, zero pages and cut the data file short, `count` times in all: each is an error or changes nothing that
    is read. How many were errors."""
    expected = _all(folder)
    path = folder / "__0_0.distcp"
    data = path.read_bytes()
    draw = random.Random(1)
    refused = 0
    for case in range(count):
        broken = bytearray(data)
        if case % 4 < 2:
            broken[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        elif case % 4 == 2:
            start = draw.randrange(len(data))
            broken[start : start + 64] = bytes(len(broken[start : start + 64]))
        else:
            del broken[draw.randrange(len(data)) :]
        path.unlink()
        path.write_bytes(broken)
        try:
            assert _same(_all(folder), expected), f"case {case}: a wrong value was read"
        except CheckpointError:
            refused += 1
    path.unlink()
    path.write_bytes(data)
    return refused


@behaviour(
    "a damaged DCP checkpoint is an error for our reader, or gives the values that were saved",
    area="checkpoints",
    torch="none",
    reason="DCP loads flipped bits as wrong values",
)
def test_damage_of_the_data_is_never_a_wrong_value(saved: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(saved, tmp_path / "x")
    assert _damaged(folder, 60) > 25


@pytest.mark.slow
def test_damage_of_the_data_is_never_a_wrong_value_many(saved: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(saved, tmp_path / "x")
    assert _damaged(folder, 1500) > 600


def test_each_byte_of_a_tensor_and_of_a_value_is_under_a_checksum(saved: Path, tmp_path: Path) -> None:
    """Where the entry lies is what `.metadata` says; what is in the middle of it are the bytes."""
    folder = shutil.copytree(saved, tmp_path / "x")
    path = folder / "__0_0.distcp"
    data = path.read_bytes()
    expected = _tensors(_state())["model.sliced"].contiguous().view(torch.uint8).flatten()
    start = data.find(bytes(expected.tolist()))
    assert start > 0
    for offset in range(len(expected)):
        broken = bytearray(data)
        broken[start + offset] ^= 1 << offset % 8
        path.write_bytes(broken)
        with DcpSource(folder) as source, pytest.raises(CheckpointDamaged, match="do not have the checksum"):
            source.read("model.sliced")
    rate = data.find(pickle.dumps(0.1, 2)[2:-1])  # the learning rate, in its pickle
    path.write_bytes(data[: rate + 3] + b"\0" + data[rate + 4 :])
    with DcpSource(folder) as source, pytest.raises(CheckpointDamaged, match="data.pkl do not have the checksum"):
        source.value("optim.param_groups.0.lr")


def test_an_entry_without_its_end_is_not_the_one_before_it(tmp_path: Path) -> None:
    """Two tensors of one shape, one after the other in the file; what finds the second one's contents is zeroed."""
    folder = _save({"a": torch.zeros(4), "b": torch.ones(4)}, tmp_path / "x")
    places = {index.fqn: info for index, info in _metadata(folder).storage_data.items()}
    second = max(places, key=lambda key: int(places[key].offset))
    path, stop = folder / places[second].relative_path, places[second].offset + places[second].length
    data = path.read_bytes()
    for count in (22, 64, 200):
        path.write_bytes(data[: stop - count] + bytes(count) + data[stop:])
        with DcpSource(folder) as source, pytest.raises(CheckpointDamaged):
            source.read(second)


def test_an_entry_of_another_tensor_is_noticed(saved: Path, tmp_path: Path) -> None:
    """Whole in itself, and not what the table says: another shape, another dtype."""
    for name, other in (("model.w", "model.turned"), ("model.counts", "model.eight")):
        folder = shutil.copytree(saved, tmp_path / name)
        metadata = _metadata(folder)
        places = {index.fqn: info for index, info in metadata.storage_data.items()}
        places[name].offset, places[name].length = places[other].offset, places[other].length
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))
        with DcpSource(folder) as source, pytest.raises(CheckpointDamaged, match="belongs to another checkpoint"):
            source.read(name)


def test_damage_of_the_metadata_is_one_error(saved: Path) -> None:
    data = (saved / ".metadata").read_bytes()
    draw = random.Random(2)
    for _ in range(600):
        broken = bytearray(data)
        broken[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        try:
            index_of(bytes(broken))
        except CheckpointError:
            pass
    for stop in range(0, len(data), 7):
        with pytest.raises(CheckpointError):
            index_of(data[:stop])


def test_a_file_of_another_save_is_noticed(saved: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(saved, tmp_path / "x")
    state = _state()
    state["model"]["w"] = torch.zeros(9, 3)
    other = _save(state, tmp_path / "y")
    shutil.copyfile(other / "__0_0.distcp", folder / "__0_0.distcp")
    with pytest.raises(CheckpointDamaged):
        _all(folder)
    (folder / "__0_0.distcp").unlink()
    with pytest.raises(CheckpointError, match="expected a file of the checkpoint, found no file"):
        _all(folder)


# ---- hostile files ---------------------------------------------------------------------------------------------


class _Touch:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return exec, (f"open({str(self.marker)!r}, 'w').close()",)


def _metadata(folder: Path) -> Any:
    with (folder / ".metadata").open("rb") as file:
        return pickle.load(file)


PLACES = (
    "whole",
    "key",
    "shape",
    "dtype",
    "planner_data",
    "storage_info",
    "storage_meta",
    "version",
    "value",
    "tensor",
)


@behaviour(
    "a hostile pickle in a DCP checkpoint runs nothing when we read it",
    area="checkpoints",
    torch="none",
    reason="DCP unpickles its metadata",
)
@pytest.mark.parametrize("place", PLACES)
def test_a_hostile_pickle_in_any_place_runs_nothing(place: str, saved: Path, tmp_path: Path) -> None:
    marker, folder = tmp_path / "ran", shutil.copytree(saved, tmp_path / "x")
    evil: Any = _Touch(marker)
    metadata = _metadata(folder)
    name = "model.w"
    match place:
        case "whole":
            metadata = evil
        case "key":
            metadata.state_dict_metadata[evil] = metadata.state_dict_metadata.pop(name)
        case "shape":
            metadata.state_dict_metadata[name].size = evil
        case "dtype":
            metadata.state_dict_metadata[name].properties.dtype = evil
        case "planner_data":
            metadata.planner_data[name] = evil
        case "storage_info":
            next(iter(metadata.storage_data.values())).offset = evil
        case "storage_meta":
            metadata.storage_meta.checkpoint_id = evil
        case "version":
            metadata.version = evil
        case "value" | "tensor":
            key = "optim.step" if place == "value" else name
            span = next(info for index, info in metadata.storage_data.items() if index.fqn == key)
            torch.save(evil, folder / "evil.distcp")
            span.relative_path, span.offset = "evil.distcp", 0
            span.length = (folder / "evil.distcp").stat().st_size
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(PickleRefused, match="exec.*Nothing was run"):
        _all(folder)
    assert not marker.exists()


@pytest.mark.parametrize(
    "name", ["../x/__0_0.distcp", "/etc/passwd", "a/b", "..", "", "a\0b", "..\\a", ".hidden", "x" * 300]
)
def test_names_of_files_stay_in_the_directory(name: str, saved: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(saved, tmp_path / "x")
    metadata = _metadata(folder)
    for info in metadata.storage_data.values():
        info.relative_path = name
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(NotDcp, match="expected a plain name in its own directory"):
        DcpSource(folder)


def test_a_value_of_2_to_the_40_items_is_refused(saved: Path, tmp_path: Path) -> None:
    """Each tuple holds the one before it twice, in a few bytes."""
    folder = shutil.copytree(saved, tmp_path / "x")
    wide: Any = ()
    for _ in range(40):
        wide = (wide, wide)
    torch.save(wide, folder / "wide.distcp")
    metadata = _metadata(folder)
    span = next(info for index, info in metadata.storage_data.items() if index.fqn == "optim.step")
    span.relative_path, span.offset, span.length = "wide.distcp", 0, (folder / "wide.distcp").stat().st_size
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with DcpSource(folder) as source, pytest.raises(PickleRefused, match="far larger than its bytes"):
        source.value("optim.step")


def test_links_are_not_followed(saved: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(saved, tmp_path / "x")
    (folder / "__0_0.distcp").unlink()
    (folder / "__0_0.distcp").symlink_to(saved / "__0_0.distcp")
    with pytest.raises(CheckpointError, match="found a link"):
        _all(folder)


def _chunk(metadata: Any, name: str) -> Any:
    return metadata.state_dict_metadata[name].chunks[0]


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda m: setattr(_chunk(m, "model.w"), "sizes", torch.Size((6, 3))), "18 of 21|3 of 21"),
        (lambda m: setattr(m.state_dict_metadata["model.w"], "size", torch.Size((8, 3))), "3 of 24"),
        (lambda m: setattr(_chunk(m, "model.w"), "sizes", torch.Size((7, 4))), "outside of shape"),
        (lambda m: m.state_dict_metadata["model.w"].chunks.append(_chunk(m, "model.w")), "overlap"),
        (lambda m: m.state_dict_metadata["model.w"].chunks.clear(), "21 of 21"),
        (lambda m: m.storage_data.clear(), "there is no file for"),
        (lambda m: setattr(m, "storage_data", None), "no table of tensors"),
        (lambda m: m.state_dict_metadata.__setitem__("model.w", 3), "expected a TensorStorageMetadata"),
        (lambda m: setattr(m.state_dict_metadata["model.w"], "size", (1 << 80,)), "expected sizes"),
        (lambda m: setattr(m.state_dict_metadata["model.w"], "size", (-1,)), "expected sizes"),
    ],
)
def test_a_table_that_does_not_cover_is_refused(edit: Any, message: str, saved: Path) -> None:
    metadata = _metadata(saved)
    edit(metadata)
    with pytest.raises(NotDcp, match=message):
        index_of(pickle.dumps(metadata))


def test_a_table_that_repeats_itself_is_not_read_to_its_end(saved: Path) -> None:
    """A few bytes that stand for a million million chunks."""
    metadata = _metadata(saved)
    entry = metadata.state_dict_metadata["model.empty"]
    entry.chunks = [_chunk(metadata, "model.empty")] * 5_000
    metadata.state_dict_metadata = {"model.empty": entry}
    data = pickle.dumps(metadata)
    # Two bytes recall a chunk, so 5,000 of them fit; a second key that recalls the list does not.
    assert len(index_of(data).tensors["model.empty"].chunks) == 5_000
    for info in list(metadata.storage_data):
        for i in range(4):
            metadata.storage_data[type(info)(f"again {i}", info.offset)] = metadata.storage_data[info]
    for i in range(4):
        metadata.state_dict_metadata[f"again {i}"] = entry
    with pytest.raises(NotDcp, match="more chunks than it has bytes"):
        index_of(pickle.dumps(metadata))


# ---- formats that are refused ----------------------------------------------------------------------------------


@pytest.mark.parametrize("strides", [None, (3, 1)])
def test_metadata_of_torch_2_15_are_read(strides: object, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its properties of a tensor have one item more, its strides, which torch up to 2.14 cannot unpickle."""
    from torch.distributed.checkpoint.metadata import TensorProperties

    metadata = _metadata(saved)
    expected = index_of(pickle.dumps(metadata))
    state = TensorProperties.__getstate__
    monkeypatch.setattr(TensorProperties, "__getstate__", lambda self: (*state(self)[:5], strides))
    assert index_of(pickle.dumps(metadata)) == expected


@behaviour(
    "what other programs saved and is not read (ShardedTensors, flat parameters) is refused with the way out",
    area="checkpoints",
    torch="none",
    reason="torch fails in its unpickler or takes it for data",
)
def test_sharded_tensors_of_an_old_torch_are_refused_with_the_way_out(saved: Path) -> None:
    from torch.distributed._shard.sharded_tensor.metadata import TensorProperties

    metadata = _metadata(saved)
    metadata.state_dict_metadata["model.w"].properties = TensorProperties(dtype=torch.bfloat16)
    with pytest.raises(ShardedTensorCheckpoint, match="torch 2.2 or older.*save it anew"):
        index_of(pickle.dumps(metadata))


@behaviour(
    "what other programs saved and is not read (ShardedTensors, flat parameters) is refused with the way out",
    area="checkpoints",
    torch="none",
    reason="torch fails in its unpickler or takes it for data",
)
def test_flat_parameters_are_refused_with_the_way_out(tmp_path: Path) -> None:
    folder = _save({"model": {"block._flat_param": torch.zeros(8)}}, tmp_path / "x")
    with pytest.raises(FlatParameterCheckpoint, match="LOCAL_STATE_DICT.*save it anew"):
        DcpSource(folder)


def test_compressed_entries_are_refused(saved: Path) -> None:
    metadata = _metadata(saved)
    next(iter(metadata.storage_data.values())).transform_descriptors = ["zstd"]
    with pytest.raises(NotDcp, match="save it without extensions"):
        index_of(pickle.dumps(metadata))
