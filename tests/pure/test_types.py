"""What type checkers say of a user's program: nothing of a right one, and the line of a wrong one."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import fullshard
from tests.harness.source import SRC
from tests.pure.test_reference import reference

ROOT = SRC.parent

RIGHT = """
import torch
from torch import nn

import fullshard
import fullshard.compat.composer
import fullshard.compat.fsdp1
import fullshard.migrate
from fullshard import FSDPModule, checkpoint, fully_shard, observe, replicate

model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
sharded = fully_shard(model)
sharded.set_requires_gradient_sync(False)
for parameter in sharded.parameters():
    parameter.requires_grad_(False)
policy = fullshard.MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)
linear = fully_shard(nn.Linear(4, 4), reshard_after_forward=False, mp_policy=policy)
linear.reshard()
print(linear.in_features)
fully_shard([model[0], model[1]])[0].unshard()
first: FSDPModule = sharded
module: nn.Module = replicate(nn.Linear(4, 4))
handle = sharded.unshard(async_op=True)
if handle is not None:
    handle.wait()
optimizer = fullshard.step_on_shards(torch.optim.AdamW(model.parameters()))
norm: torch.Tensor = fullshard.clip_grad_norm_(model.parameters(), 1.0)
with observe.record(model) as trace, fullshard.guard(model, optimizer), fullshard.unit_open(model):
    print(trace.commands)
with fullshard.full_params(model, rank0_only=True), fullshard.install():
    pass
micro = fullshard.MicroBatches(model)
losses = micro.backward(lambda piece: model(torch.ones(4)[piece]), 4)
print(sum(losses))
for batch, own, weight in fullshard.joined(model, [torch.ones(1)]):
    print(batch.shape, own, weight)
print(fullshard.report(model, optimizer).peak_nbytes, sharded.set_memory_budget(prefetch=1).resident)
state, optimizer_state = checkpoint.get_state_dict(model, optimizer)
checkpoint.save({"model": state, "step": 1}, checkpoint_id="x")
if (newest := checkpoint.latest("x")) is not None:
    checkpoint.load({"model": state}, checkpoint_id=newest)
checkpoint.set_state_dict(model, optimizer, model_state_dict=state, optim_state_dict=optimizer_state)
print(checkpoint.async_save({"model": state}, checkpoint_id="x").waited)
with fullshard.average(model, decay=0.9).applied():
    pass
plan = fullshard.Parallelism(tensor_parallel_degree=2)
prepared = fullshard.prepare_fully_shard(model, optimizer, {"wrap": "children"}, parallelism=plan)
print(prepared.share, prepared.units)
print(fullshard.grad_stats(model).parameters["x"].max)
for bucket in fullshard.weights(model, dtype=torch.bfloat16):
    for name, tensor in bucket:
        print(name, tensor.shape)
print(fullshard.transfer(model, {"x": torch.ones(1)}, names={"a": "b", "c": None}).plan())
fullshard.step_on_owners([optimizer], model=model).step()
print(fullshard.sleep(model, optimizer).freed_nbytes)
program = fullshard.Program(
    model=lambda: nn.Linear(1, 1), loss=lambda model, batch: model(batch).sum(), batch=lambda index: torch.ones(1)
)
with observe.Recorder(model, "x", optimizer) as recorder:
    recorder.begin(1)
    recorder.end(loss=1.0)
print(fullshard.check_gradients(model, norm).ok, fullshard.find_drift(model))
print(fullshard.migrate.to_toml(fullshard.migrate.read_config("x.toml")))
layer = fullshard.MixtureOfExperts(4, 8, experts=2, experts_per_token=1)
loss = layer(torch.ones(1, 4)).sum() + fullshard.balance_loss(layer)
fullshard.compat.fsdp1.FullyShardedDataParallel(model).clip_grad_norm_(1.0)
"""
WRONG = ("fullshard.no_such_name", "fullshard.observe.no_such_name", "sharded.set_requires_gradient_sync(not_a_name=1)")


def every_public_name() -> str:
    """A line that assigns each, so that one whose type is not known is reported."""
    places = {
        f"{group if group.startswith('fullshard.') else title}.{name}"
        for title, _, groups in reference.API.values()
        for group, names in groups.items()
        for name in names
    }
    places |= {f"fullshard.{name}" for name in fullshard.__all__}
    return "\n".join(f"name_{index} = {place}" for index, place in enumerate(sorted(places)))


def lines_by_mypy(folder: Path, text: str) -> list[int]:
    """Those with an error."""
    program = folder / "program.py"
    program.write_text(text)
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file", str(ROOT / "pyproject.toml"), str(program)]
    run = subprocess.run([*command, "--cache-dir", str(ROOT / ".mypy_cache")], capture_output=True, text=True, cwd=ROOT)
    assert run.returncode in (0, 1) and run.stdout, run.stderr
    return [int(line.split(":")[1]) for line in run.stdout.splitlines() if "error:" in line]


def lines_by_pyright(folder: Path, text: str) -> list[int]:
    """Those with an error, in the strict mode, but for signatures of torch that are not annotated."""
    (folder / "program.py").write_text(text)
    rules = dict.fromkeys(
        ("reportUnknownMemberType", "reportUnusedVariable", "reportUnusedExpression", "reportUnusedImport"), False
    )
    options = {"typeCheckingMode": "strict", "include": ["program.py"], **rules}
    (folder / "pyrightconfig.json").write_text(json.dumps(options))
    command = [sys.executable, "-m", "basedpyright", "--outputjson", "--pythonpath", sys.executable, "-p", str(folder)]
    run = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    found = json.loads(run.stdout)
    assert found["summary"]["filesAnalyzed"] == 1, run.stdout
    errors = [each for each in found["generalDiagnostics"] if each["severity"] == "error"]
    return sorted({each["range"]["start"]["line"] + 1 for each in errors})


@pytest.mark.slow
@pytest.mark.parametrize("check", [lines_by_mypy, lines_by_pyright])
def test_programs_are_checked_as_with_torch(check: Callable[[Path, str], list[int]], tmp_path: Path) -> None:
    assert check(tmp_path, f"{RIGHT}\n{every_public_name()}\n") == []
    first = RIGHT.count("\n") + 2
    assert check(tmp_path, "\n".join((RIGHT, *WRONG))) == [first, first + 1, first + 2]


def test_dir_shows_the_public_names_alone() -> None:
    public = {name for name in dir(fullshard) if not name.startswith("__")}
    assert public == {*fullshard.__all__, "checkpoint", "extras", "observe"} - {"__version__"}
