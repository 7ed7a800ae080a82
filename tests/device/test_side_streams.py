"""Programs that use several streams: what autograd does with them, and users, is ordered, and the numbers are right.

Each program takes the three steps of `on_device.train` in another way. Memory that crosses streams in the *program* has
`record_stream`, as torch asks for; the engine must order everything else.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.harness import on_device
from tests.harness.models import Case, assert_close_to_tensor_max
from tests.harness.on_device import Setup
from tests.harness.pool import pool
from tests.harness.seeded_faults import SeededFault, seeded

STEPS = 3


class Program:
    """One rank's model and optimizer; each program below is a function of it."""

    def __init__(self, rank: int, setup: Setup) -> None:
        self.rank, self.setup = rank, setup
        self.case: Case = on_device.case_of(setup)
        self.model = on_device.sharded(self.case.build().to("simulated"), setup)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def loss(self, step: int) -> Tensor:
        batch = tuple(part.to("simulated") for part in self.case.batch(step, self.rank))
        return self.case.loss(self.model, batch)  # type: ignore[arg-type]

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def unit(self, index: int) -> nn.Module:
        return self.model.get_submodule(self.case.units[index])


def new() -> torch.Stream:
    return torch.Stream(device="simulated")


@contextmanager
def on(stream: torch.Stream) -> Iterator[None]:
    """Under `stream`, after the current one; which comes after it."""
    current = torch.accelerator.current_stream()
    stream.wait_stream(current)
    with stream:
        yield
    current.wait_stream(stream)


