"""From format to format: bit for bit, in bounded memory, whole or not at all; and the command line that does it."""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import Tensor

import fullshard.checkpoint as ours
from fullshard.checkpoint.errors import CheckpointMismatch
from fullshard.checkpoint.formats import Chosen, Source, convert, llama, open_source
from fullshard.cli import main
from fullshard.train.model import Llama, LlamaShape
from tests.harness.behaviours import behaviour


def _state() -> dict[str, Any]:
    shape = LlamaShape(vocab=13, layers=2, dim=16, heads=4, kv_heads=2, ffn_dim=32, context=8, tie_embeddings=False)
    model = Llama(shape)
    model.init_weights(3)
    draw = torch.Generator().manual_seed(1)
    weights = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    weights["layers.1.ffn.up.weight"] = weights["layers.1.ffn.up.weight"].bfloat16()
    moments = {
        name: {"exp_avg": torch.randn(t.shape, generator=draw), "step": torch.tensor(5.0)}
        for name, t in weights.items()
    }
    groups = [{"lr": 0.1, "betas": (0.9, 0.95), "params": list(weights)}]
    return {"model": weights, "optimizer": {"state": moments, "param_groups": groups}, "step": 5}


def _dcp_save(state: dict[str, Any], folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=folder)


def _dcp_load(state: dict[str, Any], folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, checkpoint_id=folder)


def _flat(source: Source) -> dict[str, Any]:
    with source:
        return {key: source.read(key) for key in source.tensors} | {key: source.value(key) for key in source.values}


def _assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        if isinstance(value, Tensor):
            assert found[key].dtype == value.dtype and found[key].shape == value.shape, key
            assert torch.equal(found[key].reshape(-1).view(torch.uint8), value.reshape(-1).view(torch.uint8)), key
        else:
            assert found[key] == value and type(found[key]) is type(value), key


@behaviour(
    "a checkpoint goes from DCP to ours to Hugging Face and back, bitwise",
    area="checkpoints",
    torch="none",
    reason="torch has no conversion to Hugging Face beside its own loaders",
)
def test_dcp_to_ours_to_hf_to_ours_to_dcp_is_bitwise(tmp_path: Path) -> None:
    """With names and rows turned on the way: torchtitan's in DCP, Hugging Face's in its files, the trainer's in "
    "ours."""
    state = _state()
    _dcp_save(state, tmp_path / "start")
    titan = {"head_dim": 4}
    with open_source(tmp_path / "start") as source:
        convert(
            Chosen(source, only=["model.*"], strip="model.", renaming=llama("fullshard", "titan", **titan)),
            tmp_path / "dcp",
            "dcp",
        )
    with open_source(tmp_path / "dcp") as source:
        convert(Chosen(source, renaming=llama("titan", "fullshard", **titan)), tmp_path / "ours")
    with open_source(tmp_path / "ours") as source:
        convert(Chosen(source, renaming=llama("fullshard", "hf")), tmp_path / "hf", "hf", max_file_nbytes=4000)
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 3
    with open_source(tmp_path / "hf") as source:
        convert(Chosen(source, renaming=llama("hf", "fullshard")), tmp_path / "ours again")
    with open_source(tmp_path / "ours again") as source:
        convert(Chosen(source, renaming=llama("fullshard", "titan", **titan)), tmp_path / "end", "dcp")
    first, last = _flat(open_source(tmp_path / "dcp")), _flat(open_source(tmp_path / "end"))
    _assert_same(last, first)
    assert not torch.equal(first["layers.0.attention.wq.weight"], state["model"]["layers.0.attention.wq.weight"])
    _assert_same(_flat(open_source(tmp_path / "ours again")), dict(state["model"]))
    # torch's own reader finds them, too.
    loaded = {name: torch.zeros_like(tensor) for name, tensor in first.items()}
    _dcp_load(loaded, tmp_path / "end")
    _assert_same(loaded, first)


