"""What is shared by all threads of a process, which may be ranks of a test, or models of a server: no thread finds it
half changed, and none changes it a second time."""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import fullshard
from fullshard import checkpoint, fully_shard, step_on_shards
from fullshard._torch import local_of
from fullshard.agree import recovery
from fullshard.agree.recovery import Recovery
from fullshard.checkpoint import background
from fullshard.checkpoint.staging import StagingMemory
from fullshard.comm import offload
from fullshard.engine import asleep, finalization, full_params, optimizer_steps
from fullshard.engine.names import all_modules, names_elsewhere, parameter_of
from fullshard.extras import owners
from fullshard.migrate import experts
from fullshard.policy import options
from fullshard.policy.options import Options, use_options
from tests.harness.models import seeded
from tests.harness.moments import SECONDS, Meeting, Shared, at_once, meanwhile
from tests.harness.threads import run_ranks

# The packages have functions of the modules' names.
SAVING: Any = sys.modules["fullshard.checkpoint.saving"]
WATCH: Any = sys.modules["fullshard.peers.watch"]


class Weakly:
    """An object to which there are weak references."""


def plain() -> torch.optim.Optimizer:
    optimizer_steps.follow_steps()
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    return torch.optim.SGD([parameter], lr=0.1)


# ---- steps of optimizers ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("registry", "error"), [(full_params._no_steps, "inside full_params"), (asleep._held, "found it asleep")]
)
def test_a_step_looks_at_all_entries_though_another_thread_removes_its_own(registry: list[Any], error: str) -> None:
    """Red before: the entry after that was left out, and the step taken."""

    class Leaves:
        def holds(self, _: object) -> bool:
            if self in registry:
                registry.remove(self)
            return False

    registry[:] = [Leaves(), SimpleNamespace(holds=lambda _: True)]
    try:
        with pytest.raises(RuntimeError, match=error):
            plain().step()
    finally:
        registry.clear()


def test_a_step_while_backwards_end_in_another_thread() -> None:
    """Red before: "dictionary changed size during iteration"."""
    registry: Any = finalization._under_way
    optimizer, added = plain(), list[int]()

    def another() -> None:
        added.append(-len(added) - 1)
        registry[added[-1]] = lambda: None

    try:
        another()
        another()
        with meanwhile(another, "engine/finalization.py"):
            optimizer.step()
    finally:
        for number in added:
            registry.pop(number)
    assert len(added) > 2


def test_a_step_does_not_ask_models_of_other_threads_whose_average_is_applied() -> None:
    """Red before: their state dicts, which reshard. It may be in a forward."""

    def rank_main(rank: int) -> None:
        model = fully_shard(seeded(lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))))
        mean, other, asked = fullshard.average(model, decay=0.5), plain(), list[object]()
        with mean.applied():
            model.register_state_dict_pre_hook(lambda *_: asked.append(1))  # type: ignore[no-untyped-call]
            other.step()
            assert not asked
            with pytest.raises(RuntimeError, match="expected no step while an average is applied"):
                torch.optim.SGD(model.parameters(), lr=0.1).step()

    run_ranks(2, rank_main)


