"""`context_parallel`: attention over sequences that are cut over the ranks of one mesh axis."""

from __future__ import annotations

import ctypes
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ..comm import SequenceLine, sum_over
from ..layout import AttentionShape, SequenceSplit, Traffic, nearest_degrees, repeats, ring_traffic, ulysses_traffic
from ..policy.arguments import expect, expect_choice, expect_each, expect_flag, expect_tensors, expect_whole
from .attention_calls import AttentionCalls, Call
from .sequence_attention import Sight, ring, ulysses
from .token_mean import same_on_all, token_mean

_WHAT = "context_parallel"
IGNORED = -100


def context_parallel(
    mesh: DeviceMesh,
    *,
    buffers: Sequence[Tensor] | None = None,
    buffer_seq_dims: Sequence[int] | None = None,
    no_restore_buffers: Iterable[Tensor] | None = None,
    variant: str = "auto",
    load_balance: bool = True,
) -> ContextParallel:
    """Attention over sequences that are cut over the ranks of `mesh`, an axis such as `mesh["cp"]`.

        cp = fullshard.context_parallel(mesh["cp"])
        with cp:
            tokens, targets, positions = cp.split((tokens, targets, positions))
            model(tokens, positions)  # (B, tokens of this rank)
            loss.backward()

    Inside, `torch.nn.functional.scaled_dot_product_attention` takes this rank's part of queries, keys and values,
    (B, H, tokens here, E), attends over whole sequences, and returns this rank's part of the result; also where
    `nn.MultiheadAttention(need_weights=False)` and the sdpa attention of transformers call it. No function of torch is
    replaced: other threads do not see the context. The backward, with recomputation in it, belongs inside.

    Shard parameters over data and context parallel ranks together: `mesh["dp_shard", "cp"]._flatten("dp_shard_cp")`.

    buffers, buffer_seq_dims, no_restore_buffers: as in `torch.distributed.tensor.experimental.context_parallel`:
        tensors that are cut in place inside, each along its dim, and restored afterwards, unless they are in
        `no_restore_buffers`.
    variant: "ulysses" sends queries, keys, values and results from rank to rank, so that each has some heads of all
        tokens; heads must divide by the number of ranks. "ring" sends keys and values around, for any heads. "auto":
        "ulysses" where heads divide, else "ring", for each call.
    load_balance: rank r of n holds chunks r and 2n-1-r of 2n, so that all have the same work under a causal mask;
        without it chunk r of n. The length of a sequence divides by the number of chunks.

    The result may be entered again and again, for each step. It sends one message of 16 bytes per batch, by which
    ranks with other batches or lengths are a `RanksDisagree` with their names. If a rank raises inside, the others'
    waits for it raise `PeerFailed`. Dropout is refused, and so is a mask over the local part.
    """
    expect("mesh", isinstance(mesh, DeviceMesh), 'a DeviceMesh such as mesh["cp"]', mesh, "pass one axis")
    if mesh.ndim != 1:
        names = mesh.mesh_dim_names or f"{mesh.ndim} axes"
        raise ValueError(f'mesh: expected one axis, found {names}; pass mesh["cp"], or flatten several axes')
    expect_choice("variant", variant, ["auto", "ulysses", "ring"])
    expect_flag("load_balance", load_balance)
    cut = [] if buffers is None else expect_tensors("buffers", buffers)
    dims: list[int] = []
    if buffer_seq_dims is not None:
        is_dim = "a dim of each buffer"
        dims = expect_each("buffer_seq_dims", buffer_seq_dims, lambda dim: type(dim) is int, is_dim)
    expect(
        "buffer_seq_dims",
        len(cut) == len(dims),
        f"{len(cut)} dims, one for each of buffers",
        str(dims),
        "pass all",
        ValueError,
    )
    left = {
        id(one)
        for one in ([] if no_restore_buffers is None else expect_tensors("no_restore_buffers", no_restore_buffers))
    }
    is_part = left <= {id(one) for one in cut}
    expect("no_restore_buffers", is_part, "some of buffers", "another tensor", "pass it in buffers too", ValueError)
    split = SequenceSplit(mesh.size(), balanced=bool(load_balance))
    given = [Buffer(tensor, dim, id(tensor) not in left) for tensor, dim in zip(cut, dims, strict=True)]
    return ContextParallel(mesh, split, variant, given)


