"""What errors advise, followed to the letter, works on all ranks."""

from __future__ import annotations

import copy
import sys
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import fullshard
from fullshard import RanksDisagree, fully_shard
from fullshard.engine.names import all_modules
from tests.harness import tolerance
from tests.harness.models import seeded
from tests.harness.threads import run_ranks
from tests.threads.programs import Model, batch, part, shard

# ---- copies of a sharded model ---------------------------------------------------------------------------------------


def _step(model: Any, optimizer: Any, tokens: Tensor) -> None:
    model(tokens).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


class Trainer:
    def __init__(self, model: Any) -> None:
        self.state = {"model": model, "step": 0}


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    "copied",
    [
        copy.deepcopy,
        AveragedModel,
        lambda model: nn.Sequential(copy.deepcopy(model)),
        lambda model: copy.deepcopy(model).eval().requires_grad_(False),
        lambda model: copy.deepcopy(model.layers),
        lambda model: copy.deepcopy(model.layers[1]),
        lambda model: copy.deepcopy(Trainer(model)),
    ],
    ids=["deepcopy", "an average", "in a module", "a teacher", "a list of units", "a unit", "a trainer"],
)
def test_the_refusal_of_a_copy_names_what_works(copied: Any) -> None:
    def run(rank: int) -> None:
        model = shard(seeded(Model))
        with pytest.raises(AssertionError, match="FSDP does not support deepcopy") as caught:
            copied(model)
        for advice in ("copy.deepcopy(model.state_dict())", "AveragedModel", "before fully_shard"):
            assert advice in str(caught.value)

    run_ranks(2, run)


def test_an_average_made_before_and_sharded_alike() -> None:
    def run(rank: int) -> None:
        plain = seeded(Model)
        model = seeded(Model)
        pairs = []
        for one in (plain, model):
            average = AveragedModel(one, multi_avg_fn=get_ema_multi_avg_fn(0.5))
            if one is model:
                shard(model)
                shard(average.module)
            pairs.append((one, average, torch.optim.SGD(one.parameters(), lr=0.1)))
        for step in range(2):
            for one, average, optimizer in pairs:
                whole = batch(2, step)
                _step(one, optimizer, whole if one is plain else part(whole, rank))
                average.update_parameters(one)
        for mine, theirs in zip(pairs[1][1].parameters(), pairs[0][1].parameters(), strict=True):
            found = mine.full_tensor() if isinstance(mine, DTensor) else mine
            assert tolerance.close(found, theirs)

    run_ranks(2, run)


def test_values_kept_and_loaded_again_or_into_another() -> None:
    def run(rank: int) -> None:
        model = shard(seeded(Model))
        kept = copy.deepcopy(model.state_dict())
        _step(model, torch.optim.SGD(model.parameters(), lr=0.1), part(batch(2, 0), rank))
        other = shard(seeded(Model, seed=3))
        for one in (model, other):
            one.load_state_dict(kept)
            assert torch.equal(one.head.weight.full_tensor(), seeded(Model).head.weight)

    run_ranks(2, run)


# ---- a loss that nothing of the model is in --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "loss",
    [
        lambda output: torch.zeros((), requires_grad=True),
        lambda output: output.detach().square().mean() * torch.ones((), requires_grad=True),
        lambda output: (2 * nn.Parameter(torch.ones(3))).sum(),
        lambda output: None,
    ],
    ids=["a zero", "a detached output", "another parameter's", "none"],
)
def test_a_loss_without_the_output_is_refused_with_what_all_ranks_can_do(loss: Any) -> None:
    def run(rank: int) -> None:
        model = shard(seeded(Model))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        found = loss(model(part(batch(2, 0), rank)))
        if found is not None:
            found.backward()
        with pytest.raises(RuntimeError, match="no backward brought any") as caught:
            optimizer.step()
        said = str(caught.value)
        assert "(output * 0).sum()" in said and "on all ranks" in said and "fullshard.joined" in said

    run_ranks(2, run)


