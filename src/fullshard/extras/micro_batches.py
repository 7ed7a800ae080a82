"""`MicroBatches`: finds the largest micro-batch that fits, by trying, with the mathematics of the whole batch."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Literal, NamedTuple, TypeVar, get_args

import torch
from torch import Tensor, nn

from .._torch import buffers_of, collect_garbage
from ..agree import guard
from ..agree.companion import about_to_count
from ..agree.joined import all_ranks_of
from ..agree.recovery import peers_below
from ..comm import largest_over, sum_over
from ..engine import Unit, root_of, unit_of
from ..engine.root import formed
from ..engine.unit import module_units
from ..observe import report
from ..observe.report import human
from ..param import KeptGradients, KeptTensor
from ..peers import PeerFailed, shown_ranks
from ..policy.arguments import expect, expect_callable, expect_module, expect_state

# ---- sizes -----------------------------------------------------------------------------------------------------------
# The size of micro-batches to try next, from the sizes that fitted so far. Numbers only, the same on every rank.


@dataclass(slots=True)
class Sizes:
    """The search of one model. Sizes are samples of a rank; 0 means "not known", and for `size` "all of them"."""

    size: int = 0  # what the next window tries
    fits: int = 0  # the largest that fitted
    fails: int = 0  # the smallest that did not
    bisect: bool = True

    def first(self, samples: int) -> int:
        """The size of the next attempt at a window of `samples` samples."""
        return min(self.size or samples, samples)

    def went_well(self, size: int, samples: int) -> None:
        """A window of `samples` samples fitted in pieces of `size`: choose the size of the next window."""
        self.fits = max(self.fits, size)
        if not self.bisect or not self.fails:
            return
        self.size = self.fits
        # A larger size is only worth trying if it saves a piece.
        pieces, fewest = -(-samples // self.fits), -(-samples // (self.fails - 1))
        if fewest < pieces:
            self.size = -(-samples // ((pieces + fewest) // 2))

    def failed(self, size: int) -> bool:
        """A piece of `size` did not fit: choose a smaller one for the same window. False if there is none."""
        if size == 1:
            return False
        self.fails = size
        if self.fits >= size:
            self.fits = 0  # it fitted before, but no longer does
        self.size = self.fits if self.fits and self.bisect else (size + 1) // 2
        return True


# ---- memory ----------------------------------------------------------------------------------------------------------
# The errors that count as out of memory, and the message when nothing is left to try.

# Texts of allocators that raise a plain RuntimeError.
_CPU_ALLOCATOR = ("DefaultCPUAllocator: can't allocate memory", "DefaultCPUAllocator: not enough memory")
_LIBRARIES = ("CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED", "CUSOLVER_STATUS_ALLOC_FAILED")
_SHOWN_TERMS = 6


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` reports a lack of memory: `torch.OutOfMemoryError`, `MemoryError`, and the RuntimeErrors of the
    CPU allocator, cuBLAS, cuDNN and cuSOLVER."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in (*_CPU_ALLOCATOR, *_LIBRARIES))


def nothing_fits(model: nn.Module, said: str) -> str:
    """The text for a model that does not run with one sample: the allocator's message, and the largest consumers."""
    try:
        found = report(model)
    except ValueError:  # nothing is sharded
        return f"{said}\na micro-batch of 1 sample does not fit"
    terms = sorted((term for term in found.peak_terms if term.nbytes), key=lambda term: -term.nbytes)
    rest = sum(term.nbytes for term in terms[_SHOWN_TERMS:])
    listed = [f"  {human(term.nbytes):>10}  {term.name}" for term in terms[:_SHOWN_TERMS]]
    if rest:
        listed.append(f"  {human(rest):>10}  the rest")
    return "\n".join(
        [
            said,
            f"A micro-batch of 1 sample does not fit on rank {found.rank}. Parameters, gradients and messages take at "
            f"most {human(found.peak_nbytes)} there, in {found.peak_moment}; activations and optimizer come on top:",
            *listed,
            "Reduce them with more ranks, reshard_after_forward=True, set_memory_budget or CPUOffloadPolicy "
            "(docs/memory.md); reduce activations with recomputation or shorter samples",
        ]
    )


# ---- start -----------------------------------------------------------------------------------------------------------
# Everything that forward and backward change, as it is at the start of a window of micro-batches. A failed attempt is
# rolled back to it.
#
# Parameters and optimizer state are not included: no forward or backward writes them (a step in backward does, and is
# rejected).


