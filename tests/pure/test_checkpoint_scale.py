"""What a save costs at thousands of ranks, counted as `benchmarks/checkpoint_scale.py` does, on a model of few layers:
the limits are those of the whole model, in proportion, and what grows with the ranks alone is that of all ranks."""

from __future__ import annotations

import pytest

from benchmarks.checkpoint_scale import STATES, counted


@pytest.mark.sample(1)
@pytest.mark.parametrize("state", ["llama-70b", "hsdp", "moe-235b"])
def test_what_a_save_costs_at_thousands_of_ranks(state: str) -> None:
    few, many = (counted(state, world, layers=3) for world in (64, 4096))
    assert few.tensors == many.tensors
    # A line for each file, and nothing for a tensor and a rank.
    per_file = (many.manifest_nbytes - few.manifest_nbytes) / (many.files - few.files)
    assert per_file < 140, "bytes of a file's name, sizes and digest"
    assert many.files <= 4096
    assert few.manifest_nbytes < 70 * few.tensors + 140 * few.files + 5000
    assert many.memory_nbytes < 32 << 20
    # In both rounds, with the record of a file; what is passed on are the records of those below.
    # Five numbers in it are those of ranks, which have two digits more.
    assert many.sent_nbytes <= 250 and many.sent_nbytes - few.sent_nbytes <= 10
    assert many.passed_on_nbytes <= 280 * 56 + 1000
    assert many.depth <= 3 and many.fan_in <= 16


def test_the_states_are_those_that_are_documented() -> None:
    assert set(STATES) == {"llama-70b", "hsdp", "moe-235b", "moe-modules"}
    whole = counted("llama-70b", 64)
    assert whole.tensors == 4 * 723