_ZEROS: dict[str, Any] = {
    "times 0": lambda output: (output * 0).sum(),
    "a mask of nothing": lambda output: output[torch.zeros(output.shape, dtype=torch.bool)].sum(),
    "all labels ignored": lambda output: nn.functional.cross_entropy(
        output.flatten(0, -2), torch.full((output.shape[:-1].numel(),), -100), reduction="sum"
    ),
    "an empty batch's mean": lambda output: output[:0].mean().nan_to_num() * 0,
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("zero", _ZEROS)
@pytest.mark.parametrize("empty", [0, 1])
def test_a_zero_loss_of_the_output_trains_as_one_process(empty: int, zero: str) -> None:
    """The rank `empty` has no loss; both ranks have the step of the other one's half."""

    def run(rank: int) -> None:
        model, plain = shard(seeded(Model)), seeded(Model)
        optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, plain)]
        output = model(part(batch(2, 0), rank))
        (_ZEROS[zero](output) if rank == empty else output.square().mean()).backward()
        (plain(part(batch(2, 0), 1 - empty)).square().mean() / 2).backward()
        for optimizer in optimizers:
            optimizer.step()
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert tolerance.close(mine.full_tensor(), theirs)

    run_ranks(2, run)


# ---- plain parameters beside a model ---------------------------------------------------------------------------------


class Head(nn.Module):
    """Another model of the program, which nothing shards."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.proj = nn.Linear(11, 3)
        self.scale = nn.Parameter(torch.full((3,), value))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.proj(x) * self.scale
        return found


def _beside(rank: int, make: Any) -> str:
    """The error of ranks whose plain parameters part; `make`: what the optimizer gets beside the model's."""
    torch.manual_seed(0)
    model = shard(seeded(Model))
    head, own = make(rank)
    optimizer = torch.optim.SGD([*model.parameters(), *own], lr=0.1)
    with pytest.raises(RanksDisagree) as caught:
        for step in range(4):
            head(model(part(batch(2, step), rank))).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return str(caught.value)


def _of_head(rank: int) -> Any:
    head = seeded(lambda: Head(2.0))
    return head, list(head.parameters())


def _of_part(rank: int) -> Any:
    head = seeded(lambda: Head(2.0))
    return head, list(head.proj.parameters())


def _loose(rank: int) -> Any:
    scale = nn.Parameter(torch.full((11,), 1.0))
    return lambda x: x * scale, [scale]


def _around(rank: int) -> Any:
    heads = seeded(lambda: nn.ModuleDict({"task": Head(2.0)}))
    return lambda x: heads["task"](x), list(heads.parameters())


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("make", "said"),
    [
        (_of_head, "Head.scale"),
        (_of_part, "Head.proj.weight"),
        (_around, "ModuleDict.task.scale"),
        (_loose, "of shape (11,)"),
    ],
)
def test_plain_parameters_beside_a_model_have_names(make: Any, said: str) -> None:
    assert all(said in error for error in run_ranks(2, lambda rank: _beside(rank, make)))


def test_the_report_names_what_the_optimizer_has_besides() -> None:
    def run(rank: int) -> None:
        model, head = shard(seeded(Model)), Head(1.0)
        optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.1)
        (note,) = fullshard.report(model, optimizer).notes
        assert "Head.scale" in note and "Head.proj.weight" in note and "3 tensors" in note

    run_ranks(2, run)


def test_looking_for_names_disturbs_no_other_thread() -> None:
    """Python raises SystemError in a thread that makes a tuple to which another one has a reference."""
    errors: list[BaseException] = []
    over, interval, one = threading.Event(), sys.getswitchinterval(), Head(1.0)

    def make() -> None:
        while not over.is_set():
            try:
                tuple(number for number in range(20))
            except SystemError as error:
                errors.append(error)

    thread = threading.Thread(target=make)
    sys.setswitchinterval(1e-5)
    thread.start()
    try:
        assert all(any(found is one for found in all_modules()) for _ in range(20))
    finally:
        over.set()
        thread.join()
        sys.setswitchinterval(interval)
    assert not errors


def test_a_model_sharded_with_the_head_in_it_trains() -> None:
    """The first cure of the text: give it to `fully_shard`."""

    def run(rank: int) -> None:
        model, head = shard(seeded(Model)), fully_shard(seeded(lambda: Head(2.0)))
        optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.1)
        for step in range(3):
            head(model(part(batch(2, step), rank))).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert not fullshard.find_drift(head) and dist.get_world_size() == 2

    run_ranks(2, run)
