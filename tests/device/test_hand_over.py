"""`weights`, `transfer` and `average` on a device: order with the steps around them, late messages, memory."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from fullshard import MixedPrecisionPolicy, average, fully_shard, transfer, weights
from tests.harness import on_device
from tests.harness.on_device import Setup
from tests.harness.pool import pool

CASE = on_device.case_of(Setup("packed"))
BUCKET = 64 << 10


def _trained(rank: int, model: Any, optimizer: Any, step: int) -> None:
    batch = tuple(part.to("simulated", non_blocking=True) for part in CASE.batch(step, rank))
    CASE.loss(model, batch).backward()  # type: ignore[arg-type]
    optimizer.step()
    optimizer.zero_grad()


def _hands_over(rank: int, offload: bool) -> dict[str, Any]:
    from tests.harness import nccl, simulated

    device = torch.simulated  # type: ignore[attr-defined]
    with simulated.watched() as seen:
        setup = Setup("packed", offload=offload)
        model: Any = on_device.sharded(CASE.build().to("simulated"), setup)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        mean = average(model, decay=0.5, device="cpu" if offload else None)
        gc.collect()
        before = device.memory_allocated()
        host = average(model, decay=0.5, device="cpu")
        gc.collect()
        grown = device.memory_allocated() - before
        engine: Any = CASE.build(seed=1).bfloat16()
        engine = engine.to("simulated") if rank == 1 else None
        move = transfer(model, engine, limit_nbytes=BUCKET)
        same, peaks = [], []
        for step in range(2):
            _trained(rank, model, optimizer, step)
            mean.update()
            host.update()
            gc.collect()
            rest = device.memory_allocated()
            device.reset_peak_memory_stats()
            found = {}
            for bucket in weights(model, bucket_nbytes=BUCKET):
                found.update({name: tensor.cpu() for name, tensor in bucket})
            del bucket
            peaks.append(device.max_memory_allocated() - rest)
            device.reset_peak_memory_stats()
            move.run()
            peaks.append(device.max_memory_allocated() - rest)
            with mean.applied():
                averaged = {name: tensor.cpu() for name, tensor in weights(model).tensors()}
            with host.applied():
                same += [torch.equal(averaged[name], tensor.cpu()) for name, tensor in weights(model).tensors()]
            # The next step follows at once: what was read is that of this one.
            _trained(rank, model, optimizer, 10 + step)
            if engine is not None:
                arrived = {name: tensor.cpu() for name, tensor in engine.state_dict().items()}
                same.append(all(torch.equal(arrived[name], found[name].bfloat16()) for name in found))
            same.append(any(not torch.equal(averaged[name], found[name]) for name in found) or step == 0)
        torch.accelerator.synchronize()
        largest = max(tensor.nbytes for tensor in found.values())
        values = {name: tensor.double().sum().item() for name, tensor in found.items()}
        on_host = {tensor.to_local().device.type for tensor in host.state_dict()["means"].values()}
        del model, optimizer, engine, move, mean, host
        gc.collect()
    return {
        "faults": [race.explain() for race in seen.races] + nccl.failures(),
        "same": same,
        "peaks": peaks,
        "largest": largest,
        "values": values,
        "host": (on_host, grown),
    }


@pytest.mark.slow
@pytest.mark.parametrize("offload", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)])
def test_hand_over_between_steps_is_ordered_and_bounded(offload: bool, seed: int) -> None:
    one, other = pool(2, backend="nccl").run(_hands_over, offload, seed=seed, timeout=90)
    for found in (one, other):
        assert not found["faults"], found["faults"][0]
        assert all(found["same"]), found["same"]
        assert found["host"] == ({"cpu"}, 0)
        buckets, moves = found["peaks"][::2], found["peaks"][1::2]
        # The tensors of a bucket, and the messages that they come in; the bucket before is freed later.
        most = max(BUCKET, found["largest"])
        assert max(buckets) <= 3 * most + 4096
        # One message; a target that is not sharded has memory of its own.
        assert max(moves) <= BUCKET + found["largest"]
    assert one["values"] == other["values"]


class _Turned(torch.nn.Module):
    """Notes what it was handed."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x: Any, freqs: Any) -> Any:
        self.seen = {"x": (x.dtype, x.device.type), "freqs": (freqs.dtype, freqs.device.type)}
        return self.linear(x)


def _casts_by_name(rank: int) -> list[Any]:
    seen = []
    for names in (["!freqs"], ["freqs"]):
        model: Any = _Turned().to("simulated")
        fully_shard(model, mp_policy=MixedPrecisionPolicy(torch.bfloat16, cast_forward_inputs=names))
        x = torch.ones(2, 4)
        model.linear.forward = lambda x: x
        model(x, x)
        seen.append(model.seen)
    return seen


def test_one_tensor_under_two_names_moves_and_is_cast_for_one_of_them() -> None:
    """The root of a device moves its inputs there: what is not cast is moved nevertheless."""
    low, full = (torch.bfloat16, "simulated"), (torch.float32, "simulated")
    for found in pool(2, backend="nccl").run(_casts_by_name):
        assert found == [{"x": low, "freqs": full}, {"x": full, "freqs": low}]


OPTIMIZERS: dict[str, Any] = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    "ASGD": lambda parameters: torch.optim.ASGD(parameters, lr=1e-2),  # its counts are on the device
}


def _moves_state(rank: int, name: str) -> dict[str, Any]:
    """A run that continues in another layout: both do the same steps afterwards."""
    from tests.harness import nccl, simulated

    with simulated.watched() as seen:
        setup = Setup("packed")
        models: list[Any] = [on_device.sharded(CASE.build(seed=s).to("simulated"), setup) for s in (0, 1)]
        whole: Any = CASE.build(seed=2).to("simulated")
        source, target = models
        mine, other, plain = (OPTIMIZERS[name](m.parameters()) for m in (source, target, whole))
        for step in range(2):
            _trained(rank, source, mine, step)
        transfer((source, mine), (target, other), limit_nbytes=BUCKET).run()
        transfer((source, mine), (whole, plain) if rank == 1 else None, limit_nbytes=BUCKET).run()
        kept = dict(weights(source).tensors())
        same = []
        if rank == 1:
            same += [torch.equal(kept[key].cpu(), tensor.cpu()) for key, tensor in whole.state_dict().items()]
            places = {key: value.device.type for key, value in plain.state[next(whole.parameters())].items()}
        else:
            places = {key: value.device.type for key, value in other.state[next(target.parameters())].items()}
        for step in range(2, 4):
            _trained(rank, source, mine, step)
            _trained(rank, target, other, step)
        ours, theirs = dict(weights(source).tensors()), dict(weights(target).tensors())
        same += [torch.equal(ours[key].cpu(), theirs[key].cpu()) for key in ours]
        torch.accelerator.synchronize()
        own = {key: value.device.type for key, value in mine.state[next(source.parameters())].items()}
        del models, source, target, whole, mine, other, plain, kept, ours, theirs
        gc.collect()
    return {"faults": [race.explain() for race in seen.races] + nccl.failures(), "same": same, "at": (places, own)}


@pytest.mark.parametrize("name", ["ASGD", pytest.param("AdamW", marks=pytest.mark.slow)])
def test_a_run_continues_with_its_optimizer_on_a_device(name: str) -> None:
    for found in pool(2, backend="nccl").run(_moves_state, name, timeout=90):
        assert not found["faults"], found["faults"][0]
        assert found["same"] and all(found["same"]), found["same"]
        places, own = found["at"]
        assert places == own
