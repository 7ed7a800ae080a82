"""The search for the largest micro-batch, against every limit that memory may have. Numbers alone."""

from __future__ import annotations

import pytest

from fullshard.extras.micro_batches import Sizes


def _windows(sizes: Sizes, samples: list[int], limits: list[int]) -> list[list[int]]:
    """The sizes that each window tries, the last of them the one that fitted."""
    tried = []
    for of_window, limit in zip(samples, limits, strict=True):
        tried.append([sizes.first(of_window)])
        while tried[-1][-1] > limit:
            assert sizes.failed(tried[-1][-1]), "there is a smaller size"
            tried[-1].append(sizes.first(of_window))
        sizes.went_well(tried[-1][-1], of_window)
    return tried


@pytest.mark.parametrize("samples", [*range(1, 34), 64, 100, 255])
def test_bisecting_ends_with_the_fewest_pieces(samples: int) -> None:
    """For every limit: no size that fits makes fewer pieces, after few windows; then nothing fails any more."""
    windows = 2 * samples.bit_length() + 2
    for limit in range(1, samples + 1):
        tried = _windows(Sizes(), [samples] * windows, [limit] * windows)
        assert -(-samples // tried[-1][-1]) == -(-samples // limit), (limit, tried)
        assert len(tried[-1]) == len(tried[-2]) == 1 and tried[-1] == tried[-2], (limit, tried)
        failures = sum(len(window) - 1 for window in tried)
        assert failures <= 2 * samples.bit_length(), (limit, tried)


@pytest.mark.parametrize("samples", range(1, 34))
def test_halving_stays_with_the_first_that_fits(samples: int) -> None:
    for limit in range(1, samples + 1):
        first, *later = _windows(Sizes(bisect=False), [samples] * 4, [limit] * 4)
        assert all(after == (before + 1) // 2 for before, after in zip(first, first[1:], strict=False))
        assert later == [[first[-1]]] * 3


def test_windows_of_other_lengths_and_memory_that_shrinks() -> None:
    sizes = Sizes()
    assert _windows(sizes, [8, 8], [8, 8]) == [[8], [8]]
    assert sizes.size == 0, "nothing failed: a longer window is tried whole"
    assert _windows(sizes, [16, 16, 5], [12, 12, 12]) == [[16, 8], [8], [5]]
    # Twelve would make two pieces of 16 samples, as eight does, but one of 12.
    assert sizes.size == 8
    assert _windows(sizes, [12, 12], [12, 12]) == [[8], [12]]
    # What fitted does so no longer.
    assert _windows(sizes, [12, 12], [2, 2])[0] == [12, 6, 3, 2]


def test_one_sample_is_the_least() -> None:
    sizes = Sizes(size=2)
    assert sizes.failed(2) and sizes.size == 1
    assert not sizes.failed(1)
