"""`fullshard doctor` as typed: processes that send messages to each other, times, JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


def _run(folder: Path, *arguments: str, **environment: str) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, "-m", "fullshard", "doctor", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1", **environment},
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.slow
@pytest.mark.hang_after(240)
def test_the_trainer_s_model_has_no_findings_and_messages_are_measured(tmp_path: Path) -> None:
    (tmp_path / "train.toml").write_text('[run]\ndir = "run"\n')
    code, out, err = _run(tmp_path, "train.toml", "--json")
    found = json.loads(out)
    ours = [finding for finding in found["findings"] if finding["check"] not in _OF_THE_MACHINE]
    assert ours == [] and code == found["exit_code"], out + err
    measured = found["measured"]
    (axis,) = measured["axes"]
    assert (axis["name"], axis["ranks"]) == ("shard", 2) and axis["all_gather"] > 0 and axis["reduce_scatter"] > 0
    assert measured["step"] > 0 and measured["host"] is not None and measured["messages"] > 0
    assert measured["failure"] == "" and measured["skipped"] == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["train.toml"]


# A machine that tests run on may be short of these.
_OF_THE_MACHINE = ("shared-memory", "open-files", "checkpoint-space", "checkpoint-memory", "two-versions")


@pytest.mark.slow
@pytest.mark.hang_after(240)
def test_both_axes_are_measured(tmp_path: Path) -> None:
    from fullshard.doctor.probe import measure

    axes = measure(4, 2, 1)
    assert [(axis.name, axis.ranks) for axis in axes] == [("shard", 2), ("replicate", 2)]
    assert all(axis.all_gather > 0 and axis.reduce_scatter > 0 for axis in axes)


@pytest.mark.slow
@pytest.mark.hang_after(240)
def test_processes_that_cannot_meet_are_an_error(tmp_path: Path) -> None:
    code, out, err = _run(tmp_path, GLOO_SOCKET_IFNAME="nowhere0")
    assert code == 2 and "network: GLOO_SOCKET_IFNAME names nowhere0" in out, out + err
    assert "processes: 2 processes of this machine sent no messages: " in out, out + err


@pytest.mark.slow
@pytest.mark.hang_after(240)
def test_a_llama_of_hugging_face_and_a_plain_script(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    for name in ("verify_llama.py", "verify_plain.py"):
        (tmp_path / name).write_text((Path(__file__).parents[2] / "examples" / name).read_text())
        entry = f"{name.removesuffix('.py')}:program"
        code, out, err = _run(tmp_path, entry, "--nproc", "1", "--json", MASTER_PORT="0")
        found = json.loads(out)
        assert [f for f in found["findings"] if f["check"] not in _OF_THE_MACHINE] == [], out + err
        assert found["measured"]["skipped"] == ["bandwidth (one process)"]
        assert code == found["exit_code"]
