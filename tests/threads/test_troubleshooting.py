"""docs/troubleshooting.md, row by row: the symptom is provoked, the page's own code shows the cause and mends it."""

from __future__ import annotations

import copy
import functools
import os
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

import fullshard
import fullshard.observe
from fullshard import MixedPrecisionPolicy, fully_shard
from fullshard.policy import use_options
from tests.harness import installed, tolerance
from tests.harness.forked import run_forks
from tests.harness.models import seeded
from tests.harness.threads import run_ranks
from tests.threads.programs import Model, adapt, batch, part, shard

PAGE = Path(__file__).parents[2] / "docs" / "troubleshooting.md"
CPU = torch.device("cpu")

# What a reader has imported.
NAMES: dict[str, Any] = {
    "AveragedModel": AveragedModel, "DistributedDataParallel": DistributedDataParallel, "Shard": Shard,
    "ColwiseParallel": ColwiseParallel, "Counter": Counter, "DTensor": DTensor,
    "MixedPrecisionPolicy": MixedPrecisionPolicy, "RowwiseParallel": RowwiseParallel,
    "StateDictOptions": StateDictOptions, "checkpoint": checkpoint, "device": CPU, "dist": dist,
    "checkpoint_wrapper": checkpoint_wrapper,
    "fullshard": fullshard, "fully_shard": fully_shard, "get_model_state_dict": get_model_state_dict,
    "get_optimizer_state_dict": get_optimizer_state_dict, "init_device_mesh": init_device_mesh, "os": os,
    "parallelize_module": parallelize_module, "partial": functools.partial,
    "set_model_state_dict": set_model_state_dict,
    "set_optimizer_state_dict": set_optimizer_state_dict, "torch": torch,
}  # fmt: skip


# Sections of the page that are tables: tests/pure/test_reference.py and tests/pure/test_faq.py hold them.
WITHOUT_CODE = ("Errors by their text", "Questions that people asked")


def blocks(page: str) -> dict[str, list[str]]:
    """The code of each row, by its title."""
    rows = re.split(r"^## (.*)$", page, flags=re.M)
    return {
        title: re.findall(r"^```python\n(.*?)^```$", text, flags=re.M | re.S)
        for title, text in zip(rows[1::2], rows[2::2], strict=True)
        if title not in WITHOUT_CODE
    }


BLOCKS = blocks(PAGE.read_text())


class Row:
    """The code of one row and the names it sees, for one rank."""

    def __init__(self, title: str, **names: Any) -> None:
        self.printed: list[Any] = []
        self.names = {**NAMES, "print": self._print, **names}
        self.code = BLOCKS[title]

    def _print(self, *values: Any) -> None:
        self.printed.extend(values)

    def see(self) -> list[Any]:
        """Run the first block; what it prints."""
        return self._run(0)

    def mend(self, which: int = 1) -> list[Any]:
        return self._run(which)

    def _run(self, which: int) -> list[Any]:
        self.printed.clear()
        exec(compile(self.code[which], f"{PAGE.name}, block {which + 1}", "exec"), self.names)
        return list(self.printed)

    def __getitem__(self, name: str) -> Any:
        return self.names[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self.names[name] = value


SYMPTOMS: dict[str, Callable[[int, str], None]] = {}


def symptom(title: str) -> Callable[[Callable[[int, str], None]], Callable[[int, str], None]]:
    """The function `(rank, title)` provokes the symptom of this row."""

    def add(function: Callable[[int, str], None]) -> Callable[[int, str], None]:
        SYMPTOMS[title] = function
        return function

    return add


@pytest.mark.sample(3)
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("title", BLOCKS)
def test_row(title: str, world: int) -> None:
    if title == "One rank alone has the checkpoint":
        # torch broadcasts over a real process group only.
        run_forks(world, SYMPTOMS[title], (title,), 60.0)
        return
    with use_options(prefetch_depth=0) if title == "Gathers are not ahead" else nullcontext():
        run_ranks(world, SYMPTOMS[title], title)


def test_page_and_tests_have_the_same_rows() -> None:
    assert list(SYMPTOMS) == list(BLOCKS)
    assert all(len(code) >= 2 for code in BLOCKS.values()), "what shows the cause, and what mends it"
    linked = re.findall(r"^\* \[.*\]\(#(.*)\)$", PAGE.read_text(), flags=re.M)
    assert linked == [title.lower().replace(" ", "-") for title in BLOCKS]


def build() -> Any:
    return seeded(Model)


def tokens_of(rank: int, step: int = 0) -> Tensor:
    return part(batch(dist.get_world_size(), step), rank)


def square(model: nn.Module, tokens: Tensor) -> Tensor:
    return model(tokens).square().mean()


def whole_gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad.clone() for p in model.parameters()]  # type: ignore[union-attr]