@pytest.mark.parametrize(
    ("name", "register"),
    [("_told", optimizer_steps.tell_each_step), ("asked_on_devices", optimizer_steps.asks_on_devices)],
)
def test_what_steps_call_is_registered_once(
    name: str, register: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def told(_: object) -> None: ...

    found = Shared()
    monkeypatch.setattr(optimizer_steps, name, found)
    at_once(*[lambda: register(told)] * 2)
    assert found == [told]


def test_steps_are_followed_from_the_first_model_of_each_thread_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Red before: the second thread continued while the first one registered the hooks."""
    registered, second_is_over = list[str](), threading.Event()

    def slowly(name: str) -> Callable[..., None]:
        def register(_: object) -> None:
            second_is_over.wait(SECONDS)
            registered.append(name)

        return register

    def followed() -> int:
        optimizer_steps.follow_steps()
        second_is_over.set()
        return len(registered)

    monkeypatch.setattr(optimizer_steps, "_hooks", [])
    monkeypatch.setattr(optimizer_steps, "register_optimizer_step_pre_hook", slowly("before"))
    monkeypatch.setattr(optimizer_steps, "register_optimizer_step_post_hook", slowly("after"))
    assert at_once(followed, followed) == [2, 2] and registered == ["before", "after"]


# ---- options ---------------------------------------------------------------------------------------------------------


def test_options_of_two_threads_end_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Red before: one removed the entry at the place where its own had been."""
    monkeypatch.setattr(options, "_open", Shared())

    def within() -> None:
        with use_options(check=True):
            both.wait(10)

    both = threading.Barrier(2)
    at_once(within, within)
    assert Options.current({}) == Options()


def test_options_are_read_though_another_thread_leaves_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Red before: the entry after that was left out."""
    opened: list[Any] = []

    class Leaving(Mapping[str, Any]):
        def __getitem__(self, name: str) -> Any:
            return 4

        def __iter__(self) -> Iterator[str]:
            if opened[0] is self:
                del opened[0]
            return iter(["prefetch_depth"])

        def __len__(self) -> int:
            return 1

    opened[:] = [Leaving(), {"check": True}]
    monkeypatch.setattr(options, "_open", opened)
    assert Options.current({}) == Options(prefetch_depth=4, check=True)


# ---- classes ---------------------------------------------------------------------------------------------------------


def _on_owners(optimizer: Any) -> Any:
    owners._attached(optimizer, SimpleNamespace(names={}))  # type: ignore[arg-type]
    return optimizer


@pytest.mark.parametrize("steps", [lambda optimizer: step_on_shards(optimizer, elementwise=True), _on_owners])
def test_optimizers_of_a_class_get_one_class(steps: Callable[[Any], Any]) -> None:
    meet = Meeting()

    class Meets(torch.optim.SGD):
        def __init_subclass__(cls) -> None:
            meet()

    def made() -> type:
        return type(steps(Meets([nn.Parameter(torch.ones(1))], lr=0.1)))

    first, second = at_once(made, made)
    assert first is second


def test_experts_of_a_class_get_one_class(monkeypatch: pytest.MonkeyPatch) -> None:
    meet = Meeting()

    class Meets(nn.Module):
        def __init_subclass__(cls) -> None:
            meet()

    def sends() -> type:
        module = Meets()
        experts.send_by(module)
        return type(module)

    monkeypatch.setattr(experts, "fused_layout", lambda _: "rows")
    first, second = at_once(sends, sends)
    assert first is second


# ---- names -----------------------------------------------------------------------------------------------------------


def test_a_name_is_looked_up_while_other_threads_build_modules() -> None:
    """Red before: "dictionary changed size during iteration", and no `_modules` yet, instead of the error that was
    about to get the name."""

    class Half(nn.Module): ...

    half, grows = Half.__new__(Half), nn.ParameterDict({"a": torch.ones(1), "b": torch.ones(1)})
    vars(half)["_parameters"] = {}  # so far another thread is
    wanted = grows["b"]

    def another() -> None:
        grows.register_parameter(f"c{len(grows._parameters)}", nn.Parameter(torch.ones(1)))
        for name in [*grows._parameters][3:-1]:
            del grows._parameters[name]

    with meanwhile(another, "engine/names.py", "nn/modules/module.py"):
        assert names_elsewhere([wanted])[id(wanted)] == "ParameterDict.b"
    gradient = wanted.grad = torch.ones(1)
    with meanwhile(another, "engine/names.py"):
        assert parameter_of(gradient) is wanted
    assert vars(half)


def test_a_tuple_of_classes_that_another_thread_makes_is_left_alone() -> None:
    """Python raises SystemError in a thread that makes a tuple to which another one has a reference."""
    inside, ended, finish = threading.Event(), threading.Event(), threading.Event()

    class Listed(nn.Module):
        @property
        def __dict__(self) -> Any:  # type: ignore[override]
            if inside.is_set() and threading.current_thread() is threading.main_thread():
                finish.set()
                ended.wait(10)
            return vars(nn.Module)["__dict__"].__get__(self)

    def classes() -> Iterator[type]:
        yield Listed
        inside.set()
        finish.wait(10)

    def make() -> tuple[type, ...]:
        try:
            return tuple(classes())
        finally:
            ended.set()

    one = Listed()
    with ThreadPoolExecutor(1) as threads:
        made = threads.submit(make)
        assert inside.wait(10)
        assert any(found is one for found in all_modules())
        assert made.result(10) == (Listed,)


# ---- garbage ---------------------------------------------------------------------------------------------------------


class _Finalized:
    """In a cycle of its own. A collection runs `do` when it frees it."""

    def __init__(self, do: Callable[[], object]) -> None:
        self.itself, self.do = self, do

    def __del__(self) -> None:
        self.do()


def test_memory_that_a_cycle_holds_goes_while_another_thread_collects() -> None:
    """Red before: `gc.collect` does nothing then, and `sleep` said that the program holds the memory."""
    inside, over = threading.Event(), threading.Event()

    def collected() -> None:
        inside.set()
        over.wait(SECONDS)

    def rank_main(rank: int) -> None:
        model = fully_shard(seeded(lambda: nn.Linear(4, 4)))
        gc.disable()  # or a collection of this thread may find the cycles before
        try:
            _Finalized(collected)
            collector = threading.Thread(target=gc.collect)
            collector.start()
            assert inside.wait(10)
            holder = SimpleNamespace(view=local_of(model.weight).view(-1))
            holder.itself = holder
            del holder
            assert fullshard.sleep(model, drop=True).freed_nbytes == 4 * 16 + 4 * 4
        finally:
            gc.enable()
            over.set()
            collector.join()

    run_ranks(1, rank_main)


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def test_two_threads_save_without_a_process_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red before: IndexError, where both found memory of an earlier save and there was one."""
    monkeypatch.setattr(background._alone, "_memory", Shared(StagingMemory()))

    def save(name: str) -> str:
        return checkpoint.async_save({"n": torch.ones(3)}, checkpoint_id=tmp_path / name, no_dist=True).result(30)

    at_once(lambda: save("a"), lambda: save("b"))
    for name in ("a", "b"):
        found = {"n": torch.zeros(3)}
        checkpoint.load(found, checkpoint_id=tmp_path / name, no_dist=True)
        assert found["n"].tolist() == [1, 1, 1]


def test_two_threads_wait_for_the_saves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "_pending", Shared(SimpleNamespace(unseen=lambda: None)))
    at_once(background.close, background.close)
    assert not background._pending


