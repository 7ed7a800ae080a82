"""What the cases of children, of collected models and of ends do."""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist

import fullshard
from fullshard import checkpoint
from tests.faults.actions import Action
from tests.faults.program import Run, _full
from tests.harness.models import seeded
from tests.threads.programs import Model, batch, shard

# What loaders read.
ITEMS: Any = [1.0, 2.0]


def child(body: Callable[[Run], None], *, pause: float = 0.0) -> Action:
    """A forked process that does `body` and ends as an interpreter does, with its exit handlers.

    `pause`: seconds that this rank then takes, in which the others wait for it and look for what became of it.
    """

    def action(run: Run) -> None:
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                body(run)
                code = 0
            finally:
                atexit._run_exitfuncs()
                os._exit(code)
        os.waitpid(pid, 0)
        time.sleep(pause)

    return action


def nothing(run: Run) -> None:
    pass


def throws(run: Run) -> None:
    """It ends with an exception, as the interpreter notes it."""
    sys.last_value = ValueError("in a child")
    raise sys.last_value


def collects(run: Run) -> None:
    """The child gives the model up, and all of its memory."""
    run.model = run.optimizer = None
    run.kept.clear()
    gc.collect()


def destroys_the_group(run: Run) -> None:
    dist.destroy_process_group()


def reads_shards(run: Run) -> None:
    """As a process that writes a checkpoint aside does."""
    state = run.model.state_dict()
    assert all(torch.isfinite(value.to_local()).all() for value in state.values())


def closes_checkpoints(run: Run) -> None:
    checkpoint.close()


def leaves(code: int) -> Callable[[Run], None]:
    return lambda run: os._exit(code)


def sleeps(seconds: float) -> Callable[[Run], None]:
    return lambda run: time.sleep(seconds)


def in_another_thread(body: Callable[[Run], None]) -> Action:
    """A thread forks, and the model's thread continues."""
    import threading

    def action(run: Run) -> None:
        threading.Thread(target=lambda: child(body)(run)).start()

    return action


def many_children(run: Run) -> None:
    for _ in range(10):
        child(nothing)(run)


def orphan_then(number: int) -> Action:
    """A child that outlives this rank, and has its connections; then a signal ends the rank."""

    def action(run: Run) -> None:
        if os.fork() == 0:
            time.sleep(12.0)
            os._exit(0)
        os.kill(os.getpid(), number)

    return action


def subprocesses(run: Run) -> None:
    subprocess.run([sys.executable, "-S", "-c", "pass"], check=True)


def _work(value: int) -> int:
    return value + 1


def _fails() -> None:
    raise ValueError("in a worker")


def worker(run: Run) -> None:
    process = multiprocessing.get_context("fork").Process(target=_work, args=(1,))
    process.start()
    process.join()
    assert process.exitcode == 0


def failing_worker(run: Run) -> None:
    process = multiprocessing.get_context("fork").Process(target=_fails)
    process.start()
    process.join()
    assert process.exitcode == 1


def workers(run: Run) -> None:
    with multiprocessing.get_context("fork").Pool(2) as pool:
        assert pool.map(_work, [1, 2, 3]) == [2, 3, 4]


def loader(run: Run) -> None:
    """Workers of a data loader come and go in each step."""
    from torch.utils.data import DataLoader

    assert len(list(DataLoader(ITEMS, num_workers=2))) == 2


def loader_that_stays(run: Run) -> None:
    """Workers of a data loader live as long as the rank."""
    from torch.utils.data import DataLoader

    if "loader" not in run.kept:
        run.kept["loader"] = DataLoader(ITEMS, num_workers=1, persistent_workers=True)
    assert len(list(run.kept["loader"])) == 2


def loader_abandoned(run: Run) -> None:
    """An iterator is given up before its end, as `break` does it."""
    from torch.utils.data import DataLoader

    for _ in DataLoader(ITEMS * 10, num_workers=1):
        break


