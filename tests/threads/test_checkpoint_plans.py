"""Plans of saves on real ranks: what they send, that they are used again, and that one which is not of this layout, or
a writer that does not follow it, is found. Every layout loads what every other one saved."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from benchmarks.scale import Law, file_calls, law_of
from fullshard import checkpoint
from fullshard._torch import strided_shard
from fullshard.checkpoint import CheckpointDamaged, CheckpointError, CheckpointMismatch, save_plan, saving
from fullshard.checkpoint.resident import NotResident
from fullshard.checkpoint.save_plan import Own, Plan, Share
from fullshard.comm.messages import Messenger
from tests.harness.threads import run_ranks

State = dict[str, Any]
WORLD = 4


# ---- layouts of four ranks -------------------------------------------------------------------------------------------


def full() -> dict[str, Tensor]:
    """Even, uneven, fewer rows than ranks, of no element, of one dim, of experts."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"even": (8, 4), "uneven": (7, 5), "few": (2, 6), "none": (0, 3), "vector": (11,), "experts": (6, 4, 3)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def _rows(tensors: dict[str, Tensor]) -> State:
    mesh = init_device_mesh("cpu", (WORLD,))
    return {name: distribute_tensor(value, mesh, [Shard(0)]) for name, value in tensors.items()}


def _columns(tensors: dict[str, Tensor]) -> State:
    mesh = init_device_mesh("cpu", (WORLD,))
    return {name: distribute_tensor(value, mesh, [Shard(value.ndim - 1)]) for name, value in tensors.items()}


def _replicated(tensors: dict[str, Tensor]) -> State:
    mesh = init_device_mesh("cpu", (2, 2))
    return {name: distribute_tensor(value, mesh, [Replicate(), Shard(0)]) for name, value in tensors.items()}


def _strided(tensors: dict[str, Tensor]) -> State:
    """FSDP over tensor parallelism: the right axis cuts first."""
    mesh = init_device_mesh("cpu", (2, 2))
    made: State = {}
    for name, value in tensors.items():
        place = [strided_shard(0, 2), Shard(0)]
        data, model = mesh.get_coordinate()  # type: ignore[misc]
        piece = _chunk(_chunk(value, 2, model), 2, data)
        made[name] = DTensor.from_local(piece, mesh, place, run_check=False, shape=value.shape, stride=value.stride())
    return made


def _chunk(value: Tensor, pieces: int, index: int) -> Tensor:
    found = value.chunk(pieces, dim=0)
    return found[index] if index < len(found) and len(value) else value[:0]


def _mesh_of_each_replica(tensors: dict[str, Tensor]) -> State:
    """`fully_shard` on one axis of a mesh: each rank knows its own."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))["shard"]
    return {name: distribute_tensor(value, mesh, [Shard(0)]) for name, value in tensors.items()}


def _experts(tensors: dict[str, Tensor]) -> State:
    """Experts over (expert, shard), the rest over all ranks, and one tensor on two of them only."""
    own, flat = init_device_mesh("cpu", (2, 2)), init_device_mesh("cpu", (WORLD,))
    made: State = {}
    for name, value in tensors.items():
        mesh, place = (own, [Shard(0), Shard(1)]) if name == "experts" else (flat, [Shard(0)])
        made[name] = distribute_tensor(value, mesh, place)
    return made


def _stages(tensors: dict[str, Tensor]) -> State:
    """A pipeline of two stages, each of two ranks, with tensors of their own."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "shard"))
    stage, mine = mesh.get_local_rank("stage"), mesh["shard"]
    names = list(tensors)[stage::2]
    return {name: distribute_tensor(tensors[name], mine, [Shard(0)], src_data_rank=None) for name in names}


def _plain(tensors: dict[str, Tensor]) -> State:
    return {name: value.clone() for name, value in tensors.items()}


LAYOUTS: dict[str, Callable[[dict[str, Tensor]], State]] = {
    "rows": _rows,
    "columns": _columns,
    "replicated": _replicated,
    "strided": _strided,
    "mesh of each replica": _mesh_of_each_replica,
    "experts": _experts,
    "stages": _stages,
    "plain": _plain,
}


def _save(rank: int, layout: str, folder: Path) -> None:
    checkpoint.save({"m": LAYOUTS[layout](full()), "step": 3}, checkpoint_id=folder)