def test_two_threads_keep_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Red before: KeyError, where both gave up the same old one."""
    meet = Meeting()

    class Plans(dict[str, Any]):
        def __delitem__(self, digest: str) -> None:
            meet()
            super().__delitem__(digest)

    plans = Plans({str(number): number for number in range(SAVING._KEPT)})
    monkeypatch.setattr(SAVING, "plans_of", lambda _: plans)
    at_once(*[lambda digest=digest: SAVING.keep_plan(None, SimpleNamespace(digest=digest), digest) for digest in "ab"])  # type: ignore[misc]
    assert len(plans) <= SAVING._KEPT and {"a", "b"} <= plans.keys()


# ---- models on devices -----------------------------------------------------------------------------------------------


def test_a_load_while_another_thread_shards_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Red before: "Set changed size during iteration"."""
    looking, added = threading.Event(), threading.Event()

    class Slow(weakref.WeakSet[Any]):
        def __iter__(self) -> Iterator[Any]:
            for one in super().__iter__():
                looking.set()
                added.wait(SECONDS)
                yield one

    monkeypatch.setattr(optimizer_steps, "asked_on_devices", [])
    scope, first = Weakly(), Weakly()
    monkeypatch.setattr(recovery, "_by_scope", weakref.WeakKeyDictionary({scope: Slow([first])}))

    def shard() -> Recovery:
        assert looking.wait(10)
        try:
            return Recovery(nn.Linear(2, 2), [], [scope])  # type: ignore[list-item]
        finally:
            added.set()

    found, made = at_once(recovery._recoveries, shard)
    assert set(found) == {first} and set(recovery._recoveries()) == {first, made}


def test_uploads_are_settled_while_another_thread_uploads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Red before: "Set changed size during iteration"."""
    links: list[offload.HostLink] = []

    def another() -> None:
        if len(links) < 99:
            links.append(link := offload.HostLink(torch.device("cpu"), pin=False))
            link._streams = streams
            with link.ahead():
                pass

    event = SimpleNamespace(synchronize=lambda: None)
    stream = SimpleNamespace(wait_stream=lambda _: None, record_event=lambda: event)
    module = SimpleNamespace(current_stream=lambda _: stream, stream=lambda _: contextlib.nullcontext())
    streams: Any = SimpleNamespace(up=stream, module=module)
    another()
    another()
    with meanwhile(another, "comm/offload.py", "_weakrefset.py"):
        offload.settle_uploads()
    offload.settle_uploads()
    assert len(links) > 2 and not offload.uploading
    another()
    links.clear()
    gc.collect()
    assert not offload.uploading, "they keep no link"


def test_two_threads_let_go_of_downloads() -> None:
    """Red before: one looked at a download, and removed the next one, which nobody had waited for."""
    meet, current = Meeting(), SimpleNamespace(wait_event=lambda _: None)

    class Event:
        def __init__(self, *, over: bool) -> None:
            self.over = over

        def query(self) -> bool:
            if self.over:
                meet()
            return self.over

    streams = object.__new__(offload._CopyStreams)
    streams._releasing = threading.Lock()
    running = Event(over=False)
    host = torch.ones(1)
    streams.downloading = deque([(Event(over=True), host, host), (running, host, host)])
    at_once(*[lambda: streams.release(current, 1)] * 2)
    assert [event for event, *_ in streams.downloading] == [running]


# ---- the watch -------------------------------------------------------------------------------------------------------


def test_a_process_group_has_one_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Red before: each thread got its own, with connections of its own, and the store counted two."""
    meet = Meeting()

    def made(*_: object) -> Weakly:
        meet()
        return Weakly()

    group = SimpleNamespace(WORLD=Weakly())
    known = SimpleNamespace(
        is_initialized=lambda: True, group=group, get_backend=lambda _: "gloo", get_world_size=lambda _: 2
    )
    monkeypatch.setattr(WATCH, "dist", known)
    monkeypatch.setattr(WATCH, "timeout_of", lambda _: 60.0)
    monkeypatch.setattr(WATCH, "_watch_of", made)
    monkeypatch.setattr(WATCH, "_watches", {})
    monkeypatch.setattr(WATCH, "_latest", [])
    first, second = at_once(WATCH.watch, WATCH.watch)
    assert first is second
