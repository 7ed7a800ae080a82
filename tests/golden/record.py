"""Records what torch's own FSDP2 does, in the vocabulary of README.md. Only this file opens torch's FSDP2.

    WRITE_GOLDEN=1 python -m pytest tests/fake/test_golden_torch.py     writes traces/
    python -m tests.golden.record                                       the same
    python -m tests.golden.record two_steps true                        prints one

Methods of torch's private classes are replaced while a model is built and run: hooks are bound at
construction, so replacing them later would miss them. A command is noted where it takes effect: a call that
returns early because there is nothing to do is none.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param_group as group_module
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.distributed.fsdp._fully_shard._fully_shard import _UnshardHandleImpl
from torch.utils._pytree import tree_leaves

from tests.golden.parse import FLAGS, Command, Event, render
from tests.golden.scenarios import RESHARD, Scenario, cases, world_of
from tests.harness.fake import fake_world

TRACES = Path(__file__).parent / "traces"


class Recorder:
    """The events and commands of one model, and the names of its units."""

    def __init__(self) -> None:
        self.trace: list[Event | Command] = []
        self._names: dict[int, str] = {}
        # What keeps the ids above from being reused.
        self._named: list[object] = []
        self._in_final_callback = False
        self._reducing: FSDPParamGroup | None = None

    def name_units(self, model: nn.Module) -> None:
        """Give every unit the name of its module; the root is "root". Only named units are recorded."""
        for name, module in model.named_modules():
            if isinstance(module, FSDPModule):
                state = module._get_fsdp_state()
                for owner in (module, state, *_groups_of(state)):
                    self._names[id(owner)] = name or "root"
                    self._named.append(owner)

    def event(self, kind: str, owner: object, **flags: bool) -> None:
        if id(owner) in self._names:
            chosen = tuple(flag for flag in FLAGS if flags.get(flag))
            self.trace.append(Event(kind, self._names[id(owner)], chosen))

    def command(self, kind: str, owner: object) -> None:
        if id(owner) in self._names:
            self.trace.append(Command(kind, self._names[id(owner)]))

    # ---- events: hooks of a unit, the end of a backward, the user's calls ---------------------------------

    def pre_forward(self, original: Any, state: FSDPState, *args: Any) -> Any:
        self.event("pre_forward", state, grad=torch.is_grad_enabled(), in_backward=_in_backward())
        return original(state, *args)

    def post_forward(self, original: Any, state: FSDPState, module: Any, args: Any, output: Any) -> Any:
        requires_grad = any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in tree_leaves(output))
        outputs = torch.is_grad_enabled() and requires_grad
        self.event("post_forward", state, outputs=outputs, in_backward=_in_backward())
        return original(state, module, args, output)

    def pre_backward(self, original: Any, state: FSDPState, grad: Tensor) -> Any:
        self.event("pre_backward", state)
        return original(state, grad)

    def post_backward(self, original: Any, group: FSDPParamGroup, *args: Any) -> Any:
        none = not any(_has_gradient(param) for param in group.fsdp_params)
        flags = {"none": none, "nosync": not group.reduce_grads, "final": self._in_final_callback}
        self.event("grads_ready", group, **flags)
        self._reducing = group
        try:
            return original(group, *args)
        finally:
            self._reducing = None

    def final_callback(self, original: Any, state: FSDPState) -> Any:
        self._in_final_callback = True
        try:
            result = original(state)
        finally:
            self._in_final_callback = False
        # The callback belongs to the whole run, whichever unit queued it.
        self.event("backward_end", state._state_ctx.all_states[0])
        return result

    def user_unshard(self, original: Any, module: FSDPModule, *args: Any, **kwargs: Any) -> Any:
        self.event("unshard", module)
        return original(module, *args, **kwargs)

    def user_wait(self, original: Any, handle: Any) -> Any:
        for group in _groups_of(handle):
            self.event("wait_unshard", group)
        return original(handle)

    def user_reshard(self, original: Any, module: FSDPModule) -> Any:
        self.event("reshard", module)
        return original(module)

    # ---- commands: where the state of a group really changes ----------------------------------------------

    def unshard(self, original: Any, group: FSDPParamGroup, *args: Any, **kwargs: Any) -> Any:
        was_pending = group._all_gather_result is not None
        kept_secondary = group.is_sharded_post_forward
        result = original(group, *args, **kwargs)
        if group._all_gather_result is not None and not was_pending:
            self.command("unshard_secondary" if kept_secondary else "unshard", group)
        return result

    def wait_for_unshard(self, original: Any, group: FSDPParamGroup) -> Any:
        if group._all_gather_result is not None:
            self.command("wait", group)
        return original(group)

    def to_sharded(self, original: Any, group: FSDPParamGroup) -> Any:
        # While an all-gather of secondary shards is in flight their state is that of before: a cancel ends it.
        if not group.is_sharded and group._all_gather_result is None:
            self.command("reshard", group)
        return original(group)

    def to_sharded_post_forward(self, original: Any, group: FSDPParamGroup) -> Any:
        if not group.is_sharded_post_forward:
            self.command("reshard_secondary", group)
        return original(group)

    def finalize_backward(self, original: Any, group: FSDPParamGroup) -> Any:
        if group._all_gather_result is not None:
            self.command("cancel", group)
        return original(group)

    def foreach_reduce(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        assert self._reducing is not None, "a reduction outside of post_backward: torch's order has changed"
        self.command("reduce", self._reducing)
        return original(*args, **kwargs)


def _groups_of(owner: Any) -> list[FSDPParamGroup]:
    """Those of a state or of a handle, which torch up to 2.11 gives one at most. A handle has none after its wait."""
    if hasattr(owner, "_fsdp_param_groups"):
        return list(owner._fsdp_param_groups or ())
    return [] if owner._fsdp_param_group is None else [owner._fsdp_param_group]


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _has_gradient(param: Any) -> bool:
    if param.unsharded_accumulated_grad is not None:
        return True
    return hasattr(param, "_unsharded_param") and param.unsharded_param.grad is not None


@contextmanager
def patched(recorder: Recorder) -> Iterator[None]:
    """While open, torch's FSDP2 reports to `recorder`."""
    seams: list[tuple[Any, str, Callable[..., Any]]] = [
        (FSDPState, "_pre_forward", recorder.pre_forward),
        (FSDPState, "_post_forward", recorder.post_forward),
        (FSDPState, "_pre_backward", recorder.pre_backward),
        (FSDPState, "_root_post_backward_final_callback", recorder.final_callback),
        (FSDPModule, "unshard", recorder.user_unshard),
        (FSDPModule, "reshard", recorder.user_reshard),
        (_UnshardHandleImpl, "wait", recorder.user_wait),
        (FSDPParamGroup, "post_backward", recorder.post_backward),
        (FSDPParamGroup, "unshard", recorder.unshard),
        (FSDPParamGroup, "wait_for_unshard", recorder.wait_for_unshard),
        (FSDPParamGroup, "_to_sharded", recorder.to_sharded),
        (FSDPParamGroup, "_to_sharded_post_forward", recorder.to_sharded_post_forward),
        (FSDPParamGroup, "finalize_backward", recorder.finalize_backward),
        (group_module, "foreach_reduce", recorder.foreach_reduce),
    ]
    originals = [(owner, name, getattr(owner, name)) for owner, name, _ in seams]
    for (owner, name, report), (_, _, original) in zip(seams, originals, strict=True):
        setattr(owner, name, _reporting(report, original))
    try:
        yield
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)


def _reporting(report: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return report(original, *args, **kwargs)

    return call


def record(scenario: Scenario, reshard: str) -> str:
    """The text of the trace of one scenario on torch's FSDP2: rank 0 of a fake world, on the CPU."""
    recorder = Recorder()
    with fake_world(world_of(reshard)), patched(recorder):
        model = scenario.build(fully_shard, RESHARD[reshard])
        recorder.name_units(model)
        scenario.run(model)
    comment = f"{scenario.name}: {scenario.about}; reshard_after_forward={RESHARD[reshard]}"
    return render(recorder.trace, comment=comment)


def path_of(scenario: Scenario, reshard: str) -> Path:
    """Where the committed trace of a case lies."""
    return TRACES / f"{scenario.name}__reshard_{reshard}.txt"


def main(arguments: list[str]) -> None:
    """Write all traces, or print one."""
    TRACES.mkdir(exist_ok=True)
    for scenario, reshard in cases():
        if not arguments:
            path_of(scenario, reshard).write_text(record(scenario, reshard))
        elif arguments == [scenario.name, reshard]:
            print(record(scenario, reshard), end="")


if __name__ == "__main__":
    main(sys.argv[1:])
