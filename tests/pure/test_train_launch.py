"""The command line and the launcher's decisions, without starting a process."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fullshard import __version__, cli
from fullshard.checkpoint.formats import STYLES
from fullshard.cli import main
from fullshard.train import launch
from fullshard.train.config import Config, ConfigError, load_config
from fullshard.train.folder import open_manifest
from fullshard.train.launch import Failure
from tests.harness.source import SRC


@pytest.fixture(autouse=True)
def no_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, words in (
        [["--version"], [__version__]],
        [["train", "--help"], ["examples:", "--nproc", "exit codes"]],
    ):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == 0
        out = capsys.readouterr().out
        assert all(word in out for word in words)


@pytest.mark.parametrize(
    "arguments",
    [["--version"], ["--help"], ["train", "--help"], ["checkpoint", "--help"], ["checkpoint", "export", "-h"]],
)
def test_help_and_version_need_no_torch(arguments: list[str]) -> None:
    """So they answer at once. In a fresh interpreter; the package itself is a stub, whatever it imports."""
    code = f"""
import sys, types
package = sys.modules["fullshard"] = types.ModuleType("fullshard")
package.__path__, package.__version__ = [{str(SRC / "fullshard")!r}], {__version__!r}
from fullshard.__main__ import main
try:
    main({arguments!r})
except SystemExit as ended:
    assert ended.code == 0
