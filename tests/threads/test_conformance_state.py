"""Conformance: mixed precision and state dicts.

Programs written for torch's FSDP2 rely on what is asserted here. Ranks are threads, so values are real; each test is a
function of (rank, impl) that asserts on its own rank.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from tests.harness import tolerance
from tests.harness.behaviours import behaviour
from tests.harness.implementations import (
    Implementation,
    each_world,
    for_each_implementation,
    probes,
    run,
    sharded,
)
from tests.harness.models import (
    Transformer,
    seeded,
)

# ---- mixed precision -----------------------------------------------------------------------------------------


@behaviour("dtypes of parameters, inputs, outputs and gradients under a policy", area="mixed precision")
@for_each_implementation
@each_world
def test_mixed_precision_dtypes(impl: Implementation, world: int) -> None:
    def rank_main(rank: int, impl: Implementation) -> None:
        policy = impl.MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float64
        )
        model = sharded(impl, probes(2), mp_policy=policy)
        out = model(torch.randn(2, 5))
        assert out.dtype == torch.float64
        out.sum().backward()
        for probe in model:
            assert probe.seen == [(nn.Parameter, (5, 5), torch.bfloat16, torch.bfloat16)]
        for param in model.parameters():
            assert param.dtype == torch.float32, "storage stays in the original dtype"
            assert param.grad is not None and param.grad.dtype == torch.float32

    run(rank_main, impl, world=world)


@behaviour("inputs are cast in any nesting, or left alone by `cast_forward_inputs=False`", area="mixed precision")
@for_each_implementation
@each_world
def test_inputs_are_left_alone_when_asked(impl: Implementation, world: int) -> None:
    class KeepsInput(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))
            self.dtypes: list[torch.dtype] = []

        def forward(self, x: torch.Tensor, *, extra: dict[str, list[torch.Tensor]]) -> torch.Tensor:
            self.dtypes += [x.dtype, extra["a"][0].dtype, extra["a"][1].dtype]
            return x.to(self.weight.dtype) * self.weight

    def rank_main(rank: int, impl: Implementation) -> None:
        for cast, floating in ((True, torch.bfloat16), (False, torch.float32)):
            policy = impl.MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=cast)
            model = impl.fully_shard(KeepsInput(), mp_policy=policy)
            out = model(torch.ones(4), extra={"a": [torch.ones(2), torch.arange(2)]})
            assert model.dtypes == [floating, floating, torch.int64], "floating-point tensors in any nesting, no others"
            assert out.dtype == torch.bfloat16

    run(rank_main, impl, world=world)


@behaviour("bfloat16 gradients are reduced in float32", area="mixed precision")
@for_each_implementation
@each_world
def test_reduction_in_float32_of_bfloat16_gradients(impl: Implementation, world: int) -> None:
    """Each rank's bfloat16 gradient is exact here, and so is their float32 mean; a bfloat16 sum would round it away."""
    contributions = [1.0, 1 / 512, 0.0, 0.0][:world]  # 1 + 1/512 has no bfloat16

    def rank_main(rank: int, impl: Implementation) -> None:
        policy = impl.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        model = impl.fully_shard(seeded(lambda: nn.Linear(3, 4, bias=False)), mp_policy=policy)
        model(torch.full((1, 3), contributions[rank])).sum().backward()
        expected = torch.full((4, 3), sum(contributions) / world)
        assert torch.equal(model.weight.grad.full_tensor(), expected)

    run(rank_main, impl, world=world)


# ---- state dicts ---------------------------------------------------------------------------------------------


@behaviour("`state_dict` is sharded and needs no communication; `load_state_dict` puts it back", area="state")
@for_each_implementation
@each_world
def test_state_dict_is_sharded_and_needs_no_communication(impl: Implementation, world: int) -> None:
    def rank_main(rank: int, impl: Implementation) -> None:
        plain = seeded(Transformer)
        plain.register_buffer("steps", torch.tensor(3))
        keys = list(plain.state_dict())
        model = plain
        for layer in model.layers:
            impl.fully_shard(layer)
        impl.fully_shard(model)
        model(torch.zeros(1, 3, dtype=torch.long)).sum().backward()
        if rank == 0:  # alone: a collective in here would wait for rank 1 and the test would hang
            state = model.state_dict()
            assert list(state) == keys
            for name, value in state.items():
                assert isinstance(value, DTensor) == (name != "steps"), name
                if isinstance(value, DTensor):
                    assert value.placements == (Shard(0),) and not value.requires_grad
        dist.barrier()
        state = {name: value.clone() for name, value in model.state_dict().items()}
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()
        model.load_state_dict(state)
        for name, value in model.state_dict().items():
            local, wanted = (t.to_local() if isinstance(t, DTensor) else t for t in (value, state[name]))
            assert torch.equal(local, wanted), name
        before = model(torch.zeros(1, 3, dtype=torch.long))
        with torch.no_grad():
            model.head.weight.mul_(2)
        assert tolerance.close(model(torch.zeros(1, 3, dtype=torch.long)), 2 * before), (
            "a change is seen by the next forward"
        )

    run(rank_main, impl, world=world)