@behaviour(
    "a training state of ours is exported as DCP's, and DCP loads all of it",
    area="checkpoints",
    torch="none",
    reason="DCP reads and writes its own format alone",
)
def test_a_whole_training_state_goes_through_dcp_and_back(tmp_path: Path) -> None:
    """Nested as it was: torch's load finds every tensor, list entry and value where its state dict has them."""
    ours.save(_state(), checkpoint_id=tmp_path / "ours", no_dist=True)
    with open_source(tmp_path / "ours") as source:
        convert(source, tmp_path / "dcp", "dcp")
    loaded = _state()
    for tensor in [*loaded["model"].values(), *(t for s in loaded["optimizer"]["state"].values() for t in s.values())]:
        tensor.zero_()
    loaded["step"], loaded["optimizer"]["param_groups"][0]["lr"] = 0, 0.0
    _dcp_load(loaded, tmp_path / "dcp")
    expected = _state()
    _assert_same(loaded["model"], expected["model"])
    for name, moments in expected["optimizer"]["state"].items():
        _assert_same(loaded["optimizer"]["state"][name], moments)
    assert loaded["step"] == 5 and loaded["optimizer"]["param_groups"] == expected["optimizer"]["param_groups"]
    with open_source(tmp_path / "dcp") as source:
        convert(source, tmp_path / "back")
    again = _state()
    ours.load(again, checkpoint_id=tmp_path / "back", no_dist=True, allow_unexpected=["*"], allow_missing=["*"])
    _assert_same(again["model"], expected["model"])


@behaviour(
    "a full state dict of torch.save becomes a checkpoint of ours, and one of ours such a file",
    area="checkpoints",
    torch="none",
    reason="DCP converts such files through a full copy in memory",
)
def test_torch_save_to_ours_and_back(tmp_path: Path) -> None:
    state = _state()
    torch.save(state, tmp_path / "x.pt")
    with open_source(tmp_path / "x.pt", allow_torch_save=True) as source:
        convert(source, tmp_path / "ours")
        with pytest.raises(FileExistsError):
            convert(source, tmp_path / "x.pt", "torch")
    with open_source(tmp_path / "ours") as source:
        convert(source, tmp_path / "y.pt", "torch")
    found = torch.load(tmp_path / "y.pt", weights_only=True)
    _assert_same(found["model"], state["model"])
    assert found["optimizer"]["param_groups"] == state["optimizer"]["param_groups"] and found["step"] == 5


class _Counting(Source):
    """A source that remembers how many tensors it handed out are still in somebody's hands."""

    kind, path, values = "test", Path("test"), {}

    def __init__(self, count: int) -> None:
        import weakref

        from fullshard.checkpoint.formats import TensorInfo

        self.tensors = {f"t{i}": TensorInfo((f"t{i}",), "float32", (100,)) for i in range(count)}
        self.living: weakref.WeakSet[Tensor] = weakref.WeakSet()
        self.most = 0

    def read(self, key: str, box: Any = None) -> Tensor:
        tensor = torch.full((100,), float(key[1:]))
        self.living.add(tensor)
        self.most = max(self.most, len(self.living))
        return tensor

    def value(self, key: str) -> Any:
        raise AssertionError


@behaviour(
    "a conversion to {target} has one tensor in memory at a time",
    area="checkpoints",
    torch="none",
    reason="DCP converts through a full copy in memory",
)
@pytest.mark.parametrize("target", ["fullshard", "dcp", "hf", "torch"])
def test_one_tensor_is_in_memory_at_a_time(target: Any, tmp_path: Path) -> None:
    source = _Counting(20)
    done: list[str] = []
    convert(source, tmp_path / "x", target, progress=lambda key, nbytes: done.append(f"{key} {nbytes}"))
    # The one that is written, and the next one while it is made.
    assert source.most <= 2
    assert sorted(done) == sorted(f"t{i} 400" for i in range(20))


class _Fails(_Counting):
    def read(self, key: str, box: Any = None) -> Tensor:
        if key == "t7":
            raise OSError(5, "Input/output error")
        return super().read(key, box)


