"""The benchmark scripts run, check what they compare, and end with one JSON line. No figure is asserted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def _last_line(*arguments: str, timeout_s: float = 110, tiny: bool = True) -> dict[str, object]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", *arguments, *(["--tiny"] if tiny else [])]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout_s)
    assert run.returncode == 0, run.stderr
    answer = json.loads(run.stdout.splitlines()[-1])
    assert isinstance(answer, dict)
    return answer


@pytest.mark.slow
def test_steps_and_peaks() -> None:
    results: Any = _last_line("benchmarks.steps_and_peaks")["results"]
    assert set(results["tiny"]) == {"fullshard", "FSDP2", "DDP", "fullshard, mixed", "FSDP2, mixed"}
    assert all(figures["peak"][0] > 0 for figures in results["tiny"].values())


@pytest.mark.slow
def test_cpu_step() -> None:
    answer = _last_line("benchmarks.cpu_step", "--worlds", "2", "--adamw", "--workloads", "light", "--rounds", "1")
    (result,) = answer["results"]
    assert (result["world"], result["workload"]) == (2, "communication-heavy")
    assert set(result["steps"]) == {"none", "ddp", "fsdp1", "fsdp2", "fullshard", "fsdp2_kept", "fullshard_kept"}
    assert result["steps"]["fsdp2"]["of_fsdp2"] == 1.0


@pytest.mark.slow
def test_hand_over() -> None:
    results: Any = _last_line("benchmarks.hand_over")["results"]
    assert [result["messages"] > 0 for result in results] == [True] * 3


@pytest.mark.slow
def test_overlap() -> None:
    answer = _last_line("benchmarks.overlap", "--workloads", "light", "--rounds", "1")
    (result,) = answer["results"]
    assert set(result["median_ms"]) == {"none", "fsdp2", "prefetch on", "prefetch off"}


@pytest.mark.slow
def test_pairs() -> None:
    results = _last_line("benchmarks.pairs", "--worlds", "2", "--rounds", "1")["results"]
    assert [result["kib"] for result in results] == [0.5, 2.0]  # type: ignore[index, attr-defined]


@pytest.mark.slow
def test_recorder() -> None:
    results: dict[str, Any] = _last_line("benchmarks.recorder", "--rounds", "1", "--workloads", "light")["results"]  # type: ignore[assignment]
    assert {"off", "figures", "full"} <= set(results["light"]) and results["light"]["bytes_of_a_full_step"] > 1000


@pytest.mark.slow
def test_host() -> None:
    answer = _last_line("benchmarks.host", "--rounds", "1")
    for result in answer["results"]:
        least = set() if result["mixed"] else {"least"}
        assert set(result["ways"]) == {"bare", "fsdp2", "fullshard", "+ shards", "direct"} | least


@pytest.mark.slow
def test_walk() -> None:
    """And nothing of torch's is replaced by a program that shards and trains."""
    results: dict[str, Any] = _last_line("benchmarks.walk", tiny=False)["results"]  # type: ignore[assignment]
    ours, theirs = results["walked"]["fullshard"], results["walked"]["FSDP2"]
    assert ours["patches"] == theirs["patches"] == []
    assert sum(theirs["by file"].values()) == theirs["calls"] > theirs["functions"] > theirs["files"] == 5
    assert ours["files from fully_shard on"] > ours["files"] > 5 and ours["switches"] < ours["calls"]
    assert results["source"]["FSDP2"]["modules"] == 9 and results["source"]["fullshard"]["files over 600 lines"] == 0


@pytest.mark.slow
def test_guard() -> None:
    (result,) = _last_line("benchmarks.guard", "--turns", "1", "--steps", "2")["results"]  # type: ignore[misc]
    assert set(result["modes"]) == {"off", "structure", "full"}


@pytest.mark.slow
def test_optimizer() -> None:
    answer = _last_line("benchmarks.optimizer", "--rounds", "1")
    (result,) = answer["results"]
    assert set(result["ways"]) == {"local", "+ message", "dtensor", "fullshard"}
    assert set(result["ways"]["+ message"]) == {
        f"{part}, {clock}" for part in ("clip", "check") for clock in ("wall", "cpu")
    }


