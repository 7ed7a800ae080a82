"""The table of private torch names is what the source uses, and what the installed torch has."""

from __future__ import annotations

import ast
import importlib
import re
from datetime import timedelta
from typing import Any

import torch

from fullshard._torch import groups
from fullshard._torch.names import MARKS, NEWEST, OLDEST, PRIVATE_NAMES, known_in
from tests.harness import installed
from tests.harness import source as src
from tests.harness.source import Source
from tests.pure.test_boundaries import PRIVATE_ALLOWED

TABLE = "_torch/names.py"
SOURCES = [source for source in src.package_sources() if source.name != TABLE]
# Every part of a name in the table, with and without what is before it.
PARTS = {part.removesuffix("()") for one in PRIVATE_NAMES for part in one.name.split(".")} | set(MARKS)


def there(name: str) -> bool:
    """Whether the installed torch has `name`, in the words of the table."""
    parts = name.split(".")
    found: Any = torch
    for position, part in enumerate(parts[1:], start=1):
        try:
            found = importlib.import_module(".".join(parts[: position + 1]))
        except ImportError:
            if not hasattr(found, part.removesuffix("()")):
                return False
            found = getattr(found, part.removesuffix("()"))
            found = found() if part.endswith("()") else found
    return True


def used(sources: list[Source]) -> set[str]:
    """Private names of torch: those that the finder of the boundaries sees, and those in texts of `_torch`, as
    `operator.attrgetter` takes them."""
    names = set()
    own = src.own_private_names(source for source in sources if source.room == "_torch")
    everybody = src.own_private_names(sources)
    for source in sources:
        ours = own if source.room == "_torch" else everybody
        for finding in src.private_torch_uses(source, ours):
            names.update(re.findall(r"(?:private name |uses \.|attr of ')([\w.]+)", finding))
        if source.room == "_torch":
            for node in ast.walk(source.tree):
                text = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
                if re.fullmatch(r"[a-z_.]*\b_[\w.]*", text) and not text.startswith("__"):
                    names.update(text.split(".") if not text.startswith("torch.") else [text])
    # Names of others, each with its reason in the list of the boundaries; torch's own one there is in the table.
    others = {name.strip("'.") for _, name in PRIVATE_ALLOWED} - {"_parameters"}
    others |= {"_getframe", "_hf_peft_config_loaded"}  # of Python's sys, of transformers
    return {name for name in names if src.is_private(name) or "." in name} - others


def missing(names: set[str]) -> list[str]:
    """Those that the table lacks. A name that begins at torch has to be in it with what is before it."""
    whole = [one.name for one in PRIVATE_NAMES]
    return sorted(
        name
        for name in names
        if not (
            any(f"{one}.".startswith(f"{name}.") for one in whole) or f"torch.autograd.Variable.{name}" in whole
            if name.startswith("torch.")
            else name in PARTS
        )
    )


def test_every_private_name_is_in_the_table() -> None:
    found = used(SOURCES)
    assert {"_dtensor__new__", "_local_tensor", "torch._C._current_graph_task_id"} <= {
        *found,
        *(name.rpartition(".")[2] for name in found),
    }
    assert not missing(found), f"add them to PRIVATE_NAMES of {TABLE}, with the versions that have them and why"


def test_every_name_of_the_table_is_used() -> None:
    text = "\n".join(source.text for source in SOURCES)
    last = [*(one.name.rpartition(".")[2] for one in PRIVATE_NAMES), *MARKS]
    stale = [name for name in last if not re.search(rf"\b{name}\b", text)]
    assert not stale, f"nothing uses them any more: take them out of {TABLE}"
    assert len({one.name for one in PRIVATE_NAMES}) == len(PRIVATE_NAMES)


def test_the_installed_torch_has_what_the_table_says() -> None:
    assert all(OLDEST <= one.first <= one.last <= NEWEST and one.why for one in PRIVATE_NAMES)
    known = known_in(installed.release())
    wrong = [one.name for one in PRIVATE_NAMES if there(one.name) != (one in known)]
    assert not wrong, f"torch {torch.__version__}: change `first` or `last` of these in {TABLE}"


# What is asked of NCCL's classes, and the settings of their options that `own_options` knows: docs/devices.md.
OF_NCCL = "abort shutdown get_error eager_connect_single_device options supports_tensor_alloc allocate_tensor".split()
OF_OPTIONS = "_timeout is_high_priority_stream config split_from split_color global_ranks_in_group group_name".split()


def test_both_nccl_of_torch_are_asked_alike() -> None:
    """The user's group may be of either class from torch 2.14 on; the engine's own are of the first. Red for a setting
    that another torch adds to the options."""
    names = ("ProcessGroupNCCL", "ProcessGroupNCCL2")
    classes = [getattr(torch.distributed, name) for name in names if hasattr(torch.distributed, name)]
    assert len(classes) == torch.distributed.is_nccl_available() * (1 + (installed.release() >= (2, 14)))
    for kind in classes:
        assert [name for name in OF_NCCL if not hasattr(kind, name)] == []
        assert kind.Options is classes[0].Options
        options = kind.Options()
        given = {name for name in dir(options) if not name.startswith("__") and name != "_pybind11_conduit_v1_"}
        left = {"backend", "enable_reconfigure", "lazy_init", "use_pg_for_symm_mem_rendezvous"}  # as torch has them
        assert set(OF_OPTIONS) <= given <= {*OF_OPTIONS, *left}
        options.config.net_name, options.config.min_ctas, options._timeout = "Socket", 3, timedelta(seconds=7)
        made = groups.own_options(options, [1, 2], "own")
        assert (made.config.net_name, made.config.min_ctas, made._timeout) == ("Socket", 3, timedelta(seconds=7))
        assert (made.global_ranks_in_group, made.group_name, made.split_from) == ([1, 2], "own", None)
        options.config.net_name = "IB"
        assert made.config.net_name == "Socket"


def test_the_installed_torch_is_of_the_range() -> None:
    assert OLDEST <= installed.release() <= NEWEST, "another torch: extend the range, and see what is red"


def test_a_name_that_the_table_lacks_is_found() -> None:
    texts = [
        "import torch\ntorch._C._new_in_2_16()",
        "x._new_in_2_16",
        "import operator\nf = operator.attrgetter('_new_in_2_16')",
        "from torch._new_in_2_16 import x",
        "getattr(x, '_new_in_2_16', None)",
    ]
    for text in texts:
        assert missing(used([Source("_torch/a.py", text)])), text
    assert there("torch.nn.Module()._buffers") and not there("torch.nn.Module()._new_in_2_16")