# ---- memory ----------------------------------------------------------------------------------------------------


@symptom("One unit for the whole model")
def _(rank: int, title: str) -> None:
    row = Row(title, model=fully_shard(build()))
    row.see()
    before = row["report"]
    whole = sum(p.numel() * 4 for p in build().parameters())
    assert len(before.units) == 1 and before.peak_nbytes > whole
    row["model"] = build()
    row.mend()
    row.see()
    assert [unit.name for unit in row["report"].units] == ["", "layers.0", "layers.1", "layers.2"]
    assert row["report"].peak_nbytes < before.peak_nbytes


@symptom("Something is in no unit")
def _(rank: int, title: str) -> None:
    model = build()
    for layer in model.layers:
        fully_shard(layer)
    row = Row(title, model=model)
    names, notes = row.see()
    assert names == ["embedding.weight", "head.weight", "head.bias"]
    assert any(note.startswith("trainable and in no unit: embedding.weight, head.weight") for note in notes)
    with pytest.raises(AssertionError):
        exec(BLOCKS[title][1].splitlines()[1], row.names)
    row.mend()
    assert row.see() == [[], ()]


@symptom("The root was sharded first")
def _(rank: int, title: str) -> None:
    row = Row(title, model=build())
    with pytest.raises(RuntimeError, match="expected inner modules to be sharded before those around them"):
        row.see()
    row["model"] = build()
    row.mend()
    assert len(fullshard.report(row["model"]).units) == 4


@symptom("Tensor parallelism comes too late")
def _(rank: int, title: str) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    model = build()
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh["dp"])
    row = Row(title, model=model, mesh=mesh)
    with pytest.raises(ValueError, match="expected tensor parallelism before fully_shard, .* up .* the unit Block"):
        row.see()
    row["model"] = build()
    row.mend()
    weight = row["model"].layers[0].up.weight
    assert weight.device_mesh.mesh_dim_names == ("dp", "tp")


@symptom("Units are too small")
def _(rank: int, title: str) -> None:
    model = build()
    for module in [m for m in model.modules() if isinstance(m, nn.Linear)]:
        fully_shard(module)
    row = Row(title, model=shard(model), tokens=tokens_of(rank))
    (many,) = row.see()
    row["model"] = build()
    row.mend()
    (few,) = row.see()
    # 7 linears, 3 blocks with a norm each and the root; then 3 blocks and the root, which is gathered once.
    assert (many["unshard"], many["reduce"]) == (2 * 10 + 1, 11)
    assert (few["unshard"], few["reduce"]) == (2 * 3 + 1, 4)


@symptom("Parameters stay full after forward")
def _(rank: int, title: str) -> None:
    row = Row(title, model=shard(build(), reshard_after_forward=False), tokens=tokens_of(rank))
    (live,) = row.see()
    assert all(live.values()) and len(live) == 4
    row["loss"].backward()
    row.mend()
    (live,) = row.see()
    assert [name for name, nbytes in live.items() if nbytes] == [""]