@behaviour(
    "a conversion to {target} that fails leaves nothing that looks like a checkpoint",
    area="checkpoints",
    torch="none",
    reason="torch writes in place",
)
@pytest.mark.parametrize("target", ["fullshard", "dcp", "hf", "torch"])
def test_a_conversion_that_fails_leaves_nothing_that_looks_like_a_checkpoint(target: Any, tmp_path: Path) -> None:
    with pytest.raises(OSError, match="Input/output error"):
        convert(_Fails(10), tmp_path / "x", target)
    left = [path for path in tmp_path.rglob("*") if path.is_file() and path.name != "LOCK"]
    assert left == []
    # And one that worked before is what it was.
    if target == "fullshard":
        convert(_Counting(3), tmp_path / "x")
        with pytest.raises(OSError, match="Input/output error"):
            convert(_Fails(10), tmp_path / "x")
        assert len(_flat(open_source(tmp_path / "x"))) == 3


def test_what_has_no_place_is_one_error_and_nothing_is_written(tmp_path: Path) -> None:
    state = {"w": torch.zeros(2), "step": 3, "raw": b"bytes", "size": torch.Size((1,))}
    _dcp_save(state, tmp_path / "dcp")
    with open_source(tmp_path / "dcp") as source:
        with pytest.raises(CheckpointMismatch, match="raw: .*bytes"):
            convert(source, tmp_path / "x")
        with pytest.raises(CheckpointMismatch, match="step: no tensor"):
            convert(source, tmp_path / "x", "hf")
        assert not (tmp_path / "x").exists()
        convert(Chosen(source, skip=["raw"]), tmp_path / "x")


# ---- the command line ------------------------------------------------------------------------------------------


