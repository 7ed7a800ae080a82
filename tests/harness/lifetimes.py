"""Programs for faults of lifetimes, laziness and coalescing (LIFETIMES in tests/harness/lifetime_faults.py).

Each is the job of one rank over NCCL on the device "simulated". It returns what it found wrong, or raises; a sound
engine gives an empty text on all ranks.
"""

from __future__ import annotations

import gc
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import fullshard
from fullshard import PeerFailed, RanksDisagree
from fullshard._torch import local_of
from fullshard.comm import ShardGroup
from fullshard.comm.data_group import DataGroup, open_data_group
from fullshard.peers import Fault, Scope, scope_of
from tests.harness import nccl, simulated
from tests.harness.models import assert_close_to_tensor_max
from tests.harness.on_device import Setup, case_of, reference, sharded, train, whole

SECONDS = 5.0


def trains(rank: int, setup: Setup) -> str:
    """Some steps: accesses, messages, numbers; and the communicators that they made."""
    nccl.library().premultiplies(False)  # as an NCCL that lacks them
    found = train(rank, setup)
    found.check()
    for name, expected in reference(setup, dist.get_world_size()).items():
        assert_close_to_tensor_max(found.params[name], expected, 12, name)
    return _lazy()


def _lazy() -> str:
    # The user's own groups have names without a path.
    lazy = [name for name in nccl.library().lazily_made() if "/" in name]
    return f"communicators were made by a message: {lazy}" if lazy else ""


def messages(rank: int) -> tuple[list[str], Counter[str], int, list[int]]:
    """The data groups of a training, its messages by kind, their launches, and the devices of the communicators beside
    the user's. Weights of a block travel by themselves, several in one message."""
    before = len(nccl.library().devices())
    launches = nccl.library().launches()
    setup = Setup("wide", steps=1)
    device = torch.device("simulated", 0)
    with simulated.watched() as seen:
        model = sharded(case_of(setup).build().to(device), setup)
        case_of(setup).loss(model, tuple(p.to(device) for p in case_of(setup).batch(0, rank))).backward()
        fullshard.clip_grad_norm_(model.parameters(), 0.5)
        seen.check()
    groups = _data_groups(model)
    assert groups and not nccl.failures()
    kinds = [f"{one.purpose}: {type(one.group._get_backend(device)).__name__}" for one in groups]
    sent = Counter({name: count for name, count in seen.operators.items() if "-" in name})
    return kinds, sent, nccl.library().launches() - launches, nccl.library().devices()[before:]


# What `messages` finds, whatever the name of the user's backend is.
MESSAGES = (
    ["data: ProcessGroupNCCL", "small: ProcessGroupNCCL"],
    Counter({"all-gather": 9, "reduce-scatter": 5, "all-reduce": 2}),
    16,
    [0, 0],
)


def named(rank: int) -> str:
    """Messages as over "nccl"."""
    found = messages(rank)
    return "" if found == MESSAGES else f"found {found}, expected {MESSAGES}"


def elsewhere(rank: int) -> str:
    """The user's group is on device 3 of each rank, the model on device 0; further groups of fullshard too."""
    world = dist.group.WORLD
    assert world is not None
    os.environ["LOCAL_RANK"] = "3"
    world.bound_device_id = None
    theirs = dist.new_group(list(range(4)))
    assert isinstance(theirs, dist.ProcessGroup) and theirs.bound_device_id == torch.device("simulated", 3)
    # As torch leaves the default group.
    world.bound_device_id = torch.device("simulated", 0)
    before = len(nccl.library().devices())
    assert nccl.library().devices()[before - 1] == 3
    mesh = DeviceMesh.from_group(theirs, "simulated", mesh_dim_names=("unlike any other",))
    case, device = case_of(Setup()), torch.device("simulated", 0)
    with simulated.watched() as seen:
        model: Any = case.build().to(device)
        for name in case.units:
            fullshard.fully_shard(model.get_submodule(name), mesh=mesh, reshard_after_forward=2)
        fullshard.fully_shard(model, mesh=mesh)
        model.set_separate_reduce_scatter_group()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(2):
            case.loss(model, tuple(p.to(device) for p in case.batch(step, rank))).backward()
            fullshard.clip_grad_norm_(model.parameters(), 1e9)
            optimizer.step()
            optimizer.zero_grad()
        seen.check()
    made = nccl.library().devices()[before:]
    plain = reference_of_steps(2)
    for name, parameter in model.named_parameters():
        parts = torch.chunk(plain[name], 4)
        expected = parts[rank] if rank < len(parts) else plain[name][:0]
        assert_close_to_tensor_max(local_of(parameter).cpu(), expected, 12, name)
    if set(made) - {0}:
        return f"communicators were made on the devices {made}"
    # Shards, blocks, reductions, small messages: one communicator each, and none that no message uses.
    expected_count = len(_data_groups(model))
    return "" if len(made) == expected_count else f"{len(made)} communicators for {expected_count} data groups"


