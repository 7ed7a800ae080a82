"""Run the quick tiers with each torch and each Python of the range, and write the table of docs/support.md.

    make versions                                  all versions; downloads what the cache lacks
    make versions ARGS="--wheels FOLDER"           torch's wheels are in FOLDER: none is downloaded that is there
    make versions ARGS="--only torch-2.11.0 --only python-3.12"
    make versions ARGS="--only torch-2.15.0 -k mixed"     what it does not know goes to pytest; no table is written
    make versions ARGS="--whole"                   `make test` of each version instead of the selection

Each torch runs on `PYTHON`, each other Python with `TORCH_OF_PYTHONS`. An environment is made once and kept in the
folder that VERSIONS_CACHE names (.versions by default): torch's wheel, unpacked, with stubs for missing NVIDIA
libraries (tools/cuda_stubs.py); for another Python than this one also `PACKAGES`, at the versions of constraints.txt.
Packages of this environment serve all versions of torch. `CACHE/bin/NAME` is the interpreter of an environment, for
use alone.

Beside the tests of `SELECTION`, each version installs the built package into an environment with a plain torch and
trains the quickstart on two ranks (tools/try_package.py), and exchanges checkpoints with other versions
(tests/procs/test_checkpoints_across_torches.py): each leaves what it saved in `CACHE/checkpoints/NAME`, loads what the
others left there, in this run or an earlier one, and the oldest and the newest torch that have an environment load what
it saved.
"""

from __future__ import annotations

import argparse
import datetime
import os
import shutil
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tools import cuda_stubs, version_table
from tools.version_table import Result, Run

ROOT = Path(__file__).resolve().parents[1]

# ---- what runs -------------------------------------------------------------------------------------------------------

# Each of them on PYTHON. Where pip offers less, the newest that it offers.
TORCHES = ("2.10.0", "2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0")
PYTHON = "3.11"
# Each of them with this torch.
PYTHONS = ("3.12", "3.13")
TORCH_OF_PYTHONS = "2.13.0"

# What the tests of SELECTION import, and torch: for a Python that has no environment of the project. Those that others
# require come with them.
PACKAGES = (
    "filelock typing-extensions sympy networkx jinja2 fsspec setuptools numpy pytest hypothesis safetensors isal rich "
    "PyYAML shtab hatchling editables matplotlib tensorboard tokenizers psutil transformers"
).split()
# These without what they require: that includes torch, with NVIDIA's packages.
PACKAGES_ALONE = ("accelerate", "peft", "bitsandbytes", "torchao")

# Of each tier what shows that the engine works with a torch: about four minutes on two idle cores. Two lists, which run
# side by side: ranks that are threads, and the others.
SELECTION: dict[str, tuple[str, ...]] = {
    "threads": ("tests/threads",),
    "others": (
        "tests/pure/test_torch_names.py",
        "tests/procs/test_checkpoints_across_torches.py",
        "tests/fake/test_golden_fullshard.py",
        "tests/fake/test_golden_torch.py",
        "tests/fake/test_conformance_surface.py",
        "tests/fake/test_communication.py",
        "tests/fake/test_operations_on_parameters.py",
        "tests/fake/test_options.py",
        "tests/fake/test_wrong_arguments.py",
        "tests/fake/test_bytes.py",
        "tests/fake/test_facts.py",
        "tests/device",
        "tests/procs/test_parity.py",
        "tests/procs/test_programs.py",
        "tests/procs/test_conformance_gloo.py",
        "tests/procs/test_conformance_messages.py",
        "tests/procs/test_data_groups.py",
        "tests/procs/test_data_groups_over_gloo.py",
        "tests/procs/test_overlap.py",
        "tests/procs/test_hsdp.py",
        "tests/procs/test_state_dcp.py",
        "tests/procs/test_checkpoint_async.py",
        "tests/procs/test_compile.py",
        "tests/procs/test_pipelining.py",
        "tests/procs/test_agreement_gloo.py",
        "tests/procs/test_peers.py",
        "tests/procs/test_first_example.py",
    ),
}
# Of a report that may have properties of tests.
REPORT = ("-o", "junit_family=xunit1")
# Beside "not slow": torch's half of the conformance, which only another torch changes.
OPTIONS = ("-m", "not slow", "--torch-half", "-q", "-p", "no:cacheprovider", *REPORT)
# Of one list, in seconds; four times what the slowest one needs.
LIMIT = 1800.0


@dataclass(frozen=True)
class Version:
    """One line of the table. `python`: X.Y; `torch`: X.Y.Z."""

    python: str
    torch: str

    @property
    def name(self) -> str:
        return f"python{self.python}-torch{self.torch}"

    @property
    def tag(self) -> str:
        """Of torch's wheel: "cp311"."""
        return f"cp{self.python.replace('.', '')}"


