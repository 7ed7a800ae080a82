"""What faults do, beside raising, killing and stalling: functions of the run that they strike (program.py)."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.faults.program import Run

Action = Callable[[Run], None]


def throw(error: type[BaseException], text: str = "injected") -> Action:
    """Raise an exception of this class."""

    def action(run: Run) -> None:
        raise error(text)

    return action


def out_of_memory(run: Run) -> None:
    """A real allocation that the CPU's allocator refuses: a RuntimeError of its own wording."""
    torch.empty(1 << 60, dtype=torch.uint8)


def send_signal(number: int) -> Action:
    """This process gets a signal."""

    def action(run: Run) -> None:
        os.kill(os.getpid(), number)

    return action


def stop_for(seconds: float) -> Action:
    """This process is stopped, and goes on by itself after `seconds`; a child of it sees to that."""

    def action(run: Run) -> None:
        pid = os.getpid()
        if os.fork() == 0:
            time.sleep(seconds)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
            os._exit(0)
        os.kill(pid, signal.SIGSTOP)

    return action


def leave(code: int) -> Action:
    """This process ends at once, with this exit status and without a word."""
    return lambda run: os._exit(code)


def evaluate(run: Run) -> None:
    run.evaluate()


def no_update(run: Run) -> None:
    """This rank leaves its update out, once."""

    def update() -> None:
        del run.update

    run.update = update  # type: ignore[method-assign]


def parameter(run: Run, name: str) -> Any:
    """The parameter of this name that stands on the model now."""
    return run.model.get_parameter(name)


def local(value: Any) -> Tensor:
    """The rows of this rank, to be written to."""
    return value.to_local() if isinstance(value, DTensor) else value


def poison(name: str, value: float, index: int = 0) -> Action:
    """One element of this parameter's gradient, on this rank, is `value`."""

    def action(run: Run) -> None:
        gradient = local(parameter(run, name).grad)
        with torch.no_grad():
            gradient.view(-1)[index] = value

    return action


def swap_layers(first: int, second: int) -> Action:
    """From now on the model runs its layers in another order; their names stay."""

    def action(run: Run) -> None:
        order = list(range(len(run.model.layers)))
        order[first], order[second] = order[second], order[first]
        run.model.layers = _Reordered(run.model.layers, order)

    return action


def skip_layer(which: int) -> Action:
    """From now on the model leaves out one of its layers."""

    def action(run: Run) -> None:
        run.model.layers = _Reordered(run.model.layers, [i for i in range(len(run.model.layers)) if i != which])

    return action


def repeat_layer(which: int) -> Action:
    """From now on the model runs one of its layers twice."""

    def action(run: Run) -> None:
        order = sorted([*range(len(run.model.layers)), which])
        run.model.layers = _Reordered(run.model.layers, order)

    return action


class _Reordered(nn.ModuleList):
    """The layers of another list under the same names, walked in the order of `order`."""

    def __init__(self, layers: Any, order: list[int]) -> None:
        super().__init__()
        self._modules.update(layers._modules)
        self.order = order

    def __iter__(self) -> Any:
        return iter([self._modules[str(i)] for i in self.order])

    def __getitem__(self, index: Any) -> Any:
        return list(self)[index]
