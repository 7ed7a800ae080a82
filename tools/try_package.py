"""Build the sdist, the wheel from it, install the wheel, and train the quickstart on two ranks: `make package`.

    python -m tools.try_package FOLDER                  torch is the one of this environment
    python -m tools.try_package FOLDER --from-registry  torch from the registry, by the pin of constraints.txt

What is built stays in FOLDER.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]


def build(target: Path) -> Path:
    """The sdist and, made of its contents alone, the wheel; both in `target`. Returns the wheel."""
    with tempfile.TemporaryDirectory() as folder:
        hatchling = [sys.executable, "-m", "hatchling", "build", "-d"]
        subprocess.run([*hatchling, folder, "-t", "sdist"], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        (sdist,) = Path(folder).glob("*.tar.gz")
        shutil.unpack_archive(sdist, folder, filter="data")
        source = Path(folder, sdist.name.removesuffix(".tar.gz"))
        subprocess.run(
            [*hatchling, str(target.resolve()), "-t", "wheel"], cwd=source, check=True, stdout=subprocess.DEVNULL
        )
        shutil.copy(sdist, target)
    (wheel,) = target.glob("*.whl")
    return wheel


def try_wheel(wheel: Path, *, from_registry: bool = False) -> str:
    """What the quickstart prints, from a new environment that has the wheel."""
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        python = str(Path(folder, "bin", "python"))
        pip = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        if from_registry:
            subprocess.run([*pip, "-c", str(ROOT / "constraints.txt"), str(wheel)], check=True)
        else:
            subprocess.run([*pip, "--no-deps", str(wheel)], check=True)
            import filelock  # torch requires it, and may be in another folder (tools/versions.py)
            import torch

            (packages,) = Path(folder).glob("lib/*/site-packages")
            # After the environment's own packages: its fullshard is the wheel's.
            folders = dict.fromkeys(str(Path(str(module.__file__)).parents[1]) for module in (torch, filelock))
            (packages / "torch.pth").write_text("\n".join(folders) + "\n")
        environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        shutil.copy(ROOT / "examples" / "quickstart.py", folder)
        where = [python, "-c", "import fullshard; print(fullshard.__file__)"]
        found = subprocess.run(where, env=environ, cwd=folder, check=True, capture_output=True, text=True).stdout
        assert found.startswith(folder), f"expected the wheel's fullshard in {folder}, found {found}"
        torchrun = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "quickstart.py"]
        ran = subprocess.run(torchrun, env=environ, cwd=folder, check=True, stdout=subprocess.PIPE, text=True).stdout
        version = subprocess.run(
            [python, "-c", "import torch; print(torch.__version__)"],
            env=environ,
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        return f"torch {version}{ran}"


if __name__ == "__main__":
    options = argparse.ArgumentParser()
    options.add_argument("folder", type=Path)
    options.add_argument("--from-registry", action="store_true")
    chosen = options.parse_args()
    chosen.folder.mkdir(parents=True, exist_ok=True)
    print(try_wheel(build(chosen.folder), from_registry=chosen.from_registry), end="")