def _opened(device: str = "simulated", purpose: str = "data") -> tuple[Scope, DataGroup]:
    origin = dist.group.WORLD
    assert origin is not None
    scope = scope_of(range(dist.get_world_size()))
    assert scope is not None
    data = open_data_group(scope, origin, torch.device(device, 0), "nccl", purpose)
    assert data is not None
    return scope, data


def _sum(data: DataGroup, *, waits: bool = True) -> Tensor:
    value = torch.ones(4, device=data.device)
    sent = data.issue("allreduce", [value])
    if waits:
        sent.wait()
    return value


def collects(rank: int) -> str:
    """What C++ keeps longer than Python: after a collection it is used, and the user's own is as it was."""
    world = dist.group.WORLD
    assert world is not None
    device = torch.device("simulated", 0)
    theirs: Any = world._get_backend(device)
    theirs.options.is_high_priority_stream = True
    theirs.options.config.max_ctas = 7
    theirs.options._timeout = timedelta(seconds=41)
    before = list(theirs.options.global_ranks_in_group), theirs.options.group_name
    with simulated.watched() as seen:
        _, data = _opened()
        _, other = _opened(purpose="other")
        for group in (data, other):
            group.connect()
        gc.collect()
        sums = [_sum(data), _sum(other), _sum(data)]
        assert all(value.cpu().tolist() == [dist.get_world_size()] * 4 for value in sums)
        seen.check()
    own: Any = data.group._get_backend(device)
    options = own.options
    assert options is not theirs.options
    assert (list(theirs.options.global_ranks_in_group), theirs.options.group_name) == before
    assert (options.is_high_priority_stream, options.config.max_ctas) == (True, 7)
    assert options._timeout == timedelta(seconds=41)
    assert list(options.global_ranks_in_group) == list(range(dist.get_world_size()))
    assert options.group_name == data.group.group_name
    # Its watchdog calls the store whenever it finds an error.
    with nccl.failing("all-reduce"):
        _sum(data)
        assert _until(lambda: bool(data.broke))
    time.sleep(0.1)
    assert not nccl.failures(), nccl.failures()[0]
    return _lazy()


def _until(happened: Callable[[], bool], seconds: float = SECONDS) -> bool:
    end = time.monotonic() + seconds
    while not happened():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def dies_connecting(rank: int) -> str:
    """Rank 1 is here, and never comes into NCCL's own rendezvous; then it says why. Rank 0 waits until then."""
    scope, data = _opened()
    if rank == 1:
        store = scope.watch.records.store
        scope.watch.begin()
        world = f"{scope.watch.records.prefix}/{scope.name}/{scope.renewed}/{data.name}/here"
        store.add(world, 1)
        time.sleep(0.5)
        scope.publish("raised", "ValueError: it never came")
        assert _until(lambda: bool(store.check(["ended"])), 8)
        return ""
    begun, ended = time.monotonic(), ""
    try:
        _sum(data)
    except PeerFailed as error:
        ended = str(error)
    seconds = time.monotonic() - begun
    scope.watch.records.store.set("ended", "")
    assert "rank 1" in ended and "it never came" in ended, ended
    return "" if seconds < SECONDS else f"it waited {seconds:.1f} s"


def refused(rank: int) -> str:
    """An error of making a communicator is raised by the message that needs it: two ranks on one device."""
    os.environ["NCCL_HOSTID"] = "the same"
    _, data = _opened()
    try:
        _sum(data)
    except RuntimeError as error:
        found = str(error)
        return "" if "Duplicate GPU" in found or "rank" in found else found
    return "two ranks were on one device"


def _model() -> tuple[Any, torch.optim.Optimizer]:
    case = case_of(Setup())
    model = sharded(case.build().to("simulated"), Setup(reshard=False))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def _step(model: Any, optimizer: torch.optim.Optimizer, rank: int, step: int) -> None:
    case = case_of(Setup())
    with fullshard.guard(model, optimizer):
        case.loss(model, tuple(p.to("simulated") for p in case.batch(step, rank))).backward()
        optimizer.step()
    optimizer.zero_grad()


def _values(model: nn.Module) -> dict[str, Tensor]:
    return {name: whole(value).cpu().clone() for name, value in model.state_dict().items()}


