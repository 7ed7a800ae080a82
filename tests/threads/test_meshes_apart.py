"""Ranks that wait for others whose meshes are of other ranks: told apart from those that are slow, and from ranks that
rightly differ (peers/diagnosis.py)."""

from __future__ import annotations

import gc
import re
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fullshard import PeerFailed, RanksDisagree, fully_shard
from fullshard.engine import unit_of
from fullshard.peers import Watch, watch
from fullshard.peers.diagnosis import Leader
from tests.harness.fake import fake_world
from tests.harness.hang import patience
from tests.harness.models import seeded
from tests.harness.threads import run_ranks
from tests.threads.programs import Block, Model, batch, part, shard
from tests.threads.test_agreement import Experts

# Who waits longer tells it, and somebody reads why. Those who are late come after many times of that.
PATIENCE, LATE = 0.03, 0.5
# In place of the time limit of a process group, for waits that nothing else ends.
LIMIT = 2.0


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in (Watch, Leader):
        module = sys.modules[kind.__module__]
        monkeypatch.setattr(module, "PATIENCE_SECONDS", PATIENCE)
        monkeypatch.setattr(module, "pace", lambda ranks: PATIENCE)
    monkeypatch.setattr(Leader, "_reading_seconds", lambda self: PATIENCE)


@contextmanager
def watched(limit: float = 60.0) -> Iterator[None]:
    """What the thread of a process does, for ranks that are threads."""
    here, ends = watch(), threading.Event()
    assert here is not None
    here.settings = replace(here.settings, limit_seconds=limit)

    def looks() -> None:
        while not ends.wait(0.01):
            here.look()

    thread = threading.Thread(target=looks, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ends.set()
        thread.join()


def step(model: Any, rank: int, *, train: bool = True) -> None:
    out = model(part(batch(dist.get_world_size(), 0), rank)).pow(2).mean()
    if train:
        out.backward()
        model.zero_grad()


class Meshes:
    """Of four ranks: all of them, and the axes of two by two. Ranks 0 and 1 are one half, 2 and 3 the other."""

    def __init__(self) -> None:
        self.all = init_device_mesh("cpu", (4,))
        two = init_device_mesh("cpu", (2, 2), mesh_dim_names=("across", "half"))
        self.half, self.across = two["half"], two["across"]


def sharded(mesh: DeviceMesh, seed: int = 0) -> Any:
    return shard(seeded(Model, seed=seed), mesh=mesh)


# ---- ranks that rightly differ -------------------------------------------------------------------------------


def slow_to_build(rank: int, on: Meshes) -> None:
    if rank == 3:
        time.sleep(LATE)
    step(sharded(on.all), rank)


def slow_to_run(rank: int, on: Meshes) -> None:
    """After a model of the same structure, and of the same values, on another mesh."""
    model, other = sharded(on.all), sharded(on.half)
    if rank >= 2:
        step(other, rank)
        time.sleep(LATE)
    step(model, rank)


def stages(rank: int, on: Meshes) -> None:
    """Of a pipeline, alike: the second half has two of them, and is slow."""
    first = sharded(on.half)
    second = sharded(on.half) if rank >= 2 else None
    if rank == 3:
        time.sleep(LATE)
    step(first, rank)
    if second is not None:
        step(second, rank)


def stages_of_unlike_neighbours(rank: int, on: Meshes) -> None:
    """Rank 0 has a stage with rank 1, and an equal one with rank 2, which waits for it."""
    with_1, with_2 = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [0, 2])
    first = sharded(with_1) if rank in (0, 1) else None
    second = sharded(with_2) if rank in (0, 2) else None
    if first is not None:
        step(first, rank)
        time.sleep(LATE)
    if second is not None:
        step(second, rank)


def teacher_and_student(rank: int, on: Meshes) -> None:
    """Alike, in another order: one half has its student first."""
    teacher, student = sharded(on.all), sharded(on.half)
    for model in (student, teacher) if rank >= 2 else (teacher, student):
        step(model, rank)
        time.sleep(LATE)


def unsharded_in_another_order(rank: int, on: Meshes) -> None:
    """A gather by hand forms what is not yet the root."""
    teacher, student = sharded(on.all), sharded(on.half)
    for model in (student, teacher) if rank >= 2 else (teacher, student):
        model.unshard()
        model.layers[0].unshard()
        time.sleep(LATE)
    for model in (student, teacher) if rank >= 2 else (teacher, student):
        step(model, rank)
        time.sleep(LATE)


