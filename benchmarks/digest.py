"""What it costs to compare initial values: the digest of a tensor, beside SHA-256 of its bytes and a plain sum.

    python -m benchmarks.digest                 a minute on two cores; --tiny: a second

And beside what happens to a full parameter anyway: drawing its values, and cutting it (a copy of a part).
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from benchmarks.common import facts
from fullshard.param import digest


def _sha256(tensor: Tensor) -> None:
    view = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    hashlib.sha256(view).hexdigest()


WAYS: dict[str, Callable[[Tensor], object]] = {
    "digest": digest,
    "sha256": _sha256,
    "sum of the bits": lambda tensor: tensor.view(torch.int32).sum(dtype=torch.int64),
    "draw (uniform)": lambda tensor: nn.init.uniform_(tensor, -1, 1),
    "copy of a half": lambda tensor: tensor[: len(tensor) // 2].clone(),
}


def _seconds(way: Callable[[Tensor], object], tensor: Tensor, repeats: int) -> float:
    way(tensor)
    found = []
    for _ in range(repeats):
        begun = time.perf_counter()
        way(tensor)
        found.append(time.perf_counter() - begun)
    return statistics.median(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true")
    parsed = parser.parse_args()
    numels = (1 << 10, 1 << 16) if parsed.tiny else (1 << 10, 1 << 16, 1 << 22, 1 << 26)
    results = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for numel in numels:
            tensor = torch.randn(numel)
            seconds = {name: _seconds(way, tensor, 3 if parsed.tiny else 15) for name, way in WAYS.items()}
            rates = {name: tensor.nbytes / 1e9 / taken for name, taken in seconds.items()}
            results.append({"threads": threads, "nbytes": tensor.nbytes, "gb_per_s": rates})
            shown = ", ".join(f"{name} {rate:.2f}" for name, rate in rates.items())
            print(f"{threads} threads, {tensor.nbytes:>11,} bytes, GB/s: {shown}")
    print(json.dumps({"benchmark": "digest", "facts": facts(), "results": results}))


if __name__ == "__main__":
    main()
