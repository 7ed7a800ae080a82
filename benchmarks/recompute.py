"""What recomputation saves and costs in the trainer's model: bytes and operations, counted, not timed.

    python -m benchmarks.recompute                both shapes; half a minute on one core

    kept         bytes of tensors that autograd keeps from forward to backward, as saved-tensor hooks see them: each
                 storage once, parameters and buffers left out
    of a block   bytes that one block's own forward keeps: with recomputation they come back, for one block at a time,
                 in backward
    forward, step   operations of matrix products and attention (torch.utils.flop_counter); a step is forward and
                 backward

Recomputation, as the trainer does it, stops where the last tensor that backward needs is there again, which leaves out
a block's last product. "to the end" is without that: the usual "one more forward".

Nothing is computed: tensors are fake (shapes and dtypes alone), so that a model of 7 billion parameters takes no
memory. Attention is the CPU's fused kernel, which keeps queries, keys, values and the output and no scores, as fused
kernels of a GPU do. It is counted in full, although causal; its backward as five products, because it computes the
scores again. That a sharded model keeps the same is in tests/fake/test_recompute_count.py.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import set_checkpoint_early_stop
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.common import facts
from fullshard import checkpoint_activations
from fullshard.train.model import Llama, LlamaShape

# The trainer's defaults; and what seed 002 speaks of: 32 layers, width 4096, 32 sequences of 2048 tokens (Llama-2-7B).
TRAINER = LlamaShape(vocab=256, layers=4, dim=128, heads=4, kv_heads=2, ffn_dim=352, context=128)
SEED = LlamaShape(
    vocab=32000, layers=32, dim=4096, heads=32, kv_heads=32, ffn_dim=11008, context=2048, tie_embeddings=False
)
SHAPES = {"trainer": (TRAINER, 4), "seed 002": (SEED, 32)}  # with the sequences of a forward
TINY = {"trainer": (TRAINER, 2)}
WAYS = ("none", "each block", "to the end")  # of recomputing


@dataclass(frozen=True)
class Counted:
    """One way of training. Bytes and operations of one rank's step."""

    dtype: str
    recompute: str  # one of WAYS
    kept_nbytes: int
    block_nbytes: int  # of this: what one block keeps, or its input with recomputation
    forward_flop: int
    step_flop: int


class Kept:
    """Counts what is saved for backward while it is open. Holds it too: a freed storage's identity may come again."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._known = {_storage(tensor) for tensor in (*model.parameters(), *model.buffers())}
        self._tensors: list[Tensor] = []
        self.nbytes = 0
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)

    def leave_out(self, tensor: Tensor) -> None:
        """Do not count the memory of `tensor`."""
        self._known.add(_storage(tensor))

    def _pack(self, tensor: Tensor) -> Tensor:
        key = _storage(tensor)
        if key not in self._known:
            self._known.add(key)
            self._tensors.append(tensor)
            self.nbytes += tensor.untyped_storage().nbytes()
        return tensor

    def __enter__(self) -> Kept:
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._hooks.__exit__(*error)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _attention_flop(query: Sequence[int], key: Sequence[int], value: Sequence[int], *_: Any, **__: Any) -> int:
    """Two products, queries by keys and scores by values. Shapes are (B, H, T, E)."""
    batch, heads, length, width = query
    return 2 * batch * heads * length * key[2] * (width + value[3])


def _attention_backward_flop(gradient: Sequence[int], *qkv: Any, **_: Any) -> int:
    return _attention_flop(*qkv) * 5 // 2


# The fused kernel of the CPU, which torch does not count.
ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flop,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward_flop,
}


def count(shape: LlamaShape, sequences: int, dtype: torch.dtype, recompute: str) -> Counted:
    """One step of the trainer's model with parameters and activations of `dtype`."""
    with FakeTensorMode(), set_checkpoint_early_stop(recompute != "to the end"):
        # Not `.to(dtype)`: converting fake parameters is refused.
        torch.set_default_dtype(dtype)
        model = Llama(shape)
        torch.set_default_dtype(torch.float32)
        for name, buffer in model.named_buffers():  # angles stay in float32, as under mixed precision
            model.get_submodule(name.rpartition(".")[0]).register_buffer(name.rpartition(".")[2], buffer.float())
        if recompute != "none":
            checkpoint_activations(model, "classes", classes=["Block"])
        tokens = torch.zeros(sequences, shape.context, dtype=torch.int64)
        x = torch.zeros(sequences, shape.context, shape.dim, dtype=dtype, requires_grad=True)
        with Kept(model) as of_block:
            model.layers[0](x)
        flops = FlopCounterMode(display=False, custom_mapping=ATTENTION)
        with flops:
            with Kept(model) as kept:
                loss = F.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten())
            forward = flops.get_total_flops()
            loss.backward()
    name = str(dtype).removeprefix("torch.")
    return Counted(name, recompute, kept.nbytes, of_block.nbytes, forward, flops.get_total_flops())


def _spelt(number: float) -> str:
    """With three digits and a decimal prefix: 1.23 G."""
    prefixes = ["", "k", "M", "G", "T", "P"]
    while number >= 1000:
        number /= 1000
        del prefixes[0]
    return f"{number:.3g} {prefixes[0]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="the trainer's shape alone, two sequences")
    shapes = TINY if parser.parse_args().tiny else SHAPES
    results = {}
    for name, (shape, sequences) in shapes.items():
        rows = [count(shape, sequences, dtype, way) for dtype in (torch.float32, torch.bfloat16) for way in WAYS]
        print(f"\n{name}: {sequences} x {shape.context} tokens, {shape}\n")
        print("| dtype | recomputation | kept | of a block | forward | step | step / without |")
        print("|---|---|---|---|---|---|---|")
        for row in rows:
            base = next(other for other in rows if (other.dtype, other.recompute) == (row.dtype, "none"))
            print(
                f"| {row.dtype} | {row.recompute} | {_spelt(row.kept_nbytes)}B | {_spelt(row.block_nbytes)}B "
                f"| {_spelt(row.forward_flop)}FLOP | {_spelt(row.step_flop)}FLOP "
                f"| {row.step_flop / base.step_flop:.3f} |"
            )
        results[name] = {"shape": asdict(shape), "sequences": sequences, "rows": [asdict(row) for row in rows]}
    print(json.dumps({"benchmark": "recompute", "facts": facts(), "results": results}))


if __name__ == "__main__":
    main()
