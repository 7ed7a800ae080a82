"""A 64-bit digest of each parameter's value at sharding, and whether its shard was written since."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .._torch import local_of, version_of
from .sharded import Initial, ShardedParam
from .swap import Found

# ---- digest ----------------------------------------------------------------------------------------------------------
# 64 bits of a tensor's bits: equal for equal values, different for different ones, including permutations.
#
#     element i, 64 bits of memory     x[i] * w[i], with its upper half folded into its lower one
#     row of 32768 of them             their sum
#     tensor                           the sums are digested in the same way, until one is left
#
# `w` are odd numbers, the same everywhere. All arithmetic is modulo 2**64, so a CPU and a GPU get the same result. Two
# different tensors collide with probability 2**-64; if they differ only by a swapped pair of signs, 2**-32. It is no
# protection against deliberate collisions. `benchmarks/digest.py` measures its speed; it takes 512 KiB.

_ROW = 1 << 15
# Rows per step on an accelerator, where a launch costs more than a row.
_ROWS_ON_DEVICE = 512


def can_digest(tensor: Tensor) -> bool:
    """Whether `tensor` is plain memory with data: no subclass, not on the meta device, not sparse, not quantised."""
    plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
    return plain and not tensor.is_meta and not tensor.is_quantized


def digest(tensor: Tensor) -> Tensor:
    """The digest of `tensor` (any shape and dtype that passes `can_digest`): int64, 0-dim, on its device.

    Shape and dtype are not part of it. Reads the tensor once; a non-contiguous one is copied first.
    """
    with torch.no_grad():
        flat = tensor.detach()
        if flat.is_complex():
            flat = torch.view_as_real(flat.resolve_conj())
        # Not reshape: a tensor of one element may have any stride and be contiguous.
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
    """One sum per row of `words` (n,); the last row may be shorter. Shape: (n / 32768, rounded up; at least 1)."""
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


_made: dict[torch.device, Tensor] = {}


def table_nbytes(device: torch.device) -> int:
    """Bytes of the table that digests keep on `device`, once for all models."""
    return _made[device].nbytes if device in _made else 0


def _weights(device: torch.device) -> Tensor:
    """(32768,) odd numbers, from a formula, so that the user's random generators stay untouched."""
    found = _made.get(device)
    if found is None:
        found = _made[device] = _numbers().to(device)
    return found


@functools.cache
def _numbers() -> Tensor:
    # The finaliser of MurmurHash3 on 1, 2, 3, ...; products wrap, and the mask makes shifts those of unsigned numbers.
    with torch.inference_mode(False):
        x, mask = torch.arange(1, _ROW + 1, device="cpu") * (0x9E37_79B9_7F4A_7C15 - (1 << 64)), (1 << 31) - 1
        for factor in (0xFF51_AFD7_ED55_8CCD, 0xC4CE_B9FE_1A85_EC53):
            x = (x ^ (x >> 33 & mask)) * (factor - (1 << 64))
        return (x ^ (x >> 33 & mask)) | 1


# ---- initial ---------------------------------------------------------------------------------------------------------


def note_initial(params: Sequence[ShardedParam], found: Sequence[Found]) -> None:
    """Remember the values in `found`, from which `params` were made; skips subclasses and tensors without data."""
    for param, source in zip(params, found, strict=True):
        full = local_of(source.parameter) if isinstance(source.parameter, DTensor) else source.parameter
        if can_digest(full) and can_digest(param.local):
            noted = digest(full), digest(param.local), weakref.ref(param.local), _versions(param)
            param.initial = Initial(*noted, version_of(source.parameter))


def note_loaded(param: ShardedParam, value: Tensor) -> None:
    """Note that `param` was made or loaded from the full `value`: ranks now compare this value."""
    if can_digest(value) and can_digest(param.local):
        param.initial = Initial(digest(value), digest(param.local), weakref.ref(param.local), _versions(param), -1)


def are_written(params: Sequence[ShardedParam]) -> list[bool]:
    """Whether each shard was written, in any way, or replaced since. True for one without a noted value. Reads the
    others once, with one synchronisation per device."""
    differs: list[Tensor | None] = [None] * len(params)
    for i, param in enumerate(params):
        noted = param.initial
        if noted is not None and noted.local() is param.local and noted.versions == _versions(param):
            # Writes through `.data` count nowhere.
            differs[i] = digest(param.local) != noted.shard
    return [value is not False for value in numbers_of(differs)]


def written_before(params: Sequence[ShardedParam]) -> str:
    """How often each parameter was written before it was sharded; "" if the value of any is unknown, or was loaded or
    written since. Ranks that only drew their initial values, by the same program, have the same text."""
    noted = [param.initial for param in params if param.initial is not None and param.initial.writes >= 0]
    if len(noted) < len(params) or any(are_written(params)):
        return ""
    return ",".join(str(initial.writes) for initial in noted)


def _versions(param: ShardedParam) -> tuple[int, int]:
    return version_of(param.sharded), version_of(param.local)


def full_digests(params: Sequence[ShardedParam]) -> list[int | None]:
    """The noted digests as numbers, None where there is none. One synchronisation per device."""
    return numbers_of([None if param.initial is None else param.initial.full for param in params])


def numbers_of(tensors: Sequence[Tensor | None]) -> list[Any]:
    """The value of each 0-dim tensor, None where there is none. One synchronisation per device."""
    values: list[Any] = [None] * len(tensors)
    by_device: dict[torch.device, list[tuple[int, Tensor]]] = {}
    for i, tensor in enumerate(tensors):
        if tensor is not None:
            by_device.setdefault(tensor.device, []).append((i, tensor))
    for found in by_device.values():
        for (i, _), value in zip(found, torch.stack([tensor for _, tensor in found]).tolist(), strict=True):
            values[i] = value
    return values
