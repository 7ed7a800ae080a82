"""`fullshard verify`: what is sound is equal, and each fault is found and named."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fullshard.cli import main
from fullshard.program import ProgramError, find_program
from fullshard.verify import page
from fullshard.verify.comparison import Comparison
from fullshard.verify.reference import read_before, read_step
from fullshard.verify.run import verify
from fullshard.verify.setting import Setting
from fullshard.verify.strategy import norms_of, parse_strategy
from fullshard.verify.subject import torch_has_overrides
from fullshard.verify.weights import Weights
from tests.harness.seeded_faults import PROVEN
from tests.harness.verified import ENTRY, compare, record

# Many more, on one to four ranks: test_verify_evidence.py.
SOUND = ["zero3", "zero2+bf16+micro=2", "zero3+offload+recompute", "zero3+micro=3", "zero2+fp16+micro=2"]


@pytest.mark.sample(1)
@pytest.mark.parametrize("strategy", SOUND)
def test_sound_training_is_equal(strategy: str, tmp_path: Path) -> None:
    result = compare(tmp_path, record(tmp_path, strategy))
    assert result.verdict == "equal", result.difference
    assert result.compared > 100 and result.noise == 0
    assert not any("part of a sum" in note for note in result.notes)
    assert result.same_bits == result.compared
    # Each of the 12 places of parameters in each forward of its unit; blocks that are computed again are seen again.
    again = 8 if "recompute" in strategy else 0
    micro = result.setting.strategy.micro
    assert read_step(tmp_path, 1, 0).uses == (12 * micro + again, [])


@pytest.mark.parametrize("library", ["fullshard", "torch"])
def test_norms_in_their_own_dtype(library: str, tmp_path: Path) -> None:
    """torch's FSDP2 has the field from 2.15 on."""
    if library == "torch" and not torch_has_overrides():
        with pytest.raises(ProgramError, match=r"norms: expected torch 2\.15"):
            verify(ENTRY, [parse_strategy("zero3+bf16+norms")], libraries=["torch"])
        return
    result = compare(tmp_path, record(tmp_path, "zero3+bf16+norms+micro=2", library=library))
    assert result.verdict == "equal", result.difference
    assert read_step(tmp_path, 1, 0).uses == (24, [])


def test_a_number_of_this_rank_s_part_of_a_sum_is_noted(tmp_path: Path) -> None:
    """And only where the program takes one: what fullshard and verify read does not count."""
    result = compare(tmp_path, record(tmp_path, "zero3", entry="tests.harness.verified:by_norm"))
    assert result.verdict == "different"
    (note,) = (note for note in result.notes if "part of a sum" in note)
    for words in ("gradient of ", "verified.py:", "in step", " more. It differs", "fullshard.grad_stats(model)"):
        assert words in note


def test_a_norm_that_does_not_keep_its_dtype_is_found() -> None:
    """Where a unit computes with it: what the shards hold, cast, is not held there."""
    held, cast = torch.ones(3), torch.ones(3, dtype=torch.bfloat16, requires_grad=True)
    assert Weights._is_held(cast, held, torch.bfloat16) and not Weights._is_held(cast, held, None)
    weights = Weights(torch.bfloat16, {"norm.weight"})
    assert weights._dtype_of("norm.weight") is None and weights._dtype_of("up.weight") == torch.bfloat16


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("program", "strategy", "world"),
    [
        # Units inside of blocks that are computed again; a buffer with two references; a unit of several modules.
        ("timed", "zero3+bf16+recompute", 2),
        ("aliased", "zero3", 2),
        ("together", "zero3+bf16", 2),
        # Other worlds, and beside tensor parallelism.
        ("program", "zero3", 1),
        ("program", "zero3", 3),
        ("program", "zero3+hsdp=2", 4),
        ("program", "zero2+hsdp=2+micro=2", 4),
        ("program", "zero3=2+bf16", 4),
        ("split", "zero3+tp=2", 2),
        ("split", "zero2+micro=2+tp=2", 4),
        ("split", "zero3+hsdp=2+tp=2", 4),
    ],
)
def test_other_programs_and_worlds_are_equal(program: str, strategy: str, world: int, tmp_path: Path) -> None:
    result = compare(tmp_path, record(tmp_path, strategy, world, entry=f"tests.harness.verified:{program}"))
    assert result.verdict == "equal", result.difference