# ---- collected models ----------------------------------------------------------------------------------------


def _model(run: Run, seed: int = 5) -> Any:
    model = seeded(Model, seed=seed)
    return model if run.impl is None else shard(model, run.impl)


def _step(run: Run, model: Any) -> Any:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(batch(run.setup.world, 3)).pow(2).mean().backward()
    optimizer.step()
    return optimizer


def _drop(run: Run, model: list[Any]) -> None:
    """Rank 1 collects it, the others keep it."""
    if run.rank == 1:
        model.clear()
        gc.collect()
    else:
        run.kept.setdefault("models", []).extend(model)


def _look(run: Run, values: Iterable[Any]) -> None:
    """Keep the full values; they are compared with those of plain training."""
    run.outputs.extend(_full(value) for value in values)


def state_of_a_dropped_model(run: Run) -> None:
    """`make().state_dict()`, and its full values on all ranks."""
    model = [_model(run)]
    state = model[0].state_dict()
    _drop(run, model)
    _look(run, state.values())


def parameters_of_a_dropped_model(run: Run) -> None:
    model = [_model(run)]
    _step(run, model[0])
    parameters = list(model[0].parameters())
    _drop(run, model)
    _look(run, parameters)


def optimizer_of_a_dropped_model(run: Run) -> None:
    model = [_model(run)]
    optimizer = _step(run, model[0])
    _drop(run, model)
    optimizer.step()
    _look(run, (value for state in optimizer.state.values() for value in state.values()))


def clipping_of_a_dropped_model(run: Run) -> None:
    model = [_model(run)]
    model[0](batch(run.setup.world, 3)).pow(2).mean().backward()
    parameters = list(model[0].parameters())
    _drop(run, model)
    clip = torch.nn.utils.clip_grad_norm_ if run.impl is None else run.impl.clip
    clip(parameters, 0.05)


def model_in_a_cycle(run: Run) -> None:
    """It is dropped on all ranks, and collected whenever each of them does so."""
    model = _model(run)
    model.itself = [model]
    _step(run, model)
    state = model.state_dict()
    del model
    if run.rank == 1:
        gc.collect()
    _look(run, state.values())


def model_after_model(run: Run) -> None:
    """A new model in each step, as trials of a search have it; the last one goes at another moment on each rank."""
    if run.rank == 1:
        run.kept.pop("trial", None)
        gc.collect()
    model = _model(run, seed=run.step + 9)
    _step(run, model)
    run.kept["trial"] = model


def collections_at_random(run: Run) -> None:
    """At other points of a step on each rank."""
    chance = random.Random(run.rank)

    def maybe(*_: Any) -> None:
        if chance.random() < 0.08:
            gc.collect()

    if not run.plain:
        for module in run.model.modules():
            module.register_forward_pre_hook(maybe)
            module.register_forward_hook(maybe)


def failed_model_dropped(run: Run) -> None:
    """A model whose forward fails on all ranks is dropped; its exception keeps it alive on rank 0."""
    model = _model(run)
    handle = model.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
    try:
        model(batch(run.setup.world, 3))
    except ZeroDivisionError as error:
        if run.rank == 0:
            run.kept["error"] = error
    handle.remove()
    del model
    if run.rank == 1:
        gc.collect()


# ---- ends ----------------------------------------------------------------------------------------------------


def ends(run: Run) -> None:
    sys.exit(0)


def fails(run: Run) -> None:
    raise ValueError("injected")


def one_more_forward(run: Run) -> None:
    run.loss(run.batches(step=70)[0])


def looks(run: Run) -> None:
    """What needs nobody else."""
    if run.ours:
        fullshard.report(run.model)
    run.model.state_dict()


def group_destroyed(run: Run) -> None:
    """As well-behaved programs end."""
    if not run.plain:
        dist.destroy_process_group()


def killed(run: Run) -> None:
    os.kill(os.getpid(), signal.SIGKILL)