def _run(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    code = main(["checkpoint", *map(str, words)])
    out, err = capsys.readouterr()
    return code, out, err


def _json(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, dict[str, Any]]:
    code, out, _ = _run(capsys, *words, "--json")
    found: dict[str, Any] = json.loads(out)
    return code, found


def test_inspect_and_verify_say_what_is_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _dcp_save(_state(), tmp_path / "run" / "step-5")
    code, out, _ = _run(capsys, "inspect", tmp_path / "run")
    assert code == 0 and "a DCP checkpoint" in out and "newest of 1" in out
    assert "model.embedding.weight" in out and "optimizer.param_groups.0.lr" in out and "(--keys shows all)" in out
    code, out, _ = _run(capsys, "inspect", tmp_path / "run", "--keys")
    assert "optimizer.state.output.weight.step" in out and "shows all" not in out
    code, found = _json(capsys, "inspect", tmp_path / "run")
    assert (code, found["ok"], found["format"], found["num_tensors"]) == (0, True, "dcp", 63)
    assert {"key": "model.norm.weight", "dtype": "float32", "shape": [16]} in found["tensors"]
    code, found = _json(capsys, "verify", tmp_path / "run")
    assert code == 0 and found["not_verified"] == ["`.metadata` itself has no checksum"]
    code, out, _ = _run(capsys, "verify", tmp_path / "run")
    assert code == 0 and "whole: 63 tensors" in out and "not verified: `.metadata`" in out


def test_convert_and_export(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _dcp_save(_state(), tmp_path / "step-5")
    code, found = _json(capsys, "convert", tmp_path / "step-5", tmp_path / "ours")
    assert code == 0 and found["from"]["format"] == "dcp" and found["to"]["format"] == "fullshard"
    assert _json(capsys, "verify", tmp_path / "ours")[1]["not_verified"] == []
    words = ["--to", "hf", "--only", "model.*", "--strip", "model.", "--names-from", "fullshard", "--names-to", "hf"]
    code, out, err = _run(capsys, "export", tmp_path / "ours", tmp_path / "hf", *words, "--max-file-size", "4KB")
    assert code == 0 and "found a fullshard checkpoint" in err and "entries left out" in out
    weights: dict[str, Tensor] = {}
    for path in (tmp_path / "hf").glob("*.safetensors"):
        weights |= load_file(path)
    assert torch.equal(weights["model.layers.0.mlp.up_proj.weight"], _state()["model"]["layers.0.ffn.up.weight"])
    # torchtitan's order of rows: the size of a head comes from config.json, or from the command.
    turn = ["--names-from", "hf", "--names-to", "titan"]
    code, _, err = _run(capsys, "convert", tmp_path / "hf", tmp_path / "titan", *turn)
    assert code == 2 and "expected the even number of elements of a head" in err
    (tmp_path / "hf" / "config.json").write_text(json.dumps({"hidden_size": 16, "num_attention_heads": 4}))
    assert _run(capsys, "convert", tmp_path / "hf", tmp_path / "titan", *turn)[0] == 0
    back = ["--names-from", "titan", "--names-to", "hf", "--head-dim", "4", "--to", "torch"]
    assert _run(capsys, "export", tmp_path / "titan", tmp_path / "x.pt", *back)[0] == 0
    _assert_same(torch.load(tmp_path / "x.pt", weights_only=True), weights)


def test_exit_codes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = {"model": {"w": torch.zeros(64), "module._orig_mod.x": torch.zeros(1)}}
    _dcp_save(state, tmp_path / "dcp")
    torch.save(state, tmp_path / "x.pt")
    # 2: cannot be run as asked
    assert _run(capsys, "inspect", tmp_path / "nothing")[0] == 2
    assert _run(capsys, "convert", tmp_path / "dcp", tmp_path / "a", "--only", "ghost.*")[0] == 2
    assert _run(capsys, "convert", tmp_path / "dcp", tmp_path / "a", "--names-from", "hf")[0] == 2
    assert _run(capsys, "convert", tmp_path / "dcp", tmp_path / "a", "--head-dim", "4")[0] == 2
    assert _run(capsys, "export", tmp_path / "dcp", tmp_path / "dcp", "--to", "dcp")[0] == 2
    with pytest.raises(SystemExit) as caught:
        main(["checkpoint", "export", "a", "b", "--to", "nonsense"])
    assert caught.value.code == 2
    # 3: recognised and refused
    code, _, err = _run(capsys, "inspect", tmp_path / "x.pt")
    assert code == 3 and "--allow-torch-save" in err
    code, found = _json(capsys, "verify", tmp_path / "x.pt")
    assert (code, found["ok"], found["error"], found["exit_code"]) == (3, False, "TorchSaveRefused", 3)
    assert _run(capsys, "inspect", tmp_path / "x.pt", "--allow-torch-save")[0] == 0
    # 0, and what --unwrap does
    assert _run(capsys, "convert", tmp_path / "dcp", tmp_path / "a", "--strip", "model.", "--unwrap")[0] == 0
    assert list(_flat(open_source(tmp_path / "a"))) == ["w", "x"]
    # 1: damaged
    path = tmp_path / "dcp" / "__0_0.distcp"
    data = bytearray(path.read_bytes())
    at = data.find(bytes(200))
    assert at > 0
    data[at + 100] ^= 1
    path.write_bytes(data)
    code, _, err = _run(capsys, "verify", tmp_path / "dcp")
    assert code == 1 and "do not have the checksum that was written with them" in err
    assert (
        _run(capsys, "convert", tmp_path / "dcp", tmp_path / "b")[0] == 1 and not (tmp_path / "b" / "CURRENT").exists()
    )


def test_names_out_of_files_cannot_command_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _dcp_save({"\x1b[2Jevil\u202e": torch.zeros(1)}, tmp_path / "dcp")
    _, out, _ = _run(capsys, "inspect", tmp_path / "dcp")
    assert "evil" in out and "\x1b" not in out and "\u202e" not in out


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="a terminal")
def test_a_terminal_gets_a_bar_and_stdout_the_result(tmp_path: Path) -> None:
    import pty
    import subprocess
    import sys

    _dcp_save(_state(), tmp_path / "dcp")
    lead, follow = pty.openpty()
    command = [
        sys.executable,
        "-m",
        "fullshard",
        "checkpoint",
        "convert",
        str(tmp_path / "dcp"),
        str(tmp_path / "ours"),
    ]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=follow, env={**os.environ, "TERM": "xterm"}, timeout=100
    )
    os.close(follow)
    shown = b""
    try:
        while piece := os.read(lead, 65536):
            shown += piece
    except OSError:
        pass
    os.close(lead)
    assert done.returncode == 0 and b"63 tensors" in done.stdout and b"\x1b" not in done.stdout
    assert b"found a DCP checkpoint" in shown and b"/s" in shown