@symptom("Activations take the memory")
def _(rank: int, title: str) -> None:
    # So many that activations outweigh weights, whose memory comes and goes and may be counted at two addresses.
    tokens = torch.cat([tokens_of(rank)] * 8)
    row = Row(title, model=shard(build()), tokens=tokens)
    (before,) = row.see()
    row["loss"].backward()
    row["model"].zero_grad()
    square(row["model"], tokens).backward()
    expected = whole_gradients(row["model"])
    # Half of the batch, twice.
    row["model"].zero_grad()
    row.mend(2)
    for mine, theirs in zip(whole_gradients(row["model"]), expected, strict=True):
        tolerance.assert_close(mine, theirs)
    row["tokens"] = tokens[:1]
    assert row.see()[0] < before
    # Recomputation.
    row["model"], row["tokens"] = build(), tokens
    row.mend(1)
    shard(row["model"])
    assert row.see()[0] < before
    row["loss"].backward()
    row["model"].zero_grad()
    square(row["model"], tokens).backward()
    for mine, theirs in zip(whole_gradients(row["model"]), expected, strict=True):
        tolerance.assert_close(mine, theirs)


@symptom("Accumulated gradients are whole")
def _(rank: int, title: str) -> None:
    model = shard(build())
    model.set_requires_gradient_sync(False)
    square(model, tokens_of(rank)).backward()
    row = Row(title, model=model)
    assert row.see()[0][0].startswith("gradients accumulated and not reduced yet: embedding.weight")
    held = fullshard.report(model).measured.gradients
    row.mend()
    square(model, tokens_of(rank, 1)).backward()
    assert row.see() == [()]
    assert fullshard.report(model).measured.gradients < held


@symptom("More memory than expected")
def _(rank: int, title: str) -> None:
    model = shard(build())
    optimizer = torch.optim.AdamW(model.parameters())
    row = Row(title, model=model, optimizer=optimizer)
    square(model, tokens_of(rank)).backward()
    optimizer.step()
    measured, expected, peak = row.see()
    assert measured == expected and measured.gradients > 0 and peak > measured.parameters
    row.mend()
    measured, expected, _ = row.see()
    assert measured.gradients == 0 < expected.gradients


@symptom("Everything is computed in float32")
def _(rank: int, title: str) -> None:
    def full_nbytes() -> int:
        for module in (*row["model"].layers, row["model"]):
            module.unshard()
        return sum(unit.full_nbytes_live for unit in fullshard.report(row["model"]).units)

    row = Row(title, model=shard(build()))
    assert {dtypes for _, *dtypes_ in row.see()[0] for dtypes in dtypes_} == {("float32",)}
    before = full_nbytes()
    row["model"] = build()
    row.mend()
    assert {tuple(dtypes) for _, *dtypes in row.see()[0]} == {(("float32",), ("bfloat16",), ("float32",))}
    assert full_nbytes() < 0.75 * before  # half, but for the alignment of small parameters


# ---- speed -----------------------------------------------------------------------------------------------------


@symptom("Gathers are not ahead")
def _(rank: int, title: str) -> None:
    row = Row(title, model=shard(build()), tokens=tokens_of(rank))
    for _ in range(2):
        (late,) = row.see()
        assert late == ["root", "layers.0", "layers.1", "layers.2"]
        row["loss"].backward()
    row.mend()
    assert row.see() == [["root", "layers.0"]]


@symptom("A message for every small batch")
def _(rank: int, title: str) -> None:
    row = Row(title, model=shard(build()), tokens=tokens_of(rank))
    assert row.see() == [4 * 2]
    expected = whole_gradients(row["model"])
    row["model"].zero_grad()
    row.mend()
    assert Counter(kind for kind, _ in row["trace"].commands)["reduce"] == 4
    for mine, theirs in zip(whole_gradients(row["model"]), expected, strict=True):
        tolerance.assert_close(mine, theirs)


@symptom("The wrong device or backend")
def _(rank: int, title: str) -> None:
    """What mends it needs a device: tests/gpu/test_troubleshooting.py."""
    row = Row(title, model=shard(build()))
    device_type, backends = row.see()
    assert device_type == "cpu" and f"cpu:{torch.distributed.get_backend()}" in backends and "nccl" not in backends


