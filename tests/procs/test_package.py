"""What `pip install fullshard` gives: the wheel, in an environment of its own, trains the quickstart on two ranks."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import venv
from pathlib import Path

import pytest

from tools import try_package

ROOT = Path(__file__).parents[2]


def _losses(printed: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"^step \d+  loss (.*)$", printed, flags=re.M)]


@pytest.mark.slow
@pytest.mark.hang_after(600)
def test_the_wheel_trains_the_quickstart(tmp_path: Path) -> None:
    """torch is that of this environment; `make versions` does the same with each other one."""
    losses = _losses(try_package.try_wheel(try_package.build(tmp_path)))
    assert len(losses) == 4 and losses[-1] < 0.02


@pytest.mark.slow
@pytest.mark.hang_after(1800)
def test_pip_installs_the_wheel_and_torch(tmp_path: Path) -> None:
    """All of it from a registry, as a user does."""
    losses = _losses(try_package.try_wheel(try_package.build(tmp_path), from_registry=True))
    assert len(losses) == 4 and losses[-1] < 0.02


def instructions() -> list[tuple[str, str]]:
    """(word, rest) of each instruction of the Dockerfile."""
    lines = [line for line in (ROOT / "Dockerfile").read_text().splitlines() if line and not line.startswith("#")]
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in lines)]


def test_the_dockerfile_has_the_instructions_that_the_next_test_knows() -> None:
    words = [word for word, _ in instructions()]
    assert words == ["FROM", "RUN", "WORKDIR", "COPY", "ENV", "RUN", "RUN", "CMD"]
    assert instructions()[1][1].startswith("apt-get update") and instructions()[3][1] == ". ."


@pytest.mark.slow
@pytest.mark.hang_after(1800)
def test_commands_of_the_dockerfile_run(tmp_path: Path) -> None:
    """In an empty environment, in what an sdist holds; packages of the system are those of this machine."""
    try_package.build(tmp_path)
    (sdist,) = tmp_path.glob("*.tar.gz")
    shutil.unpack_archive(sdist, tmp_path, filter="data")
    folder = tmp_path / sdist.name.removesuffix(".tar.gz")
    venv.create(tmp_path / "venv", with_pip=True)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environment["PATH"] = f"{tmp_path / 'venv' / 'bin'}{os.pathsep}{environment['PATH']}"
    commands = [rest for word, rest in instructions() if word == "RUN" and not rest.startswith("apt-get")]
    commands += [shlex.join(eval(rest)) for word, rest in instructions() if word == "CMD"]
    for command in commands:
        ran = subprocess.run(command, shell=True, cwd=folder, env=environment, capture_output=True, text=True)
        assert ran.returncode == 0, f"{command}\n{ran.stdout}{ran.stderr}"
    losses = _losses(ran.stdout)
    assert len(losses) == 4 and losses[-1] < 0.02