@pytest.mark.slow
def test_a_fault_beside_tensor_parallelism(tmp_path: Path) -> None:
    """A rank is named by its number in the world, and batches are those of the data-parallel ranks."""
    folder = tmp_path / "trained"
    setting = record(folder, "zero3+tp=2", 4, entry="tests.harness.verified:split")
    losses = [read_step(folder, 0, rank).losses for rank in range(4)]
    assert torch.equal(losses[0][0], losses[1][0]) and not torch.equal(losses[1][0], losses[2][0])
    for rank in (2, 3):
        step = read_step(folder, 0, rank)._replace(losses=losses[0])
        torch.save(tuple(step), folder / "step-0" / f"rank-{rank}.pt")
    found = compare(folder, setting).difference
    assert found is not None and (found.phase, found.rank) == ("forward", 2)
    assert "the batch of rank 0" in found.cause


def test_gradients_in_fp16_that_are_not_finite_are_not_stepped_with(tmp_path: Path) -> None:
    """The scaler skips the step and halves its scale, and so does the reference."""
    setting = record(tmp_path, "zero3+fp16", entry="tests.harness.verified:overflowing")
    assert not read_step(tmp_path, 0, 0).gradients["embedding.weight"].isfinite().all()
    before, after = read_before(tmp_path, 0).parameters, read_step(tmp_path, 0, 0).parameters
    assert all(torch.equal(before[name], value) for name, value in after.items())
    second = read_step(tmp_path, 1, 0)
    assert all(g is None or bool(g.isfinite().all()) for g in second.gradients.values())
    result = compare(tmp_path, setting)
    assert result.verdict == "equal", result.difference


@pytest.mark.sample(1)
@pytest.mark.parametrize("strategy", ["zero3", "zero2+micro=2"])
def test_all_generators_are_seeded(strategy: str, tmp_path: Path) -> None:
    """Python's and numpy's, as torch's: a loss that depends on them is equal."""
    result = compare(tmp_path, record(tmp_path, strategy, entry="tests.harness.verified:drawing"))
    assert result.verdict == "equal", result.difference
    assert result.noise == 0


def test_norms_need_a_lower_precision_and_a_model_with_norms() -> None:
    with pytest.raises(ValueError, match="expected bf16 or fp16 beside norms"):
        parse_strategy("zero3+norms")
    assert str(parse_strategy("zero3+norms+bf16")) == "zero3+bf16+norms"
    assert [type(m) for m in norms_of(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.RMSNorm(2)))] == [
        torch.nn.RMSNorm
    ]


@pytest.mark.parametrize("text", ["zero3=1", "tp=0", "fp32", "zero3=x", ""])
def test_a_word_that_is_none(text: str) -> None:
    with pytest.raises(ValueError, match="expected words of zero3, zero3=N, zero2"):
        parse_strategy(text)


@pytest.mark.parametrize(("text", "world"), [("hsdp=3", 4), ("tp=2+hsdp=2", 6), ("zero3=2", 2), ("zero3=4+tp=2", 8)])
def test_a_strategy_that_does_not_fit_the_world(text: str, world: int) -> None:
    with pytest.raises(ValueError, match=r"expected a (world|number)"):
        parse_strategy(text).shards(world)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", SOUND)
def test_torch_is_a_subject_too(strategy: str, tmp_path: Path) -> None:
    result = compare(tmp_path, record(tmp_path, strategy, library="torch"))
    assert result.verdict == "equal", result.difference


