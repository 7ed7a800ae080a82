"""What a run writes: safetensors, metrics, manifest, folder, picture; and what it does without optional packages."""

from __future__ import annotations

import importlib
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fullshard.checkpoint.formats.hf import Entry, SafetensorsWriter, read_safetensors
from fullshard.train import console, metrics
from fullshard.train.config import ConfigError, load_config
from fullshard.train.folder import close_manifest, discard_run_dir, make_run_dir, open_manifest, remove_parts
from fullshard.train.metrics import MetricsFile, StepRecord, read_metrics


def record(step: int, **changes: Any) -> StepRecord:
    values: dict[str, Any] = {
        "loss": 5.5 / step,
        "bits_per_byte": 8.0 / step,
        "grad_norm": 1.0,
        "lr": 1e-3,
        "tokens": 10 * step,
        "seconds": 0.5,
        "tokens_per_second": 20.0,
        "tflop_per_second": 0.01,
        "mfu": None,
        "memory_bytes": 2**20,
    }
    return StepRecord(step=step, **(values | changes))


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "a.weight": torch.randn(3, 5, generator=generator),
        "b": torch.randn(7, generator=generator).bfloat16(),
        "empty": torch.empty(0, 4),
        "scalar": torch.tensor(3.5, dtype=torch.float64),
        "é.ids": torch.arange(6).view(2, 3),
        "mask": torch.tensor([True, False, True]),
        "turned": torch.randn(4, 6, generator=generator).t(),
    }


def write(path: Path, values: dict[str, torch.Tensor]) -> None:
    entries = [Entry(name, t.dtype, tuple(t.shape)) for name, t in values.items()]
    with SafetensorsWriter(path, entries) as file:
        for name, tensor in values.items():
            file.write(name, tensor)


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


def test_tensors_come_back(tmp_path: Path) -> None:
    write(tmp_path / "m.safetensors", tensors())
    assert_same(read_safetensors(tmp_path / "m.safetensors"), tensors())
    assert [p.name for p in tmp_path.iterdir()] == ["m.safetensors"]


def test_the_package_safetensors_reads_ours_and_we_read_its(tmp_path: Path) -> None:
    package = pytest.importorskip("safetensors.torch")
    write(tmp_path / "ours", tensors())
    assert_same(package.load_file(tmp_path / "ours"), tensors())
    package.save_file({n: t.contiguous() for n, t in tensors().items()}, tmp_path / "theirs", metadata={"a": "b"})
    assert_same(read_safetensors(tmp_path / "theirs"), tensors())


def test_a_file_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    """An exception, a forgotten tensor and a wrong order leave what was there before, and no rest."""
    path = tmp_path / "m.safetensors"
    write(path, {"old": torch.zeros(2)})
    entries = [Entry("a", torch.float32, (2,)), Entry("b", torch.float32, (3,))]
    with pytest.raises(KeyboardInterrupt), SafetensorsWriter(path, entries) as file:
        file.write("a", torch.ones(2))
        raise KeyboardInterrupt
    with pytest.raises(ValueError, match="1 announced tensor"), SafetensorsWriter(path, entries) as file:
        file.write("a", torch.ones(2))
    with pytest.raises(ValueError, match="in the announced order"), SafetensorsWriter(path, entries) as file:
        file.write("b", torch.ones(3))
    assert read_safetensors(path).keys() == {"old"}
    assert [p.name for p in tmp_path.iterdir()] == ["m.safetensors"]


