"""`fullshard env` prints what a report of a bug needs, nothing private, and does so with a torch that does not work."""

from __future__ import annotations

import getpass
import json
import os
import platform
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import fullshard
from fullshard.cli import env, main
from tests.harness.source import SRC

WORKING = '{"version": "2.99", "backends": ["gloo"], "devices": []}'


@pytest.fixture
def torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of a torch that stands before the real one; what is in it runs on import."""
    folder = tmp_path / "path" / "torch"
    folder.mkdir(parents=True)
    monkeypatch.syspath_prepend(folder.parent)
    return folder / "__init__.py"


def test_the_real_torch_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    assert main(["env", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["fullshard"]["version"] == fullshard.__version__
    assert facts["python"]["version"] == platform.python_version()
    assert facts["torch"]["import"] == "works" and facts["torch"]["version"] == str(torch.__version__)
    assert facts["torch"]["backends"][0] == "gloo"
    assert len(facts["torch"]["devices"]) == torch.accelerator.device_count()
    assert facts["platform"]["machine"] == platform.machine()
    assert set(facts) == {"fullshard", "python", "platform", "torch", "packages", "variables"}


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("raise OSError('libcudart.so.13: cannot open shared object file')", ["exit code 1", "libcudart.so.13"]),
        ("import os; os.kill(os.getpid(), 11)", ["signal 11"]),
        ("import sys; sys.exit(3)", ["exit code 3"]),
    ],
)
def test_a_torch_that_cannot_be_imported_is_reported(
    torch: Path, source: str, says: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    torch.write_text(source)
    assert main(["env"]) == 0
    text = capsys.readouterr().out
    assert all(one in text for one in says), text
    assert f"version    {fullshard.__version__}" in text


def test_a_torch_that_hangs_is_reported(torch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.write_text("import time; time.sleep(100)")
    monkeypatch.setattr(env, "TORCH_SECONDS", 1.0)
    assert env.environment()["torch"]["import"] == "no answer within 1 s"


def test_this_process_imports_no_torch(torch: Path) -> None:
    torch.write_text("raise ImportError('broken')")
    code = "import sys; from fullshard.cli import main; main(['env']); assert 'torch' not in sys.modules"
    path = os.pathsep.join([str(torch.parents[1]), str(SRC)])
    ran = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert ran.returncode == 0 and "broken" in ran.stdout, ran.stderr


def test_variables_are_those_that_matter_without_secrets(torch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.write_text("raise ImportError(__file__)")
    secret = "hunter2-not-to-be-seen"
    for name in ("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "NCCL_AUTH_KEY", "TORCH_TOKEN", "MY_VARIABLE"):
        monkeypatch.setenv(name, secret)
    monkeypatch.setattr(socket, "gethostname", lambda: "node-7")
    monkeypatch.setenv("HOME", "/home/ann")
    monkeypatch.setenv("LOGNAME", "annabel")
    monkeypatch.setenv("LD_LIBRARY_PATH", "/home/ann/lib:/data/annabel/lib")
    monkeypatch.setenv("MASTER_ADDR", "trainer-7.internal")
    monkeypatch.setenv("TORCH_STORE", f"tcp://me:{secret}@10.20.30.40:99/node-7/x")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    facts = env.environment()
    text = json.dumps(facts)
    assert not any(word in text for word in (secret, "trainer-7", "10.20.30.40", "/home/ann", getpass.getuser()))
    assert facts["variables"]["NCCL_DEBUG"] == "INFO"
    assert facts["variables"]["NCCL_AUTH_KEY"] == facts["variables"]["TORCH_TOKEN"] == "<left out>"
    assert facts["variables"]["LD_LIBRARY_PATH"] == "~/lib:/data/<user>/lib"
    assert facts["variables"]["TORCH_STORE"] == "tcp://<address>:99/<host>/x"
    assert not {"HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "MY_VARIABLE"} & set(facts["variables"])
