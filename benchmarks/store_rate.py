"""How many requests a second the server of torch's TCPStore answers.

    python -m benchmarks.store_rate                       a minute
    python -m benchmarks.store_rate --clients 1 8 32      other numbers of processes that ask

A server in a process of its own, and clients that ask for two seconds each, as fast as they get answers. Three kinds of
requests of `fullshard.guard`: `add` (a question), `compare_set` (a sign of life: 300 bytes) and `get`. A get is two
requests, as torch's client sends them, and counted so.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

CLIENTS = (1, 4, 16, 64)
SECONDS = 2.0
_RECORD = "x" * 300


def _asks(store: dist.TCPStore, kind: str, client: int) -> tuple[Callable[[], object], int]:
    """A call, and the requests that it sends."""
    key = f"{kind}/{client}"
    store.set(key, _RECORD if kind != "add" else "0")
    return {
        "add": (lambda: store.add(key, 1), 1),
        "compare_set": (lambda: store.compare_set(key, _RECORD, _RECORD), 1),
        "get": (lambda: store.get(key), 2),
    }[kind]


def _serve(port: Any, ends: Any) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port.send(store.port)
    ends.wait()


def _ask(port: int, kind: str, client: int, begin: Any, asked: Any) -> None:
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60), wait_for_workers=False)
    call, requests = _asks(store, kind, client)
    begin.wait()
    count, start = 0, time.perf_counter()
    while (now := time.perf_counter()) - start < SECONDS:
        for _ in range(20):
            call()
        count += 20
    asked.put(count * requests / (now - start))


def rate(kind: str, clients: int) -> float:
    """Requests a second of `clients` processes together."""
    context = multiprocessing.get_context("fork")
    receives, sends = context.Pipe(duplex=False)
    ends, begin, asked = context.Event(), context.Barrier(clients), context.Queue()
    server = context.Process(target=_serve, args=(sends, ends))
    server.start()
    port = receives.recv()
    processes = [context.Process(target=_ask, args=(port, kind, i, begin, asked)) for i in range(clients)]
    try:
        for each in processes:
            each.start()
        return sum(asked.get(timeout=120) for _ in processes)
    finally:
        ends.set()
        for each in (*processes, server):
            each.join(20)
            each.kill()


def rates(clients: Sequence[int] = CLIENTS) -> dict[str, dict[int, float]]:
    """By kind and number of clients."""
    return {kind: {count: rate(kind, count) for count in clients} for kind in ("add", "compare_set", "get")}


def machine() -> str:
    """The processor, and how many of it this process may use."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
    return f"{len(os.sched_getaffinity(0))} processors, {model}"


def table(found: dict[str, dict[int, float]]) -> list[str]:
    """Markdown: a row for each kind, requests a second."""
    clients = list(next(iter(found.values())))
    lines = ["| requests a second | " + " | ".join(f"{count} client{'s' * (count > 1)}" for count in clients) + " |"]
    lines.append("|---|" + "---|" * len(clients))
    for kind, row in found.items():
        lines.append(f"| {kind} | " + " | ".join(f"{round(row[count], -2):,.0f}" for count in clients) + " |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="+", default=list(CLIENTS))
    options = parser.parse_args()
    print(machine())
    print("\n".join(table(rates(options.clients))))


if __name__ == "__main__":
    main()
