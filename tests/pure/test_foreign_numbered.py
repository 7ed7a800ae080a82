"""Optimizers in files of torch.save number their parameters: named where names are given, refused without."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fullshard import checkpoint
from fullshard.checkpoint import CheckpointMismatch
from fullshard.checkpoint.formats import load_full, open_source, optimizer_names
from fullshard.cli import main
from tests.harness.behaviours import behaviour


def model_of(seed: int) -> nn.Module:
    """With a buffer, and two parameters of one shape, which only a name tells apart."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 4, bias=False), nn.Linear(4, 2))


def optimizer_of(model: nn.Module, *, turned: bool = False) -> torch.optim.Optimizer:
    """Matrices decay, vectors do not: an order of its own."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups[::-1] if turned else groups, lr=0.05, amsgrad=True)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        x = torch.randn(5, 3, generator=torch.Generator().manual_seed(step))
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """After three steps of a plain program; in a form of its own, as Lightning has it."""
    model = model_of(0)
    optimizer = optimizer_of(model)
    train(model, optimizer, range(3))
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 3}, tmp_path / "x.pt")
    (tmp_path / "names").write_text("\n".join(optimizer_names(model, optimizer)) + "\n")
    return tmp_path / "x.pt"


def convert(file: Path, target: Path, *options: str) -> int:
    return main(["checkpoint", "convert", str(file), str(target), "--allow-torch-save", "--json", *options])


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(equal(x, y) for x, y in zip(a, b, strict=True))
    return torch.equal(a, b) if isinstance(a, Tensor) else bool(a == b)


@behaviour(
    "the numbered state of a torch optimizer in a file of torch.save is converted where names are given",
    area="checkpoints",
    torch="none",
    reason="torch loads it into an optimizer of the same order alone",
)
def test_a_training_goes_on_from_a_file_with_numbers(file: Path, tmp_path: Path) -> None:
    """Into an optimizer that numbers its parameters otherwise: state goes by name."""
    assert convert(file, tmp_path / "ours", "--optimizer-names", str(tmp_path / "names")) == 0
    checkpoint.verify(tmp_path / "ours")
    model, expected = model_of(1), model_of(0)
    optimizer, undisturbed = optimizer_of(model, turned=True), optimizer_of(expected)
    train(expected, undisturbed, range(3))
    model_state, optimizer_state = checkpoint.get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state, "step": 0}
    checkpoint.load(state, checkpoint_id=tmp_path / "ours", no_dist=True)
    checkpoint.set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
    assert state["step"] == 3
    found, wanted = (checkpoint.get_state_dict(*one)[1] for one in ((model, optimizer), (expected, undisturbed)))
    assert equal(dict(found["state"]), dict(wanted["state"])) and len(wanted["state"]) == 7
    assert equal(found["param_groups"], wanted["param_groups"][::-1])
    train(model, optimizer, range(3, 5))
    train(expected, undisturbed, range(3, 5))
    assert equal(dict(model.state_dict()), dict(expected.state_dict()))
    names = (tmp_path / "names").read_text().split()
    assert names[:3] == ["0.weight", "2.weight", "3.weight"], "the order of the groups, not that of the model"
    with checkpoint.open_checkpoint(tmp_path / "ours") as opened:
        assert "optimizer.state.3.bias.max_exp_avg_sq" in opened.manifest.tensors


def test_without_names_it_is_refused_with_the_way_out(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert convert(file, tmp_path / "ours") == 2
    message = json.loads(capsys.readouterr().out)["message"]
    assert "optimizer.state: the state of an optimizer whose parameters are numbered" in message
    assert "--optimizer-names" in message and not (tmp_path / "ours").exists()
    assert convert(file, tmp_path / "ours", "--skip", "optimizer.*") == 0, "or without it"
    model = model_of(1)
    with pytest.raises(CheckpointMismatch, match="numbered"):
        load_full(model, optimizer_of(model), file, allow_torch_save=True)


def test_names_that_do_not_fit_are_one_error(file: Path, tmp_path: Path) -> None:
    names = (tmp_path / "names").read_text().split()

    def problems(given: list[str], path: Path = file) -> list[str]:
        with pytest.raises(CheckpointMismatch) as caught:
            open_source(path, allow_torch_save=True, optimizer_names=given)
        return list(caught.value.problems)

    assert problems(names[:-1]) == ["6 names for 7 numbered parameters: optimizer has 7"]
    assert problems([*names[:-1], names[0]]) == ["0.weight is named twice"]
    # In the order of the model, which is not that of the groups: shapes tell, of each moment.
    found = problems([name for name, _ in model_of(0).named_parameters()])
    assert "optimizer: exp_avg of number 1 is (4, 4), 0.bias is (4,)" in found and len(found) == 4 * 3
    swapped = [names[2], *names[1:2], names[0], *names[3:]]
    assert len(problems(swapped)) == 6 and "exp_avg of number 0 is (4, 3), 3.weight is (2, 4)" in problems(swapped)[0]
    torch.save({"w": torch.zeros(2)}, tmp_path / "w.pt")
    assert problems(names, tmp_path / "w.pt") == ["no optimizer whose parameters are numbered"]
    raw = torch.load(file, weights_only=True)
    raw["optimizer"]["state"][9] = raw["optimizer"]["state"][0]
    torch.save(raw, tmp_path / "more.pt")
    assert problems(names, tmp_path / "more.pt") == ["optimizer: state of 9, which is in no group of parameters"]
    raw["optimizer"]["param_groups"][1]["params"][0] = 7
    torch.save(raw, tmp_path / "other.pt")
    assert "expected the numbers 0 to 6" in problems(names, tmp_path / "other.pt")[0]
    checkpoint.save({"w": torch.zeros(2)}, checkpoint_id=tmp_path / "ours", no_dist=True)
    with pytest.raises(ValueError, match="expected a file of torch.save"):
        open_source(tmp_path / "ours", optimizer_names=names)


def test_several_optimizers_one_behind_the_other(tmp_path: Path) -> None:
    """Wherever they stand, also in a list; and one that has not stepped."""
    model = model_of(0)
    first = torch.optim.SGD(model[0].parameters(), lr=0.1, momentum=0.9)  # type: ignore[index]
    second = torch.optim.AdamW(model[3].parameters())  # type: ignore[index]
    model(torch.randn(5, 3)).sum().backward()
    first.step()
    root = {"model": model.state_dict(), "optimizer_states": [first.state_dict(), second.state_dict()]}
    torch.save(root, tmp_path / "x.pt")
    names = optimizer_names(model, [first, second])
    assert names == ["0.weight", "0.bias", "3.weight", "3.bias"]
    with open_source(tmp_path / "x.pt", allow_torch_save=True, optimizer_names=names) as source:
        moment = source.read("optimizer_states.0.state.0.bias.momentum_buffer")
        groups = source.value("optimizer_states.1.param_groups")
    assert torch.equal(moment, first.state[model[0].bias]["momentum_buffer"])  # type: ignore[index]
    assert groups[0]["params"] == ["3.weight", "3.bias"]


def test_an_optimizer_of_named_parameters_needs_no_names(tmp_path: Path) -> None:
    model = model_of(0)
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=0.05)
    train(model, optimizer, range(2))
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "x.pt")
    other = model_of(1)
    loaded = torch.optim.AdamW(other.named_parameters(), lr=1.0)
    load_full(other, loaded, tmp_path / "x.pt", allow_torch_save=True)
    assert equal(loaded.state_dict(), optimizer.state_dict())