# ---- numbers ---------------------------------------------------------------------------------------------------


@symptom("Gradients are kept in bfloat16")
def _(rank: int, title: str) -> None:
    micro_batches = 24

    def error(model: Any) -> float:
        """Of accumulated gradients, beside their sum in float64."""
        sums: list[Tensor] = []
        for accumulate in (False, True):
            for step in range(micro_batches):
                model.set_requires_gradient_sync(not accumulate or step == micro_batches - 1)
                square(model, tokens_of(rank, step)).backward()
                if not accumulate:
                    new = [gradient.double() for gradient in whole_gradients(model)]
                    sums = [a + b for a, b in zip(sums, new, strict=True)] if sums else new
                    model.zero_grad()
        found = whole_gradients(model)
        return sum(float((a - b).norm()) for a, b in zip(found, sums, strict=True))

    row = Row(title, model=shard(build(), mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)))
    assert row.see() == [[("bfloat16",)] * 4]
    before = error(row["model"])
    row["model"] = build()
    row.mend()
    assert row.see() == [[("float32",)] * 4]
    assert error(row["model"]) < before / 4


@symptom("Gradients explode")
def _(rank: int, title: str) -> None:
    model = shard(build())
    (1e4 * square(model, tokens_of(rank))).backward()
    row = Row(title, model=model)
    expected = torch.stack([gradient.norm() for gradient in whole_gradients(model)]).norm()
    (norm,) = row.see()
    assert norm > 100
    tolerance.assert_close(norm, expected)
    row.mend()
    (norm,) = row.see()
    assert abs(float(norm) - 1.0) < 1e-4


@symptom("Gradients vanish in float16")
def _(rank: int, title: str) -> None:
    def small(model: nn.Module, tokens: Tensor) -> Tensor:
        return model(tokens).float().square().mean() * 1e-8

    model = shard(build(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32))
    optimizer = torch.optim.AdamW(model.parameters(), eps=1e-30, weight_decay=0.0)
    row = Row(title, model=model, tokens=tokens_of(rank), loss=small, optimizer=optimizer)
    assert set(row.see()[0].values()) == {0}
    optimizer.zero_grad()
    before = model.head.weight.full_tensor().clone()
    row.mend()
    assert not torch.equal(model.head.weight.full_tensor(), before)
    assert row["scaler"].get_scale() == 65536.0, "no gradient overflowed"


# ---- order of calls, and state ---------------------------------------------------------------------------------


@symptom("The optimizer was built before")
def _(rank: int, title: str) -> None:
    model = build()
    row = Row(title, model=model, optimizer=torch.optim.AdamW(model.parameters()))
    shard(model)
    square(model, tokens_of(rank)).backward()
    with pytest.raises(RuntimeError, match="AdamW.step: expected parameters that are on the model, found some that"):
        row["optimizer"].step()
    assert row.see()[0][0].startswith("the optimizer holds 21 tensors that are no parameters of this model")
    row.mend()
    before = model.head.weight.full_tensor().clone()
    row["optimizer"].step()
    assert row.see() == [()] and not torch.equal(model.head.weight.full_tensor(), before)


@symptom("Nothing was initialised")
def _(rank: int, title: str) -> None:
    with torch.device("meta"):
        model = Model()
    row = Row(title, model=shard(model), tokens=tokens_of(rank))
    with pytest.raises(RuntimeError, match="expected every parameter and buffer to have a value .*embedding.weight"):
        row.see()
    row.mend()
    assert model(row["tokens"]).isfinite().all()


@symptom("One rank alone has the checkpoint")
def _(rank: int, title: str) -> None:
    saved = {name: value + 1.0 for name, value in build().state_dict().items()}
    row = Row(title, model=shard(build()), full=dict(saved) if rank == 0 else {})
    if rank == 0:
        row.see()
    else:
        with pytest.raises(RuntimeError, match="Missing key"):
            row.see()
    row["model"] = shard(build())
    row.mend()
    for name, value in row["model"].state_dict().items():
        assert torch.equal(value.full_tensor(), saved[name]), name