class Start:
    """Gradients, buffers, random state and the engine's own state, on this rank.

    Takes memory for a copy of the buffers and of existing gradients (for gradients held unreduced: the bytes of the
    unsharded model); none for gradients after `zero_grad()`.
    """

    def __init__(self, model: nn.Module) -> None:
        self._units = module_units(model)
        self._gradients = [KeptGradients(param) for unit in self._units for param in unit.params]
        self._windows = [unit.gradients.windows for unit in self._units]
        ours = {id(param.sharded) for unit in self._units for param in unit.params}
        ours |= {id(param.full) for unit in self._units for param in unit.params if hasattr(param, "full")}
        plain = (parameter for parameter in model.parameters() if id(parameter) not in ours)
        self._plain = [(parameter, KeptTensor(parameter.grad)) for parameter in plain]
        self._restore_rest = rest_of(model, self._units)

    def restore(self) -> None:
        """Puts gradients and windows back, on every rank and outside of a backward. Discards the remains of the failed
        step, on this rank or another."""
        for root in dict.fromkeys(root for unit in self._units if (root := formed(unit)) is not None):
            root.reset()
        for gradients in self._gradients:
            gradients.restore()
        for unit, windows in zip(self._units, self._windows, strict=True):
            unit.gradients.windows = windows
        for parameter, kept in self._plain:
            parameter.grad = kept.restore()
        self._restore_rest()
        # Frames of the failed attempt may be in reference cycles, with the activations that they hold.
        collect_garbage()
        for kind in {unit.device.type for unit in self._units}:
            # Only whole free blocks count for what fits: release those of the failed sizes.
            getattr(torch.get_device_module(kind), "empty_cache", _nothing)()


def _nothing() -> None:
    pass


def rest_of(model: nn.Module, units: Iterable[Unit]) -> Callable[[], None]:
    """A function that restores the buffers of `model` and the random state of this rank as they are now."""
    buffers, random_states = _buffers(model), _random_states(unit.device for unit in units)

    def restore() -> None:
        for module, kept in buffers:
            standing = buffers_of(module)
            standing.clear()
            standing.update({name: value.restore() for name, value in kept.items()})
        for put_back in random_states:
            put_back()

    return restore


def _buffers(model: nn.Module) -> list[tuple[nn.Module, dict[str, KeptTensor]]]:
    """The buffers of each module; one that several modules share is copied once."""
    once: dict[int, KeptTensor] = {}

    def kept(buffer: torch.Tensor | None) -> KeptTensor:
        if id(buffer) not in once:
            once[id(buffer)] = KeptTensor(buffer)
        return once[id(buffer)]

    found = []
    for module in model.modules():
        # Also for modules without any: a forward may register its first one.
        found.append((module, {name: kept(buffer) for name, buffer in buffers_of(module).items()}))
    return found


def _random_states(devices: Iterable[torch.device]) -> list[Callable[[], None]]:
    """Functions that restore the generators of this process as they are now: torch's of the host and of `devices`,
    Python's, and numpy's if it is imported."""
    host, python = torch.get_rng_state(), random.getstate()
    states: list[Callable[[], None]] = [lambda: torch.set_rng_state(host), lambda: random.setstate(python)]
    for device in {device for device in devices if device.type not in ("cpu", "meta")}:
        states.append(_device_state(device))
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        state = numpy.random.get_state()
        states.append(lambda: numpy.random.set_state(state))
    return states


def _device_state(device: torch.device) -> Callable[[], None]:
    module = torch.get_device_module(device)
    state = module.get_rng_state(device)
    return lambda: module.set_rng_state(state, device)


# ---- batches ---------------------------------------------------------------------------------------------------------


class Share(NamedTuple):
    """The share of a window that this rank has. `most`: the samples of the rank with the most; `scale`: of losses,
    None: 1."""

    samples: int
    most: int
    scale: float | None = None


Search = Literal["bisect", "halve", "fixed"]
Reduce = Literal["last", "each"]
Answer = TypeVar("Answer", Tensor, tuple[Tensor, Any])


