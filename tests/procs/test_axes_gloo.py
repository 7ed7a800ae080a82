"""One declaration of axes over gloo: what threads cannot run, because torch keeps it for a whole process."""

from __future__ import annotations

from typing import Any

import pytest

from fullshard.migrate import ConfigError
from tests.harness.axes import assert_norms, hugging_face, llama, plainly, planned
from tests.harness.models import Trained, assert_same_training
from tests.harness.pool import pool

LOSS = {"tensor_parallel_degree": 2, "enable_loss_parallel": True}


def with_cut_logits(rank: int, sequence: bool) -> tuple[Trained, list[float], list[str]]:
    return planned(rank, llama, {**LOSS, "enable_sequence_parallel": sequence})


@pytest.mark.hang_after(300)
@pytest.mark.parametrize("sequence", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["sp", "tp"])
def test_logits_stay_cut_for_the_loss(sequence: bool) -> None:
    """Parameters, optimizer state and norms are those of one process."""
    expected, norms = plainly(llama, 1)
    ranks: list[Any] = pool(2).run(with_cut_logits, sequence, timeout=240)
    for trained, found, printed in ranks:
        assert_same_training(trained, expected)
        assert_norms(found, norms)
        head = "sequence->column: output" if sequence else "column: layers.*.attention.wq"
        assert any(line.strip().startswith(head) for line in printed)
        assert not any("column->whole" in line for line in printed)


def refused(rank: int) -> str:
    try:
        planned(rank, llama, {"tensor_parallel_degree": 3})
    except ConfigError as error:
        return str(error)
    return ""


def test_a_plan_that_is_not_legal_ends_on_every_rank() -> None:
    for text in pool(2).run(refused):
        assert text.endswith(
            "are 3 of 2 ranks; nearest legal plan: data_parallel_shard_degree = 1, tensor_parallel_degree = 2"
        )


def of_hugging_face(rank: int) -> tuple[Trained, list[float], list[str]]:
    return planned(rank, small, {"tensor_parallel_degree": 2})


def small() -> Any:
    return hugging_face("Llama")


@pytest.mark.slow
@pytest.mark.hang_after(300)
def test_a_model_of_transformers() -> None:
    expected, norms = plainly(small, 1)
    ranks: list[Any] = pool(2).run(of_hugging_face, timeout=240)
    for trained, found, _ in ranks:
        assert_same_training(trained, expected)
        assert_norms(found, norms)