def unsharded_before_the_rest(rank: int, on: Meshes) -> None:
    """The unit on the mesh of all ran; its root did not."""
    model, other = sharded(on.all), sharded(on.half)
    model.layers[0].unshard()
    if rank >= 2:
        step(other, rank)
        time.sleep(LATE)
    step(model, rank)


def another_of_other_values(rank: int, on: Meshes) -> None:
    """One half trains another model of that structure before it builds the one for all."""
    first = sharded(on.half, seed=5) if rank >= 2 else None
    if first is not None:
        step(first, rank)
        time.sleep(LATE)
    step(sharded(on.all), rank)


def evaluated_before(rank: int, on: Meshes) -> None:
    """One half evaluates the same model before it builds the one for all."""
    copy = sharded(on.half) if rank >= 2 else None
    if copy is not None:
        with torch.no_grad():
            step(copy, rank, train=False)
        time.sleep(LATE)
    step(sharded(on.all), rank)


def in_mode_of_evaluation(rank: int, on: Meshes) -> None:
    copy = sharded(on.half).eval() if rank >= 2 else None
    if copy is not None:
        step(copy, rank)
        time.sleep(LATE)
    step(sharded(on.all), rank)


def frozen_copy(rank: int, on: Meshes) -> None:
    copy = sharded(on.half).requires_grad_(False) if rank >= 2 else None
    if copy is not None:
        step(copy, rank, train=False)
        time.sleep(LATE)
    step(sharded(on.all), rank)


def trial_after_trial(rank: int, on: Meshes) -> None:
    """Both halves train the same model before that for all; one is slower."""
    first = sharded(on.half)
    step(first, rank)
    if rank >= 2:
        time.sleep(LATE)
    step(sharded(on.all), rank)


def built_again_and_again(rank: int, on: Meshes) -> None:
    """Both halves build models in a loop, one of them more than the other; what they trained before is gone."""
    for _ in range(4 if rank >= 2 else 3):
        model = sharded(on.half)
        step(model, rank)
        unit = weakref.ref(unit_of(model))
        del model
        while unit() is not None:  # one thread at a time may collect
            gc.collect()
            time.sleep(0.001)
    dist.barrier()
    if rank >= 2:
        time.sleep(LATE)
    model = sharded(on.all)
    step(model, rank)


def experts(rank: int, on: Meshes) -> None:
    """On meshes of their own, alike everywhere: rank 1 waits for those of rank 3, rank 0 for the rest of rank 1."""
    model = seeded(lambda: Experts(0))
    fully_shard(model.experts["e0"], mesh=on.across)
    shard(model)
    if rank == 3:
        time.sleep(LATE)
    step(model, rank)


def inner_first(rank: int, on: Meshes) -> None:
    """A unit that ran by itself as a root, on another mesh than an equal one elsewhere."""
    model, alone = sharded(on.all), fully_shard(seeded(Block), mesh=on.half)
    if rank >= 2:
        alone(torch.ones(2, 6)).sum().backward()
        time.sleep(LATE)
    step(model, rank)
    if rank < 2:
        alone(torch.ones(2, 6)).sum().backward()


LEGAL: list[Callable[[int, Meshes], None]] = [
    slow_to_build, slow_to_run, stages, stages_of_unlike_neighbours, teacher_and_student, unsharded_in_another_order,
    unsharded_before_the_rest, another_of_other_values, evaluated_before, in_mode_of_evaluation, frozen_copy,
    trial_after_trial, built_again_and_again, experts, inner_first,
]  # fmt: skip


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "program",
    [pytest.param(one, marks=pytest.mark.slow) if one is built_again_and_again else one for one in LEGAL],
    ids=lambda program: program.__name__,
)
def test_ranks_that_rightly_differ_are_waited_for(program: Callable[[int, Meshes], None]) -> None:
    def job(rank: int) -> None:
        meshes = Meshes()
        with watched():
            program(rank, meshes)
            dist.barrier()

    run_ranks(4, job)


# ---- ranks that never meet -----------------------------------------------------------------------------------


def _axes(rank: int, on: Meshes) -> DeviceMesh:
    return on.across if rank < 2 else on.half


def _all_or_half(rank: int, on: Meshes) -> DeviceMesh:
    return on.half if rank >= 2 else on.all