@pytest.mark.sample(1)
@pytest.mark.parametrize("fault", [None, "the result is rounded"])
def test_torch_is_the_reference_too(fault: str | None, tmp_path: Path) -> None:
    """Also of what the plain model was found to be equal to: here a comparison that the fault had passed."""
    case = PROVEN["the result is rounded"]
    setting = record(tmp_path / "ours", case.strategy, fault=case.fault if fault else None)
    record(tmp_path / "theirs", case.strategy, library="torch")
    comparison = Comparison(find_program(setting.entry), setting, tmp_path / "ours", torch.device("cpu"))
    comparison.run()
    comparison.result.difference = None
    comparison.take_beside(tmp_path / "theirs")
    compared, same = comparison.result.beside or (0, 0)
    assert compared >= 10
    assert (same > compared // 2) == (fault is None), (compared, same)
    assert "of the first step are the same bits" in page.table([comparison.result])


def test_a_gradient_that_torch_does_not_have(tmp_path: Path) -> None:
    setting = record(tmp_path / "ours", "zero3", fault=PROVEN["the result is doubled"].fault)
    record(tmp_path / "theirs", "zero3", library="torch")
    comparison = Comparison(find_program(setting.entry), setting, tmp_path / "ours", torch.device("cpu"))
    comparison.run()
    comparison.result.difference = None
    comparison.take_beside(tmp_path / "theirs")
    found = comparison.result.difference
    assert found is not None and (found.step, found.phase, found.name) == (0, "backward", "norm.norm.bias")
    assert "torch's FSDP2, as the reference" in found.cause and comparison.result.verdict == "different"


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", PROVEN)
def test_a_fault_of_the_engine_is_found_and_named(name: str, tmp_path: Path) -> None:
    case = PROVEN[name]
    entry = f"tests.harness.verified:{case.program}"
    result = compare(tmp_path, record(tmp_path, case.strategy, case.world, case.fault, entry=entry))
    found = result.difference
    assert found is not None
    assert (found.phase, found.name, result.verdict) == (case.phase, case.name, "different"), found
    assert case.cause in found.cause, found


# ---- records that were changed ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Setting]:
    folder = tmp_path_factory.mktemp("trained")
    return folder, record(folder, "zero3")


def _swap(value: torch.Tensor) -> torch.Tensor:
    first, second = value.chunk(2)
    return torch.cat([second, first])


def _not_stepped(value: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    value = value.clone()
    value[:5] = before[:5]
    return value


# What is changed in rank 0's record of the first step, and what must be said: phase, name, cause.
CHANGES: dict[str, tuple[Callable[[dict[str, Any], dict[str, Any]], object], str, str, str]] = {
    "shards in each other's place": (
        lambda step, before: step["gradients"].update(
            {"embedding.weight": _swap(step["gradients"]["embedding.weight"])}
        ),
        "backward",
        "embedding.weight",
        "shards of rank 0 and rank 1",
    ),
    "rows off by one": (
        lambda step, before: step["gradients"].update(
            {"blocks.1.0.weight": step["gradients"]["blocks.1.0.weight"].roll(1, 0)}
        ),
        "backward",
        "blocks.1.0.weight",
        "off by one",
    ),
    "a gradient that nobody made": (
        lambda step, before: step["gradients"].update({"blocks.0.0.bias": torch.ones(33)}),
        "backward",
        "blocks.0.0.bias",
        "no rank produced",
    ),
    "one element": (
        lambda step, before: step["gradients"]["blocks.0.3.weight"].view(-1)[7].add_(1e-3),
        "backward",
        "blocks.0.3.weight",
        "unknown",
    ),
    "a parameter that is not stepped": (
        lambda step, before: step["parameters"].update({"norm.norm.weight": before["parameters"]["norm.norm.weight"]}),
        "optimizer step",
        "norm.norm.weight",
        "was not stepped",
    ),
    "rows that are not stepped": (
        lambda step, before: step["parameters"].update(
            {
                "embedding.weight": _not_stepped(
                    step["parameters"]["embedding.weight"], before["parameters"]["embedding.weight"]
                )
            }
        ),
        "optimizer step",
        "embedding.weight",
        "of rank 0, were not stepped",
    ),
    "half of the update": (
        lambda step, before: step["parameters"].update(
            {"norm.norm.bias": (step["parameters"]["norm.norm.bias"] + before["parameters"]["norm.norm.bias"]) / 2}
        ),
        "optimizer step",
        "norm.norm.bias",
        "0.5 times the expected",
    ),
    "a moment": (
        lambda step, before: step["state"]["norm.norm.bias"]["exp_avg_sq"].mul_(1.01),
        "optimizer state",
        "norm.norm.bias.exp_avg_sq",
        "unknown",
    ),
    "an entry of the state": (
        lambda step, before: step["state"]["norm.norm.bias"].pop("exp_avg_sq"),
        "optimizer state",
        "norm.norm.bias",
        "where one process has",
    ),
    "a stale buffer": (
        lambda step, before: step["buffers"].update({"norm.mean": before["buffers"]["norm.mean"]}),
        "buffers",
        "norm.mean",
        "stale buffer",
    ),
    "another batch": (
        lambda step, before: step["losses"].__setitem__(0, step["other losses"][0]),
        "forward",
        "loss",
        "the batch of rank 1",
    ),
    "a buffer of another name": (
        lambda step, before: before["buffers"].update({"norm.other": before["buffers"]["norm.mean"]}),
        "initial values",
        "norm.other",
        "a buffer that is not in the plain model",
    ),
    "initial values": (
        lambda step, before: before["parameters"].update(
            {"embedding.weight": _swap(before["parameters"]["embedding.weight"])}
        ),
        "initial values",
        "embedding.weight",
        "shards of rank 0 and rank 1",
    ),
    "a broken tie": (
        lambda step, before: before["ties"].clear(),
        "initial values",
        "embedding.weight",
        "a tie was broken",
    ),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_found_and_named(name: str, trained: tuple[Path, Setting], tmp_path: Path) -> None:
    folder, setting = trained
    change, phase, where, cause = CHANGES[name]
    step, before = read_step(folder, 0, 0)._asdict(), read_before(folder, 0)._asdict()
    change(step | {"other losses": read_step(folder, 0, 1).losses}, before)
    for part in ("before", "step-0", "step-1"):
        (tmp_path / part).mkdir()
        for rank in range(2):
            (tmp_path / part / f"rank-{rank}.pt").write_bytes((folder / part / f"rank-{rank}.pt").read_bytes())
    torch.save(tuple(step.values()), tmp_path / "step-0" / "rank-0.pt")
    torch.save(tuple(before.values()), tmp_path / "before" / "rank-0.pt")
    found = compare(tmp_path, setting).difference
    assert found is not None
    assert (found.phase, found.name) == (phase, where), found
    assert cause in found.cause, found


@pytest.fixture(scope="module")
def cut_along_1(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Setting]:
    folder = tmp_path_factory.mktemp("cut")
    return folder, record(folder, "zero3", entry="tests.harness.verified:cut")


def _swap_halves(value: torch.Tensor) -> torch.Tensor:
    return _swap(value.mT).mT


def _still(value: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    value = value.clone()
    value[:, 9:12] = before[:, 9:12]
    return value


def _raised(value: torch.Tensor) -> torch.Tensor:
    value = value.clone()
    value[37, 3] += 1e-2
    return value


# What becomes of the embedding's gradients or new values, and what must be said: the rank, and the cause.
ALONG_1: dict[str, tuple[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor], int | None, str]] = {
    "shards": (
        "gradients",
        lambda value, _: _swap_halves(value),
        None,
        "the shards of rank 0 and rank 1 are in each other's place along dim 1",
    ),
    "columns": ("gradients", lambda value, _: value.roll(1, 1), None, "rows are off by one along dim 1"),
    "updates": ("parameters", _still, 1, "rows 9 to 11 along dim 1, of rank 1, were not stepped"),
    "an element": ("gradients", lambda value, _: _raised(value), 0, "unknown"),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ALONG_1)
def test_where_parameters_are_cut_along_another_dim(
    name: str, cut_along_1: tuple[Path, Setting], tmp_path: Path
) -> None:
    folder, setting = cut_along_1
    assert compare(folder, setting).verdict == "equal"
    field, change, rank, cause = ALONG_1[name]
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    step, before = read_step(folder, 0, 0), read_before(folder, 0)
    assert before.cuts["embedding.weight"] == 1 and before.cuts["norm.norm.bias"] == 0
    values = getattr(step, field)
    values["embedding.weight"] = change(values["embedding.weight"], before.parameters["embedding.weight"])
    torch.save(tuple(step), tmp_path / "step-0" / "rank-0.pt")
    found = compare(tmp_path, setting).difference
    assert found is not None and found.name == "embedding.weight" and found.cause == cause, found
    assert rank is None or found.rank == rank, found


def test_the_page_and_the_json(trained: tuple[Path, Setting]) -> None:
    result = compare(*trained)
    text = page.page("a:b", [result])
    assert text.count("<svg") == 2 and "src=" not in text and "href=" not in text
    found = json.loads(json.dumps(page.as_json("a:b", [result]), allow_nan=False))["results"][0]
    assert found["verdict"] == "equal" and found["losses"] == found["reference_losses"]
    assert set(found["gradient_errors"]) == {
        n for n, g in read_step(trained[0], 0, 0).gradients.items() if g is not None
    }


# ---- the command -----------------------------------------------------------------------------------------------------

PROGRAMS = """
import os
import signal

import torch
from torch import nn

import fullshard


def batch(index):
    x = torch.randn(8, 20, generator=torch.Generator().manual_seed(index))
    return x, x.sum(1, keepdim=True)


def loss(model, batch):
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def build():
    return nn.Sequential(nn.Linear(20, 64), nn.GELU(), nn.Linear(64, 1))


def program(text=""):
    if text == "wide":
        return fullshard.Program(build, lambda model, batch: model(batch[0]), batch)
    if text == "shapes":
        return fullshard.Program(build, loss, lambda index: (torch.zeros(8, 3), torch.zeros(8, 1)))
    if text == "exits":
        raise SystemExit(3)
    if text == "exits later":
        return fullshard.Program(lambda: exit("no model\\nmore"), loss, batch)
    if text == "raises":
        raise OSError("no such data\\nmore")
    if text in ("killed", "backward"):

        def fails(model, batch):
            value = loss(model, batch)
            if torch.distributed.is_initialized() and torch.distributed.get_rank() == 1:
                if text == "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                value.register_hook(lambda _: {}["in backward"])
            return value

        return fullshard.Program(build, fails, batch)
    if text == "unsharded":
        return fullshard.Program(build, loss, batch, shard=lambda model, fully_shard: None)
    if text == "precision":
        policy = fullshard.MixedPrecisionPolicy(torch.bfloat16)
        return fullshard.Program(build, loss, batch, shard=lambda model, shard: shard(model, mp_policy=policy))
    if text == "wrong shard":
        return fullshard.Program(build, loss, batch, shard=lambda model, fully_shard: fully_shard(model.nothing))
    if text == "late":
        return fullshard.Program(build, loss, lambda index: batch(index) if index < 2 else 1 / 0)
    if text == "one step":
        # Takes its second step twice.
        class Twice(torch.optim.SGD):
            def step(self):
                for _ in range(1 + isinstance(self.param_groups[0]["params"][0], torch.distributed.tensor.DTensor)):
                    super().step()

        return fullshard.Program(build, loss, batch, optimizer=lambda parameters: Twice(parameters, lr=0.1))
    return fullshard.Program(build, loss, batch)


class Broken:
    pass
"""


def _run(folder: Path, *arguments: str) -> tuple[int, str, str]:
    (folder / "programs_here.py").write_text(PROGRAMS)
    done = subprocess.run(
        [sys.executable, "-m", "fullshard", "verify", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.hang_after(240)
@pytest.mark.slow
def test_the_command_says_equal_and_could_not_run(tmp_path: Path) -> None:
    code, out, err = _run(
        tmp_path, "programs_here:program", "--strategies", "zero3", "zero2+bf16", "--html", "page.html"
    )
    assert code == 0 and out.count(" equal ") == 2, out + err
    assert (tmp_path / "page.html").read_text().startswith("<!doctype html>")
    code, out, err = _run(tmp_path, "programs_here:program:late", "--strategies", "zero3", "zero2", "--steps", "2")
    assert code == 2 and out.count("failed") == 2 and "ZeroDivisionError: division by zero" in out, out + err


@pytest.mark.slow
def test_the_command_says_different(tmp_path: Path) -> None:
    code, out, err = _run(tmp_path, "programs_here:program:one step", "--strategies", "zero3", "--json", "--steps", "1")
    (found,) = json.loads(out)["results"]
    assert code == 1 and found["verdict"] == "different", out + err
    cause = found["difference"]["cause"]
    assert found["difference"]["phase"] == "optimizer step" and cause.startswith("the optimizer's step: "), cause
    assert "the update is 2 times" in cause


@pytest.mark.slow
@pytest.mark.hang_after(240)
@pytest.mark.parametrize(
    ("program", "library", "said"),
    [
        ("killed", "fullshard", "rank 1 was killed by SIGKILL"),
        pytest.param("killed", "torch", "rank 1 was killed by SIGKILL", marks=pytest.mark.slow),
        pytest.param("backward", "fullshard", "KeyError: 'in backward'", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_is_killed_or_raises_is_a_failure_with_a_name(
    program: str, library: str, said: str, tmp_path: Path
) -> None:
    against = ("--against", "torch") if library == "torch" else ()
    code, out, err = _run(tmp_path, f"programs_here:program:{program}", "--strategies", "zero3", *against)
    assert code == 2 and "failed" in out and said in out, out + err


@pytest.mark.slow
@pytest.mark.hang_after(240)
@pytest.mark.parametrize(("steps", "while_it"), [("100000", "training"), ("3", "comparing")])
def test_a_signal_ends_the_command_with_a_line(steps: str, while_it: str, tmp_path: Path) -> None:
    (tmp_path / "programs_here.py").write_text(PROGRAMS)
    command = [sys.executable, "-m", "fullshard", "verify", "programs_here:program", "--steps", steps]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    assert "training 6 setting(s) on 2 processes" in process.stderr.readline()
    if while_it == "training":
        time.sleep(2)
    else:
        assert "loading 6 checkpoint(s) on 3 processes" in process.stderr.readline()
        assert while_it in process.stderr.readline()
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (2, "")
    assert err.strip().splitlines()[-1] == "fullshard verify: stopped by SIGTERM", err


@pytest.mark.sample(12)
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("programs_here",), "expected module:function"),
        (("not_here:program",), "found no module not_here"),
        (("programs_here:nothing",), "programs_here has no nothing"),
        (("programs_here:batch",), "expected a function that takes no argument"),
        (("programs_here:Broken",), "returns a Broken"),
        (("programs_here:program:wide",), "expected a loss of one element, found a tensor of shape (8, 1)"),
        (("programs_here:program:shapes",), "the plain model cannot take a step with batch 0: RuntimeError"),
        (("programs_here:program:raises",), "the function raised OSError: no such data"),
        (("programs_here:program:exits",), "the function raised SystemExit: 3"),
        (
            ("programs_here:program:exits later",),
            "the plain model cannot take a step with batch 0: SystemExit: no model",
        ),
        (("exiting_here:program",), "exiting_here cannot be imported: SystemExit: 2"),
        (("programs_here:program", "--html", "none/x.html"), "expected a file to write, found no folder none"),
        (("programs_here:program", "--html", "."), "expected a file to write, found a folder"),
        (("broken_here:program",), "broken_here cannot be imported: NameError: name 'nothing' is not defined"),
        (("programs_here:program:unsharded",), "found no call"),
        (("programs_here:program:precision",), "expected the strategy to choose the precision"),
        (("programs_here:program:wrong shard",), "shard cannot be applied to the model: AttributeError"),
        (("programs_here:program", "--strategies", "zero4"), "expected words of zero3"),
        (("programs_here:program", "--strategies", "hsdp=2", "--nproc", "3"), "that 2 divides, found 3"),
        (("programs_here:program", "--nproc", "0"), "--nproc 0: expected at least 1"),
        (("programs_here:program", "--device", "cuda"), "device cuda: expected one for each of 2 processes, found 0"),
        (("programs_here:program", "--device", "gpu"), "device gpu: expected one for each of 2 processes, found 0"),
        (("no.toml",), "no.toml"),
    ],
)
def test_what_cannot_run_is_said_in_one_line(
    arguments: tuple[str, ...],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "programs_here.py").write_text(PROGRAMS)
    (tmp_path / "broken_here.py").write_text("nothing")
    (tmp_path / "exiting_here.py").write_text("import sys\nsys.exit(2)")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "programs_here", raising=False)
    assert main(["verify", *arguments]) == 2
    err = capsys.readouterr().err
    assert said in err and len(err.splitlines()) == 1, err


@pytest.mark.slow
@pytest.mark.hang_after(400)
def test_the_trainer_s_model_and_a_llama_of_hugging_face(tmp_path: Path) -> None:
    code, out, err = _run(tmp_path)
    assert code == 0 and out.count(" equal ") == 6, out + err
    pytest.importorskip("transformers")
    for name in ("verify_llama.py", "verify_plain.py"):
        (tmp_path / name).write_text((Path(__file__).parents[2] / "examples" / name).read_text())
    code, out, err = _run(tmp_path, "verify_plain:program", "--strategies", "zero3+bf16+offload")
    assert code == 0 and out.count(" equal ") == 1, out + err
    code, out, err = _run(
        tmp_path, "verify_llama:program", "--against", "torch", "--strategies", "zero3", "zero3+bf16+micro=2"
    )
    assert code == 0 and out.count(" equal ") == 4, out + err