def _load(rank: int, layout: str, folder: Path) -> None:
    state = {"m": LAYOUTS[layout]({name: torch.full_like(value, -1) for name, value in full().items()}), "step": 0}
    checkpoint.load(state, checkpoint_id=folder)
    expected = LAYOUTS[layout](full())
    assert state["step"] == 3 and state["m"].keys() == expected.keys()  # type: ignore[attr-defined]
    for name, value in expected.items():
        found = state["m"][name]  # type: ignore[index]
        if isinstance(value, DTensor):
            found, value = found.to_local(), value.to_local()
        assert torch.equal(found, value), name


@pytest.mark.sample(2)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_loads_what_every_other_saved(layout: str, tmp_path: Path) -> None:
    run_ranks(WORLD, _save, layout, tmp_path / "c")
    checkpoint.verify(tmp_path / "c")
    for other in LAYOUTS:
        run_ranks(WORLD, _load, other, tmp_path / "c")
    with checkpoint.open_checkpoint(tmp_path / "c") as found:
        for name, value in full().items():
            assert torch.equal(found.tensor(f"m.{name}"), value)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_layout_of_meshes_is_listed(layout: str, tmp_path: Path) -> None:
    """A rule says who has which part, so that the manifest does not grow with ranks."""
    run_ranks(WORLD, _save, layout, tmp_path / "c")
    manifest = checkpoint.inspect(tmp_path / "c")
    assert all(type(entry.rule).__name__ == "Rule" for entry in manifest.tensors.values())


# ---- what is sent ----------------------------------------------------------------------------------------------------


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[int, list[int]]]:
    """The bytes of each message of each rank, to the first one and from it."""
    found: dict[int, list[int]] = {}
    fold, share = Messenger.fold, Messenger.share

    def folding(self: Messenger, text: bytes, combine: Any) -> Any:
        found.setdefault(self.rank, []).append(len(text))
        return fold(self, text, combine)

    def sharing(self: Messenger, text: bytes | None) -> bytes:
        answer = share(self, text)
        found.setdefault(self.rank, []).append(len(answer))
        return answer

    monkeypatch.setattr(Messenger, "fold", folding)
    monkeypatch.setattr(Messenger, "share", sharing)
    yield found


