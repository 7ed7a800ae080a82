"""64 bits of a tensor's bits: equal for equal values, different for others, permuted ones too.

    element i, 64 bits of memory     x[i] * w[i], its upper half folded into its lower one
    row of 32768 of them             their sum
    tensor                           the sums are digested in the same way, until one is left

`w` are odd numbers, the same everywhere. All arithmetic is modulo 2**64, so a CPU and a GPU find the same. Two
different tensors have the same digest with probability 2**-64; where a pair of signs is exchanged and nothing else,
2**-32. It is no protection against somebody who looks for such tensors. `benchmarks/digest.py` measures its speed; it
takes 512 KiB.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn

_ROW = 1 << 15
# On an accelerator so many rows at a time: a launch costs more than a row.
_ROWS_ON_DEVICE = 512


def can_digest(tensor: Tensor) -> bool:
    """Whether `tensor` is plain memory with data: no subclass, not on the meta device, not sparse, not quantised."""
    plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
    return plain and not tensor.is_meta and not tensor.is_quantized


def digest(tensor: Tensor) -> Tensor:
    """Of `tensor`, any shape and dtype for which `can_digest`: int64, no dims, on its device.

    Shape and dtype are not in it. Reads it once; what is not contiguous is copied first.
    """
    with torch.no_grad():
        flat = tensor.detach()
        if flat.is_complex():
            flat = torch.view_as_real(flat.resolve_conj())
        # Not reshape: one element may have any stride and be contiguous.
        flat = flat.resolve_neg().contiguous().as_strided((flat.numel(),), (1,)).view(torch.uint8)
        if flat.storage_offset() % 8:
            flat = flat.clone()
        whole = flat.numel() // 8 * 8
        words = flat[:whole].view(torch.int64)
        if whole < flat.numel():
            tail = flat.new_zeros(8)
            tail[: flat.numel() - whole] = flat[whole:]
            sums = torch.cat([_sums(words), tail.view(torch.int64)])
        else:
            sums = _sums(words)
        while sums.numel() > 1:
            sums = _sums(sums)
        return sums.reshape(())


def _sums(words: Tensor) -> Tensor:
    """One sum for each row of `words` (n,), the last of which may be shorter: (n / 32768, rounded up; at least 1)."""
    weights = _weights(words.device)
    count, left = divmod(words.numel(), _ROW)
    step = 1 if words.device.type == "cpu" else _ROWS_ON_DEVICE
    rows = words[: count * _ROW].view(count, _ROW)
    sums = torch.zeros(count + (left > 0 or count == 0), dtype=torch.int64, device=words.device)
    if count:
        product = torch.empty(min(step, count), _ROW, dtype=torch.int64, device=words.device)
        folded = torch.empty_like(product)
        for start in range(0, count, step):
            some = min(step, count - start)
            torch.mul(rows[start : start + some], weights, out=product[:some])
            torch.bitwise_right_shift(product[:some], 32, out=folded[:some])
            product[:some].bitwise_xor_(folded[:some])
            torch.sum(product[:some], 1, out=sums[start : start + some])
    if left:
        product = words[count * _ROW :] * weights[:left]
        sums[count] = product.bitwise_xor_(product >> 32).sum()
    return sums


@functools.cache
def _weights(device: torch.device) -> Tensor:
    """(32768,) odd numbers, from a formula: the random generators of the process are the user's."""
    # The finaliser of MurmurHash3 on 1, 2, 3, ...; shifts of Python's integers are those of unsigned numbers.
    mask = (1 << 64) - 1
    values = []
    for i in range(1, _ROW + 1):
        x = (i * 0x9E37_79B9_7F4A_7C15) & mask
        x = ((x ^ (x >> 33)) * 0xFF51_AFD7_ED55_8CCD) & mask
        x = ((x ^ (x >> 33)) * 0xC4CE_B9FE_1A85_EC53) & mask
        x = (x ^ (x >> 33)) | 1
        values.append(x - (1 << 64) if x >> 63 else x)
    with torch.inference_mode(False):
        return torch.tensor(values, dtype=torch.int64).to(device)
