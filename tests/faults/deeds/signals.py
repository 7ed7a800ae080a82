"""What the cases of signals do: signals that come while a rank waits for another one."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

from tests.faults.actions import Action
from tests.faults.program import Run
from tests.faults.ranks import Caught


class Terminated(Exception):
    """Raised by a handler of SIGTERM, as jobs of a cluster have it."""


def _raise(number: int, frame: Any) -> None:
    raise Terminated(f"injected by signal {number}")


def later(number: int, seconds: float) -> None:
    """This process gets a signal in so many seconds, wherever it is then."""
    threading.Timer(seconds, lambda: os.kill(os.getpid(), number)).start()


def interrupt(seconds: float = 1.0) -> Action:
    """Ctrl-C."""

    def action(run: Run) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        later(signal.SIGINT, seconds)

    return action


def terminate(seconds: float = 1.0) -> Action:
    """SIGTERM, whose handler raises."""

    def action(run: Run) -> None:
        signal.signal(signal.SIGTERM, _raise)
        later(signal.SIGTERM, seconds)

    return action


def send(number: int, seconds: float = 1.0) -> Action:
    """A signal that ends or stops this process."""
    return lambda run: later(number, seconds)


def alarms(run: Run) -> None:
    """A signal every few milliseconds for two seconds, whose handler does nothing."""
    signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 0.005, 0.005)
    threading.Timer(2.0, lambda: signal.setitimer(signal.ITIMER_REAL, 0.0)).start()


def noted(run: Run) -> None:
    """A signal whose handler notes it and returns."""
    signal.signal(signal.SIGUSR2, lambda *_: run.kept.update(noted=True))
    later(signal.SIGUSR2, 1.0)


def stopped_for_a_while(run: Run) -> None:
    """While it waits, this process is stopped for two seconds."""
    pid = os.getpid()
    if os.fork() == 0:
        time.sleep(0.7)
        os.kill(pid, signal.SIGSTOP)
        time.sleep(2.0)
        os.kill(pid, signal.SIGCONT)
        os._exit(0)


def tried_again(call: Callable[[Run], None]) -> Action:
    """`call`; where it raises, again, three times at most."""

    def action(run: Run) -> None:
        for _ in range(2):
            try:
                return call(run)
            except BaseException as error:
                assert run.told is not None
                run.told.caught.append(Caught.of(error))
        call(run)

    return action