@pytest.mark.threads_only(reason="what is sent is seen in this process")
@pytest.mark.parametrize(("layout", "first_round"), [("rows", 8), ("experts", 8), ("stages", 14)])
def test_the_second_save_of_a_layout_sends_little(
    layout: str, first_round: int, sent: dict[int, list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six messages of at most a kilobyte together; where ranks declare differently, the first save asks for that."""
    made: list[str] = []
    for name in ("plan_of", "merge"):
        original = getattr(saving, name)
        monkeypatch.setattr(
            saving, name, lambda *args, name=name, original=original: (made.append(name), original(*args))[1]
        )

    def rank_main(rank: int) -> None:
        for step in range(3):
            sent.setdefault(rank, []).clear()
            made_before = len(made)
            dist.barrier()
            checkpoint.save({"m": LAYOUTS[layout](full()), "step": step}, checkpoint_id=tmp_path / "c")
            dist.barrier()
            assert (len(made) > made_before) == (step == 0)
            assert len(sent[rank]) == (first_round if not step else 6), sent[rank]
            if step:
                assert sum(sent[rank]) <= 1000, sent[rank]
            dist.barrier()

    run_ranks(WORLD, rank_main)
    assert checkpoint.inspect(tmp_path / "c").values["step"].value == 2


@pytest.mark.threads_only(reason="what is sent is seen in this process")
def test_a_load_sends_no_manifest(sent: dict[int, list[int]], tmp_path: Path) -> None:
    run_ranks(WORLD, _save, "rows", tmp_path / "c")
    sent.clear()
    run_ranks(WORLD, _load, "rows", tmp_path / "c")
    assert all(len(each) == 6 and max(each) < 300 for each in sent.values()), sent


# ---- plans that are wrong --------------------------------------------------------------------------------------------


def _fails(state: Callable[[], State], folder: Path, kind: type[Exception], says: str) -> None:
    before = checkpoint.inspect(folder).save_id
    with pytest.raises(kind, match=says):
        checkpoint.save(state(), checkpoint_id=folder)
    dist.barrier()
    assert checkpoint.inspect(folder).save_id == before


@pytest.mark.threads_only(reason="the plans of all ranks are in this process")
@pytest.mark.parametrize("stale", [(1,), (0, 1, 2, 3)])
def test_a_stale_plan_is_found(stale: tuple[int, ...], tmp_path: Path) -> None:
    """On one rank, or on all: the digest is the same, the boxes are not."""
    folder = tmp_path / "c"

    def state(layout: str) -> State:
        return {"m": LAYOUTS[layout](full())}

    def rank_main(rank: int) -> None:
        checkpoint.save(state("rows"), checkpoint_id=folder)
        checkpoint.save(state("columns"), checkpoint_id=folder)
        from fullshard.comm import messenger

        plans = saving.plans_of(messenger(None))
        (rows, plan), (columns, other) = plans.items()
        if rank in stale:
            plans[columns] = Plan(plan.world, plan.entries, plan.values, plan.computed, plan.first, other.declared)
        assert plans[columns].id == other.id
        _fails(lambda: state("columns"), folder, CheckpointError, "expected this rank to hold .* another layout")
        plans.clear()
        checkpoint.save(state("columns"), checkpoint_id=folder)

    run_ranks(WORLD, rank_main)
    run_ranks(WORLD, _load_even, folder)


def _load_even(rank: int, folder: Path) -> None:
    state = {"m": _plain(full())}
    checkpoint.load(state, checkpoint_id=folder)
    assert all(torch.equal(state["m"][name], value) for name, value in full().items())


@pytest.fixture
def disobedient(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Share], Share]], None]:
    """Rank 1 does something else than its share."""

    def install(change: Callable[[Share], Share]) -> None:
        def share_of(plan: Plan, own: list[Own], rank: int) -> Share:
            share = save_plan.share_of(plan, own, rank)
            return change(share) if rank == 1 else share

        monkeypatch.setattr(saving, "share_of", share_of)

    return install


@pytest.mark.threads_only(reason="which rank writes is seen in this process")
def test_a_writer_that_leaves_parts_out_is_found_at_once(tmp_path: Path, disobedient: Any) -> None:
    run_ranks(WORLD, _save, "rows", tmp_path / "c")
    disobedient(lambda share: share._replace(write={v: parts[1:] for v, parts in share.write.items()}))

    def rank_main(rank: int) -> None:
        _fails(lambda: {"m": _rows(full())}, tmp_path / "c", CheckpointMismatch, "bytes of")

    run_ranks(WORLD, rank_main)


@pytest.mark.threads_only(reason="which rank writes is seen in this process")
def test_a_writer_that_wrote_another_layout_is_found_by_readers(tmp_path: Path, disobedient: Any) -> None:
    """As many bytes, under the names of other parts."""

    def moved(share: Share) -> Share:
        places = {
            i: place._replace(box=place.box._replace(offsets=(0,) * len(place.shape)))
            for i, place in share.place.items()
        }
        return share._replace(place=places)

    disobedient(moved)
    run_ranks(WORLD, _save, "rows", tmp_path / "c")
    with pytest.raises(CheckpointDamaged, match="found that it was saved in other parts"):
        checkpoint.verify(tmp_path / "c")

    def rank_main(rank: int) -> None:
        with pytest.raises(CheckpointDamaged, match="found that it was saved in other parts"):
            _load(rank, "columns", tmp_path / "c")

    run_ranks(WORLD, rank_main)


def test_replicas_that_differ_are_named_with_their_ranks(tmp_path: Path) -> None:
    """Of many tensors that one, of many ranks those."""

    def rank_main(rank: int) -> None:
        state = _replicated(full())
        if rank == 3:
            state["uneven"].to_local()[0, 0] = 9.0
        plain = {"same": torch.ones(3), "other": torch.full((2,), float(rank == 2))}
        with pytest.raises(CheckpointMismatch, match="take_first") as caught:
            checkpoint.save({"m": state, "p": plain}, checkpoint_id=tmp_path / "c")
        one, other = caught.value.problems
        assert one.startswith("m.uneven: rank 1 has ") and ", rank 3 has " in one and one.endswith(" at [4:7, 0:5]")
        assert other.startswith("p.other: ranks 0 and 1 and 3 have ") and ", rank 2 has " in other

    run_ranks(WORLD, rank_main)
    assert not checkpoint.is_complete(tmp_path / "c")


def test_a_rank_that_lacks_a_tensor_is_named_before_anything_is_written(tmp_path: Path) -> None:
    def rank_main(rank: int) -> None:
        state = _rows(full())
        if rank == 2:
            del state["even"]
        with pytest.raises(CheckpointMismatch, match=r"m.even \(8, 4\): 8 of 32 elements are in no part"):
            checkpoint.save({"m": state}, checkpoint_id=tmp_path / "c")

    run_ranks(WORLD, rank_main)
    assert not (tmp_path / "c").exists()


# ---- files -----------------------------------------------------------------------------------------------------------


def test_files_are_bounded_and_may_be_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several files for each rank, which load as one."""
    monkeypatch.setattr(save_plan, "FILE_NBYTES", 64)
    original = saving.snapshot

    def snapshot(*args: Any, **kwargs: Any) -> saving.Snapshot:
        return original(*args, **kwargs)._replace(apart=frozenset({"m.vector", "m.few"}))

    monkeypatch.setattr("fullshard.checkpoint.api.snapshot", snapshot)
    run_ranks(WORLD, _save, "rows", tmp_path / "c")
    manifest = checkpoint.verify(tmp_path / "c")
    volumes: dict[int, set[str]] = {}
    for key, entry in manifest.tensors.items():
        if entry.nbytes:
            volumes.setdefault(entry.volume, set()).add(key)
    assert {"m.vector", "m.few"} in volumes.values() and len(volumes) > 2
    names = [file.name for file in manifest.files]
    assert "data-00001.safetensors" in names and "data-00001-001.safetensors" in names
    monkeypatch.undo()
    for layout in ("columns", "plain"):
        run_ranks(WORLD, _load, layout, tmp_path / "c")


def test_a_load_tells_how_far_it_is(tmp_path: Path) -> None:
    run_ranks(WORLD, _save, "rows", tmp_path / "c")
    said: list[tuple[int, int]] = []
    state = {"m": _plain(full()), "step": 0}
    checkpoint.load(state, checkpoint_id=tmp_path / "c", progress=lambda done, total: said.append((done, total)))
    total = sum(value.nbytes for value in full().values())
    assert said[-1] == (total, total) and [done for done, _ in said] == sorted(done for done, _ in said)
    assert {one for _, one in said} == {total}
    with pytest.raises(TypeError, match="progress"):
        checkpoint.load(state, checkpoint_id=tmp_path / "c", progress=3)  # type: ignore[arg-type]


@pytest.mark.threads_only(reason="which files are read is seen in this process")
def test_a_rank_reads_the_tables_of_its_own_parts_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_ranks(WORLD, _save, "rows", tmp_path / "c")
    from fullshard.checkpoint.reading import CheckpointReader

    proven: list[int] = []
    original = CheckpointReader._prove

    def prove(self: CheckpointReader, file: Any, number: int) -> Any:
        proven.append(number)
        return original(self, file, number)

    monkeypatch.setattr(CheckpointReader, "_prove", prove)
    run_ranks(WORLD, _load, "rows", tmp_path / "c")
    assert sorted(proven) == [0, 1, 2, 3], "each rank its own"
    proven.clear()
    run_ranks(WORLD, _load, "plain", tmp_path / "c")
    assert len(proven) == 16


@pytest.mark.parametrize("locked", [True, False])
@pytest.mark.threads_only(reason="which files are opened is seen in this process")
def test_threads_read_files_side_by_side(locked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each opens each of its files once, whether their pages may be locked or not."""
    run_ranks(WORLD, _save, "rows", tmp_path / "c")
    from fullshard.checkpoint.reading import CheckpointReader

    opened: list[str] = []
    original = CheckpointReader._open_file

    def opening(self: CheckpointReader, entry: Any) -> Any:
        opened.append(entry.name)
        return original(self, entry)

    if not locked:
        monkeypatch.setattr(CheckpointReader, "lend_each", _refuse_to_lend)
    monkeypatch.setattr(CheckpointReader, "_open_file", opening)
    for threads, most in ((1, WORLD), (3, WORLD + 2)):
        monkeypatch.setattr("fullshard.checkpoint.loading.spare_cores", lambda world, threads=threads: threads)
        for layout in ("plain", "columns"):
            opened.clear()
            run_ranks(WORLD, _load, layout, tmp_path / "c")
            assert WORLD * WORLD <= len(opened) <= WORLD * most, (threads, layout)


def _refuse_to_lend(*_: object) -> None:
    raise NotResident("no pages are locked")


def test_layouts_are_all_pairs() -> None:
    assert len(list(itertools.product(LAYOUTS, LAYOUTS))) == 64


# ---- the laws of benchmarks/scale.py -------------------------------------------------------------------------


def test_calls_with_a_file_name() -> None:
    found = file_calls((2, 4, 8))
    save, load, files = (law_of({world: counts[i] for world, counts in found.items()}) for i in range(3))
    assert files == Law(1, 3)
    assert save == Law(3, 19)
    assert load == Law(8, 2)