class MicroBatches:
    """Forward and backward over the samples of a step in pieces, with the largest pieces that fit into memory.

        micro = fullshard.MicroBatches(model)
        for inputs, targets in batches:  # this rank's part of a step
            tokens = targets.numel()

            def loss_of(piece: slice) -> Tensor:
                logits = model(inputs[piece])
                return F.cross_entropy(logits.flatten(0, 1), targets[piece].flatten(), reduction="sum") / tokens

            loss = sum(micro.backward(loss_of, len(inputs)))
            optimizer.step()
            optimizer.zero_grad()

    If a rank runs out of memory in forward or backward, even a single one, all ranks retry the window (all pieces of
    the call) with smaller pieces. Changes of a failed attempt are rolled back: gradients (including those of earlier
    backwards), buffers, random state, and the engine's own state. Forward and backward do not touch parameters and
    optimizer. So the result is bitwise that of a run with this size from the beginning. Sizes are remembered.

    model: sharded by `fully_shard`; the whole model, not a part of it.
    size: the size that the first window tries, in samples of a rank; None: all of them.
    search: "bisect": after a size did not fit, the next windows try sizes between it and the largest that did, until no
        larger one would save a piece. "halve": half of the size that did not fit. "fixed": always `size`; out of memory
        is an error.
    reduce: "last": gradients are held unsharded and reduced after the last piece (`set_requires_gradient_sync`);
        "each": after every piece, in less memory. A window that is not the last of a step needs synchronisation
        switched off by the caller; that setting is respected.

    Other side effects of hooks and forwards (counters in Python, files) are not rolled back, nor is data that `loss_of`
    draws itself: pass it slices of data drawn before. Batch normalisation sees pieces, so its results depend on their
    size.
    """

    def __init__(
        self, model: nn.Module, *, size: int | None = None, search: Search = "bisect", reduce: Reduce = "last"
    ) -> None:
        """Raises `ValueError` for a model without sharded parts and arguments out of their range, and `RuntimeError`
        if an optimizer steps in backward: its steps cannot be rolled back."""
        expect_module("model", model)
        if not module_units(model):
            raise ValueError("model: expected a module with sharded parts, found none; apply fully_shard first")
        _check_choice("search", search, get_args(Search))
        _check_choice("reduce", reduce, get_args(Reduce))
        _check_count("size", size, none=search != "fixed")
        self.model = model
        self.search, self._reduce = search, reduce
        self._sizes = Sizes(size or 0, bisect=search == "bisect")

    @property
    def size(self) -> int | None:
        """The most samples per forward of a rank in the next window; None: all of them."""
        return self._sizes.size or None

    def state_dict(self) -> dict[str, int]:
        """The state of the search, the same on all ranks; 0 means unknown."""
        return {"size": self._sizes.size, "fits": self._sizes.fits, "fails": self._sizes.fails}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue a search."""
        expect_state("state", state, {"size", "fits", "fails"})
        self._sizes.size, self._sizes.fits, self._sizes.fails = state["size"], state["fits"], state["fails"]

    def backward(
        self,
        loss_of: Callable[[slice], Answer],
        samples: int,
        *,
        tokens: int | None = None,
        filler: Callable[[], Answer] | None = None,
    ) -> list[Answer]:
        """Forward and backward over `samples` samples of this rank. Collective. Without `tokens`, `samples` is the same
        number on every rank; with it, each rank may have another one.

        tokens: what this rank's samples weigh in the window (tokens that count in the loss, or samples; at least 0).
            `loss_of` then returns *sums*, and gradients become those of the sum over all ranks divided by the tokens of
            all ranks:

                loss_of = lambda piece: F.cross_entropy(model(x[piece]), y[piece], reduction="sum")
                micro.backward(loss_of, len(x), tokens=len(x))

            The losses that are returned are scaled too: their sum, averaged over the ranks, is the loss of the window.
            All ranks take as many turns as the one with the most samples needs. One without samples left takes part
            with its last piece again, which adds nothing: gradients of zero; buffers and random state are restored.
            Two messages of 8 and 16 bytes per axis of the mesh, and the host waits for them.
        filler: for a rank with `samples` 0: returns the loss of any input, like `loss_of`.

        `loss_of(slice(a, b))` returns the contribution of samples a to b to the loss, a scalar to differentiate. The
        contributions of all pieces must add up to the loss, so without `tokens` divide by the number of tokens or
        samples of the whole step, not of the piece. It may also return a tuple of that scalar and any further result.
        A retry of the window calls it again from the first sample on.

        Returns the results of `loss_of` for the samples of this rank, in order, with the losses detached.

        Raises, if even one sample does not fit, an error of the allocator's type with the terms of memory in its text,
        and `PeerFailed` on the ranks where it fitted. Any other error of `loss_of` or the backward is raised as it is,
        and the other ranks raise `PeerFailed`. After each of these the state is that of before the call. `PeerFailed`
        is also raised if another rank's process ended or is held up; then nothing can be rolled back together.
        With `tokens`, `ValueError` on all ranks if they have none together, and if one has neither a sample nor a
        filler; for a model that is not the outermost sharded module, or whose gradients are not all divided by the same
        number.
        """
        expect_callable("loss_of", loss_of, "a function of a slice")
        expect_callable("filler", filler, "a function without arguments", or_none=True)
        self._refuse_steps_in_backward()
        share = self._share(samples, tokens, filler is None)
        most = share.most
        if self.search == "fixed":
            return self._window(loss_of, filler, share, self._sizes.first(most))
        self._form_root()
        start = Start(self.model)
        while True:
            size = self._sizes.first(most)
            ended = self._attempt(partial(self._window, loss_of, filler, share, size))
            if ended.answers is not None:
                self._sizes.went_well(size, most)
                return ended.answers
            # Every rank reaches this point, so none waits for one that does not come back.
            lacking = self._together(ended)
            start.restore()
            if ended.raised is not None:
                raise ended.raised
            if lacking.error is not None:
                raise lacking.error
            if not self._sizes.failed(size):
                raise self._nothing_fits(ended, lacking)

    def _share(self, samples: int, tokens: int | None, lonely: bool) -> Share:
        """Agree on the turns and the scale of a window. `lonely`: there is no filler. Collective with `tokens`."""
        if tokens is None:
            _check_count("samples", samples)
            return Share(samples, samples)
        _check_count("samples", samples, least=0)
        _check_count("tokens", tokens, least=0)
        root, mesh = all_ranks_of(self.model, "tokens")
        most, total, without = samples, tokens, int(lonely and not samples)
        if mesh is not None:
            about_to_count(root, "int64*3")
            what = "MicroBatches: the tokens of a window"
            (total,) = sum_over(mesh, torch.tensor([total]), what).tolist()
            most, without = largest_over(mesh, torch.tensor([most, without]), what).tolist()
        if not total:
            raise ValueError(
                "tokens: expected some on one rank at least, found 0 on all; skip this window on all ranks"
            )
        if without:
            raise ValueError(
                f"MicroBatches: expected samples or a filler on every rank, found a rank with neither (this one has "
                f"{samples} samples); pass filler= there, which returns the loss of any input"
            )
        return Share(samples, most, _divisor(root.units) / total)

    # ---- an attempt ----------------------------------------------------------------------------------------

    def _attempt(self, window: Callable[[], list[Answer]]) -> _Ended[Answer]:
        """A window. If a rank raises in it, all ranks do, before they leave it."""
        try:
            with guard(self.model):
                return _Ended(answers=window())
        except PeerFailed:
            return _Ended()
        except Exception as error:
            if not is_out_of_memory(error):
                return _Ended(raised=error)
            # Keep only texts: the exception holds the frames of the attempt, and so its activations.
            return _Ended(lacked=(_kind_of(error), str(error)))

    def _together(self, ended: _Ended[Any]) -> _Lacking:
        """After a failed window: the failures of all ranks. Every rank makes this call.

        Raises `PeerFailed` if a rank cannot take part, because its process ended or is held up.
        """
        peers = peers_below(self.model)
        peers.meet()
        said = _FOLLOWED
        if ended.raised is not None:
            said = f"{type(ended.raised).__name__}: {ended.raised}"
        elif ended.lacked is not None:
            said = _LACKED
        found = peers.compare("the end of a window of micro-batches", said, _weight)
        failed = {rank: text for rank, text in found.items() if text not in (_FOLLOWED, _LACKED)}
        if failed:
            rank, text = min(failed.items())
            message = f"MicroBatches: expected every rank to complete its window, found that rank {rank} raised: {text}"
            return _Lacking((), PeerFailed(message, rank=rank, text=text))
        return _Lacking(tuple(rank for rank, text in found.items() if text == _LACKED), None)

    def _form_root(self) -> None:
        """Let ranks make their connections together, before one of them may run out of memory alone."""
        top = unit_of(self.model)
        if top is not None:
            root_of(top)

    def _window(
        self, loss_of: Callable[[slice], Answer], filler: Callable[[], Answer] | None, share: Share, size: int
    ) -> list[Answer]:
        """Runs as many pieces of `size` as the rank with the most samples has."""
        units = module_units(self.model)
        records = [unit.record for unit in units]
        asked = [record.plan.sync for record in records]
        answers: list[Any] = []
        piece, restore = slice(0), _nothing
        try:
            for first in range(0, share.most, size):
                last = first + size >= share.most
                for record, sync in zip(records, asked, strict=True):
                    record.plan.sync = sync and (last or self._reduce == "each")
                own = first < share.samples
                if own:
                    piece = slice(first, min(first + size, share.samples))
                elif restore is _nothing:
                    restore = rest_of(self.model, units)
                answer: Any = filler() if filler is not None and not share.samples else loss_of(piece)
                loss = answer[0] if isinstance(answer, tuple) else answer
                expect("loss_of(...)", isinstance(loss, Tensor), "a loss, or a tuple with it", loss, "return it")
                if share.scale is not None:
                    loss = loss * (share.scale if own else 0.0)
                torch.autograd.backward(loss)
                if own:
                    detached = loss.detach()
                    answers.append((detached, *answer[1:]) if isinstance(answer, tuple) else detached)
        finally:
            restore()
            for record, sync in zip(records, asked, strict=True):
                record.plan.sync = sync
        return answers

    def _nothing_fits(self, ended: _Ended[Any], lacking: _Lacking) -> Exception:
        if ended.lacked is not None:
            kind, text = ended.lacked
            return kind(nothing_fits(self.model, text))
        return PeerFailed(
            f"MicroBatches: expected a micro-batch of 1 sample to fit on every rank, found that "
            f"{shown_ranks(list(lacking.ranks))} ran out of memory with it; see the error there",
            rank=min(lacking.ranks),
            text="out of memory",
        )

    def _refuse_steps_in_backward(self) -> None:
        if any(unit.gradients.stepper is not None for unit in module_units(self.model)):
            raise RuntimeError(
                "MicroBatches: expected gradients to stay until optimizer.step(), found that the optimizer steps in "
                "backward (fullshard.step_in_backward), which cannot be rolled back when a piece does not fit; call "
                "remove() of the object that step_in_backward returned, or use a loop with a fixed size"
            )


class _Ended(NamedTuple, Generic[Answer]):
    """How a window ended on this rank; without any of the three, it was given up because a peer failed."""

    answers: list[Answer] | None = None
    lacked: tuple[type[Exception], str] | None = None  # the allocator's error: its type and text
    raised: Exception | None = None  # anything else


class _Lacking(NamedTuple):
    ranks: tuple[int, ...]  # those that ran out of memory
    error: PeerFailed | None  # raised on this rank if another one raised something else


_FOLLOWED, _LACKED = "", "out of memory"


def _weight(said: str) -> int:
    return 0 if said == _FOLLOWED else 1 if said == _LACKED else 2


def _kind_of(error: Exception) -> type[Exception]:
    """The type to raise again, built from a text alone."""
    return next((kind for kind in (torch.OutOfMemoryError, MemoryError) if isinstance(error, kind)), RuntimeError)


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name}: expected one of {', '.join(map(repr, choices))}, found {value!r}")


def _check_count(name: str, value: object, *, none: bool = False, least: int = 1) -> None:
    if value is None and none:
        return
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        of = name if name == "tokens" else "samples"
        raise ValueError(f"{name}: expected a number of {of}, at least {least}, found {value!r}")


def _divisor(units: Iterable[Unit]) -> float:
    """Returns the number by which the sum of gradients over the ranks is divided."""
    found = {
        unit.settings.controls.divide_factor or float(group.placing.mesh.size()): unit.record.name
        for unit in units
        for group in unit.groups
    }
    if len(found) > 1:
        told = ", ".join(f"{number:g} ({name})" for number, name in found.items())
        raise ValueError(
            f"tokens: expected that the gradients of all units are divided by one number, found {told}; call "
            f"set_gradient_divide_factor on all of them, or leave tokens out and scale the loss"
        )
    return next(iter(found), 1.0)