@pytest.mark.slow
def test_operations() -> None:
    results = _last_line("benchmarks.operations")["results"]
    assert set(results) == {"mul_", "add", "detach", "AdamW step", "AdamW step, foreach"}  # type: ignore[call-overload]


@pytest.mark.slow
def test_operators_of_steps() -> None:
    rows = _last_line("benchmarks.operations", "--steps")["results"]
    found = {(row["setting"], row["library"]): row for row in rows}
    for (setting, library), row in found.items():
        if library == "fullshard":
            theirs = found[setting, "fsdp2"]
            assert row["step"]["waits"] == 0, setting
            # One rank has no message, and copies nothing.
            assert row["clip"]["kernels"] <= theirs["clip"]["kernels"] + 1 and row["AdamW"] == theirs["AdamW"], setting
            assert row["step"]["kernels"] <= theirs["step"]["kernels"] + 15, setting


@pytest.mark.slow
def test_bytes() -> None:
    for result in _last_line("benchmarks.bytes", "--worlds", "1", "2")["results"]:
        assert set(result["ways"]) == {"fsdp2", "gloo plan", "NCCL plan"}


@pytest.mark.slow
def test_recompute() -> None:
    rows = _last_line("benchmarks.recompute")["results"]["trainer"]["rows"]  # type: ignore[index]
    by_way = {(row["dtype"], row["recompute"]): row for row in rows}
    for dtype, itemsize in (("float32", 4), ("bfloat16", 2)):
        none, usual, to_the_end = (by_way[dtype, way] for way in ("none", "each block", "to the end"))
        assert usual["block_nbytes"] == 2 * 128 * 128 * itemsize, "a block keeps its input"
        assert usual["kept_nbytes"] == to_the_end["kept_nbytes"] < none["kept_nbytes"] / 4
        assert none["step_flop"] < usual["step_flop"] < to_the_end["step_flop"]
        # All but the last product, the logits, are computed once more.
        once_more = none["forward_flop"] - 2 * (2 * 128) * 128 * 256
        assert to_the_end["step_flop"] - none["step_flop"] == once_more


@pytest.mark.slow
def test_loss_curve() -> None:
    ways = _last_line("benchmarks.loss_curve")["results"]["ways"]  # type: ignore[index]
    assert all(way["difference"] < 1e-5 for way in ways.values())


@pytest.mark.slow
def test_memory() -> None:
    for result in _last_line("benchmarks.memory", "--worlds", "2")["results"]:
        assert all(0 < way["forward"] and 0 < way["backward"] for way in result["ways"].values())


@pytest.mark.slow
@pytest.mark.hang_after(300)
def test_peers_that_are_missing_are_named() -> None:
    answer = _last_line("benchmarks.peers", "--workloads", "light", "--rounds", "1", timeout_s=280)
    results = answer["results"]
    assert isinstance(results, dict)
    assert (
        set(results["missing"]) == {"deepspeed", "megatron-fsdp"} and "pip install" in results["missing"]["deepspeed"]
    )
    (table,) = results["tables"]
    assert set(table["ways"]) == {"fsdp2", "fullshard"} and table["ways"]["fullshard"]["losses_agree"]


@pytest.mark.slow
def test_checkpoint() -> None:
    answer = _last_line("benchmarks.checkpoint")
    results = answer["results"]
    assert isinstance(results, list)
    (of_two,) = results
    ways = {"fullshard", "no checksums", "dcp", "torch.save", "safetensors"}
    for durable in ("synced", "unsynced"):
        assert set(of_two[durable]) == ways
        assert set(of_two[durable]["fullshard"]["seconds"]) == {"save", "warm", "cold", "blocked", "saved"}
        assert of_two[durable]["fullshard"]["written_nbytes"] >= 12 << 20
    assert set(of_two["price_of_durability"]) == ways


@pytest.mark.slow
def test_digest() -> None:
    results = _last_line("benchmarks.digest")["results"]
    assert isinstance(results, list)
    assert {"digest", "sha256"} <= set(results[0]["gb_per_s"])
