"""CPU offload. On a mesh of CPUs there is nothing to move. What happens beside a device is run here too: `moved`
(tests/harness/moved.py) makes the runtime believe in one, so that every copy takes place and is counted.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import fullshard
from fullshard.comm import HostLink, Landing
from fullshard.comm.group import message_device
from fullshard.comm.offload import land
from fullshard.engine import unit_of
from fullshard.engine.root import refuse_off_host
from fullshard.policy import use_options
from tests.harness.behaviours import behaviour
from tests.harness.implementations import FULLSHARD, Implementation, for_each_implementation, run
from tests.harness.models import BY_NAME, assert_same_training, collect, seeded
from tests.harness.moved import links, moved
from tests.harness.threads import WORLD, run_ranks

assert moved  # a fixture
CASE = BY_NAME["transformer"]


def train(rank: int, model: Any, *, steps: int = 3, clip: Any = None, micro: int = 1) -> Any:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(steps):
        optimizer.zero_grad()
        for part in range(micro):
            model.set_requires_gradient_sync(part == micro - 1)
            CASE.loss(model, CASE.batch(step * micro + part, rank)).backward()
        if clip is not None:
            clip(model.parameters(), 0.5)
        optimizer.step()
    return collect(model, optimizer)


@behaviour("CPUOffloadPolicy on a mesh of CPUs moves nothing and changes nothing", area="offload")
@for_each_implementation
def test_on_a_cpu_mesh_offload_changes_nothing(impl: Implementation) -> None:
    models = [CASE.build() for _ in range(2 * WORLD)]

    def rank_main(rank: int, impl: Implementation) -> None:
        plain = train(rank, CASE.shard(models[rank], impl.fully_shard), clip=impl.clip)
        policy = impl.namespace.CPUOffloadPolicy(pin_memory=False)
        model = CASE.shard(models[WORLD + rank], impl.fully_shard, offload_policy=policy)
        offloaded = train(rank, model, clip=impl.clip)
        assert_same_training(offloaded, plain, 0)
        assert all(p.to_local().device.type == "cpu" for p in model.parameters() if isinstance(p, DTensor))
        if impl is FULLSHARD:
            assert links(model) == [], "nothing is there that could copy"

    run(rank_main, impl)


def test_torch_s_policy_is_accepted_and_others_are_not() -> None:
    def rank_main(rank: int) -> None:
        for policy in (torch_fsdp.CPUOffloadPolicy(), torch_fsdp.OffloadPolicy(), fullshard.OffloadPolicy()):
            model: Any = fullshard.fully_shard(seeded(lambda: nn.Linear(3, 3)), offload_policy=policy)  # type: ignore[arg-type]
            model(torch.ones(1, 3)).sum().backward()
        with pytest.raises(TypeError, match="expected an OffloadPolicy, found True; leave it out"):
            fullshard.fully_shard(nn.Linear(3, 3), offload_policy=True)  # type: ignore[arg-type]

    run_ranks(WORLD, rank_main)


# ---- as on a device ------------------------------------------------------------------------------------------


MIXED = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}


@pytest.mark.sample(1)
@pytest.mark.parametrize(("world", "policy", "micro"), [(1, {}, 2), (1, MIXED, 1), (2, {}, 1), (3, MIXED, 2)])
def test_one_copy_each_way_for_each_gather_and_reduction(world: int, policy: Any, micro: int, moved: None) -> None:
    """Bitwise the training without offload, with clipping and accumulation; for each unit, per micro-batch: the forward
    and the backward gather (one for the root, which stays full), and one reduction per step."""
    models = [CASE.build() for _ in range(2 * world)]

    def rank_main(rank: int) -> None:
        options = {"mp_policy": fullshard.MixedPrecisionPolicy(**policy)}
        clip = fullshard.clip_grad_norm_
        plain = train(rank, CASE.shard(models[rank], fullshard.fully_shard, **options), clip=clip, micro=micro)
        options["offload_policy"] = fullshard.CPUOffloadPolicy()
        model = CASE.shard(models[world + rank], fullshard.fully_shard, **options)
        offloaded = train(rank, model, clip=clip, micro=micro)
        assert_same_training(offloaded, plain, 0)
        found = links(model)
        assert len(found) == 4
        assert [link.downloads for link in found] == [3] * 4
        assert [link.uploads for link in found] == [3 * micro, *[3 * micro * 2] * 3]

    run_ranks(world, rank_main)


def test_gradients_are_read_only_after_their_copies_are_complete(moved: None) -> None:
    """Copies that fill their target only when they are waited for: hooks after accumulation, an optimizer in backward,
    `.grad` that is added to, and a unit that is reduced twice in one backward all see the right values."""
    models = [CASE.build() for _ in range(2 * WORLD)]

    def rank_main(rank: int) -> None:
        results = []
        for offload in (False, True):
            options = {"offload_policy": fullshard.CPUOffloadPolicy()} if offload else {}
            model: Any = CASE.shard(models[WORLD * offload + rank], fullshard.fully_shard, **options)
            for link in links(model):
                late(link)
            seen: list[Tensor] = []
            for p in model.parameters():
                p.register_post_accumulate_grad_hook(lambda p, seen=seen: seen.append(p.grad.full_tensor().clone()))
            for step in range(2):
                x = CASE.batch(step, rank)
                (CASE.loss(model, x) + CASE.loss(model, x)).backward()
            results.append([*seen, *(p.grad.full_tensor() for p in model.parameters())])
        assert len(results[0]) == len(results[1]) > 0
        for plain, offloaded in zip(*results, strict=True):
            assert torch.equal(plain, offloaded)

    run_ranks(WORLD, rank_main)


def late(link: HostLink) -> None:
    """Let downloads of `link` arrive at `finish` and not before, as on a device that is behind."""
    arriving: list[tuple[Tensor, Tensor]] = []
    at_once, finish = link._copy, link.finish

    def copy(out: Tensor, source: Tensor) -> None:
        if out.numel() == 0 or not _downloads(link):
            at_once(out, source)
            return
        out.fill_(float("nan"))
        arriving.append((out, source.clone()))

    def finish_all() -> None:
        for out, source in arriving:
            at_once(out, source)
        arriving.clear()
        finish()

    link._copy = copy
    link.finish = finish_all  # type: ignore[method-assign]


def _downloads(link: HostLink) -> bool:
    """Whether `download` is what calls the copy."""
    import sys

    return sys._getframe(2).f_code.co_name == "download"


@use_options(reductions_in_flight=1)
def test_a_failed_backward_and_a_retry(moved: None) -> None:
    models = [CASE.build() for _ in range(2 * WORLD)]

    def rank_main(rank: int) -> None:
        grads = []
        for fail in (False, True):
            model: Any = CASE.shard(
                models[WORLD * fail + rank], fullshard.fully_shard, offload_policy=fullshard.CPUOffloadPolicy()
            )
            if fail:
                # Behind the last unit in backward: what comes before it was reduced, and is on its way to the host.
                handle = first_unit(model).register_forward_hook(_fail_in_backward)
                with pytest.raises(ArithmeticError):
                    CASE.loss(model, CASE.batch(0, rank)).backward()
                handle.remove()
                assert sum(link.downloads for link in links(model)) > 0
            CASE.loss(model, CASE.batch(0, rank)).backward()
            grads.append([p.grad.full_tensor() for p in model.parameters()])
        assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))

    run_ranks(WORLD, rank_main)


def first_unit(model: nn.Module) -> nn.Module:
    """The unit that runs first below the root."""
    return next(module for module in model.modules() if module is not model and unit_of(module) is not None)


def _fail_in_backward(module: nn.Module, args: Any, output: Tensor) -> None:
    output.register_hook(_raise)


def _raise(_: Tensor) -> None:
    raise ArithmeticError


def test_shards_that_are_not_on_the_host_are_refused(moved: None) -> None:
    def rank_main(rank: int) -> None:
        model = fullshard.fully_shard(nn.Linear(3, 3), offload_policy=fullshard.CPUOffloadPolicy())
        unit: Any = unit_of(model)
        refuse_off_host(unit)
        param = SimpleNamespace(name="weight", local=SimpleNamespace(device=torch.device("cuda", 0)))
        moved_unit: Any = SimpleNamespace(params=[param], host_link=unit.host_link, record=unit.record)
        with pytest.raises(RuntimeError, match=r"on the CPU.* found weight on cuda:0; .*to_empty\(device='cpu'\)"):
            refuse_off_host(moved_unit)
        moved_unit.host_link = None
        refuse_off_host(moved_unit)

    run_ranks(1, rank_main)


# ---- the channel by itself -----------------------------------------------------------------------------------


def test_parts_land_in_one_copy() -> None:
    copies: list[int] = []

    def copy(out: Tensor, source: Tensor) -> None:
        copies.append(source.numel())
        out.copy_(source)

    link = HostLink(torch.device("cpu"), pin=True, copy=copy)
    assert not link.pin, "there is nothing to lock pages for"
    chunk = torch.arange(20.0)
    views = [chunk[4:10].view(2, 3), None, chunk[12:15], chunk[15:15].view(0, 5)]
    for given, moved_numel in ((views, 11), ([v if v is None else v.clone() for v in views], 9)):
        landed = land(given, link)
        link.finish()
        assert copies == [moved_numel]
        for part, expected in zip(landed, views, strict=True):
            assert (part is None) == (expected is None)
            if part is not None and expected is not None:
                assert torch.equal(part, expected) and part.is_contiguous()
                assert part.numel() == 0 or part.data_ptr() != expected.data_ptr()
        copies.clear()
    assert land([None, None], link) == [None, None] and not copies
    assert (link.uploads, link.downloads) == (0, 2)


def test_scalars_go_by_way_of_the_device_of_the_group() -> None:
    """A host norm and a group of NCCL alone: the message takes place on the device."""
    cpu, cuda = torch.device("cpu"), torch.device("cuda", 0)
    assert message_device("cuda:nccl", cpu) == "cuda"
    assert message_device("cpu:gloo,cuda:nccl", cpu) is None
    assert message_device("cpu:gloo,cuda:gloo", cuda) is None
    assert message_device("threaded", cpu) is None


def test_a_second_result_of_one_backward_waits_for_the_first() -> None:
    """A unit whose gradients are reduced twice: the host adds the two, so both must have landed."""
    link = HostLink(torch.device("cpu"), pin=False)
    landing, finished = Landing(link), []
    for part in (1.0, 2.0):
        (landed,) = landing([torch.full((3,), part)])
        assert landed is not None and landed.eq(part).all()
        finished.append(link.round)
    assert finished == [0, 1]
    # In the next backward it is again the first.
    link.finish()
    landing([torch.ones(3)])
    assert link.round == 2
