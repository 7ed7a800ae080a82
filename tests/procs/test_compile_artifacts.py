"""What torch.compile writes for later runs: `torch.compiler.save_cache_artifacts`, and packages of compiled code."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._dynamo as dynamo
from torch import nn
from torch._dynamo.utils import counters

import fullshard
from tests.harness import installed
from tests.harness.behaviours import behaviour
from tests.harness.compiled import fresh_compiler, train
from tests.harness.implementations import FULLSHARD, TORCH, for_each_implementation
from tests.harness.models import BY_NAME, Trained, assert_same_training
from tests.harness.pool import pool
from tests.procs.test_compile_programs import own_cache

pytestmark = pytest.mark.hang_after(400)
TIMEOUT = 360.0
IMPLEMENTATIONS = {impl.name: impl for impl in (TORCH, FULLSHARD)}
CASE = BY_NAME["residual"]


def _run(rank: int, impl: str, artifacts: bytes | None) -> tuple[Trained, bytes, dict[str, int]]:
    """Train compiled blocks with an empty cache, or with what `artifacts` has; what was found in it."""
    with own_cache(rank), fresh_compiler("inductor"):
        if artifacts is not None:
            torch.compiler.load_cache_artifacts(artifacts)
        model: Any = CASE.build()
        for block in model:
            block.compile()
        trained = train(rank, CASE.shard(model, IMPLEMENTATIONS[impl].fully_shard), CASE.loss, CASE.batch)
        found = dict(counters["aot_autograd"])
        saved = torch.compiler.save_cache_artifacts()
        assert saved is not None
        return trained, saved[0], found


def _saved_and_loaded(rank: int, impl: str) -> None:
    trained, artifacts, found = _run(rank, impl, None)
    assert found["autograd_cache_miss"] == 2 and "autograd_cache_hit" not in found
    again, _, found = _run(rank, impl, artifacts)
    assert found["autograd_cache_hit"] == 2 and "autograd_cache_miss" not in found
    assert_same_training(again, trained, 0)


@behaviour("`torch.compiler.save_cache_artifacts`: a later run finds its compiled blocks", area="compile")
@for_each_implementation
@pytest.mark.slow
def test_a_later_run_compiles_nothing(impl: Any) -> None:
    pool(2).run(_saved_and_loaded, impl.name, timeout=TIMEOUT)


def _packaged(rank: int) -> str:
    with dynamo.config.patch(caching_precompile=True), fresh_compiler():
        model = fullshard.fully_shard(nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
        model.compile(backend="eager")
        try:
            model(torch.ones(2, 4)).sum()
        except dynamo.exc.InternalTorchDynamoError as error:
            return str(error)
        return "compiled"


@behaviour(
    "packages of compiled code (TORCH_CACHING_PRECOMPILE) of sharded modules are an error",
    area="compile",
    torch="different",
    reason="torch writes one, which can be read only where the class was sharded before it is compiled",
)
def test_packages_of_compiled_code_are_refused() -> None:
    """Dynamo pickles what guards compare, and so the module. Its own way out of that, a PackageError, ends in an
    assertion in torch 2.13."""
    (said,) = pool(1).run(_packaged)
    if said == "compiled":
        assert not installed.is_pinned(), "torch leaves out the package, and compiles nevertheless"
        return
    assert "PicklingError: pickle: expected a module that is not sharded, found FSDPSequential" in said