def under(stream: torch.Stream, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`function` of one tensor under `stream`, with the tensors that cross recorded."""

    def call(x: Tensor) -> Tensor:
        current = torch.accelerator.current_stream()
        x.record_stream(stream)
        with on(stream):
            out = function(x)
        out.record_stream(current)
        return out

    return call


# ---- programs --------------------------------------------------------------------------------------------------------


def warm_up(do: Program) -> None:
    """What CUDA graphs ask for: some iterations on a side stream, whose losses are still held."""
    held = []
    with on(new()):
        for step in range(2):
            held.append(do.loss(step))
            held[-1].backward(retain_graph=True)
            do.optimizer.zero_grad()
    plain(do)


def warm_up_of_forwards(do: Program) -> None:
    """A graph of the side stream that never had its backward is held while the model trains."""
    with on(new()):
        held = do.loss(0)
    do.model.reset_iter_state()
    plain(do)
    del held


def plain(do: Program) -> None:
    for step in range(STEPS):
        do.loss(step).backward()
        do.step()


def backward_elsewhere(do: Program) -> None:
    for step in range(STEPS):
        loss = do.loss(step)
        loss.record_stream(side := new())
        with on(side):
            loss.backward()
        do.step()


def forward_elsewhere(do: Program) -> None:
    current = torch.accelerator.current_stream()
    for step in range(STEPS):
        with on(new()):
            loss = do.loss(step)
        loss.record_stream(current)
        loss.backward()
        do.step()


def step_elsewhere(do: Program) -> None:
    """Forward, backward and the optimizer on a stream each."""
    a, b, c = new(), new(), new()
    for step in range(STEPS):
        with on(a):
            loss = do.loss(step)
        loss.record_stream(b)
        with on(b):
            loss.backward()
        with on(c):
            do.optimizer.step()
            # Their memory goes back to the stream of the backward: it is kept.
            do.optimizer.zero_grad(set_to_none=False)


def alternately(do: Program) -> None:
    """Each step on another stream, while the graph of the step before is held."""
    streams, held = [new(), new()], None
    for step in range(STEPS):
        with on(streams[step % 2]):
            loss = do.loss(step)
            loss.backward(retain_graph=True)
            do.step()
        held = loss
    del held


def inside_a_unit(do: Program) -> None:
    """A unit computes on another stream inside its forward."""
    module, side = do.unit(1), new()
    module.forward = under(side, module.forward)  # type: ignore[method-assign]
    plain(do)


def route(do: Program, calls: dict[int, Callable[[Tensor], Tensor]]) -> None:
    """The model, a sequence, calls its units through `calls`."""
    model = do.model

    def forward(x: Tensor) -> Tensor:
        for index, module in enumerate(model):
            x = calls.get(index, module)(x)
        return x

    model.forward = forward


def around_a_unit(do: Program) -> None:
    """A unit is called under another stream: its hooks run there, in forward and in backward."""
    route(do, {1: under(new(), do.unit(1))})
    plain(do)


def around_two_units(do: Program) -> None:
    """The same for two, each on its own, and the units are prefetched across streams."""
    first, second, third = (do.unit(i) for i in range(3))
    first.set_modules_to_forward_prefetch([second, third])  # type: ignore[operator]
    third.set_modules_to_backward_prefetch([second, first])  # type: ignore[operator]
    route(do, {0: under(new(), first), 2: under(new(), third)})
    plain(do)


def recomputed_elsewhere(do: Program) -> None:
    """Forward, and its recomputation in backward, switch the stream."""
    routed = {i: under(new(), do.unit(i)) for i in (0, 2)}
    route(do, {i: lambda x, call=call: checkpoint(call, x, use_reentrant=False) for i, call in routed.items()})  # type: ignore[misc]
    plain(do)


def recomputed_by_reentry(do: Program) -> None:
    """As before, in a backward inside of the backward."""
    inner, current = under(new(), do.unit(1)), torch.accelerator.current_stream()

    def call(x: Tensor) -> Tensor:
        # torch's nested backward leaves its gradient in memory of the other stream.
        x.register_hook(lambda gradient: gradient.record_stream(current))
        return checkpoint(inner, x, use_reentrant=True)  # type: ignore[no-any-return]

    route(do, {1: call})
    plain(do)


class _Same(torch.autograd.Function):
    """Its gradient is computed on another stream, from which it comes as torch asks for."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, stream: torch.Stream) -> Tensor:
        ctx.stream = stream
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return under(ctx.stream, lambda g: g * 1)(gradient), None


def gradients_from_elsewhere(do: Program) -> None:
    """Gradients of a weight are written by another stream than that of its node."""
    module: Any = do.unit(1)
    side = new()
    module.forward = lambda x: (
        x + module.down(F.silu(F.linear(module.norm(x), _Same.apply(module.up.weight, side), module.up.bias)))
    )
    plain(do)


def evaluations_elsewhere(do: Program) -> None:
    """A forward without gradients on another stream, while the graph of a training step is held."""
    for step in range(STEPS):
        loss = do.loss(step)
        with torch.no_grad(), on(new()):
            do.model(do.case.batch(0, do.rank)[0].to("simulated"))
        loss.backward()
        do.step()


def evaluations_beside(do: Program) -> None:
    """An evaluation that the program orders with the optimizer alone: it shares the weights of a training step."""
    current, side = torch.accelerator.current_stream(), new()
    for step in range(STEPS):
        side.wait_stream(current)
        loss = do.loss(step)
        with torch.no_grad(), side:
            do.model(do.case.batch(0, do.rank)[0].to("simulated"))
        loss.backward()
        current.wait_stream(side)
        do.step()


def an_optimizer_s_stream(do: Program) -> None:
    """`set_post_optim_event`, with a backward on a stream of its own."""
    side, of_optimizer = new(), new()
    for step in range(STEPS):
        loss = do.loss(step)
        loss.record_stream(side)
        with on(side):
            loss.backward()
        of_optimizer.wait_stream(torch.accelerator.current_stream())
        with of_optimizer:
            do.optimizer.step()
            do.optimizer.zero_grad(set_to_none=False)
        do.model.set_post_optim_event(of_optimizer.record_event())


def accumulated_elsewhere(do: Program) -> None:
    """Micro-batches, the second of each step on another stream."""
    for step in range(STEPS):
        for micro in range(2):
            do.model.set_requires_gradient_sync(micro == 1)
            if micro == 0:
                (do.loss(2 * step) / 2).backward()
                continue
            with on(new()):
                (do.loss(2 * step + 1) / 2).backward()
        do.step()


def partial_sums_elsewhere(do: Program) -> None:
    """Micro-batches that replicas do not sum yet; the last of each step, on another stream, adds to them and sums."""
    for step in range(STEPS):
        for micro in range(3):
            do.model.set_requires_all_reduce(micro == 2)
            with on(new()) if micro == 2 else nullcontext():
                (do.loss(3 * step + micro) / 3).backward()
        do.step()


def hooks_of_users(do: Program) -> None:
    """A hook after accumulation reads and writes `.grad`, in a backward under another stream."""
    for parameter in do.model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: p.grad.mul_(2.0).div_(2.0))
    backward_elsewhere(do)