@given(st.data())
def test_a_damaged_file_is_refused_or_harmless(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Cut anywhere or changed in one header byte: `ValueError`, or other names for the same bytes; never a crash."""
    folder = tmp_path_factory.mktemp("damaged")
    write(folder / "m", {"a": torch.ones(2, 3), "b": torch.zeros(4)})
    raw = bytearray((folder / "m").read_bytes())
    if data.draw(st.booleans()):
        raw = raw[: data.draw(st.integers(0, len(raw) - 1))]
        must_fail = True
    else:
        position = data.draw(st.integers(0, 8 + int.from_bytes(raw[:8], "little") - 1))
        raw[position] = data.draw(st.integers(0, 255))
        must_fail = False
    (folder / "m").write_bytes(raw)
    try:
        found = read_safetensors(folder / "m")
    except ValueError:
        return
    assert not must_fail
    assert sum(t.numel() * t.element_size() for t in found.values()) == 40


def test_metrics_are_a_json_object_a_line(tmp_path: Path) -> None:
    """Whole after every write, appended to, validation only where it was; what is not finite is null, and NaN again."""
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path)
    file.write(record(1))
    assert [r["step"] for r in read_metrics(path)] == [1]
    file.write(record(2, val_loss=4.0, val_bits_per_byte=5.8))
    first, second = read_metrics(path)
    assert "val_loss" not in first and second["val_loss"] == 4.0 and first["mfu"] is None
    file.write(record(3, loss=math.nan, grad_norm=math.inf, nonfinite="the loss"))
    file.close()
    line = json.loads(path.read_text().splitlines()[2])
    assert line["loss"] is line["grad_norm"] is line["mfu"] is None and line["nonfinite"] == "the loss"
    third = read_metrics(path)[2]
    assert math.isnan(third["loss"]) and math.isnan(third["grad_norm"]) and third["mfu"] is None
    assert "nonfinite" not in first


def test_the_folder_must_be_fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """New or empty; otherwise one line with a free name, which is then accepted."""
    monkeypatch.chdir(tmp_path)
    config = load_config(None, [f"run.dir={tmp_path}/a/run"])
    path = make_run_dir(config)
    assert load_config(path / "config.toml") == config
    assert make_run_dir(config) == path  # a run that did not end goes on in its folder
    (path / "config.toml").rename(path / "notes.toml")
    with pytest.raises(ConfigError) as caught:
        make_run_dir(config)
    nearest = json.loads(str(caught.value).rpartition("nearest valid: ")[2])
    assert make_run_dir(load_config(None, [f"run.dir={nearest}"])) == Path(nearest)
    (path / "notes.toml").rename(path / "config.toml")
    discard_run_dir(path)
    assert make_run_dir(config) == path
    dated = [make_run_dir(load_config(None)) for _ in range(3)]  # within one second or two
    assert len(set(dated)) == 3 and all(p.parent == Path("runs") for p in dated)


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="run.dir = .*file/run.*cannot be made: Not a directory"):
        make_run_dir(load_config(None, [f"run.dir={tmp_path}/file/run"]))


def test_a_closed_manifest_stays_closed(tmp_path: Path) -> None:
    """Rank and launcher may both try: the first status counts."""
    open_manifest(tmp_path, {"seed": 3})
    close_manifest(tmp_path, "completed", last_step=5)
    close_manifest(tmp_path, "interrupted", last_step=4)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert (manifest["status"], manifest["last_step"], manifest["seed"]) == ("completed", 5, 3)
    (tmp_path / "model.safetensors.part").write_text("half")
    remove_parts(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["manifest.json"]


def test_a_missing_package_is_named_with_its_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """rich, tensorboard and matplotlib are niceties: one line says what is missing, and the run goes on without."""
    for package in ("rich", "tensorboard", "matplotlib"):
        monkeypatch.setitem(sys.modules, package, None)
    assert not any(metrics.installed(package) for package in ("rich", "tensorboard", "matplotlib"))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert isinstance(console.console_for(0, log_every=1), console.PlainConsole)
    assert 'pip install "fullshard[ui]"' in capsys.readouterr().out
    assert 'pip install "fullshard[tb]"' in metrics.missing("tensorboard", "tb", "there are no files")


def test_an_error_inside_an_optional_package_is_not_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package that is there but broken is not "not installed"."""
    (tmp_path / "brokenpackage.py").write_text("import a_module_that_is_not_there\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert metrics.installed("brokenpackage") and not metrics.installed("no_such_package_at_all")
    with pytest.raises(ModuleNotFoundError, match="a_module_that_is_not_there"):
        importlib.import_module("brokenpackage")


def test_plain_lines_come_when_they_should(capsys: pytest.CaptureFixture[str]) -> None:
    """The first step, every tenth, the last, and wherever it validates."""
    lines = console.PlainConsole(10)
    lines.begin(25)
    for step in range(1, 26):
        lines.step(record(step, val_loss=4.0 if step == 7 else None))
    out = capsys.readouterr().out.splitlines()
    assert [line.split("/")[0] for line in out] == ["step  1", "step  7", "step 10", "step 20", "step 25"]
    for word in ("loss ", "norm ", "mem 1.0 MiB", "tok/s", "left "):
        assert word in out[0]
    assert "val 4.0000" in out[1] and "MFU" not in out[1]


def test_a_line_has_eighty_columns_and_the_rate() -> None:
    """Whatever else has no room."""
    whole = record(
        12, val_loss=1.2345, tokens_per_second=1234567.0, mfu=0.412, grad_norm=123.456, memory_bytes=80 * 2**30
    )
    for before, after in (("", ""), ("step 12345/100000", "left 12:34:56"), ("step 12", "")):
        line = console.summary(whole, before, after)
        assert len(line) <= 80 and "1,234,567 tok/s" in line and "loss " in line and line.startswith(before)
    assert "mem 80.0 GiB" in console.summary(whole) and "mem" not in console.summary(
        whole, "step 12345/100000", "left 1:00"
    )


@pytest.mark.parametrize("loss", [123.4567, 1e30, float("inf"), -1e30])
@pytest.mark.parametrize("val_loss", [None, 123.4567, 1e30])
@pytest.mark.parametrize("mfu", [None, 0.412])
def test_wide_values_fit(
    loss: float,
    val_loss: float | None,
    mfu: float | None,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Step, loss, validation and rate are in the line; what is left of the run is where there is room."""
    now = [0.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: now[0])
    lines = console.PlainConsole(1)
    lines.begin(1_000_000)
    wide = {"loss": loss, "val_loss": val_loss, "mfu": mfu, "tokens_per_second": 12_345_678.0}
    wide |= {"grad_norm": 1e5, "memory_bytes": round(1234.5 * 2**30)}
    for step in (1, 1_000_000):
        now[0] += 12.0
        lines.step(record(step, **wide))
    out = capsys.readouterr().out.splitlines()
    assert len(out) == 2 and max(map(len, out)) <= 80, out
    assert out[1].startswith("step 1000000/1000000  loss ") and out[1].endswith("left 0:00")
    for line in out:
        assert "12,345,678 tok/s" in line and ("val " in line) == (val_loss is not None)
    assert val_loss is not None or out[0].endswith("left 3333:19:48")


def test_other_ranks_say_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    silent = console.console_for(1, log_every=1)
    silent.say("x")
    silent.begin(1)
    silent.step(record(1))
    silent.end()
    assert capsys.readouterr().out == ""


def test_the_bar_keeps_validations_as_lines(capsys: pytest.CaptureFixture[str]) -> None:
    """With rich, and not on a terminal here: what was said stays in the output, and ending twice is harmless."""
    pytest.importorskip("rich")
    bar = console.ProgressConsole()
    bar.say("before")
    bar.begin(2)
    bar.step(record(1))
    bar.step(record(2, val_loss=3.25))
    bar.end()
    bar.end()
    bar.say("after")
    out = capsys.readouterr().out
    assert out.index("before") < out.index("step 2  loss") < out.index("after") and "val 3.2500" in out


def test_the_curve_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "loss.png"
    console.draw_loss([json.loads(record(s, val_loss=4.0 if s == 2 else None).to_json()) for s in (1, 2, 3)], path)
    assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 5000
    assert [p.name for p in tmp_path.iterdir()] == ["loss.png"]