class Buffer(NamedTuple):
    """A tensor that is cut in place."""

    tensor: Tensor
    dim: int
    is_restored: bool


class Batch(NamedTuple):
    """The batch that was split last. `length`: of its sequences, without padding; 0: not known."""

    length: int = 0
    padded: int = 0
    documents: Tensor | None = None
    digest: str = ""
    number: int = 0


class ContextParallel:
    """The result of `context_parallel`, and of `Prepared.context`: a context, and what cuts batches for it."""

    def __init__(
        self,
        mesh: DeviceMesh | None,
        split: SequenceSplit,
        variant: str = "auto",
        buffers: Sequence[Buffer] = (),
        *,
        data: DeviceMesh | None = None,
        token_means: bool = False,
        line: SequenceLine | None = None,
    ) -> None:
        """`mesh`: None without an axis over which sequences are cut: batches stay whole, and attention is torch's.
        `data`: the mesh of the parameters; None: `mesh`. `token_means`: a cross entropy inside is the mean over the
        tokens of the whole sequences. `line`: what messages go over; None: that of `mesh`."""
        self.mesh, self.variant, self.data = mesh, variant, mesh if data is None else data
        self._split, self._buffers = split, buffers
        self._line = SequenceLine(mesh, split) if line is None else line
        self._is_cut = mesh is not None or line is not None
        self._batch = Batch()
        # Whether the model's loss is that of the next token, so that `labels` of a mapping are shifted.
        self.shifts_labels = True
        # Is called with the tensors of each batch, whole.
        self.on_split: Callable[[list[Any]], None] | None = None
        # The kinds of calls that the ranks compared since the context was entered, or the last batch was split.
        self._compared: set[str] = set()
        self._entered: ExitStack | None = None
        # Calls of attention since then.
        self._attended = 0
        means = self._loss if token_means else None
        self._calls = AttentionCalls(self._attend, lambda: self._batch.padded // split.degree, means)

    @classmethod
    def of_plan(
        cls, mesh: DeviceMesh | None, data: DeviceMesh, variant: str, *, shifts_labels: bool = True
    ) -> ContextParallel:
        """The context of a plan whose parameters are on `data`: over `mesh`, its axis `cp`; None: it has none. The mean
        of a cross entropy inside is that of all tokens. Sends nothing."""
        split = SequenceSplit(1, balanced=False) if mesh is None else SequenceSplit(mesh.size(), balanced=True)
        made = cls(mesh, split, variant, data=data, token_means=mesh is not None)
        made.shifts_labels = shifts_labels
        return made

    @property
    def degree(self) -> int:
        """The number of ranks that share a sequence."""
        return self._split.degree

    @property
    def chunks(self) -> int:
        """The number by which the length of a sequence divides."""
        return self._split.chunks

    @property
    def length(self) -> int:
        """The tokens of the sequences of the last batch, with padding."""
        return self._batch.padded

    @property
    def has_documents(self) -> bool:
        """Whether sequences of the last batch are packed, or masked."""
        return self._batch.documents is not None

    def expect_split(self) -> None:
        """Raise `RuntimeError` where a model gets what `split` did not return, whose attention would be wrong."""
        if self.degree > 1 and (self._entered is None or not self._batch.padded):
            found = "one outside of it" if self._entered is None else "one before split() inside of it"
            raise RuntimeError(
                f"cp: expected forwards with gradients inside of the context, with parts of sequences, found {found}; "
                f"write `with prepared.context() as cp: inputs, labels = cp.split((inputs, labels))`, and the backward "
                f"inside"
            )

    # ---- context -------------------------------------------------------------------------------------------

    def __enter__(self) -> ContextParallel:
        if self._entered is not None:
            raise RuntimeError(f"{_WHAT}: expected a context that is not entered, found an open one; leave it first")
        with ExitStack() as stack:
            stack.enter_context(self._line.together(_WHAT))
            stack.callback(self._compared.clear)
            for buffer in self._buffers:
                stack.callback(_restore, buffer, buffer.tensor.detach().clone() if buffer.is_restored else None)
                with torch.no_grad():
                    cut = self._cut(buffer.tensor, buffer.dim).clone()
                    buffer.tensor.resize_(cut.shape).copy_(cut)
            if self._is_cut:
                stack.enter_context(self._calls)
            self._compared.clear()
            self._attended = 0
            self._entered = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        stack, self._entered = self._entered, None
        assert stack is not None
        self._batch = Batch(number=self._batch.number)
        if kind is not None:
            stack.__exit__(kind, error, trace)
            return
        with stack:
            # A rank that calls attention once more waits for the others, which have to be here still.
            if self.degree > 1:
                end = f"the end of the context, after {self._attended} calls of attention"
                self._line.at(f"{_WHAT}, {end}")
                self._line.compare(_WHAT, end)

    # ---- batches -------------------------------------------------------------------------------------------

    def split(
        self,
        batch: Any,
        *,
        seq_dim: int = 1,
        documents: Tensor | None = None,
        pad_with: int | None = None,
        shift_labels: bool | None = None,
    ) -> Any:
        """This rank's part of a batch, which is the same on all ranks that share its sequences.

        batch: a tensor, several, or a mapping as Hugging Face's models take. Tensors that have the length of the
            sequence at `seq_dim` are cut there; what has not is passed on.
        documents: (B, tokens), int, for packed sequences: the number of the document of each token. Attention inside
            the context then sees keys of the own document alone.
        pad_with: the token by which `input_ids` of a mapping are padded to a legal length; None: other lengths are
            refused.
        shift_labels: whether `labels` of a mapping are those of the tokens themselves, and the loss is that of the next
            token. None: as the loss of a Hugging Face model that was given to `prepare_fully_shard` has it; otherwise
            True. False for masked language models.

        Of a mapping, such `labels` are shifted before they are cut, so that the last token of a chunk has its label.
        They are both `labels` and `shift_labels` of the result; `position_ids` are those of the whole sequence, and
        made if there are none. Documents are taken from positions that do not go up by one, and from an
        `attention_mask` (tokens that it leaves out are seen by one another alone); the mask of the result is one of
        ones.

        Documents count until the next split, or the end of the context. Raises `ValueError` for a length that does not
        divide, with the nearest ones.
        """
        expect_whole("seq_dim", seq_dim, 0)
        self._calls.refuse_new_batch()
        if isinstance(batch, Mapping):
            shifts = self.shifts_labels if shift_labels is None else shift_labels
            whole, documents = self._prepared(batch, seq_dim, documents, pad_with, shifts)
            length = _length_of(batch, seq_dim)
        else:
            expect("pad_with", pad_with is None, "None, but for a mapping", pad_with, "pad the tensors", ValueError)
            tensors = [batch] if isinstance(batch, Tensor) else list(batch)
            whole = {str(at): tensor for at, tensor in enumerate(tensors)}
            length = _length_of(whole, seq_dim)
        padded = _length_of(whole, seq_dim)
        self._expect_legal(padded)
        if documents is not None:
            shape = tuple(documents.shape)
            expect(
                "documents",
                len(shape) == 2 and shape[1] == padded,
                f"(B, {padded})",
                str(shape),
                "pass all tokens",
                ValueError,
            )
        if self.mesh is None and documents is not None:
            raise ValueError(
                f"documents: expected None without an axis for {_WHAT}, found some; pass the model what it takes for "
                f"packed sequences, or set context_parallel_degree"
            )
        digest = "" if self.mesh is None else _digest([*whole.values(), documents])
        self._batch = Batch(length, padded, documents, digest, self._batch.number + 1)
        self._compared.clear()
        if self.on_split is not None:
            self.on_split([*whole.values(), documents])
        found = {
            key: self._cut(value, seq_dim) if _has_length(value, seq_dim, padded) else value
            for key, value in whole.items()
        }
        if isinstance(batch, Mapping):
            return found
        if isinstance(batch, Tensor):
            return found["0"]
        return type(batch)(found.values()) if type(batch) in (list, tuple) else tuple(found.values())

    def unsplit(self, tensor: Tensor, *, seq_dim: int = 1) -> Tensor:
        """The whole of a tensor of which each rank has its part along `seq_dim`, without a graph and without padding.
        Collective, inside the context."""
        whole = self._line.gathered(tensor, seq_dim)
        batch = self._batch
        return whole.narrow(seq_dim, 0, batch.length) if whole.shape[seq_dim] == batch.padded else whole

    def positions(self, length: int, device: torch.device | str = "cpu") -> Tensor:
        """(tokens here,), int64: where in a sequence of `length` tokens those of this rank are."""
        self._expect_legal(length)
        return Sight(self._split, causal=False).positions(self._line.rank, length, torch.device(device))

    def tokens_per_rank(self, labels: Tensor, mesh: DeviceMesh | None = None, *, ignore_index: int = IGNORED) -> Tensor:
        """The number of labels that count, over all ranks of `mesh` together, divided by the number of these ranks: a
        0-dim tensor, the same on all of them. Collective.

        Divide the sum of this rank's losses by it. `fully_shard` over `mesh` averages gradients over ranks, so that the
        result is the mean over all tokens, however many each rank has. mesh: of the parameters; None: that of this
        context, and after `prepare_fully_shard` that of the model. Raises `ValueError` for a mesh without the ranks
        that share these sequences.
        """
        mesh = self.data if mesh is None else mesh
        assert mesh is not None
        self._expect_all_parts(mesh)
        count = sum_over(mesh, (labels != ignore_index).sum(), _WHAT)
        return count.clamp(min=1) / mesh.size()

    def traffic(self, shape: AttentionShape, *, variant: str | None = None) -> Traffic:
        """The messages and bytes that one rank sends for one attention of `shape`, forward and backward. No message."""
        found = self._variant(shape.heads, shape.kv_heads) if variant in (None, "auto") else variant
        return ulysses_traffic(shape, self.degree) if found == "ulysses" else ring_traffic(shape, self.degree)

    def _expect_legal(self, length: int) -> None:
        nearest = self._split.nearest(length)
        if self.mesh is not None and nearest != (length,):
            found, degrees = self._split.balanced, " or ".join(map(str, self._split.legal_degrees(length)))
            raise ValueError(
                f"{_WHAT}: expected a length that divides by {self.chunks} ({self.degree} ranks, "
                f"load_balance={found}), found {length}; the nearest: {' and '.join(map(str, nearest))}, or degree "
                f"{degrees}"
            )

    def _expect_all_parts(self, mesh: DeviceMesh) -> None:
        """Raise `ValueError` if gradients over `mesh` would be without those of other parts of the same sequences."""
        if self.mesh is None or {*self.mesh.mesh.flatten().tolist()} <= {*mesh.mesh.flatten().tolist()}:
            return
        axis, found = (self.mesh.mesh_dim_names or ("cp",))[0], ", ".join(mesh.mesh_dim_names or ("no names",))
        raise ValueError(
            f"mesh: expected the ranks along {axis} in it, which have parts of the same sequences, found {found}: "
            f'gradients are then not averaged over {axis}; pass mesh["dp_shard", "{axis}"]._flatten(), of which '
            f"fully_shard gets the same"
        )

    def _loss(self, func: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        assert self.mesh is not None
        here = self._batch.padded // self.degree
        if func is F.cross_entropy:
            return token_mean(self.mesh, here, *args, **kwargs)
        return same_on_all(self.mesh, here, func(*args, **kwargs), args[0] if args else kwargs["input"])

    def _cut(self, tensor: Tensor, dim: int) -> Tensor:
        self._expect_legal(tensor.shape[dim])
        each = tensor.shape[dim] // self.chunks
        parts = [tensor.narrow(dim, chunk * each, each) for chunk in self._split.held(self._line.rank)]
        return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts, dim)

    def _prepared(
        self, batch: Mapping[str, Any], seq_dim: int, documents: Tensor | None, pad_with: int | None, shifts: bool
    ) -> tuple[dict[str, Any], Tensor | None]:
        """The whole batch as the model takes it, padded, with positions and shifted labels; and its documents."""
        whole, length = dict(batch), _length_of(batch, seq_dim)
        like = next(value for value in batch.values() if _has_length(value, seq_dim, length))
        rows, device = like.shape[0], like.device
        padded = length if pad_with is None else self._split.nearest(length)[-1]
        # Labels of whole sequences, such as a class, stay.
        if shifts and _has_length(whole.get("labels"), seq_dim, length):
            if "shift_labels" not in whole:
                whole["shift_labels"] = F.pad(whole["labels"], (0, 1), value=IGNORED)[..., 1:]
            whole["labels"] = whole["shift_labels"]
        positions = whole.get("position_ids")
        if positions is None:
            positions = torch.arange(length, device=device).expand(rows, length)
        elif documents is None:
            jumps = (positions.diff(dim=-1) != 1).long()
            if bool(jumps.any()):
                documents = F.pad(jumps, (1, 0)).cumsum(-1).expand(rows, length)
        if self.mesh is None:  # the rest is what the model takes
            return whole, documents
        whole["position_ids"] = positions
        mask = whole.get("attention_mask")
        if mask is not None and mask.ndim != 2:
            raise ValueError(
                f"attention_mask: expected (B, {length}) or none, found {tuple(mask.shape)}; pass what each query sees "
                f"as attn_mask of scaled_dot_product_attention, or documents"
            )
        if mask is not None and not bool(mask.all()):
            numbers = torch.zeros_like(mask, dtype=torch.int64) if documents is None else documents
            documents = numbers.masked_fill(mask == 0, -1)
        whole["attention_mask"] = torch.ones((rows, length), dtype=torch.int64, device=device)
        if padded > length:
            more = padded - length
            fill = {"input_ids": pad_with, "labels": IGNORED, "shift_labels": IGNORED, "attention_mask": 1}
            for key, value in whole.items():
                if not _has_length(value, seq_dim, length):
                    continue
                if key == "position_ids":
                    after = torch.arange(length, padded, device=device).expand(*value.shape[:-1], more)
                    whole[key] = torch.cat([value, after], -1)
                elif key in fill:
                    whole[key] = F.pad(value, (0, more), value=fill[key])
                else:
                    raise ValueError(
                        f"pad_with: expected input_ids, labels and masks, found {key}; pad the batch before"
                    )
            if documents is not None:
                documents = F.pad(documents, (0, more), value=-1)
        return whole, documents

    # ---- attention -----------------------------------------------------------------------------------------

    def _variant(self, heads: int, kv_heads: int) -> str:
        if self.variant != "auto":
            return self.variant
        return "ring" if repeats(heads, kv_heads, self.degree) is None else "ulysses"

    def _attend(self, call: Call) -> Tensor:
        """The attention of one call over whole sequences."""
        query, key, value = call.tensors
        length = query.shape[-2] * self.degree
        variant = self._variant(query.shape[1], key.shape[1])
        if variant == "ulysses" and repeats(query.shape[1], key.shape[1], self.degree) is None:
            heads = query.shape[1]
            legal = " or ".join(map(str, nearest_degrees(heads, self.degree)))
            raise ValueError(
                f"{_WHAT}: expected heads that divide by {self.degree} ranks with variant='ulysses', found {heads}; "
                f"use variant='ring', or {legal} ranks"
            )
        batch = self._batch
        if batch.padded and length != batch.padded:
            raise ValueError(
                f"{_WHAT}: expected {batch.padded // self.degree} queries of the batch that was split, found "
                f"{query.shape[-2]}; call split for each batch"
            )
        self._expect_legal(length)
        window = call.window
        if window is not None and window < length:
            raise NotImplementedError(
                f"{_WHAT}: expected attention without a sliding window, found a window of {window} in a sequence of "
                f"{length} tokens; use layers with full attention"
            )
        sight = Sight(self._split, call.is_causal, self._documents(query, call), call.mask_of(length, variant))
        self._compare(call, variant)
        if sight.documents is not None:
            sight = sight._replace(stamp=batch.number)
        attend = ulysses if variant == "ulysses" else ring
        return attend(self._line, query, key, value, call.scale, sight)

    def _documents(self, query: Tensor, call: Call) -> Tensor | None:
        batch = self._batch
        documents = batch.documents
        if documents is None and batch.padded > batch.length and not call.is_causal:
            # Of a causal mask padding comes after everything that is seen.
            documents = torch.zeros((1, batch.padded), dtype=torch.int64)
            documents[:, batch.length :] = -1
        if documents is None:
            return None
        if documents.shape[0] not in (1, query.shape[0]):
            raise ValueError(
                f"{_WHAT}: expected {documents.shape[0]} rows, as the documents have, found {query.shape[0]}; call "
                f"split for each batch"
            )
        return documents.to(query.device)

    def _compare(self, call: Call, variant: str) -> None:
        """Ranks compare what they attend to, once for each batch and kind of call."""
        shapes = [f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}" for tensor in call.tensors]
        said = (
            f"{variant}{'' if self._split.balanced else ' without load_balance'}, {', '.join(shapes)}"
            f"{', causal' if call.is_causal else ''}, batch {self._batch.digest or '?'}"
        )
        self._attended += 1
        self._line.at(f"{_WHAT}, call {self._attended} of attention, {said}")
        if said not in self._compared:
            if self.degree > 1:
                self._line.compare(_WHAT, said)
            self._compared.add(said)


def _restore(buffer: Buffer, whole: Tensor | None) -> None:
    if whole is not None:
        with torch.no_grad():
            buffer.tensor.resize_(whole.shape).copy_(whole)


def _has_length(value: Any, dim: int, length: int) -> bool:
    return isinstance(value, Tensor) and value.ndim > dim and value.shape[dim] == length


def _length_of(batch: Mapping[Any, Any], dim: int) -> int:
    """The length of sequences: of `input_ids` or `inputs_embeds`, else of the first tensor that has the dim."""
    named = [batch[key] for key in ("input_ids", "inputs_embeds") if batch.get(key) is not None]
    found = [value for value in [*named, *batch.values()] if isinstance(value, Tensor) and value.ndim > dim]
    if not found:
        raise ValueError(f"{_WHAT}: expected a tensor with dim {dim}, found none in the batch; pass its tensors")
    first: Tensor = found[0]
    if isinstance(first, DTensor):
        raise TypeError(f"{_WHAT}: expected plain tensors, found a DTensor; pass what each rank has")
    return first.shape[dim]


def _digest(values: Iterable[Any]) -> str:
    """A digest of shapes, and of values on the host: reading others would wait for the device."""
    digest = hashlib.blake2s(digest_size=6)
    for value in values:
        if isinstance(value, Tensor):
            here = value.detach()
            digest.update(json.dumps([list(here.shape), str(here.dtype)]).encode())
            if here.device.type == "cpu" and here.numel():
                here = here.contiguous()
                digest.update(ctypes.string_at(here.data_ptr(), here.nbytes))  # without numpy
    return digest.hexdigest()
