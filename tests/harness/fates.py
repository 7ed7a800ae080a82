"""Ranks as forks that meet through a store which rank 0 serves, each with a fate of its own: some end, are killed or
stopped, and the others tell what became of their waits.

    told = run_fates(2, fn, limit=8.0)      # fn(rank) on two forks; limit: of their process group
    told[0].error, told[0].seconds          # what it raised, and when: since the fork began to run `fn`

Nothing of pytest's runs in a fork, and what runs at the end of a process runs at the end of each fork.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch.distributed as dist

from fullshard.peers import watch
from tests.harness import forked, hang


@dataclass(frozen=True)
class Told:
    """What a rank told: what `fn` returned, or the error that it raised (`kinds`: names of its class and bases, `text`
    with those of its causes). `code`: how its process ended, minus a signal's number; 999: it had to be killed."""

    value: Any = None
    kinds: tuple[str, ...] = ()
    text: str = ""
    seconds: float = 0.0
    code: int = 0
    output: str = ""


def run_fates(
    world: int,
    fn: Callable[..., Any],
    *args: Any,
    limit: float = 20.0,
    timeout: float = 40.0,
    environment: Mapping[str, str] | None = None,
    stays: bool = True,
    lost: tuple[int, ...] = (),
    backend: str = "gloo",
) -> list[Told]:
    """Call `fn(rank, *args)` on `world` forks. `stays`: a rank whose `fn` returned ends when all have; else at once.
    `lost`: ranks that nobody waits for once the others have told. Backend "nccl": on the device
    "simulated", gloo for the host."""
    with tempfile.TemporaryDirectory(prefix="fullshard-fates-") as folder:
        place, given = Path(folder), environment or {}
        call = (world, fn, args, place, limit, given, stays, backend)
        ranks = [forked.fork(_rank_main, rank, *call) for rank in range(world)]
        told: dict[int, Told] = {}
        waiting = {conn: rank for rank, (_, conn) in enumerate(ranks)}
        deadline = time.monotonic() + hang.patience(timeout)
        while set(waiting.values()) - set(lost) and (left := deadline - time.monotonic()) > 0:
            for conn in wait(list(waiting), timeout=left):
                assert isinstance(conn, Connection)
                rank = waiting.pop(conn)
                with contextlib.suppress(EOFError, OSError):
                    told[rank] = pickle.loads(conn.recv_bytes())
        for pid, conn in ranks:
            with contextlib.suppress(OSError):
                conn.send_bytes(b"all have answered")
            if conn in waiting:
                forked.stacks(pid)
        found = []
        for rank, (pid, conn) in enumerate(ranks):
            code = forked.end(pid, 0.5 if conn in waiting else 10.0)
            conn.close()
            output = Path(folder, f"output{rank}").read_text(errors="replace")[-6000:]
            one = told.get(rank, Told())
            found.append(Told(one.value, one.kinds, one.text, one.seconds, code, output))
        return found


def _rank_main(
    conn: Connection,
    rank: int,
    world: int,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    folder: Path,
    limit: float,
    environment: Mapping[str, str],
    stays: bool,
    backend: str,
) -> None:
    forked.as_a_program(folder / f"output{rank}")
    forked.prepare()
    os.environ.update(environment)
    begun, told = time.monotonic(), Told()
    try:
        store = forked.store_of_rank_0(rank, folder)
        if backend == "nccl":
            from tests.harness import nccl

            nccl.register()
            backend = nccl.backends_of(backend)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timedelta(seconds=limit))
        begun = time.monotonic()
        value = fn(rank, *args)
        told = Told(value, seconds=time.monotonic() - begun)
    except BaseException as error:
        kinds = tuple(kind.__name__ for kind in type(error).__mro__)
        told = Told(None, kinds, _texts(error), time.monotonic() - begun)
        traceback.print_exc()
        if not isinstance(error, SystemExit):
            sys.last_value = error
    conn.send_bytes(pickle.dumps(told))
    if stays and not told.kinds:
        with contextlib.suppress(EOFError, OSError):
            conn.recv_bytes()
    with contextlib.suppress(Exception):
        atexit._run_exitfuncs()
    sys.stderr.flush()
    os._exit(1 if told.kinds else 0)


def watch_module() -> Any:
    """peers/watch.py, which says that a process ends."""
    return sys.modules[watch.__module__]


def _texts(error: BaseException | None) -> str:
    texts = []
    while error is not None:
        texts.append(f"{type(error).__name__}: {error}")
        error = error.__cause__
    return "\n".join(texts)