def unsharded_elsewhere(do: Program) -> None:
    """The user's own calls, under another stream than the model."""
    for step in range(STEPS):
        with on(new()):
            handle = do.unit(1).unshard(async_op=True)  # type: ignore[operator]
            with on(new()):
                do.unit(2).unshard()  # type: ignore[operator]
            handle.wait()
        # The checks of first forwards wait on the host, which orders more than the engine does.
        with mock.patch("fullshard.engine.seal.Seal.before_forward", lambda self, sums: None):
            do.loss(step).backward()
        do.step()
        with on(new()):
            do.model.unshard()
            do.model.reshard()


def errors_elsewhere(do: Program) -> None:
    """A forward and a backward on another stream raise; then the model trains on the first one."""
    for where in ("forward", "backward"):
        fails = _failing(do.unit(1), where)
        with pytest.raises(ArithmeticError), on(new()):
            do.loss(0).backward()
        fails.remove()
        do.optimizer.zero_grad()
    plain(do)


def _failing(module: nn.Module, where: str) -> Any:
    def fail(module: Any, args: Any, output: Tensor) -> None:
        if where == "forward":
            raise ArithmeticError
        output.register_hook(_raise)

    return module.register_forward_hook(fail)


def _raise(_: Tensor) -> None:
    raise ArithmeticError


def begun_elsewhere(do: Program) -> None:
    """The last of three backwards adds to `.grad` on another stream, and the program does not order it after them."""
    side = new()
    for step in range(STEPS):
        for micro in range(2):
            (do.loss(3 * step + micro) / 3).backward()
        with side:
            (do.loss(3 * step + 2) / 3).backward()
        torch.accelerator.current_stream().wait_stream(side)
        do.step()


def kept_elsewhere(do: Program) -> None:
    """Evaluations keep full parameters; another stream reads them and lets them go."""
    side, current = new(), torch.accelerator.current_stream()
    for step in range(STEPS):
        with torch.no_grad():
            do.loss(step)
            side.wait_stream(current)
            with side:
                do.loss(step)
                do.model.reshard()
                for module in do.model:
                    module.reshard()
        current.wait_stream(side)
        do.loss(step).backward()
        do.step()


class _Mixer(nn.Module):
    """Two inputs, through a frozen weight each, on streams of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.out = (nn.Linear(10, 10, bias=False) for _ in range(3))
        self.streams: list[torch.Stream] = []
        for frozen in (self.left, self.right):
            frozen.requires_grad_(False)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        if self.streams:
            a, b = under(self.streams[0], self.left)(a), under(self.streams[1], self.right)(b)
        else:
            a, b = self.left(a), self.right(b)
        return self.out(a * b)  # type: ignore[no-any-return]


class _Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.mixer = nn.Linear(10, 10), _Mixer()

    def forward(self, x: Tensor) -> Tensor:
        x, functions = self.first(x), [torch.sin, torch.cos]
        if self.mixer.streams:
            functions = [under(*pair) for pair in zip(self.mixer.streams[2:], functions, strict=True)]  # type: ignore[misc]
        return self.mixer(*(function(x) for function in functions))  # type: ignore[no-any-return]


MIXED = Case("mixed", _Mixed, ("first", "mixer"), (10,), (10,))


def two_inputs(do: Program) -> None:
    """The gradients of a unit's inputs are complete on two streams, from reads on two others."""
    do.model.mixer.streams = [new() for _ in range(4)]
    plain(do)


class _Fork(nn.Module):
    """Two branches, of which the second computes on another stream."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(10, 10), nn.Linear(10, 10)
        self.stream: torch.Stream | None = None

    def forward(self, x: Tensor) -> Tensor:
        second = self.second if self.stream is None else under(self.stream, self.second)
        return self.first(x) + second(x)  # type: ignore[no-any-return]


BRANCHES = Case("branches", lambda: nn.Sequential(_Fork(), _Fork()), ("0", "1"), (10,), (10,))


def branches(do: Program) -> None:
    """The first gradients of a unit come on another stream, and the last ones on the model's."""
    for fork in do.model:
        fork.stream = new()
    plain(do)


