"""Hugging Face folders, single files and `torch.save` files: values, slices, damage; names of parameters."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from fullshard.checkpoint.errors import CheckpointError, CheckpointMismatch
from fullshard.checkpoint.formats import FlatParameterCheckpoint, ShardedTensorCheckpoint
from fullshard.checkpoint.formats.convert import RefusedCheckpoint, UnknownCheckpoint, detect
from fullshard.checkpoint.formats.hf import INDEX, SINGLE, Entry, HfSource, write_hf
from fullshard.checkpoint.formats.names import UNWRAPPED, Chosen, head_dim_of, llama, strip_wrappers
from fullshard.checkpoint.formats.torch_file import TorchSaveRefused, TorchSource, names_in
from fullshard.checkpoint.plan import Box
from tests.harness.behaviours import behaviour


def _weights(**shapes: tuple[int, ...]) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(0)
    return {name.replace("__", "."): torch.randn(shape, generator=draw) for name, shape in shapes.items()}


def _write(folder: Path, tensors: dict[str, Tensor], **options: Any) -> list[Path]:
    entries = [Entry(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]
    return write_hf(folder, entries, tensors.__getitem__, **options)


def _equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


WEIGHTS = _weights(a__w=(5, 3), a__b=(5,), c=(), d=(0, 4), e=(2, 3, 4)) | {"f": torch.arange(7).bfloat16()}


@behaviour(
    "Hugging Face's safetensors with an index are read and written, and the package reads what we wrote",
    area="checkpoints",
    torch="none",
    reason="not a part of FSDP2",
)
@pytest.mark.parametrize(("limit", "files"), [(10**9, 1), (30, 4), (1, 6)])
def test_files_of_a_folder_are_read_by_the_package_and_by_us(limit: int, files: int, tmp_path: Path) -> None:
    written = _write(tmp_path, WEIGHTS, max_nbytes=limit)
    data = [path for path in written if path.suffix == ".safetensors"]
    assert len(data) == files and sorted(written) == sorted(tmp_path.iterdir())
    theirs: dict[str, Tensor] = {}
    for path in data:
        part = load_file(path)
        # A tensor larger than the limit has a file of its own.
        assert sum(t.nbytes for t in part.values()) <= limit or len(part) == 1
        theirs |= part
    _equal(theirs, WEIGHTS)
    assert detect(tmp_path).kind == "hf"
    with HfSource(tmp_path) as source:
        assert source.num_files == files
        _equal({name: source.read(name) for name in source.tensors}, WEIGHTS)
        for a, n in ((0, 5), (1, 3), (4, 1), (2, 0)):
            assert torch.equal(source.read("a.w", Box((a, 1), (n, 2))), WEIGHTS["a.w"][a : a + n, 1:])
        assert torch.equal(source.read("e", Box((0, 1, 0), (2, 2, 4))), WEIGHTS["e"][:, 1:])
    if files > 1:
        index = json.loads((tmp_path / INDEX).read_text())
        assert index["metadata"]["total_size"] == sum(t.nbytes for t in WEIGHTS.values())


def test_files_of_the_package_are_read(tmp_path: Path) -> None:
    save_file(WEIGHTS, tmp_path / "any.safetensors")
    for path in (tmp_path, tmp_path / "any.safetensors"):
        with HfSource(detect(path).path) as source:
            _equal({name: source.read(name) for name in source.tensors}, WEIGHTS)


def test_one_tensor_is_in_memory_at_a_time_and_a_failure_leaves_nothing(tmp_path: Path) -> None:
    entries = [Entry(str(i), torch.float32, (4,)) for i in range(5)]

    def read(name: str) -> Tensor:
        if name == "3":
            raise OSError("gone")
        return torch.zeros(4)

    with pytest.raises(OSError, match="gone"):
        write_hf(tmp_path / "x", entries, read, max_nbytes=16)
    assert list((tmp_path / "x").iterdir()) == []
    _write(tmp_path / "x", WEIGHTS)
    with pytest.raises(FileExistsError, match="choose a folder without a model"):
        _write(tmp_path / "x", WEIGHTS)
    with pytest.raises(ValueError, match="expected a dtype that safetensors has"):
        write_hf(tmp_path / "y", [Entry("x", torch.complex64, (1,))], lambda _: torch.zeros(1))


BREAKS: list[tuple[str, Callable[[Path, dict[str, Any]], object]]] = [
    ("expected a plain file name in its folder", lambda _, i: i["weight_map"].update({"a.w": "../x.safetensors"})),
    ("expected a plain file name in its folder", lambda _, i: i["weight_map"].update({"a.w": "/etc/passwd"})),
    ("the index names this file, which does not exist", lambda f, _: (f / "model-00002-of-00004.safetensors").unlink()),
    ("files do not match", lambda _, i: i["weight_map"].pop("a.b")),
    ("files do not match", lambda _, i: i["weight_map"].update({"ghost": "model-00001-of-00004.safetensors"})),
    ("expected a weight_map", lambda _, i: i.pop("weight_map")),
    ("is a link out of its folder", lambda f, _: _link(f / "model-00001-of-00004.safetensors")),
]


def _link(path: Path) -> None:
    away = path.parent.parent / "away"
    shutil.move(path, away)
    path.symlink_to(away)


@pytest.mark.parametrize(("message", "damage"), BREAKS, ids=range(len(BREAKS)))
def test_an_index_that_does_not_fit_its_files_is_refused(
    message: str, damage: Callable[[Path, dict[str, Any]], object], tmp_path: Path
) -> None:
    folder = tmp_path / "x"
    _write(folder, WEIGHTS, max_nbytes=30)
    index = json.loads((folder / INDEX).read_text())
    damage(folder, index)
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=message):
        HfSource(folder)


def test_the_links_of_the_cache_are_followed(tmp_path: Path) -> None:
    """`~/.cache/huggingface/hub` keeps files under their hashes and links to them."""
    snapshot, blobs = tmp_path / "models--x" / "snapshots" / "abc", tmp_path / "models--x" / "blobs"
    _write(snapshot, WEIGHTS, max_nbytes=30)
    blobs.mkdir()
    for i, path in enumerate(sorted(snapshot.glob("*.safetensors"))):
        shutil.move(path, blobs / str(i))
        path.symlink_to(blobs / str(i))
    with HfSource(snapshot) as source:
        _equal({name: source.read(name) for name in source.tensors}, WEIGHTS)


def test_several_files_without_an_index_are_refused(tmp_path: Path) -> None:
    for name in ("x", "y"):
        save_file({name: torch.zeros(1)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(UnknownCheckpoint, match="without model.safetensors.index.json"):
        detect(tmp_path)
    assert detect(tmp_path / "x.safetensors").kind == "hf"


# ---- torch.save ------------------------------------------------------------------------------------------------

NESTED = {"model": dict(WEIGHTS), "epoch": 3, "groups": [{"lr": 0.1}], "list": [torch.zeros(2), 1]}


@behaviour(
    "files of torch.save are read where that was asked for, and only there",
    area="checkpoints",
    torch="none",
    reason="torch.load reads what it is given",
)
@pytest.mark.parametrize("zipped", [True, False])
def test_torch_save_is_read_only_where_it_is_asked_for(zipped: bool, tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    torch.save(NESTED, path, _use_new_zipfile_serialization=zipped)
    assert detect(tmp_path) == detect(path) and detect(path).kind == "torch"
    with pytest.raises(TorchSaveRefused, match="allow_torch_save=True"):
        TorchSource(path, allow=False)
    with TorchSource(path, allow=True) as source:
        _equal({name: source.read(f"model.{name}") for name in WEIGHTS}, WEIGHTS)
        assert torch.equal(source.read("model.a.w", Box((1, 0), (2, 2))), WEIGHTS["a.w"][1:3, :2])
        assert (source.value("epoch"), source.value("groups"), source.value("list.1")) == (3, [{"lr": 0.1}], 1)
        assert source.values["list.1"] == ("list", 1) and source.tensors["list.0"].shape == (2,)


class _Touch:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return exec, (f"open({str(self.marker)!r}, 'w').close()",)


@pytest.mark.parametrize("zipped", [True, False])
def test_a_hostile_torch_save_runs_nothing(zipped: bool, tmp_path: Path) -> None:
    path, marker = tmp_path / "x.pt", tmp_path / "ran"
    torch.save({"model": {"w": torch.zeros(1)}, "evil": _Touch(marker)}, path, _use_new_zipfile_serialization=zipped)
    with pytest.raises(TorchSaveRefused, match="cannot be read through weights_only"):
        TorchSource(path, allow=True)
    assert not marker.exists()
    if zipped:
        assert "__builtin__.exec" in names_in(path)


class _Of:
    """Pickled as an instance of another class."""

    def __init__(self, kind: type) -> None:
        self.kind = kind

    def __reduce__(self) -> tuple[Any, ...]:
        return self.kind, ()


def test_parts_of_a_sharded_state_are_recognised_and_refused(tmp_path: Path) -> None:
    from torch.distributed._shard.sharded_tensor import ShardedTensor

    torch.save({"w": _Of(ShardedTensor)}, tmp_path / "s.pt")
    with pytest.raises(ShardedTensorCheckpoint, match="one rank's part of a SHARDED_STATE_DICT"):
        TorchSource(tmp_path / "s.pt", allow=True)
    torch.save({"w": _Of(DTensor)}, tmp_path / "d.pt")
    with pytest.raises(TorchSaveRefused, match="one rank's rows"):
        TorchSource(tmp_path / "d.pt", allow=True)
    torch.save({"a._flat_param": torch.zeros(4)}, tmp_path / "f.pt")
    with pytest.raises(FlatParameterCheckpoint, match="LOCAL_STATE_DICT"):
        TorchSource(tmp_path / "f.pt", allow=True)
    (tmp_path / "ranks").mkdir()
    for rank in range(2):
        torch.save({}, tmp_path / "ranks" / f"ep0-ba1-rank{rank}.pt")
    with pytest.raises(RefusedCheckpoint, match="one for each rank"):
        detect(tmp_path / "ranks")


# ---- names -----------------------------------------------------------------------------------------------------


def test_what_wrappers_put_into_names_is_taken_out() -> None:
    for name, expected in {
        "module.a.b": "a.b",
        "_orig_mod.a": "a",
        "a._checkpoint_wrapped_module.b._orig_mod.c": "a.b.c",
        "module._orig_mod.layers.0._checkpoint_wrapped_module._fsdp_wrapped_module.w": "layers.0.w",
        "a.module.b": "a.module.b",
        "my_orig_mod.a": "my_orig_mod.a",
        "submodule.a": "submodule.a",
    }.items():
        assert strip_wrappers(name) == expected


def _titan(layers: int, dim: int, heads: int, kv: int) -> dict[str, Tensor]:
    shapes: dict[str, tuple[int, ...]] = {
        "tok_embeddings.weight": (11, dim),
        "norm.weight": (dim,),
        "output.weight": (11, dim),
    }
    head = dim // heads
    for i in range(layers):
        shapes |= {
            f"layers.{i}.attention.wq.weight": (dim, dim),
            f"layers.{i}.attention.wk.weight": (kv * head, dim),
            f"layers.{i}.attention.wv.weight": (kv * head, dim),
            f"layers.{i}.attention.wo.weight": (dim, dim),
            f"layers.{i}.attention_norm.weight": (dim,),
            f"layers.{i}.ffn_norm.weight": (dim,),
            f"layers.{i}.feed_forward.w1.weight": (20, dim),
            f"layers.{i}.feed_forward.w2.weight": (dim, 20),
            f"layers.{i}.feed_forward.w3.weight": (20, dim),
        }
    return _weights(**shapes)


def _as_file(tensors: dict[str, Tensor], folder: Path) -> HfSource:
    save_file(tensors, folder / SINGLE)
    return HfSource(folder)


def test_llama_names_there_and_back_are_bitwise(tmp_path: Path) -> None:
    state = _titan(12, 16, 4, 2)
    with _as_file(state, tmp_path) as source:
        hf = Chosen(source, renaming=llama("titan", "hf", head_dim=4))
        assert "model.layers.11.self_attn.q_proj.weight" in hf.tensors and "lm_head.weight" in hf.tensors
        ours = Chosen(hf, renaming=llama("hf", "fullshard"))
        back = Chosen(ours, renaming=llama("fullshard", "titan", head_dim=4))
        _equal({name: back.read(name) for name in state}, state)
        # Any rows of what is turned: those of the heads around them are read, and no others.
        asked: list[int] = []
        read = source.read

        def counted(key: str, box: Box | None = None) -> Tensor:
            found = read(key, box)
            asked.append(found.numel())
            return found

        source.read = counted  # type: ignore[method-assign]
        for a in range(8):
            for n in range(8 - a):
                name = "model.layers.3.self_attn.k_proj.weight"
                box = Box((a, 2), (n, 5))
                whole_k = hf.read(name)
                asked.clear()
                assert torch.equal(hf.read(name, box), whole_k[a : a + n, 2:7])
                heads = -(-(a + n) // 4) - a // 4
                assert asked == [heads * 4 * 5]


@behaviour(
    "rows of query and key weights are turned between torchtitan's order and Hugging Face's",
    area="checkpoints",
    torch="none",
    reason="not a part of FSDP2",
)
def test_the_rows_of_heads_are_turned_so_that_attention_is_the_same(tmp_path: Path) -> None:
    """Scores of rotated queries and keys, once by pairs as torchtitan does, once by halves as Hugging Face does."""
    heads, kv, head, dim, length = 4, 2, 6, 24, 5
    state = _titan(1, dim, heads, kv)
    angle = torch.outer(torch.arange(length).double(), 10.0 ** (-torch.arange(head // 2).double() / head * 2))

    def by_pairs(x: Tensor) -> Tensor:  # (length, heads, head)
        turned = (
            torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
            * torch.polar(torch.ones_like(angle), angle)[:, None]
        )
        return torch.view_as_real(turned).flatten(-2)

    def by_halves(x: Tensor) -> Tensor:
        low, high = x.chunk(2, -1)
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]
        return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)

    def scores(wq: Tensor, wk: Tensor, rotate: Callable[[Tensor], Tensor]) -> Tensor:
        x = torch.randn(length, dim, generator=torch.Generator().manual_seed(1)).double()
        q = rotate((x @ wq.double().t()).unflatten(-1, (-1, head)))
        k = rotate((x @ wk.double().t()).unflatten(-1, (-1, head))).repeat_interleave(heads // kv, 1)
        return torch.einsum("qhe,khe->hqk", q, k)

    with _as_file(state, tmp_path) as source:
        hf = Chosen(source, renaming=llama("titan", "hf", head_dim=head))
        theirs = [state[f"layers.0.attention.{name}.weight"] for name in ("wq", "wk")]
        ours = [hf.read(f"model.layers.0.self_attn.{name}_proj.weight") for name in "qk"]
        expected = scores(theirs[0], theirs[1], by_pairs)
        assert torch.allclose(scores(ours[0], ours[1], by_halves), expected, atol=1e-12)
        assert not torch.allclose(scores(theirs[0], theirs[1], by_halves), expected, atol=1e-3)


def test_what_does_not_fit_is_one_error_that_lists_it_all(tmp_path: Path) -> None:
    with _as_file(
        _weights(norm__weight=(4,), rope__freqs=(2,), other=(1,), module__norm__weight=(4,)), tmp_path
    ) as source:
        with pytest.raises(CheckpointMismatch) as caught:
            Chosen(source, skip=["nothing*"], renaming=llama("titan", "hf", head_dim=2))
        text = str(caught.value)
        for part in ("'nothing*'", "rope.freqs: unknown", "other: unknown", "would both be model.norm.weight"):
            assert part in text
        kept = Chosen(source, skip=["rope.*", "module.*", "other"], renaming=llama("titan", "fullshard", head_dim=2))
        assert list(kept.tensors) == ["norm.weight"] and kept.left_out == 3
        assert list(Chosen(source, only=["rope.*"], strip="rope.").tensors) == ["freqs"]
        with pytest.raises(CheckpointMismatch, match="other does not begin with 'rope.'"):
            Chosen(source, only=["rope.*", "other"], strip="rope.")
        with pytest.raises(CheckpointMismatch, match="would both be norm.weight"):
            Chosen(source, renaming=UNWRAPPED)
    with pytest.raises(ValueError, match="expected the even number of elements of a head, found None"):
        llama("titan", "hf")
    with pytest.raises(ValueError, match="expected one of fullshard, hf, titan"):
        llama("gpt", "hf")  # type: ignore[arg-type]
    assert head_dim_of({"hidden_size": 64, "num_attention_heads": 8}) == 8 == head_dim_of({"head_dim": 8})


@behaviour(
    "a rule that renames a parameter renames the state of its optimizer too",
    area="checkpoints",
    torch="none",
    reason="torch has no renaming",
)
def test_the_optimizer_s_state_follows_its_parameter(tmp_path: Path) -> None:
    name = "layers.0.attention.wq.weight"
    state = {
        "model": {name: torch.arange(8.0).view(4, 2)},
        "optimizer": {
            "state": {name: {"exp_avg": torch.arange(8.0).view(4, 2), "step": torch.tensor(3.0)}},
            "param_groups": [{"params": [name], "lr": 0.1}],
        },
    }
    torch.save(state, tmp_path / "x.pt")
    with TorchSource(tmp_path / "x.pt", allow=True) as source:
        hf = Chosen(source, renaming=llama("titan", "hf", head_dim=4))
        new = "model.layers.0.self_attn.q_proj.weight"
        assert set(hf.tensors) == {f"model.{new}", f"optimizer.state.{new}.exp_avg", f"optimizer.state.{new}.step"}
        assert hf.tensors[f"optimizer.state.{new}.exp_avg"].path == ("optimizer", "state", new, "exp_avg")
        assert torch.equal(hf.read(f"model.{new}"), hf.read(f"optimizer.state.{new}.exp_avg"))
        assert hf.read(f"model.{new}")[:, 0].tolist() == [0, 4, 2, 6]
        assert hf.value("optimizer.param_groups") == [{"params": [new], "lr": 0.1}]
