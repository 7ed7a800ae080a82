"""Optional packages: found when they are asked for, named with their extra when they are missing."""

from __future__ import annotations

import importlib
import logging
import os
from typing import Any


def find(module: str) -> Any | None:
    """The imported module, or None where its package is not installed. An error inside the package is not hidden."""
    package = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.partition(".")[0] == package:
            return None
        raise


def missing(package: str, extra: str, consequence: str) -> str:
    """The one line that tells the user: `missing("rich", "ui", "plain lines instead of a progress bar")`."""
    return f'{package} is not installed, so {consequence}; to have it: pip install "fullshard[{extra}]"'


def silence_matplotlib() -> None:
    """Keep matplotlib from announcing, on its first use on a machine, that it builds a font cache."""
    logging.getLogger("matplotlib").setLevel(logging.ERROR)


def silence_tensorboard() -> None:
    """Keep TensorBoard's fall-back for the missing TensorFlow, and its C++ libraries, quiet."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
