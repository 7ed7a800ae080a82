"""64 bits of a tensor: the same for the same bits, wherever they lie, and another number for any others."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fullshard.param import can_digest, digest
from fullshard.param.initial import _ROW

DTYPES = [
    torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int64, torch.int32,
    torch.int16, torch.uint8, torch.bool, torch.complex64,
]  # fmt: skip
# Elements of eight bytes: around a row, and many rows.
NUMELS = (1, 2, 3, 7, 8, 9, 1000, _ROW - 1, _ROW, _ROW + 1, 3 * _ROW + 5)


def value(numel: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(numel, generator=generator).to(dtype)
    return torch.randint(0, 2 if dtype is torch.bool else 100, (numel,), generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equal_bits_have_equal_digests_and_others_have_not(dtype: torch.dtype) -> None:
    """Also as a view that begins anywhere, not contiguous, and beside another tensor in memory."""
    for numel in NUMELS[:8]:
        tensor = value(numel, dtype)
        found = digest(tensor)
        assert found.dtype is torch.int64 and found.dim() == 0
        shifted = torch.empty(numel + 1, dtype=dtype)[1:]
        shifted.copy_(tensor)
        strided = torch.empty(numel, 2, dtype=dtype)[:, 1]
        strided.copy_(tensor)
        assert found == digest(tensor.clone()) == digest(shifted) == digest(strided)
        if numel > 8:
            assert found != digest(value(numel, dtype, seed=1))


@pytest.mark.parametrize("numel", NUMELS)
def test_every_bit_counts(numel: int) -> None:
    """One of them changed, at the ends of rows and in between; in each of the 64."""
    tensor = value(numel, torch.int64)
    found = digest(tensor)
    for position in {0, numel // 2, numel - 1, min(_ROW - 1, numel - 1), min(_ROW, numel - 1)}:
        for bit in range(0, 64, 1 if numel < 10 else 9):
            other = tensor.clone()
            other[position] ^= (1 << bit) if bit < 63 else -(1 << 63)
            assert digest(other) != found, (position, bit)


def test_positions_count() -> None:
    """Exchanges that keep all sums: of two elements, of whole rows, of a permutation matrix, and of signs alone."""
    tensor = value(3 * _ROW, torch.int64)
    found = int(digest(tensor))
    rows = tensor.view(3, _ROW)[[1, 0, 2]].reshape(-1)
    assert int(digest(rows)) != found and int(digest(tensor.flip(0))) != found
    eye = torch.eye(64)
    numbers = {int(digest(eye[torch.randperm(64, generator=torch.Generator().manual_seed(i))])) for i in range(200)}
    assert len(numbers) == 200
    signs = torch.ones(128)
    signs[1::2] = -1.0
    numbers = {int(digest(signs))}
    for i in range(0, 126):
        other = signs.clone()
        other[i], other[i + 1] = signs[i + 1], signs[i]
        numbers.add(int(digest(other)))
    assert len(numbers) == 127


def test_shapes_do_not_count_and_nothing_has_a_digest_too() -> None:
    tensor = value(12, torch.float32)
    assert digest(tensor) == digest(tensor.view(3, 4)) == digest(torch.nn.Parameter(tensor))
    assert int(digest(torch.empty(0))) == int(digest(torch.empty(0, 4))) == 0
    assert digest(torch.tensor(2.5)) == digest(torch.tensor([2.5]))
    with torch.inference_mode():
        assert digest(tensor) == digest(tensor.clone())


def test_what_has_no_plain_memory_is_left_out() -> None:
    assert can_digest(torch.ones(2)) and can_digest(torch.nn.Parameter(torch.ones(2)))
    assert not can_digest(torch.ones(2, device="meta"))
    assert not can_digest(torch.eye(2).to_sparse())


def test_the_formula_stays() -> None:
    """Ranks may run on machines of different kinds, and a number that is written down somewhere stays right."""
    assert int(digest(torch.arange(10))) == -1017506831812160782
    assert int(digest(torch.arange(100_000, dtype=torch.float32))) == -2725810719807648876
