"""`fullshard verify` and the faults of `tests/harness/planted_faults.py`, which came before what finds them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from fullshard.program import Program, find_program
from fullshard.verify import arithmetic
from fullshard.verify.experiments import Experiments
from fullshard.verify.kernels import can_be_equal, elementwise
from fullshard.verify.reference import read_before, read_step
from fullshard.verify.replicas import digest
from fullshard.verify.setting import Setting
from fullshard.verify.strategy import parse_strategy
from tests.harness.planted_faults import PLACES, PLANTED, Planted
from tests.harness.planted_later import LATER, UNKNOWN
from tests.harness.seeded_faults import PROVEN, source_of
from tests.harness.verified import ENTRY, compare, explain, record, record_planted


def test_the_registry() -> None:
    assert len(PLANTED) >= 40 and not set(PLANTED) & set(PROVEN)
    assert sum(fault.new for fault in PLANTED.values()) >= 30
    assert {fault.place for fault in PLANTED.values()} == set(PLACES)


@pytest.mark.sample(33)
@pytest.mark.parametrize("fault", [*PLANTED.values(), *LATER.values()], ids=[*PLANTED, *LATER])
def test_what_a_fault_changes_is_there(fault: Planted) -> None:
    for each in fault.faults:
        assert source_of(each)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_found_and_its_place_named(name: str, tmp_path: Path) -> None:
    """The table of all of them: `python -m tests.harness.planted_table`."""
    fault = PLANTED[name]
    result = compare(tmp_path, record_planted(tmp_path, fault))
    assert result.difference is not None and result.difference.phase in fault.phases, result.difference
    found = explain(result, fault)
    assert found is not None and found.cause.startswith(f"{PLACES[fault.place]}:"), found


@pytest.mark.slow
@pytest.mark.parametrize("name", LATER)
def test_a_later_fault_is_found_and_its_place_named(name: str, tmp_path: Path) -> None:
    fault = LATER[name]
    result = compare(tmp_path, record_planted(tmp_path, fault))
    assert result.difference is not None and result.difference.phase in fault.phases, result.difference
    found = explain(result, fault)
    assert found is not None
    assert found.cause == "unknown" if name in UNKNOWN else found.cause.startswith(f"{PLACES[fault.place]}:"), found


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", [name for name, case in PROVEN.items() if case.phase in ("forward", "backward")])
def test_experiments_agree_with_what_a_pattern_shows(name: str, tmp_path: Path) -> None:
    """The causes of the first faults keep their words, after the place."""
    case = PROVEN[name]
    entry = f"tests.harness.verified:{case.program}"
    found = explain(compare(tmp_path, record(tmp_path, case.strategy, case.world, case.fault, entry=entry)), case.fault)
    assert found is not None and ": " in found.cause
    assert case.cause == "unknown" or case.cause in found.cause, found


@pytest.mark.slow
def test_a_difference_that_does_not_come_again(tmp_path: Path) -> None:
    fault = PLANTED["gradients 5 percent too large"]
    found = explain(compare(tmp_path, record_planted(tmp_path, fault)), None)
    assert found is not None and found.cause.startswith("unknown: the difference did not come again")


def test_a_training_that_fails_has_no_experiments(tmp_path: Path) -> None:
    fault = PLANTED["gradients 5 percent too large"]
    result = compare(tmp_path, record_planted(tmp_path, fault))
    assert result.difference is not None
    experiments = Experiments(
        find_program(ENTRY), result.setting, torch.device("cpu"), lambda jobs: dict.fromkeys(jobs, "")
    )
    assert experiments.explained(result.difference) == result.difference


# ---- copies ----------------------------------------------------------------------------------------------------------


def test_a_digest_is_of_all_bytes() -> None:
    value = torch.arange(6, dtype=torch.float32).view(2, 3)
    assert digest(value) == digest(value.clone()) != digest(value.t())
    other = value.clone()
    other.view(torch.uint8)[1, -1] ^= 1
    assert digest(value) != digest(other) and digest(torch.zeros(2)) != digest(-torch.zeros(2))
    assert digest(value[:0]) == digest(torch.zeros(0))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "world", "program"), [("zero3+hsdp=2", 4, "cut"), ("zero3+hsdp=2+tp=2", 4, "split")]
)
def test_copies_are_compared(strategy: str, world: int, program: str, tmp_path: Path) -> None:
    """Rank 1's, or rank 3's, local shards beside those of the first rank that has them: found with rank and element."""
    setting = record(tmp_path, strategy, world, entry=f"tests.harness.verified:{program}")
    steps = [read_step(tmp_path, 0, rank) for rank in range(world)]
    assert all(not step.gradients_apart and not step.stepped_apart for step in steps)
    assert compare(tmp_path, setting).verdict == "equal"


@pytest.mark.slow
def test_a_copy_of_a_moment_is_compared(tmp_path: Path) -> None:
    """By its digest, so nothing of it is written where it is equal."""
    sound, faulty = tmp_path / "sound", tmp_path / "faulty"
    record(sound, "zero3+hsdp=2", 4)
    record_planted(faulty, PLANTED["replica 1 negates its gradients from step 3"])
    kinds = [{(one.name, one.key) for one in read_step(faulty, 2, rank).stepped_apart} for rank in range(4)]
    assert not kinds[0] and not kinds[1]
    assert {("norm.norm.bias", ""), ("norm.norm.bias", "exp_avg")} <= kinds[2] & kinds[3]
    assert ("norm.norm.bias", "step") not in kinds[2]
    # A negative gradient has the same square.
    assert ("norm.norm.bias", "exp_avg_sq") not in kinds[2]


# ---- bits ------------------------------------------------------------------------------------------------------------


def _setting(strategy: str, world: int = 2, library: str = "fullshard", device: str = "cpu") -> Setting:
    return Setting(ENTRY, library, parse_strategy(strategy), world, 1, device)


def test_where_the_order_of_sums_is_known() -> None:
    known = {("zero3", 2), ("zero3", 8), ("zero2+bf16+micro=4", 3), ("zero3+hsdp=2", 4), ("zero3+bf16+pure", 2)}
    assert all(arithmetic.order_is_known(_setting(*each)) for each in known)
    unknown = {("zero3+hsdp=3", 6), ("zero3+tp=2", 4), ("hsdp=2+bf16+pure", 2)}
    assert not any(arithmetic.order_is_known(_setting(*each)) for each in unknown)
    assert arithmetic.order_is_known(_setting("zero3", 2, "torch"))
    assert not arithmetic.order_is_known(_setting("zero3", 3, "torch"))
    assert not arithmetic.order_is_known(_setting("zero3", 3, device="cuda"))
    assert not arithmetic.order_is_known(_setting("zero3", 2, "fsdp1"))


def test_on_a_device_bits_are_expected_of_deterministic_kernels_alone() -> None:
    assert can_be_equal(_setting("zero3")) and not can_be_equal(_setting("zero3+tp=2", 4))
    assert not can_be_equal(_setting("zero3", library="ddp"))
    on_device = _setting("zero3", device="cuda")
    assert not can_be_equal(on_device)
    torch.use_deterministic_algorithms(True)
    try:
        assert can_be_equal(on_device)
    finally:
        torch.use_deterministic_algorithms(False)


def test_the_mean_has_the_arithmetic_of_the_reduction() -> None:
    """Held in float32 and added as bfloat16 numbers: 1 + 1/256 is no bfloat16 number, and is kept."""
    one, small = torch.tensor([1.0]).bfloat16(), torch.tensor([2.0**-8]).bfloat16()
    found = arithmetic.mean([[one, small], [None, None]], _setting("zero3+bf16+micro=2"), torch.float32)
    assert found is not None and found.item() == (1 + 2**-8) / 2
    pure = arithmetic.mean([[one, small], [None, None]], _setting("zero3+bf16+pure+micro=2"), torch.float32)
    assert pure is not None and pure.item() == 0.5
    assert arithmetic.mean([[None], [None]], _setting("zero3"), torch.float32) is None


def test_other_kernels_are_seen_and_bits_not_expected(tmp_path: Path) -> None:
    """Where the plain model gives other bits in the processes of the training: tolerances are those of rounding."""
    setting = record(tmp_path / "trained", "zero3+bf16")
    shutil.copytree(tmp_path / "trained", tmp_path / "other")
    before = read_before(tmp_path / "other", 1)
    torch.save(
        tuple(before._replace(control=before.control | {"loss": 1})), tmp_path / "other" / "before" / "rank-1.pt"
    )
    for folder, off in (("trained", True), ("other", False)):
        step = read_step(tmp_path / folder, 0, 0)
        gradient = step.gradients["norm.norm.bias"]
        assert gradient is not None
        gradient[3] *= 1.01
        torch.save(tuple(step), tmp_path / folder / "step-0" / "rank-0.pt")
        result = compare(tmp_path / folder, setting)
        found = result.difference
        assert any("gives other bits in the processes" in note for note in result.notes) is not off
        # What the optimizer took is the changed gradient, so the step is not that of the record.
        assert found is not None
        assert (found.phase, found.allowed) == ("backward", 0.0) if off else found.phase == "optimizer step", found


class _Normalised(torch.optim.SGD):
    """Divides each gradient by its norm, so an element's update depends on others."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.div_(p.grad.norm() + 1e-6)
        super().step()