def cuts(rank: int) -> str:
    """Reductions are under way when the watch cuts the connections: the step is not taken, the model is lost, and after
    a load the ranks connect anew."""
    with simulated.watched(queries=nccl.is_quiet) as seen:
        model, optimizer = _model()
        _step(model, optimizer, rank, 0)
        values = _values(model)
        cut = [group.group for group in _data_groups(model)]
        _cut_while_held(model, optimizer, rank)
        for group in cut:
            try:
                group.allreduce([torch.ones(1, device="simulated")])
                return "a communicator that was cut was not aborted"
            except RuntimeError as error:
                assert "was aborted" in str(error), str(error)
        if not _is_lost(model, optimizer, rank):
            return "the model was not lost"
        optimizer.zero_grad()
        model.load_state_dict(values)
        if rank == 0:
            # It is rank 0 that writes where the others connect: they ask first, and must not find what it wrote before.
            time.sleep(1)
        _step(model, optimizer, rank, 1)
        _step(model, optimizer, rank, 2)
        after = _values(model)
        del seen
    plain = reference_of_steps(3)
    for name, value in plain.items():
        assert_close_to_tensor_max(after[name], value, 12, name)
    return _lazy()


def _cut_while_held(model: Any, optimizer: torch.optim.Optimizer, rank: int) -> None:
    from fullshard.engine.unit import module_units

    (scope,) = module_units(model)[0].root.companion.scopes  # type: ignore[union-attr]
    before = _values(model)

    def cut() -> None:
        if nccl.waits_on_host.wait(SECONDS):
            scope.fail(Fault(1 - rank, "lost", "gave no sign of life", scope.name, scope.epoch))

    cutting = threading.Thread(target=cut)
    with nccl.held("reduce-scatter"):
        cutting.start()
        try:
            _step(model, optimizer, rank, 1)
            raise AssertionError("the step was taken, though its gradients never arrived")
        except (PeerFailed, RanksDisagree):
            pass
        finally:
            cutting.join()
    changed = _changed(model, before, rank)
    assert not changed, changed


def _changed(model: Any, before: dict[str, Tensor], rank: int) -> str:
    """The first shard that is not what it was."""
    model.reset_iter_state()  # after a failure in backward parameters may be whole
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor), name
        parts = list(torch.chunk(before[name], dist.get_world_size(), 0))[rank:][:1]
        if parts and not torch.equal(local_of(parameter).cpu(), parts[0]):
            return name
    return ""


def reference_of_steps(steps: int) -> dict[str, Tensor]:
    """Plain training with the batches of all ranks."""
    case, world = case_of(Setup()), dist.get_world_size()
    model = case.build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        for rank in range(world):
            (case.loss(model, case.batch(step, rank)) / world).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach() for name, p in model.named_parameters()}


_MANY = 1_000_000


def breaks(rank: int, late: bool) -> str:
    """NCCL's own watchdog ends a communicator: an error of a message that is found later, or its time limit. On their
    streams messages count as arrived then. No step is taken, and the model is lost on all ranks."""
    with simulated.watched(queries=nccl.is_quiet):
        model, optimizer = _model()
        with nccl.failing("reduce-scatter", after=_MANY) as left:
            _step(model, optimizer, rank, 0)
        # The last one fails: a later message would find that the watchdog has ended the communicator, or not yet.
        last = _MANY - left[0] - 1
        before = _values(model)
        told = ""
        if not late:
            for group in _data_groups(model):
                own: Any = group.group._get_backend(group.device)
                own.options._timeout = timedelta(milliseconds=300)
        with nccl.failing("reduce-scatter", after=last) if late else nccl.held("reduce-scatter"):
            try:
                _step(model, optimizer, rank, 1)
            except (RuntimeError, PeerFailed, RanksDisagree) as error:
                told = f"{type(error).__name__}: {error}"
        if not told:
            return "a step was taken with gradients that never arrived"
        if name := _changed(model, before, rank):
            return f"{name} was changed"
        if not _is_lost(model, optimizer, rank):
            return "the model was not lost"
    return "" if not nccl.failures() else nccl.failures()[0]


def _data_groups(model: Any) -> list[DataGroup]:
    from fullshard.engine.unit import module_units

    (scope,) = module_units(model)[0].root.companion.scopes  # type: ignore[union-attr]
    return [g for g in scope.groups.all() if isinstance(g, DataGroup) and g.on_streams and g.is_connected]


def goes_on(rank: int) -> str:
    """As `breaks`, without a guard: no one waits for the last reductions, and the next message is refused. The model is
    lost."""
    case = case_of(Setup())
    with simulated.watched():
        model, optimizer = _model()
        _step(model, optimizer, rank, 0)
        groups = _data_groups(model)
        with nccl.failing("reduce-scatter"):
            with suppress(RuntimeError):  # a later message of it may be refused
                case.loss(model, tuple(p.to("simulated") for p in case.batch(1, rank))).backward()
        assert any(group.broke for group in groups)
        return "" if _is_lost(model, optimizer, rank) else "the model was not lost"