heavy = sorted({{"torch", "numpy", "rich"}} & set(sys.modules))
assert not heavy, f"imports {{heavy}}"
"""
    run = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0 and run.stdout, run.stderr


def test_the_styles_of_names_are_those_of_the_converter() -> None:
    """The command line has its own list, because that of the converter comes with torch."""
    assert cli.STYLES == STYLES


def test_print_config_is_a_config(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Resolved, commented, valid TOML, with what automatic values mean here."""
    arguments = ["train", "--set", "training.steps=7", "--set", "training.device=cpu", "--nproc", "8", "--print-config"]
    assert main(arguments) == 0
    text = capsys.readouterr().out
    path = tmp_path / "c.toml"
    path.write_text(text)
    assert load_config(path) == load_config(None, ["training.steps=7", "training.device=cpu"])
    lines = {line.partition(" ")[0]: line for line in text.splitlines()}
    assert lines["data_parallel_shard_degree"].endswith("[here: 8]")
    assert lines["micro_batch"].endswith("[here: 2]")
    assert lines["ffn_dim"].endswith("[here: 352]")
    assert main([*arguments, "--set", "training.micro_batch=auto"]) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("micro_batch"))
    assert line.startswith('micro_batch = "auto"') and line.endswith("[here: at most 2]")


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["train", "--set", "training.stps=3"], ["training.stps = 3", "training.steps"]),
        (["train", "--nproc", "3", "--set", "training.device=cpu"], ["training.global_batch = 16", "15"]),
        (["train", "--nproc", "0"], ["--nproc 0", "nearest valid: 1"]),
        (["train", "--nproc", "-2"], ["--nproc -2", "nearest valid: 1"]),
        (["train", "none.toml"], ["none.toml", "No such file"]),
        (["train", "--set", "data.corpus=path:none.txt"], ["data.corpus", "none.txt", "No such file"]),
        (["generate", "no_such_run"], ["no_such_run", "config.toml"]),
    ],
)
def test_a_mistake_is_one_line_and_exit_2(
    arguments: list[str],
    words: list[str],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No traceback, no folder, no process."""
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert captured.err.startswith("fullshard: ") and all(word in captured.err for word in words)
    assert not list(tmp_path.iterdir())


def test_under_torchrun_one_rank_tells(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Every rank exits with 2, rank 0 alone says why."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in (0, 1):
        monkeypatch.setenv("RANK", str(rank))
        assert main(["train", "--set", "training.stps=3"]) == 2
        assert capsys.readouterr().err.count("training.stps") == 1 - rank
    monkeypatch.setenv("RANK", "0")
    assert main(["train", "--nproc", "4"]) == 2
    assert "already started as one of 2" in capsys.readouterr().err


def test_how_many_processes() -> None:
    """--nproc, else the shard degree, else two on a CPU."""
    default, four = (load_config(None, ["training.device=cpu", *more]) for more in ([], [f"{DEGREE}=4"]))
    assert [launch.num_processes(c, asked) for c, asked in ((default, None), (default, 3), (four, None))] == [2, 3, 4]
    with pytest.raises(ConfigError, match="shard_degree = 4: with 1 copy there are 4 of 3 ranks; nearest valid: 3 "):
        four.check_world(launch.num_processes(four, 3))


def test_copies_of_the_state() -> None:
    """Both degrees start their product; what does not fit the processes is one line with the nearest that does."""

    def config(*settings: str) -> Config:
        return load_config(
            None, ["training.device=cpu", "training.global_batch=24", "training.micro_batch=0", *settings]
        )

    for settings, asked, processes, degrees in (
        ((COPIES + "=2",), None, 4, (2, 2)),
        ((COPIES + "=3", DEGREE + "=2"), None, 6, (3, 2)),
        ((COPIES + "=4", DEGREE + "=1"), None, 4, (4, 1)),
        ((COPIES + "=2",), 6, 6, (2, 3)),
    ):
        one = config(*settings)
        assert launch.num_processes(one, asked) == processes
        one.check_world(processes)
        assert one.sharding.degrees(processes) == degrees
    with pytest.raises(ConfigError, match=r"replicate_degree = 3: must divide the 4 ranks; nearest valid: 2$"):
        config(COPIES + "=3").check_world(4)
    with pytest.raises(ConfigError, match=r"shard_degree = 4: with 2 copies there are 8 of 4 ranks; nearest valid: 2 "):
        config(COPIES + "=2", DEGREE + "=4").check_world(4)


DEGREE = "sharding.data_parallel_shard_degree"
COPIES = "sharding.data_parallel_replicate_degree"


def test_accelerators_have_one_process_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    config = load_config(None)
    assert launch.device_kind(config) == "cuda" and launch.num_processes(config, None) == 8
    assert launch.num_processes(load_config(None, ["training.device=cpu"]), None) == 2
    with pytest.raises(ConfigError, match="--nproc 9: there are 8 CUDA device"):
        launch.num_processes(config, 9)


def test_cores_are_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(12)), raising=False)
    config = load_config(None)
    assert [launch.threads_per_process(config, n) for n in (1, 2, 5, 24)] == [12, 6, 2, 1]
    assert launch.threads_per_process(load_config(None, ["training.threads=3"]), 4) == 3


BUG = Failure(rank=1, exit_code=1, message="ValueError: a bug", traceback="Traceback: a bug\n", seconds=8.0)
LOST_PEER = Failure(0, 1, "RuntimeError: Connection closed by peer [127.0.0.1]:1", "Traceback: gloo\n", 7.0)
ENDED = Failure(rank=2, exit_code=143, message="", traceback="", seconds=7.0)
KILLED = Failure(rank=3, exit_code=-9, message="", traceback="", seconds=9.0)
TERMINATED = Failure(rank=3, exit_code=-15, message="", traceback="", seconds=9.0)
SILENT_PEER = Failure(0, 1, "PeerFailed: expected it, found that rank 3 gave no sign of life for 60 s", "", 6.0)
USAGE = Failure(rank=1, exit_code=2, message="ConfigError: a.b = 3: no", traceback="Traceback: x\n", seconds=9.0)


@pytest.mark.parametrize(
    "failures, code, said, traceback",
    [
        ([LOST_PEER, ENDED, BUG], 1, "rank 1 failed: ValueError: a bug (after step 2", "Traceback: a bug\n"),
        ([LOST_PEER, ENDED, KILLED], 1, "rank 3 was killed by SIGKILL (out of memory?) (after", ""),
        # The launcher kills a stopped process that does not end in time: its peer's report is the cause. A process that
        # was killed first is one, whatever its peer saw of it later.
        ([SILENT_PEER, ENDED, KILLED], 1, "rank 0 failed: PeerFailed: expected it, found that rank 3 gave no sign", ""),
        ([SILENT_PEER._replace(seconds=70.0), KILLED], 1, "rank 3 was killed by SIGKILL (out of memory?) (after", ""),
        ([LOST_PEER, ENDED], 143, "interrupted by SIGTERM (after step 2", ""),
        ([LOST_PEER, TERMINATED], 143, "interrupted by SIGTERM (after", ""),
        ([ENDED._replace(exit_code=130)], 130, "interrupted by SIGINT (after", ""),
        ([LOST_PEER], 1, "rank 0 failed: RuntimeError: Connection closed", "Traceback: gloo\n"),
        ([ENDED._replace(exit_code=7)], 1, "rank 2 ended with code 7 (after", ""),
        ([BUG._replace(message="FloatingPointError: step 3: loss is nan")], 1, "rank 1 failed: FloatingPointError", ""),
    ],
)
def test_the_cause_is_told_and_not_its_consequences(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], failures: list[Failure], code: int, said: str, traceback: str
) -> None:
    """Whoever failed first of its own; the manifest keeps it; one line, after a traceback where there is one."""
    open_manifest(tmp_path, {})
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n')
    assert launch.ended_badly(tmp_path, failures) == code
    error = capsys.readouterr().err
    assert error.startswith(traceback + "fullshard: " + said)
    assert error.removeprefix(traceback).count("\n") == 1
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["status"] == ("failed" if code == 1 else "interrupted") and manifest["last_step"] == 2


def test_a_mistake_found_by_a_rank_frees_the_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What only a rank can find out (a corpus too small, say) ends like any other mistake in the configuration."""
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "config.toml").write_text("")
    assert launch.ended_badly(run_dir, [ENDED, USAGE]) == 2
    assert capsys.readouterr().err == "fullshard: a.b = 3: no\n"
    assert not run_dir.exists()


def test_a_kill_signal_is_no_request_to_stop() -> None:
    assert KILLED.stopped_by is None
    assert (ENDED.stopped_by, TERMINATED.stopped_by) == (signal.SIGTERM, signal.SIGTERM)
    assert BUG.stopped_by is None