@pytest.mark.parametrize("kind", ["AdamW", "SGD", "normalised", "whole"])
def test_optimizers_that_give_the_same_bits_on_shards(kind: str) -> None:
    """Found by trying, with the shards of each rank as plain tensors."""

    def whole(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        if any(p.shape[0] != 5 for p in parameters):
            raise ValueError("expected whole matrices")
        return torch.optim.SGD(parameters, lr=0.1)

    make = {
        "AdamW": lambda ps: torch.optim.AdamW(ps, lr=1e-3),
        "SGD": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
        "normalised": lambda ps: _Normalised(ps, lr=0.1),
        "whole": lambda ps: whole([*ps]),
    }[kind]
    program = Program(nn.Module, lambda model, batch: torch.zeros(()), lambda index: index, optimizer=make)
    torch.manual_seed(0)
    before, gradient = {"weight": torch.randn(5, 7)}, torch.randn(5, 7)
    parameter = nn.Parameter(before["weight"].clone())
    parameter.grad = gradient.clone()
    make([parameter]).step()
    after = {"weight": parameter.detach()}
    found = [elementwise(program, before, {"weight": gradient}, after, {"weight": dim}, 3) for dim in (0, 1)]
    # Cut along dim 1, each piece has all rows.
    assert found == [kind in ("AdamW", "SGD"), kind in ("AdamW", "SGD", "whole")]
