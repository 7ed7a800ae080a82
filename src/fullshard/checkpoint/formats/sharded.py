"""Checkpoints of other programs into a sharded model and back, without a full model anywhere.

| from | to | |
|---|---|---|
| any source | the shards of a state dict | `load_into`: each rank reads its rows |
| the shards of a state dict | one file, or a Hugging Face folder | `export_full`: gathered tensor by tensor |
| a model and its optimizers | one file, and back | `save_full`, `load_full` |
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ...comm import alone, messenger, whole_of
from ...policy.arguments import expect_flag
from ..agreement import Heard, Message, agree
from ..companions import adapted, files_of, tied_names
from ..errors import CheckpointError, CheckpointMismatch
from ..loading import LoadJob, LoadOptions, Rename, write
from ..manifest import Manifest, TensorEntry, ValueEntry, encode
from ..plan import Box, key_of, matches, whole
from ..state import Optimizers, flatten, get_state_dict, named_tensors, set_state_dict
from .adapter_checkpoints import refuse_adapters
from .adapters import Merged, adapter_keys, write_adapters
from .convert import open_source, reason, regrouped
from .hf import DEFAULT_MAX_NBYTES, order_of, write_folder
from .names import HINT, Chosen, Renaming
from .source import LeavesSource, Source, place
from .torch_file import write_torch
from .writings import published


def load_into(
    state_dict: dict[str, Any],
    source: Source,
    *,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    cast: bool = False,
    allow_missing: Sequence[str] = (),
    allow_unexpected: Sequence[str] = (),
    rename: Rename | None = None,
) -> None:
    """`fullshard.checkpoint.load` from a checkpoint of any format: in place, all or nothing, on every rank.

    Every rank of `process_group` calls it, each with the same checkpoint opened (`open_source`). A rank reads only the
    rows that it holds; besides the model it needs memory for this rank's part of the state.

        model_state, _ = checkpoint.get_state_dict(model)
        with open_source("Llama-3.2-1B") as source:
            load_into(model_state, Chosen(source, renaming=llama("hf", "fullshard")))

    Options and errors are those of `load`.
    """
    options = LoadOptions(cast, tuple(allow_missing), tuple(allow_unexpected), rename)
    job = _ImportJob(source, alone() if no_dist else messenger(process_group), options)
    job.run(state_dict)


class _ImportJob(LoadJob):
    """A load whose manifest and tensors come from a source."""

    def __init__(self, source: Source, messages: Any, options: LoadOptions) -> None:
        super().__init__(str(source.path), messages, options)
        self._source = source

    def run(self, state_dict: dict[str, Any]) -> None:
        agree(self.messenger, self.what, lambda: self._match_source(state_dict), self._refuse_differences)
        agree(self.messenger, self.what, self._read_parts, lambda _: {})
        write(self._tree, self._wanted, self._copies)

    def _match_source(self, state_dict: dict[str, Any]) -> Message:
        source = self._source
        tensors = {key: TensorEntry(*i) for key, i in source.tensors.items()}
        readable, unreadable = {}, {}
        for key, path in source.values.items():
            value = None
            try:
                value = source.value(key)
                encode(value)
                readable[path] = value
            except (CheckpointError, TypeError, ValueError) as error:
                unreadable[key] = reason(error, value)  # an error only if it is asked for
        values = {key_of(path): ValueEntry(path, value) for path, value in regrouped(source, readable).items()}
        values |= {key: ValueEntry(source.values[key], None) for key in unreadable}
        self._manifest = Manifest("", 1, source.kind, tensors, values, ())
        found = self._match(state_dict)
        # Unreadable values are an error if they are asked for. Parameter numbers instead of names always are, because
        # they cannot be asked for.
        for key, why in unreadable.items():
            if key in found["keys"] or (why == HINT and not matches(key, self.options.allow_unexpected)):
                found["problems"].append(f"{key}: {why}")
        return found

    def _read_parts(self) -> Message:
        self._take(
            [
                torch.empty(0) if part.box is None else self._source.read(entry.key, part.box)
                for entry, part in self._wanted.tensors
            ]
        )
        return {}


# ---- exporting -------------------------------------------------------------------------------------------------


class StateSource(LeavesSource):
    """A state dict of this program as a source. `read` gathers DTensors, so all ranks of a mesh read the same keys in
    the same order."""

    kind = "state"

    def __init__(self, state_dict: dict[str, Any]) -> None:
        tree = flatten(state_dict)
        if tree.problems:
            raise CheckpointMismatch("exporting: expected tensors and plain values, found", tree.problems)
        self._owners = [owner for _, owner in tree.owners]
        for path, owner in tree.owners:
            prefix = key_of((*path, ""))
            names = tied_names(named_tensors(owner), owner) if isinstance(owner, nn.Module) else {}
            self.tied = {**self.tied, **{prefix + name: prefix + kept for name, kept in names.items()}}
        # The model, if the state dict is its own.
        self.model = next((owner for path, owner in tree.owners if not path and isinstance(owner, nn.Module)), None)
        self._left: list[str] = []
        leaves = [*tree.tensors.values(), *tree.values.values()]
        super().__init__(Path("the state dict"), [(leaf.path, leaf.value) for leaf in leaves])

    def companions(self, model: str | None = None) -> dict[str, bytes]:
        return {name: data for owner in self._owners for name, data in files_of(owner).items()}

    @torch.no_grad()
    def read(self, key: str, box: Box | None = None) -> Tensor:
        if self._left:
            # In another order ranks would gather different tensors.
            assert key == self._left[0], f"{key} is read before {self._left[0]}"
            del self._left[0]
        tensor = self._leaves[key].detach()
        full = whole_of(tensor, f"the export of {key}") if isinstance(tensor, DTensor) else tensor
        return full if box is None else place(full, whole(tuple(full.shape)), box)

    @contextlib.contextmanager
    def reading(self, keys: Iterable[str]) -> Iterator[None]:
        """A block in which all ranks read `keys`, in this order: what this rank does not read itself, or not before an
        error, it reads at the end."""
        self._left = list(keys)
        try:
            yield
        finally:
            for key in list(self._left):
                self.read(key)


def export_full(
    state_dict: dict[str, Any],
    target: str | os.PathLike[str],
    format: Literal["hf", "torch"],
    *,
    renaming: Renaming | None = None,
    tokenizer: Any = None,
    max_file_nbytes: int = DEFAULT_MAX_NBYTES,
    merge_adapters: bool = False,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Write the full tensors of a sharded state dict: "hf", a folder of safetensors files; "torch", a file for
    `torch.load`.

    Every rank of `process_group` calls it; the first writes. "hf" also writes the configuration of a model of
    transformers whose state `get_state_dict` took, and the files of `tokenizer`; of tied parameters it writes one.
    Names, shapes and files are those of its `save_pretrained` in one process. Of a model under PEFT "hf" writes the
    adapters alone, as its `save_pretrained` does, for `PeftModel.from_pretrained`; or with `merge_adapters=True` the
    base model with the active adapters merged, for `from_pretrained` of transformers.

    Tensors are gathered one by one and not kept: no rank ever holds more than the largest, and the first besides what a
    conversion or a merged layer makes of it; all adapters, where they are written alone. On an error, which all ranks
    raise, no file looks complete: `CheckpointMismatch` for names without a rule and for entries that the format cannot
    hold, `CheckpointIOError`.
    """
    expect_flag("merge_adapters", merge_adapters)
    messages = messenger(process_group)
    what = f"exporting to {target}"
    opened: list[tuple[StateSource, Source]] = []

    def check() -> Message:
        state = StateSource(state_dict)
        source: Source = Chosen(state, renaming=renaming)
        under = adapted(state.model) if format == "hf" and renaming is None else None
        if format == "hf" and source.values:
            problems = [f"{key}: no tensor, and safetensors files hold nothing else" for key in source.values]
            raise CheckpointMismatch(f"{what}: expected only tensors, found", problems)
        keys = list(source.tensors)
        alone: list[str] = []
        if under is not None and merge_adapters:
            merged = Merged(source, under)
            source = published(merged, merged.model)
        elif under is not None:
            alone = adapter_keys(under, source.tensors) if messages.rank == 0 else []
        elif merge_adapters:
            raise CheckpointMismatch(
                f"{what}: expected a model with adapters of PEFT for merge_adapters=True, found",
                [type(state.model).__name__ if state.model is not None else "a state dict of no model"],
                'pass the state that get_state_dict took of the PeftModel, with format "hf" and without renaming',
            )
        elif format == "hf":
            refuse_adapters(what, keys)
            source = published(source, state.model)
        opened.append((state, source))
        return {"keys": keys, "alone": alone, "adapters": under is not None and not merge_adapters}

    def decide(heard: Heard) -> Message:
        _same_keys(what, [(ranks[0], message["keys"]) for ranks, message in heard.groups])
        return heard.messages[0]

    decided = agree(messages, what, check, decide)
    ((state, source),) = opened
    if decided["adapters"]:
        order = decided["alone"]
    else:
        order = order_of(source, max_file_nbytes) if format == "hf" else list(source.tensors)

    def gather() -> Message:
        with state.reading(source.inputs(order)):
            more = files_of(tokenizer) if tokenizer is not None and messages.rank == 0 else {}
            if messages.rank == 0 and decided["adapters"]:
                write_adapters(Path(target), adapted(state.model), {key: source.read(key) for key in order}, more)
            elif messages.rank == 0 and format == "hf":
                companions = source.companions() | more
                write_folder(Path(target), source, source.read, companions, max_nbytes=max_file_nbytes)
            elif messages.rank == 0:
                write_torch(Path(target), source, source.read)
        return {}

    agree(messages, what, gather, lambda _: {})