@symptom("The loss jumps after a resume")
def _(rank: int, title: str) -> None:
    def step(model: Any, optimizer: torch.optim.Optimizer, number: int) -> None:
        square(model, tokens_of(rank, number)).backward()
        optimizer.step()
        optimizer.zero_grad()

    trained = shard(build())
    trained_optimizer = torch.optim.AdamW(trained.parameters(), lr=0.1)
    step(trained, trained_optimizer, 0)
    model = shard(build())
    model.load_state_dict(copy.deepcopy(trained.state_dict()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with tempfile.TemporaryDirectory() as folder:
        names = {"trained": trained, "trained_optimizer": trained_optimizer, "path": f"{folder}/{rank}.pt"}
        row = Row(title, model=model, optimizer=optimizer, **names)
        assert row.see() == [0]
        row.mend()
    assert row.see() == [21]
    step(trained, trained_optimizer, 1)
    step(model, optimizer, 1)
    for (name, mine), theirs in zip(model.named_parameters(), trained.parameters(), strict=True):
        assert torch.equal(mine.full_tensor(), theirs.full_tensor()), name


# ---- what people report ----------------------------------------------------------------------------------------


class Collects(nn.Module):
    """Layers that write into their second argument as `edit` says."""

    def __init__(self, edit: Callable[[Any, Tensor], object]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.edit = edit

    def forward(self, x: Tensor, aux: Any) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            self.edit(aux, x.float().mean())
        return x


@symptom("Losses that layers collect are missing")
def _(rank: int, title: str) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    model = fully_shard(seeded(lambda: Collects(lambda aux, loss: aux.append(loss))), mp_policy=policy)
    row = Row(title, model=model, tokens=torch.ones(2, 4))
    assert row.see() == [4]
    in_place = lambda aux, loss: aux[0].add_(loss.detach())  # noqa: E731
    with pytest.raises(RuntimeError, match=r"aux\[0\] to be left as it is in forward, found it edited in place"):
        fully_shard(seeded(lambda: Collects(in_place)), mp_policy=policy)(torch.ones(2, 4), [torch.zeros(1)])
    row.mend()
    model, aux = fully_shard(seeded(lambda: Collects(in_place)), mp_policy=row["policy"]), [torch.zeros(1)]
    model(torch.ones(2, 4, dtype=torch.bfloat16), aux)
    assert aux[0] != 0


@symptom("Another library does not know the class")
def _(rank: int, title: str) -> None:
    model = shard(build())
    row = Row(title, model=model, registry={Model: "a model"})
    assert row.see() == ["FSDPModel", None]
    assert row.mend() == ["Model", "a model"]
    assert row.see() == ["FSDPModel", None]


class Scaled(nn.Module):
    """(n, 4) -> (n, 4), with the temperature of a CLIP."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.logit_scale = nn.Parameter(torch.tensor(2.6592))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.linear(x) * self.logit_scale.exp()
        return output


@symptom("A parameter has no dims")
def _(rank: int, title: str) -> None:
    row = Row(title, model=seeded(Scaled))
    with pytest.raises(ValueError, match=r"logit_scale: .* found a scalar.*ignored_params, or in wrap\.ignored"):
        row.see()
    row.mend()
    model, optimizer = row["model"], row["optimizer"]
    plain: Any = seeded(Scaled)
    reference = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    world = dist.get_world_size()
    for step in range(2):
        parts = [torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + one)) for one in range(world)]
        model(parts[rank]).square().mean().backward()
        plain(torch.cat(parts)).square().mean().backward()
        # The sum of the ranks' gradients, each rounded, divided by a power of two.
        assert tolerance.close(model.logit_scale.grad, plain.logit_scale.grad)
        for one in (optimizer, reference):
            one.step()
            one.zero_grad()
    every = [torch.zeros(()) for _ in range(world)]
    dist.all_gather(every, model.logit_scale.detach())
    assert all(torch.equal(one, every[0]) for one in every)
    config = {"wrap": {"by": "plan", "plan": ["linear"], "ignored": ["logit_scale"]}}
    model = seeded(Scaled)
    fullshard.prepare_fully_shard(model, None, config, show=False)
    assert not isinstance(model.logit_scale, DTensor) and isinstance(model.linear.weight, DTensor)


@symptom("What was frozen trains now")
def _(rank: int, title: str) -> None:
    first = build()
    first.layers.requires_grad_(False)
    shard(first)
    optimizer = torch.optim.AdamW([p for p in first.parameters() if p.requires_grad], lr=0.1)
    square(first, tokens_of(rank)).backward()
    optimizer.step()
    _, stored = fullshard.checkpoint.get_state_dict(first, optimizer)
    model = shard(build())
    row = Row(title, model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=0.1), stored=stored)
    with pytest.raises(fullshard.checkpoint.CheckpointMismatch, match=r"missing: layers.*in no stored group"):
        row.see()
    row.mend()
    square(model, tokens_of(rank)).backward()
    row["optimizer"].step()
    steps = {name: int(row["optimizer"].state[p]["step"]) for name, p in model.named_parameters()}
    assert all(count == (1 if name.startswith("layers") else 2) for name, count in steps.items())


@symptom("The exported file has base and adapters")
def _(rank: int, title: str) -> None:
    from peft import LoraConfig, get_peft_model
    from safetensors.torch import load_file

    model = seeded(lambda: get_peft_model(Model(), LoraConfig(r=2, target_modules=["head"], init_lora_weights=False)))
    fully_shard(model)
    folders = [tempfile.mkdtemp() if rank == 0 else ""]
    dist.broadcast_object_list(folders)
    folder = Path(folders[0])
    row = Row(title, model=model, folder=folder)
    assert row.see() == [["base_model.model.head.base_layer.weight"]]
    row.mend()
    if rank == 0:
        names = {
            part: sorted(load_file(next((folder / part).glob("*.safetensors")))) for part in ("adapters", "merged")
        }
        assert names["adapters"] == [f"base_model.model.head.lora_{one}.weight" for one in "AB"]
        assert names["merged"] == sorted(Model().state_dict())
        shutil.rmtree(folder)


class WithHead(nn.Module):
    """A model whose loss reads the weight of its last unit."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.body(x)
        return found


@symptom("A weight is read outside of its forward")
def _(rank: int, title: str) -> None:
    whole, model = seeded(WithHead), seeded(WithHead)
    head: Any = fully_shard(model.get_submodule("head"))
    fully_shard(model)
    tokens = torch.full((2, 4), 1.0 + rank)
    row = Row(title, model=model, head=head, tokens=tokens)
    with pytest.raises(RuntimeError, match="mixed torch.Tensor and DTensor"):
        row.see()
    row.mend()
    inputs = torch.stack([torch.full((2, 4), 1.0 + each) for each in range(dist.get_world_size())])
    whole.get_submodule("head")(whole(inputs)).square().mean().backward()
    for found, expected in zip(whole_gradients(model), whole_gradients(whole), strict=True):
        torch.testing.assert_close(found, expected)


@symptom("A gradient norm is too small")
def _(rank: int, title: str) -> None:
    world = dist.get_world_size()
    model, plain = shard(build()), build()
    for one, tokens in ((model, tokens_of(rank)), (plain, batch(world, 0))):
        square(one, tokens).backward()
    row = Row(title, model=model)
    wanted: Tensor = plain.layers[0].up.weight.grad
    norm, count, _ = row.see()
    assert norm < 0.95 * float(wanted.norm())
    assert count < wanted.count_nonzero()
    parts: list[Any] = [None] * world
    dist.all_gather_object(parts, norm)
    assert sum(value**2 for value in parts) ** 0.5 == pytest.approx(float(wanted.norm()), rel=1e-4)
    whole, layer, *figures = row.mend()
    own = [float(p.grad.norm()) for p in plain.layers[0].parameters()]
    every = [float(p.grad.norm()) for p in plain.parameters()]
    assert whole == pytest.approx(sum(x**2 for x in every) ** 0.5, rel=1e-4)
    assert layer == pytest.approx(sum(x**2 for x in own) ** 0.5, rel=1e-4)
    expected = [float(wanted.norm()), float(wanted.mean()), float(wanted.abs().max())]
    assert figures == pytest.approx(expected, rel=1e-4, abs=1e-7)


@symptom("Ranks part at a check for NaN")
def _(rank: int, title: str) -> None:
    model = shard(build())
    square(model, tokens_of(rank)).backward()
    if rank == 1:
        model.head.weight.grad.to_local()[0, 0] = float("nan")
    row = Row(title, model=model)
    # From 2.14 on torch gathers the tensor for this; before, each rank read its own share.
    assert row.see() == [rank == 1 or installed.release() >= (2, 14)]
    assert row.mend() == [True, ["head.weight"]]


@symptom("A copy of the model is refused")
def _(rank: int, title: str) -> None:
    row = Row(title, model=shard(build()))
    with pytest.raises(AssertionError, match="does not support deepcopy.*AveragedModel.*before fully_shard"):
        row.see()
    row["model"] = build()
    row.mend()
    assert torch.equal(row["average"].module.head.weight.full_tensor(), build().head.weight)


@symptom("A rank has no loss")
def _(rank: int, title: str) -> None:
    model, plain = shard(build()), build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    row = Row(title, model=model, tokens=tokens_of(rank), optimizer=optimizer, has_labels=rank != 1)
    with pytest.raises(RuntimeError, match=r"found none after a forward.*\(output \* 0\)\.sum\(\)"):
        row.see()
    row.mend()
    world = dist.get_world_size()
    for one in range(world):
        if one != 1:
            (square(plain, tokens_of(one)) / world).backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        tolerance.assert_close(mine.full_tensor(), theirs.detach())


class Head(nn.Module):
    """Another model, after the first."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(11))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


@symptom("Parameters beside the model differ")
def _(rank: int, title: str) -> None:
    model, head = shard(build()), Head()
    optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.1)
    row = Row(title, model=model, head=head, tokens=tokens_of(rank), optimizer=optimizer)
    with pytest.raises(fullshard.RanksDisagree, match="^Head.scale, parameter 0 beside the model's in the optimizer"):
        row.see()
    row["model"], row["head"] = shard(build()), Head()
    row.mend()
    row.see()


@symptom("Adapters were added after sharding")
def _(rank: int, title: str) -> None:
    row = Row(title, model=build(), add_adapters=adapt, tokens=tokens_of(rank))
    with pytest.raises(fullshard.RanksDisagree, match=r"^layers\.0\.up\.b\.weight: .* no unit has it, .*averages"):
        row.see()
    row["model"] = build()
    row.mend()
    optimizer = torch.optim.SGD([p for p in row["model"].parameters() if p.requires_grad], lr=0.1)
    for _ in range(3):
        square(row["model"], tokens_of(rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert all(isinstance(p, DTensor) for p in row["model"].parameters())


@symptom("Plain and sharded parameters in one step")
def _(rank: int, title: str) -> None:
    model, plain = seeded(Model), seeded(Model)
    shard(model, ignored_params={model.head.bias})
    whole = batch(dist.get_world_size(), 0)
    for one in (model, plain):  # the same batch on all ranks: nothing averages the bias
        square(one, whole).backward()
    row = Row(title, model=model)
    with pytest.raises(RuntimeError, match="mixed torch.Tensor and DTensor"):
        row.see()
    with pytest.raises(RuntimeError, match=r"found .*weight, which is sharded, beside .*head.bias, .*step_on_shards"):
        torch.optim.AdamW(model.parameters(), foreach=True).step()
    row.mend()
    torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
    torch.optim.AdamW(plain.parameters(), lr=1e-2).step()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        found = mine.full_tensor() if isinstance(mine, DTensor) else mine
        torch.testing.assert_close(found.detach(), theirs.detach(), rtol=0, atol=1e-3)


@symptom("Kernels that want plain tensors")
def _(rank: int, title: str) -> None:
    import bitsandbytes

    model = shard(build())
    square(model, tokens_of(rank)).backward()
    before = model.head.weight.full_tensor().clone()
    row = Row(title, model=model, bitsandbytes=bitsandbytes)
    with pytest.raises(RuntimeError, match=r"AdamW8bit.step: .* elementwise=True"):
        row.see()
    row.mend()
    assert not torch.equal(model.head.weight.full_tensor(), before)


@symptom("DistributedDataParallel around units")
def _(rank: int, title: str) -> None:
    model = build()
    fully_shard(model.layers[0])
    row = Row(title, model=model)
    with pytest.raises(RuntimeError, match="DistributedDataParallel: .* sharded layers.0.norm.weight"):
        row.see()
    row["model"] = build()
    row.mend()
    square(row["model"], tokens_of(rank)).backward()
    assert row["model"].head.weight.grad.device_mesh.mesh_dim_names == ("replicate", "shard")


class Scoring(nn.Module):
    """(n, 4) -> (n, 1)."""

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.score(x)
        return found


@symptom("Muon and a weight with few rows")
def _(rank: int, title: str) -> None:
    row = Row(title, model=fully_shard(seeded(Scoring)))
    inputs = torch.linspace(-1, 2, 8).view(2, 4)
    row["model"](inputs).sum().backward()
    if torch.__version__ >= "2.12":
        with pytest.raises(RuntimeError, match="expected matrices with a row for each rank, found score.weight"):
            row.see()
    row["model"], plain = seeded(Scoring), seeded(Scoring)
    row.mend()
    for one in (row["model"], plain):
        one(inputs).sum().backward()
    row.see()
    torch.optim.Muon([plain.score.weight], lr=1e-2).step()
    # It computes in bfloat16: a hundredth of a step, whose elements are below its length of 0.01.
    torch.testing.assert_close(row["model"].score.weight.full_tensor(), plain.score.weight, rtol=0, atol=1e-3)


class Normed(nn.Module):
    """(n, 4) -> (n, 4); a BatchNorm, and three blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layers(self.norm(x))
        return found


@symptom("Statistics differ between ranks")
def _(rank: int, title: str) -> None:
    row = Row(title, model=shard(seeded(Normed)), inputs=torch.linspace(-1, 2 + rank, 8).view(2, 4))
    (found,) = row.see()
    assert set(found) == {"norm.running_mean", "norm.running_var"}
    row.mend()
    assert not fullshard.find_drift(row["model"])


@symptom("A checkpoint is around several units")
def _(rank: int, title: str) -> None:
    row = Row(title, model=shard(seeded(Normed)), inputs=torch.linspace(-1, 2, 8).view(2, 4))
    (kinds,) = row.see()
    assert kinds[:4] == ["unshard"] * 3 + ["reshard"] and "unshard" not in kinds[4:]
    expected = whole_gradients(row["model"])
    model = shard(seeded(Normed))
    apart = Row(title, model=model, inputs=row["inputs"])
    apart.mend()
    loss = model(row["inputs"]).sum()
    with fullshard.observe.record(model) as trace:
        loss.backward()
    kinds = [kind for kind, unit in trace.commands if kind in ("unshard", "reshard") and unit != "root"]
    full = [kinds[:place].count("unshard") - kinds[:place].count("reshard") for place in range(len(kinds) + 1)]
    assert max(full) <= 2, kinds
    for mine, theirs in zip(whole_gradients(model), expected, strict=True):
        assert torch.equal(mine, theirs)
