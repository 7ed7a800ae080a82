"""A directory that not all hosts see is refused before the first byte. Ranks are threads: which host they are on, and
what they see there, is imitated by their names."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import torch

from fullshard import checkpoint
from fullshard.checkpoint import limits
from tests.harness.threads import run_ranks

HOSTS = {"rank 0": "alpha", "rank 1": "alpha", "rank 2": "beta", "rank 3": "beta", "rank 4": "gamma"}


class Cluster:
    """Three hosts, and which ranks looked for what another one made. `blind`: the hosts that see none of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *blind: str) -> None:
        self.looked: list[str] = []
        self.told = 0
        here = lambda: HOSTS[threading.current_thread().name]  # noqa: E731

        def view() -> str:
            self.told += 1
            return here()

        def sees(path: str, name: str) -> str | None:
            assert os.path.isdir(f"{path}/{name}")
            self.looked.append(threading.current_thread().name)
            return "does not see it" if here() in blind else None

        monkeypatch.setattr(limits, "view", view)
        monkeypatch.setattr(limits, "host", here)
        monkeypatch.setattr(limits, "sees", sees)


@pytest.mark.threads_only(reason="hosts are imitated in this process")
def test_one_rank_of_each_other_host_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(monkeypatch)

    def rank_main(rank: int) -> None:
        for step in (1, 2):
            checkpoint.save({"n": step}, checkpoint_id=tmp_path / f"step-{step}")

    run_ranks(5, rank_main)
    assert sorted(cluster.looked) == ["rank 2", "rank 2", "rank 4", "rank 4"], "once for each save"
    assert cluster.told == 5, "where they are is asked for once"


@pytest.mark.threads_only(reason="hosts are imitated in this process")
@pytest.mark.parametrize("blind", [("beta",), ("beta", "gamma")])
def test_hosts_that_do_not_see_it_are_named_and_nothing_is_written(
    blind: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Cluster(monkeypatch, *blind)
    written: list[int] = []
    original = os.write

    def write(fd: int, data: memoryview) -> int:
        written.append(len(data))
        return original(fd, data)

    def rank_main(rank: int) -> str:
        with pytest.raises(checkpoint.CheckpointError) as caught:
            checkpoint.save({"w": torch.ones(8), "n": 1}, checkpoint_id=tmp_path / "c")
        return str(caught.value)

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", write)
        texts = run_ranks(5, rank_main)
    assert len(set(texts)) == 1 and "host alpha made" in texts[0] and "the directory must be one that all" in texts[0]
    assert all((f"host {name} does not see it" in texts[0]) == (name in blind) for name in ("beta", "gamma"))
    assert not written and os.listdir(tmp_path / "c") == ["LOCK"]
