"""`MicroBatches`: the largest micro-batch that fits, found by trying, with the mathematics of the whole batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Generic, Literal, NamedTuple, TypeVar, get_args

import torch
from torch import Tensor, nn

from ..comm import sum_over
from ..runtime.forming import module_units
from .memory import is_out_of_memory, nothing_fits
from .sizes import Sizes
from .start import Start

Search = Literal["bisect", "halve", "fixed"]
Reduce = Literal["last", "each"]
Answer = TypeVar("Answer", Tensor, tuple[Tensor, Any])


class MicroBatches:
    """Forward and backward over the samples of a step in pieces, with the largest pieces that fit into memory.

        micro = fullshard.MicroBatches(model)
        for inputs, targets in batches:  # what this rank has of a step
            tokens = targets.numel()

            def loss_of(piece: slice) -> Tensor:
                logits = model(inputs[piece])
                return F.cross_entropy(logits.flatten(0, 1), targets[piece].flatten(), reduction="sum") / tokens

            loss = sum(micro.backward(loss_of, len(inputs)))
            optimizer.step()
            optimizer.zero_grad()

    When a rank runs out of memory in forward or backward, the window (all pieces of the call) is tried again by all
    ranks with smaller pieces. What a failed attempt changed is put back: gradients (those of earlier backwards too),
    buffers, random numbers, and the engine's own state; parameters and optimizer are not touched by forward and
    backward. So the result is bitwise that of a run that had used the size from the beginning. Sizes are remembered.

    model: sharded by `fully_shard`, whole (not a part of it).
    size: what the first window tries, in samples of a rank; None: all of them.
    search: "bisect": where a size did not fit, the next windows try what lies between it and the largest that did,
        until no larger one would save a piece. "halve": half of what did not fit. "fixed": `size` as it is; out of
        memory is an error.
    reduce: "last": gradients are held whole and reduced behind the last piece (`set_requires_gradient_sync`); "each":
        after every piece, in less memory. A window that is not the last of a step is one with synchronisation switched
        off by the caller; that is left as it is.

    Not put back: what hooks and forwards write beside buffers (counters in Python, files), and the data that
    `loss_of` draws itself: give it slices of what was drawn before. Batch normalisation sees pieces, so its results
    depend on their size.
    """

    def __init__(
        self, model: nn.Module, *, size: int | None = None, search: Search = "bisect", reduce: Reduce = "last"
    ) -> None:
        """Raises `ValueError` for a model without sharded parts and arguments out of their range, and `RuntimeError`
        where an optimizer steps in backward: its steps cannot be taken back."""
        units = module_units(model)
        if not units:
            raise ValueError("model: expected a module with sharded parts, found none; apply fully_shard first")
        _check_choice("search", search, get_args(Search))
        _check_choice("reduce", reduce, get_args(Reduce))
        _check_count("size", size, none=search != "fixed")
        self.model = model
        self.search, self._reduce = search, reduce
        # Ranks that compute together: those that share and replicate, and those that cut parameters beforehand (TP).
        groups = [group for unit in units for group in unit.groups]
        own = (param.own_spec.mesh for group in groups for param in group.params if param.own_spec is not None)
        self._meshes = list(dict.fromkeys([*(group.placing.mesh for group in groups), *own]))
        self._sizes = Sizes(size or 0, bisect=search == "bisect")

    @property
    def size(self) -> int | None:
        """Most samples in one forward of a rank, as the next window will have them; None: all of them."""
        return self._sizes.size or None

    def state_dict(self) -> dict[str, int]:
        """What was found, the same on all ranks; 0 stands for nothing."""
        return {"size": self._sizes.size, "fits": self._sizes.fits, "fails": self._sizes.fails}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Begin with what was found before."""
        self._sizes.size, self._sizes.fits, self._sizes.fails = state["size"], state["fits"], state["fails"]

    def backward(self, loss_of: Callable[[slice], Answer], samples: int) -> list[Answer]:
        """Forward and backward over `samples` samples of this rank (the same number on every rank). Collective.

        `loss_of(slice(a, b))` returns the part of the loss that samples a to b of them bring, a scalar to
        differentiate, so that the parts of all pieces add up to the loss: weigh by the number of tokens or samples of
        the whole step and not of the piece. Or a tuple of that and something that it wants returned. In a window that
        is tried again it is called again from the first sample on.

        Returns what `loss_of` returned, in order, the losses detached.

        Raises, where even one sample does not fit, an error of the allocator's type with the terms of memory in its
        text, and `RuntimeError` on ranks where it did; then everything is as it was before the call. What else
        `loss_of` or the backward raises goes through as in any step.
        """
        _check_count("samples", samples)
        self._refuse_steps_in_backward()
        if self.search == "fixed":
            return self._window(loss_of, samples, self._sizes.first(samples))
        start = Start(self.model)
        while True:
            size = self._sizes.first(samples)
            ended = self._attempt(loss_of, samples, size)
            if ended.answers is not None:
                self._sizes.went_well(size, samples)
                return ended.answers
            start.restore()
            if not self._sizes.failed(size):
                raise self._nothing_fits(ended)

    # ---- an attempt ----------------------------------------------------------------------------------------

    def _attempt(self, loss_of: Callable[[slice], Answer], samples: int, size: int) -> _Ended[Answer]:
        """A window with pieces of `size`, and how it ended on all ranks."""
        answers, said = None, None
        try:
            answers = self._window(loss_of, samples, size)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            # The exception itself holds the frames of the attempt, and so its activations.
            said = (_kind_of(error), str(error))
        return _Ended(None if self._any_rank(said is not None) else answers, said)

    def _any_rank(self, here: bool) -> bool:
        """Whether `here` is true on some rank. Collective."""
        count = torch.tensor([int(here)])
        for mesh in self._meshes:
            count = sum_over(mesh, count)
        return bool(count.item())

    def _window(self, loss_of: Callable[[slice], Answer], samples: int, size: int) -> list[Answer]:
        records = [unit.record for unit in module_units(self.model)]
        asked = [record.sync for record in records]
        answers: list[Any] = []
        try:
            for first in range(0, samples, size):
                last = first + size >= samples
                for record, sync in zip(records, asked, strict=True):
                    record.sync = sync and (last or self._reduce == "each")
                answer: Any = loss_of(slice(first, min(first + size, samples)))
                loss = answer[0] if isinstance(answer, tuple) else answer
                torch.autograd.backward(loss)
                detached = loss.detach()
                answers.append((detached, *answer[1:]) if isinstance(answer, tuple) else detached)
        finally:
            for record, sync in zip(records, asked, strict=True):
                record.sync = sync
        return answers

    def _nothing_fits(self, ended: _Ended[Any]) -> Exception:
        if ended.said is not None:
            kind, text = ended.said
            return kind(nothing_fits(self.model, text))
        return RuntimeError(
            "MicroBatches: expected a micro-batch of 1 sample to fit on every rank, found that another rank ran out of "
            "memory with it; see the error of that rank"
        )

    def _refuse_steps_in_backward(self) -> None:
        if any(unit.stepper is not None for unit in module_units(self.model)):
            raise RuntimeError(
                "MicroBatches: expected gradients to stay until optimizer.step(), found that the optimizer steps in "
                "backward (fullshard.step_in_backward), which cannot be taken back when a piece does not fit; call "
                "remove() of what step_in_backward returned, or use a fixed loop of your own"
            )


class _Ended(NamedTuple, Generic[Answer]):
    answers: list[Answer] | None  # None: some rank was out of memory
    said: tuple[type[Exception], str] | None  # by the allocator of this rank


def _kind_of(error: Exception) -> type[Exception]:
    """The type to raise again, which is made of a text alone."""
    return next((kind for kind in (torch.OutOfMemoryError, MemoryError) if isinstance(error, kind)), RuntimeError)


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name}: expected one of {', '.join(map(repr, choices))}, found {value!r}")


def _check_count(name: str, value: object, *, none: bool = False) -> None:
    if value is None and none:
        return
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name}: expected a number of samples, at least 1, found {value!r}")