def _is_lost(model: Any, optimizer: torch.optim.Optimizer, rank: int) -> bool:
    """Whether a forward says so, after those that a peer's failure ends."""
    case = case_of(Setup())
    while True:
        optimizer.zero_grad()
        model.reset_iter_state()
        try:
            case.loss(model, tuple(p.to("simulated") for p in case.batch(1, rank))).backward()
            return False
        except RuntimeError as error:
            if "found it lost on a device" in str(error):
                fullshard.mark_restored(model)  # or a later job of this process finds it lost
                return True


def closes(rank: int) -> str:
    """A destroyed process group leaves no communicator, and none to its destructor."""
    with simulated.watched():
        model, optimizer = _model()
        _step(model, optimizer, rank, 0)
        scopes = [group.scope for group in _data_groups(model)]
        dist.barrier()
        dist.destroy_process_group()
        del model, optimizer
        for scope in scopes:
            scope.watch.close()
        del scopes
        gc.collect()
    assert not nccl.library().unclosed(), "a communicator was left to its destructor"
    return "" if not nccl.library().alive() else "a communicator was left open"


def bound(rank: int) -> str:
    """The default group is bound to a device, so torch would make every group a split of all ranks; half of the ranks
    train."""
    world, device = dist.group.WORLD, torch.device("simulated", 0)
    assert world is not None
    half = dist.new_group([0, 1])
    # The user's group is a split, as torch makes it where the default group is bound.
    world.bound_device_id = device
    default: Any = world._get_backend(device)
    default.eager_connect_single_device(device)
    try:
        if rank < 2:
            options: Any = half._get_backend(device).options  # type: ignore[union-attr]
            options.split_from, options.split_color = default, 5
            mesh = DeviceMesh.from_group(half, "simulated", mesh_dim_names=("stage of half",))  # type: ignore[arg-type]
            case = case_of(Setup())
            model: Any = case.build().to(device)
            for name in case.units:
                fullshard.fully_shard(model.get_submodule(name), mesh=mesh, reshard_after_forward=2)
            fullshard.fully_shard(model, mesh=mesh)
            model.set_separate_reduce_scatter_group()
            case.loss(model, tuple(p.to(device) for p in case.batch(0, rank))).backward()
            options.split_from = None
    finally:
        world.bound_device_id = None
    return f"{nccl.library().splits()} splits" if nccl.library().splits() else ""


def direct(rank: int) -> str:
    """Dtypes that NCCL lacks, several messages as one, sums that it has only from some version on."""
    scope, _ = _opened()
    group = ShardGroup(dist.group.WORLD, torch.device("simulated", 0))  # type: ignore[arg-type]
    group.open(scope)
    nccl.library().premultiplies(False)
    with simulated.watched() as seen:
        for dtype in (torch.int16, torch.complex64, torch.float8_e4m3fn, torch.float32):
            pieces = [torch.full((4 + i,), rank + 1.0, device="simulated").to(dtype) for i in range(2)]
            outs = [torch.empty(2 * len(piece), device="simulated").to(dtype) for piece in pieces]
            for work in group.gather_each(outs, pieces):
                work.wait()
            for out, piece in zip(outs, pieces, strict=True):
                expected = torch.arange(1.0, 3.0).repeat_interleave(len(piece))
                assert torch.equal(
                    out.cpu().to(torch.float32 if not dtype.is_complex else dtype),
                    expected.to(torch.float32 if not dtype.is_complex else dtype),
                )
            group.gather_into(outs[0], pieces[0]).wait()
        sums = torch.zeros(2, device="simulated")
        group.reduce_scatter(sums, torch.ones(4, device="simulated")).wait()
        assert sums.cpu().tolist() == [2.0, 2.0]
        seen.check()
    return nccl.failures()[0] if nccl.failures() else ""


def alone(rank: int) -> str:
    """NCCL without gloo for the host: what is small and on the host goes over the device."""
    model, optimizer = _model()
    case = case_of(Setup())
    with simulated.watched():
        case.loss(model, tuple(p.to("simulated") for p in case.batch(0, rank))).backward()
        fullshard.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    from fullshard.comm import all_reduce_over

    counts = torch.ones(2)
    all_reduce_over(counts, dist.group.WORLD, dist.ReduceOp.SUM)  # type: ignore[arg-type]
    assert counts.tolist() == [2.0, 2.0]
    return _lazy()


def holds_nothing(rank: int) -> str:
    """After a stream waits for a message, nothing holds its buffers, though the device is not that far yet."""
    with simulated.watched(queries=lambda: False):
        _, data = _opened()
        value = _sum(data)
        memory = torch.get_device_module("simulated")
        before = memory.memory_allocated()
        del value
        return "" if memory.memory_allocated() < before else "a message holds its buffers"
