"""`fullshard completion` in shells: bash answers the tab key as its user would see it."""

from __future__ import annotations

import os
import pty
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fullshard.cli import main


@pytest.fixture
def script(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Path:
    assert main(["completion", "bash"]) == 0
    path = tmp_path / "fullshard.bash"
    path.write_text(capsys.readouterr().out)
    return path


def answers(script: Path, line: str) -> list[str]:
    """What bash offers for the last word of the line."""
    ask = """
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMP_LINE="$*"; COMP_POINT=${#COMP_LINE}
$(complete -p fullshard | sed 's/.*-F \\([^ ]*\\).*/\\1/')
printf '%s\\n' "${COMPREPLY[@]}"
"""
    ran = subprocess.run(
        ["bash", "-c", ask, "bash", script, *line.split(" ")],
        capture_output=True,
        text=True,
        timeout=50,
        cwd=script.parent,
    )
    assert ran.returncode == 0, ran.stderr
    return sorted(ran.stdout.split())


def test_commands_options_names_and_files_complete(script: Path) -> None:
    assert answers(script, "fullshard ver") == ["verify"]
    assert answers(script, "fullshard checkpoint con") == ["convert"]
    assert answers(script, "fullshard plan --re") == ["--recompute", "--reduce-dtype", "--replicas", "--reshard"]
    assert answers(script, "fullshard plan --recompute ") == ["alternate", "none", "selective", "whole"]
    assert answers(script, "fullshard plan --hardware h") == ["h100-80g", "h100-96g", "h200-141g", "here"]
    assert answers(script, "fullshard plan --explain smal") == ["smaller-mesh"]
    assert answers(script, "fullshard see full") == answers(script, "fullshard doctor full") == ["fullshard.bash"]
    assert answers(script, "fullshard plan --nothing-like-it") == []


def test_the_tab_key_completes(script: Path) -> None:
    """In an interactive bash behind a terminal."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ |= {"TERM": "dumb", "PS1": "$ ", "INPUTRC": "/dev/null", "HISTFILE": ""}
        os.execvp("bash", ["bash", "--norc", "--noprofile", "-i"])
    try:
        os.write(terminal, f"fullshard() {{ echo ran:$*; }}; source {script}\n".encode())
        os.write(terminal, b"fullshard pl\t--hardw\tb200\t\n")
        seen, until = "", time.monotonic() + 50
        while "ran:" not in seen.partition("source")[2] and time.monotonic() < until:
            if select.select([terminal], [], [], 1)[0]:
                seen += os.read(terminal, 4096).decode()
        assert "ran:plan --hardware b200-180g" in seen
    finally:
        os.close(terminal)  # bash ends with its terminal
        os.waitpid(pid, 0)


@pytest.mark.parametrize("shell", ["bash", *filter(shutil.which, ("zsh", "fish"))])
def test_the_script_is_the_shell_s(shell: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Read by the shell itself where it is installed, and never run."""
    assert main(["completion", shell]) == 0
    path = tmp_path / "script"
    path.write_text(capsys.readouterr().out)
    ran = subprocess.run([shell, "-n", path], capture_output=True, text=True, timeout=50)
    assert ran.returncode == 0 and ran.stderr == ""


def test_without_shtab_the_package_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["completion", "fish"]) == 2
    assert 'pip install "fullshard[completion]"' in capsys.readouterr().err