class _Hiding(nn.Module):
    """A second output, computed on another stream, is not in what its unit returns."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(10, 10), nn.Linear(10, 10)
        self.stream: torch.Stream | None = None
        self.hidden: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        second = self.second if self.stream is None else under(self.stream, self.second)
        self.hidden = second(x)
        return self.first(x)  # type: ignore[no-any-return]


class _Hidden(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.below, self.unit = nn.Linear(10, 10), _Hiding()

    def forward(self, x: Tensor) -> Tensor:
        x = self.unit(self.below(x))
        assert self.unit.hidden is not None
        return x + self.unit.hidden  # type: ignore[no-any-return]


HIDDEN = Case("hidden", _Hidden, ("below", "unit"), (10,), (10,))
on_device.OTHERS += [MIXED, BRANCHES, HIDDEN]


def hidden_outputs(do: Program) -> None:
    """A weight is read on another stream, to which no hook of its unit leads."""
    do.model.unit.stream = new()
    plain(do)


def two_roots(do: Program) -> None:
    """Two roots that share their messages in flight, each on a stream of its own."""
    import fullshard

    found = []
    for stream in (torch.accelerator.current_stream(), new()):
        first, second = Program(do.rank, do.setup), Program(do.rank, do.setup)
        fullshard.share_comm_ctx([first.model, second.model])
        call = under(stream, second.model)
        for step in range(STEPS):
            x, y = (part.to("simulated") for part in do.case.batch(step, do.rank))
            F.mse_loss(call(first.model(x)), y).backward()
            first.step()
            second.step()
        found.append([on_device.whole(p) for one in (first, second) for p in one.model.parameters()])
    assert all(map(torch.equal, *found))
    plain(do)


TWO, FOUR = Setup(steps=STEPS), Setup(steps=STEPS, replicas=2)
KEPT, OFFLOAD = replace(TWO, reshard=False), replace(TWO, offload=True)
PROGRAMS: dict[str, tuple[Callable[[Program], None], Setup, int]] = {
    "warm-up with its losses held": (warm_up, TWO, 2),
    "backward elsewhere": (backward_elsewhere, TWO, 2),
    "forward elsewhere": (forward_elsewhere, TWO, 2),
    "around a unit": (around_a_unit, TWO, 2),
    "gradients from elsewhere": (gradients_from_elsewhere, TWO, 2),
    "a stream for each": (step_elsewhere, TWO, 2),
    "alternately": (alternately, TWO, 2),
    "inside a unit": (inside_a_unit, TWO, 2),
    "around two units, prefetched": (around_two_units, TWO, 2),
    "recomputed elsewhere": (recomputed_elsewhere, TWO, 2),
    "recomputed by re-entry": (recomputed_by_reentry, TWO, 2),
    "evaluations elsewhere": (evaluations_elsewhere, TWO, 2),
    "evaluations beside": (evaluations_beside, KEPT, 2),
    "an optimizer's stream": (an_optimizer_s_stream, TWO, 2),
    "accumulated elsewhere": (accumulated_elsewhere, replace(TWO, micro=2), 2),
    "partial sums elsewhere": (partial_sums_elsewhere, replace(FOUR, micro=3), 4),
    "begun elsewhere": (begun_elsewhere, replace(TWO, micro=3), 2),
    "kept elsewhere": (kept_elsewhere, KEPT, 2),
    "hooks of users": (hooks_of_users, TWO, 2),
    "unsharded elsewhere": (unsharded_elsewhere, TWO, 2),
    "errors elsewhere": (errors_elsewhere, TWO, 2),
    "two inputs": (two_inputs, replace(TWO, case="mixed"), 2),
    "hidden outputs": (hidden_outputs, replace(TWO, case="hidden"), 2),
    "branches": (branches, replace(TWO, case="branches"), 2),
    "two roots": (two_roots, TWO, 2),
    "warm-up of forwards alone": (warm_up_of_forwards, TWO, 2),
    "warm-up with its losses held, ZeRO-2": (warm_up, KEPT, 2),
    "warm-up with its losses held, offload": (warm_up, OFFLOAD, 2),
    "warm-up with its losses held, one rank": (warm_up, TWO, 1),
    "warm-up with its losses held, HSDP": (warm_up, FOUR, 4),
    "backward elsewhere, hpZ": (backward_elsewhere, replace(TWO, reshard=2), 4),
    "backward elsewhere, offload": (backward_elsewhere, OFFLOAD, 2),
    "around a unit, ZeRO-2": (around_a_unit, KEPT, 2),
    "around a unit, large parameters": (around_a_unit, replace(TWO, case="alone"), 2),
    "around a unit, exchanged": (around_a_unit, replace(TWO, calls=(("set_communication", "all-to-all"),)), 2),
    "around a unit, one rank": (around_a_unit, TWO, 1),
    "gradients from elsewhere, offload": (gradients_from_elsewhere, OFFLOAD, 2),
}


def run_program(rank: int, name: str, fault: str = "") -> tuple[list[str], dict[str, Tensor]]:
    """What the watch found, and the parameters."""
    from tests.harness import nccl, simulated

    program, setup, _ = PROGRAMS[name]
    with (
        simulated.watched() as seen,
        warnings.catch_warnings(),
        seeded(FAULTS[fault][0]) if fault else nullcontext(),
    ):
        # torch warns once that a held graph keeps nodes of another stream, of plain models too.
        warnings.filterwarnings("ignore", "The AccumulateGrad node's stream")
        do = Program(rank, setup)
        program(do)
        torch.accelerator.synchronize()
        params = {key: on_device.whole(p).cpu() for key, p in do.model.named_parameters()}
        del do
        gc.collect()
    return [race.explain() for race in seen.races] + nccl.failures(), params


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_with_several_streams_train_as_plain_ones(name: str) -> None:
    _, setup, world = PROGRAMS[name]
    expected = on_device.reference(setup, world)
    for wrong, params in pool(world, backend="nccl").run(run_program, name, timeout=40):
        assert not wrong, f"{len(wrong)} unordered; the first:\n{wrong[0]}"
        for key, values in params.items():
            # Three AdamW steps, each of two roundings at the size of the largest element, and the sums of gradients.
            assert_close_to_tensor_max(values, expected[key], 12, key)


# ---- faults ----------------------------------------------------------------------------------------------------------

_STREAM = "engine.stream:ModelStream"
# Each order that the engine adds, and a program that needs it.
FAULTS: dict[str, tuple[SeededFault, str]] = {
    "commands do not wait for the report's stream": (
        SeededFault(f"{_STREAM}.ordered", "self.stream.wait_stream(current)", "pass"),
        "around a unit",
    ),
    "the report's stream does not wait for commands": (
        SeededFault(f"{_STREAM}.ordered", "current.wait_stream(self.stream)", "pass"),
        "around a unit",
    ),
    "commands run on the report's stream": (
        SeededFault(f"{_STREAM}.ordered", "with self.stream:", "with current:"),
        "warm-up with its losses held",
    ),
    "a report without commands orders nothing": (
        SeededFault("engine.root:Root._do", "stream is not None and", "stream is not None and commands and"),
        "evaluations beside",
    ),
    "a gradient of another stream does not order it": (
        SeededFault("engine.root:Root._gradient_arrived", "with stream.ordered():", "if stream:"),
        "branches",
    ),
    "a gradient of another stream goes back before it was read": (
        SeededFault("engine.root:Root._gradient_arrived", "stream.reads(param.full.grad)", "pass"),
        "around a unit",
    ),
    "the user's stream does not keep gradients": (
        SeededFault("engine.executor:Executor._finish", "stream.leaves(", "("),
        "forward elsewhere",
    ),
    "the first of two inputs does not order its stream": (
        SeededFault("engine.hooks:_InputsReached.one", "self._root.stream.follow()", "pass"),
        "two inputs",
    ),
    "a weight is read on another stream at once": (
        SeededFault("engine.root:Root._weight_needed", "self.stream.lead()", "self.stream is None"),
        "hidden outputs",
    ),
    "such a unit is not watched any longer": (
        SeededFault("engine.root:Root._weight_needed", "unit.reads.is_irregular = True\n        return", "return"),
        "hidden outputs",
    ),
    "another stream begins at once": (
        SeededFault(f"{_STREAM}.begins", "current.wait_stream(self.stream)", "pass"),
        "begun elsewhere",
    ),
    "another stream takes over memory": (
        SeededFault(f"{_STREAM}.begins", " or any(held)", ""),
        "kept elsewhere",
    ),
    "another stream takes over held gradients": (
        SeededFault("engine.unit:Unit.holds_memory", "or gradients.window_open", ""),
        "accumulated elsewhere",
    ),
    "another stream takes over partial sums": (
        SeededFault("engine.unit:Unit.holds_memory", "or gradients.partial_open", ""),
        "partial sums elsewhere",
    ),
    "a root keeps memory of another stream": (
        SeededFault("engine.root:_settle", "root.reshard(unit)", "pass"),
        "unsharded elsewhere",
    ),
    "a root takes another one's message on its own stream": (
        SeededFault("engine.executor:Executor._advance_oldest", "if flight.owner is self else", "if True else"),
        "two roots",
    ),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("fault", FAULTS)
def test_an_order_that_is_left_out_is_found(fault: str) -> None:
    _, name = FAULTS[fault]
    _, setup, world = PROGRAMS[name]
    found = pool(world, backend="nccl").run(run_program, name, fault, timeout=40)
    assert any(wrong for wrong, _ in found)