def _same_keys(what: str, keys: list[tuple[int, list[str]]]) -> Message:
    for rank, found in keys:
        if found != keys[0][1]:
            odd = sorted(set(found) ^ set(keys[0][1])) or ["the same keys in another order"]
            raise CheckpointMismatch(f"{what}: expected the same keys on all ranks, rank {rank} differs in", odd)
    return {}


# ---- one file for a training run -------------------------------------------------------------------------------


def save_full(
    model: nn.Module,
    optimizers: Optimizers,
    path: str | os.PathLike[str],
    *,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Write the full state of a sharded model and its optimizers (`()` for none) to one new file.

    `{"model": {name: tensor}, "optimizer": {"state": {name: {...}}, "param_groups": [...]}}`, under the names of the
    plain model; `torch.load(path, weights_only=True)` reads it anywhere. Every rank calls it. Tensors are gathered with
    `DTensor.full_tensor` one by one: no rank ever holds more than the largest. Raises the errors of `export_full`.
    """
    export_full(_training_state(model, optimizers), path, "torch", process_group=process_group)


def load_full(
    model: nn.Module,
    optimizers: Optimizers,
    path: str | os.PathLike[str],
    *,
    allow_torch_save: bool = False,
    optimizer_names: Sequence[str] | None = None,
    allow_missing: Sequence[str] = (),
    allow_unexpected: Sequence[str] = (),
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Load a file of `save_full` on any number of ranks, or such a state dict of a program without sharding. Every rank
    calls it.

    The file is mapped and each rank reads its rows: no communication, and memory only for one rank's part of the state
    besides the model. All or nothing, like `load_into`. `allow_torch_save`: the file is a pickle, read through
    `weights_only`; pass True for files that you trust. `optimizer_names`: the names for the parameter numbers of a
    file with torch's own `optimizer.state_dict()`; `formats.optimizer_names(model, optimizers)` if that program built
    its optimizer in the same order. The optimizer need not have stepped. `allow_missing`, `allow_unexpected`: names of
    parameters that were frozen, or are now, as in `set_state_dict`.
    """
    state = _training_state(model, optimizers)
    left_out = [f"optimizer.state.{name}.*" for name in allow_unexpected]
    with open_source(path, allow_torch_save=allow_torch_save, optimizer_names=optimizer_names) as source:
        load_into(state, source, process_group=process_group, allow_unexpected=left_out)
    set_state_dict(
        model,
        optimizers,
        model_state_dict=state["model"],
        optim_state_dict=state.get("optimizer"),
        allow_missing=allow_missing,
        allow_unexpected=allow_unexpected,
    )


def _training_state(model: nn.Module, optimizers: Optimizers) -> dict[str, Any]:
    model_state, optimizer_state = get_state_dict(model, optimizers)
    has_optimizer = bool(optimizer_state["param_groups"])
    return {"model": model_state, "optimizer": optimizer_state} if has_optimizer else {"model": model_state}
