"""torch.compile in tests: a backend that counts what reaches it, and a compiler that knows nothing of other tests."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch._dynamo as dynamo
from torch import nn
from torch._dynamo.utils import counters

from tests.harness.models import Batch, Trained, adamw, collect

STEPS = 4
# What wrappers put into names.
WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "inner.")

Loss = Callable[[nn.Module, Batch], torch.Tensor]


class Graphs:
    """A backend that counts: `products` has, for each graph that dynamo made, its matrix products."""

    def __init__(self, backend: str) -> None:
        self._inner = dynamo.lookup_backend(backend)
        self.products: list[int] = []

    def __call__(self, graph: torch.fx.GraphModule, example_inputs: Any) -> Any:
        # Recomputed parts are graphs inside the graph.
        targets = [str(n.target) for m in graph.modules() if isinstance(m, torch.fx.GraphModule) for n in m.graph.nodes]
        self.products.append(sum(any(word in t for word in ("linear", "matmul", "scaled_dot")) for t in targets))
        return self._inner(graph, example_inputs)

    @property
    def breaks(self) -> int:
        return sum(counters["graph_break"].values())


@contextmanager
def fresh_compiler(backend: str = "eager") -> Iterator[Graphs]:
    """Nothing compiled before, and nothing left for the next job of the process."""
    dynamo.reset()
    counters.clear()
    try:
        with warnings.catch_warnings():
            # Dynamo's own look at every tensor it meets.
            warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
            if backend == "inductor":
                # It imports what torch itself has deprecated.
                warnings.simplefilter("ignore", DeprecationWarning)
            yield Graphs(backend)
    finally:
        dynamo.reset()
        counters.clear()


def train(rank: int, model: nn.Module, loss: Loss, batch: Callable[[int, int], Batch], *, settled: int = 2) -> Trained:
    """AdamW steps; from step `settled` on a recompilation is an error."""
    optimizer = adamw(model.parameters())
    for step in range(STEPS):
        with dynamo.config.patch(error_on_recompile=step >= settled):
            loss(model, batch(step, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
    trained = collect(model, optimizer)
    return Trained(*({_clean(name): v for name, v in d.items()} for d in (trained.params, trained.state)))


def _clean(name: str) -> str:
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def compiled(module: nn.Module, graphs: Graphs, *, wrap: bool, **options: Any) -> Any:
    """In place (`module.compile()`), or a new module around it (`torch.compile(module)`)."""
    if wrap:
        return torch.compile(module, backend=graphs, **options)
    module.compile(backend=graphs, **options)
    return module