VERSIONS = {f"torch-{torch}": Version(PYTHON, torch) for torch in TORCHES}
VERSIONS |= {f"python-{python}": Version(python, TORCH_OF_PYTHONS) for python in PYTHONS}


class NotPossible(Exception):
    """Why a version cannot run here, and what to do."""


# ---- environments ----------------------------------------------------------------------------------------------------


@dataclass
class Cache:
    """`folder`: environments; `wheels`: folders that may have torch's wheels, the first one is also written to."""

    folder: Path
    wheels: Sequence[Path]

    @property
    def checkpoints(self) -> Path:
        """What each version saved, by its name."""
        return self.folder / "checkpoints"

    def has(self, version: Version) -> bool:
        """Whether the environment is made, in this run or an earlier one."""
        made = (self._unpacked(version) / "made").is_file() or _has(Path(sys.executable), version.torch)
        return made and (self.folder / "bin" / version.name).is_file()

    def interpreter(self, version: Version) -> Path:
        """The interpreter of an environment, which is made if it is not there."""
        python = self._python(version.python)
        torch = "" if _has(python, version.torch) else f"{self._torch(version)}:"
        path = self.folder / "bin" / version.name
        path.parent.mkdir(parents=True, exist_ok=True)
        # Its programs start others with `sys.executable`, which find the same torch by the variable.
        # In one step: another run with this cache may be executing it.
        new = path.with_name(f"{path.name}.{os.getpid()}")
        new.write_text(
            f'#!/bin/sh\nPYTHONPATH={torch}:{ROOT / "src"}:{ROOT}${{PYTHONPATH:+:$PYTHONPATH}} exec {python} "$@"\n'
        )
        new.chmod(0o755)
        new.replace(path)
        check = "import torch; print(torch.__version__)"
        ran = subprocess.run([path, "-W", "error", "-c", check], capture_output=True, text=True, cwd=ROOT)
        if ran.returncode or ran.stdout.split("+")[0].strip() != version.torch:
            raise NotPossible(
                f"{path}: expected torch {version.torch}, found {ran.stdout.strip() or ran.stderr.strip()[-2000:]}; "
                f"remove {torch.rstrip(':') or python} to have it made again"
            )
        return path

    def _torch(self, version: Version) -> Path:
        """The folder with torch, unpacked; made with its stubs."""
        folder = self._unpacked(version)
        if (folder / "made").is_file():
            return folder
        wheel = self._wheel(version)
        print(f"{version.name}: unpacking {wheel}", flush=True)
        shutil.rmtree(folder, ignore_errors=True)
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
        for program in (folder / "torch" / "bin").glob("*"):
            program.chmod(0o755)
        stubs = cuda_stubs.make(folder)
        (folder / "made").write_text(f"{wheel.name}\n{' '.join(stubs)}\n")
        return folder

    def _unpacked(self, version: Version) -> Path:
        return self.folder / f"torch-{version.torch}-{version.tag}"

    def _wheel(self, version: Version) -> Path:
        for folder in self.wheels:
            found = sorted(folder.glob(f"torch-{version.torch}[+-]*{version.tag}-{version.tag}-*.whl"))
            if found:
                return found[-1]
        folder = self.wheels[0]
        folder.mkdir(parents=True, exist_ok=True)
        print(f"{version.name}: downloading torch {version.torch} for Python {version.python}", flush=True)
        ran = subprocess.run(
            [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps",
             "--only-binary=:all:", "--python-version", version.python, "-d", str(folder), f"torch=={version.torch}"],
            capture_output=True, text=True)  # fmt: skip
        found = sorted(folder.glob(f"torch-{version.torch}[+-]*{version.tag}-{version.tag}-*.whl"))
        if ran.returncode or not found:
            raise NotPossible(
                f"pip offers no torch {version.torch} for Python {version.python}: {ran.stderr.strip()[-500:]}\n"
                f"put its wheel into a folder that --wheels names, or take the version from TORCHES of {__file__}"
            )
        return found[-1]

    def _python(self, python: str) -> Path:
        """An interpreter with the packages; this one where it has the version."""
        if python == _this_python():
            return Path(sys.executable)
        folder = self.folder / f"python{python}"
        interpreter = folder / "bin" / "python"
        if (folder / "made").is_file():
            return interpreter
        base = _works(f"python{python}")
        print(f"python {python}: making an environment with its packages", flush=True)
        shutil.rmtree(folder, ignore_errors=True)
        _do([base, "-m", "venv", str(folder)])
        pip = [str(interpreter), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        _do([*pip, "-c", str(ROOT / "constraints.txt"), *PACKAGES])
        _do([*pip, "-c", str(ROOT / "constraints.txt"), "--no-deps", *PACKAGES_ALONE])
        _do([*pip, "--no-deps", "--no-build-isolation", "-e", str(ROOT)])
        (folder / "made").write_text("\n".join(PACKAGES) + "\n")
        return interpreter


def _works(program: str) -> str:
    """The first program of that name on the path that runs: version managers have some for versions that they lack."""
    for folder in os.get_exec_path():
        path = Path(folder, program)
        if (
            path.is_file()
            and not subprocess.run([path, "-c", "import venv, ensurepip"], capture_output=True).returncode
        ):
            return str(path)
    raise NotPossible(f"no {program} with venv and ensurepip is on the path; install one, or leave the version out")


def _this_python() -> str:
    return f"{sys.version_info[0]}.{sys.version_info[1]}"


def _has(python: Path, torch: str) -> bool:
    """Whether the interpreter's own packages have that torch."""
    code = "import importlib.metadata as m; print(m.version('torch'))"
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ran = subprocess.run([python, "-c", code], capture_output=True, text=True, env=environ)
    return ran.stdout.split("+")[0].strip() == torch


def _do(command: list[str]) -> None:
    ran = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    if ran.returncode:
        raise NotPossible(f"{' '.join(command)}: status {ran.returncode}\n{(ran.stdout + ran.stderr)[-3000:]}")


# ---- runs ------------------------------------------------------------------------------------------------------------


@dataclass
class _Running:
    """One program and its process group."""

    name: str
    program: subprocess.Popen[bytes]
    log: Path
    deadline: float = field(default_factory=lambda: time.monotonic() + LIMIT)

    def end(self) -> str:
        """Wait; "" or why it failed."""
        try:
            status = self.program.wait(max(0.0, self.deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.kill()
            return f"{self.name}: not over after {LIMIT:.0f} s, killed; see {self.log}"
        # 5: nothing was selected, as with -k.
        return f"{self.name}: status {status}; see {self.log}" if status not in (0, 5) else ""

    def kill(self) -> None:
        """Whatever the program started too."""
        try:
            os.killpg(self.program.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.program.wait()


def start(name: str, command: list[str], log: Path, environ: dict[str, str]) -> _Running:
    with log.open("wb") as output:
        program = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, cwd=ROOT, env=environ, start_new_session=True
        )
    return _Running(name, program, log)


def run(version: Version, cache: Cache, readers: list[Path], extra: list[str], whole: bool) -> Run:
    """What came of one version. `readers`: interpreters with other versions of torch, which load its checkpoints."""
    begun = time.monotonic()
    interpreter = cache.interpreter(version)
    facts = subprocess.run(
        [interpreter, "-c", "import sys, torch; print('%d.%d.%d' % sys.version_info[:3], torch.__version__)"],
        capture_output=True, text=True, check=True, cwd=ROOT).stdout.split()  # fmt: skip
    logs = cache.folder / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    for old in logs.glob(f"{version.name}.*"):
        old.unlink()
    environ = {**os.environ, "TESTS_OTHER_PYTHON": os.pathsep.join(map(str, readers))}
    environ["TESTS_CHECKPOINTS"] = str(cache.checkpoints)
    environ.pop("PYTHONPATH", None)
    lists = {name: list(paths) for name, paths in SELECTION.items()}
    options = list(OPTIONS)
    if whole:
        lists = {
            "threads": ["tests/threads"],
            "others": [f"tests/{t}" for t in "procs device faults pure fake golden".split()],
        }
    running = []
    problems: list[str] = []
    try:
        for number, (name, paths) in enumerate(lists.items()):
            reported = logs / f"{version.name}.{name}.xml"
            command = [str(interpreter), "-m", "pytest", *options, f"--junitxml={reported}", *extra, *paths]
            own = {**environ, "TESTS_WORKER": str(number)}
            running.append(start(name, command, logs / f"{version.name}.{name}.log", own))
        problems += [found for one in running if (found := one.end())]
        if not extra:
            command = [str(interpreter), "-m", "tools.try_package", str(logs / f"{version.name}.dist")]
            trained = start("quickstart", command, logs / f"{version.name}.quickstart.log", environ)
            running.append(trained)
            quickstart = trained.end()
            problems += [quickstart] if quickstart else []
            shutil.rmtree(logs / f"{version.name}.dist", ignore_errors=True)
    finally:
        for one in running:
            if one.program.poll() is None:
                one.kill()
    reports = list(logs.glob(f"{version.name}.*.xml"))
    results, exchanged = tiers_of(reports), exchanged_of(reports)
    if not extra:
        results["quickstart"] = Result(passed=int(not quickstart), failed=[quickstart] if quickstart else [])
    return Run(
        python=facts[0],
        torch=facts[1],
        date=datetime.date.today().isoformat(),
        whole=whole,
        tiers=results,
        problems=problems,
        seconds=round(time.monotonic() - begun),
        **exchanged,
    )


def others(chosen: Iterable[str], cache: Cache) -> list[Path]:
    """The interpreters with the oldest and the newest torch, of those that this run chose or an earlier one made."""
    there = [name for name in VERSIONS if name.startswith("torch-")]
    there = [name for name in there if name in chosen or cache.has(VERSIONS[name])]
    found = []
    for name in dict.fromkeys([*there[:1], *there[-1:]]):
        try:
            found.append(cache.interpreter(VERSIONS[name]))
        except NotPossible as reason:
            print(f"{name}: loads no checkpoints of others: {reason}", flush=True)
    return found


def _cases(reports: Iterable[Path]) -> Iterator[ElementTree.Element]:
    """The tests in pytest's reports. Raises nothing for a report that a killed run left."""
    for report in reports:
        try:
            yield from ElementTree.parse(report).iter("testcase")
        except (ElementTree.ParseError, OSError):
            continue


def _bad(case: ElementTree.Element) -> ElementTree.Element | None:
    """How it failed."""
    return next((found for kind in ("failure", "error") if (found := case.find(kind)) is not None), None)


def exchanged_of(reports: Iterable[Path]) -> dict[str, list[str]]:
    """`loads` and `loaded_by` of a `Run`: the properties of tests that passed."""
    found: dict[str, list[str]] = {"loads": [], "loaded_by": []}
    for case in _cases(reports):
        for one in case.iter("property"):
            if one.get("name") in found and _bad(case) is None:
                found[one.get("name", "")].append(one.get("value", ""))
    return {what: sorted(names) for what, names in found.items()}


def tiers_of(reports: Iterable[Path]) -> dict[str, Result]:
    """Tier -> what came of its tests."""
    passed: Counter[str] = Counter()
    skipped: dict[str, Counter[str]] = {}
    failed: dict[str, list[str]] = {}
    for case in _cases(reports):
        where = case.get("classname") or case.get("name", "")
        parts = where.split(".")
        tier = parts[1] if len(parts) > 1 else "collection"
        bad, skip = _bad(case), case.find("skipped")
        if bad is not None:
            message = (bad.get("message") or "").strip().splitlines()
            failed.setdefault(tier, []).append(f"{'/'.join(parts)}.py::{case.get('name')}: {' '.join(message)[:300]}")
        elif skip is not None:
            skipped.setdefault(tier, Counter())[(skip.get("message") or "").strip()] += 1
        else:
            passed[tier] += 1
    return {
        tier: Result(passed[tier], dict(sorted(skipped.get(tier, {}).items())), sorted(failed.get(tier, [])))
        for tier in sorted({*passed, *skipped, *failed})
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.versions", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--cache", type=Path, default=Path(os.environ.get("VERSIONS_CACHE") or ROOT / ".versions"))
    parser.add_argument("--wheels", type=Path, action="append", default=[], help="a folder with torch's wheels")
    parser.add_argument("--only", action="append", choices=list(VERSIONS), help="this version; again for more")
    parser.add_argument("--whole", action="store_true", help="all tests that are not slow")
    parser.add_argument("--make", action="store_true", help="make the environments and run nothing")
    chosen, extra = parser.parse_known_args(arguments)
    cache = Cache(chosen.cache.resolve(), [chosen.cache.resolve() / "wheels", *map(Path.resolve, chosen.wheels)])
    versions = {name: VERSIONS[name] for name in chosen.only or VERSIONS}
    interpreters: dict[str, Path] = {}
    impossible: dict[str, str] = {}
    for name, version in versions.items():
        try:
            interpreters[name] = cache.interpreter(version)
            print(f"{name}: {interpreters[name]}", flush=True)
        except NotPossible as reason:
            impossible[name] = str(reason)
            print(f"{name}: not possible: {reason}", flush=True)
    runs = []
    if not chosen.make:
        ends = others(interpreters, cache)
        for name in interpreters:
            readers = [path for path in ends if path != interpreters[name]]
            found = run(versions[name], cache, readers, extra, chosen.whole)
            runs.append(found)
            print(f"\n{name}: {version_table.summary(found)}", flush=True)
    if runs and not extra:
        version_table.write(runs)
        print(f"\nwritten: {version_table.PAGE.relative_to(ROOT)}, {version_table.RESULTS.relative_to(ROOT)}")
    for name, why in impossible.items():
        print(f"{name}: did not run: {why}")
    return int(bool(impossible) or any(not one.is_green for one in runs))


if __name__ == "__main__":
    sys.exit(main())