def _by_itself(rank: int, on: Meshes) -> DeviceMesh:
    """The last rank gives a mesh of itself: it trains, and nobody tells it."""
    alone = [DeviceMesh("cpu", [one]) for one in range(4)]
    return alone[3] if rank == 3 else on.all


def _turned(rank: int, on: Meshes) -> DeviceMesh:
    """Each rank waits for another one: nobody trains."""
    pairs = [DeviceMesh("cpu", pair) for pair in ([0, 1], [1, 2], [2, 3], [0, 3])]
    return pairs[rank]


def _waits_in_vain(rank: int, chosen: Callable[[int, Meshes], DeviceMesh], waiting: tuple[int, ...]) -> str:
    """The error of a forward; ranks that do not wait take part in it, and live on until all others were told."""
    mesh = chosen(rank, Meshes())
    here = watch()
    assert here is not None
    store = here.records.store
    with watched(LIMIT):
        model = sharded(mesh)
        found = ""
        if rank in waiting:
            # Those that train have done so: on a busy machine a step may take longer than the limit.
            while not all(store.check([f"trained {one}"]) for one in range(4) if one not in waiting):
                time.sleep(0.002)
            begun = time.monotonic()
            with pytest.raises((RanksDisagree, PeerFailed)) as caught:
                step(model, rank)
            # A bound that a real limit would break, not a measurement.
            assert time.monotonic() - begun < patience(20)
            store.set(f"told {rank}", "")
            found = f"{caught.type.__name__}: {caught.value}"
        else:
            step(model, rank)
            # On a busy machine the record of this rank may be older than the peers' time limit.
            here.post()
            store.set(f"trained {rank}", "")
        while not store.check([f"told {one}" for one in waiting]):
            time.sleep(0.002)
        return found


APART = {
    "axes": (_axes, (0, 1), "rank 2 in no call of fullshard's ("),
    "all or half": (_all_or_half, (0, 1), "rank 2 in no call of fullshard's ("),
    "by itself": (_by_itself, (0, 1, 2), "rank 3, which has not begun to train"),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", APART)
def test_who_waits_in_vain_for_ranks_that_train_is_told_where_these_are(name: str) -> None:
    """At the time limit of the process group: that they will not come is known to nobody."""
    chosen, waiting, where = APART[name]
    found = run_ranks(4, _waits_in_vain, chosen, waiting)
    for rank in waiting:
        assert found[rank].startswith(
            "PeerFailed: expected every rank to take part in the units and parameters of the model, found that rank"
        )
        assert "s, the time limit of the process group: it is rank" in found[rank]
    assert where in found[0], found[0]
    if name != "by itself":
        assert re.search(r"tests/threads/\w+\.py:\d+ in \w+\)", found[0]), found[0]


def test_a_ring_of_ranks_each_of_which_waits_for_the_next() -> None:
    found = run_ranks(4, _waits_in_vain, _turned, (0, 1, 2, 3))
    assert len(set(found)) == 1
    assert found[0] == (
        "RanksDisagree: expected all ranks to do the same, found ranks 0 to 3 waiting in the units and parameters of "
        "the model: none of them can continue; make all ranks take the same calls in the same order"
    )


def test_what_failed_is_mended_by_all_together() -> None:
    """Who was told, and who trained happily elsewhere, build the model anew on one mesh."""

    def job(rank: int) -> None:
        on = Meshes()
        model: Any = sharded(_axes(rank, on))
        if rank < 2:
            with watched(LIMIT), pytest.raises(PeerFailed):
                step(model, rank)
        else:
            step(model, rank)
        dist.barrier()
        with watched():
            model = sharded(on.across)
            failed: list[str] = []
            while len(failed) < 5:
                try:
                    step(model, rank)
                    break
                except (PeerFailed, RanksDisagree) as error:
                    failed.append(str(error))
            else:
                raise AssertionError(f"they do not meet: {failed}")
            dist.barrier()

    run_ranks(4, job)


# ---- where nobody is asked -----------------------------------------------------------------------------------


def test_one_rank_and_fake_groups_have_nobody_to_wait_for() -> None:
    def job(rank: int) -> None:
        assert watch() is None
        step(shard(seeded(Model)), rank)

    run_ranks(1, job)
    with fake_world(4):
        assert watch() is None
        on = Meshes()
        step(sharded(on.across), 0)
