"""Recurrent layers as torch runs them on a CPU, where the meta device has other operations and keeps other memory.

LSTMs are layers of oneDNN, whose workspace stays for backward; the others, and LSTMs that oneDNN does not take, are
steps over inputs that one product made for all of them (torch's ATen/native/RNN.cpp and native/mkldnn/RNN.cpp).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .._torch import is_bfloat16_in_onednn

LAYER, LAYER_BACKWARD = "aten.mkldnn_rnn_layer", "aten.mkldnn_rnn_layer_backward"
# The number of an LSTM among oneDNN's layers.
_LSTM = 2
# Up to so many states of steps and samples, the workspace of a layer is asked for; above, it is linear in both.
_ASKED = 2048
# Samples of whose states any bytes are whole pages, so that nothing is rounded.
_WHOLE = 1024


class _Given(NamedTuple):
    """The arguments of `torch.lstm` and its like. `sizes`: how many sequences of a packed batch have each step."""

    data: Tensor
    sizes: tuple[int, ...]
    hidden: list[Tensor]
    weights: list[Tensor]
    has_biases: bool
    layers: int
    dropout: float
    bidirectional: bool
    batch_first: bool


class _Weights(NamedTuple):
    """The weights of one layer and direction. `out`: of a projection."""

    of_input: Tensor
    of_hidden: Tensor
    bias_input: Tensor | None
    bias_hidden: Tensor | None
    out: Tensor | None


_State = tuple[Tensor, ...]
_Cell = Callable[[Tensor, _State, _Weights], _State]


def on_cpu(func: Any, args: Sequence[Any]) -> Any:
    """The result of `torch.lstm`, `torch.gru`, `torch.rnn_tanh` or `torch.rnn_relu`."""
    given = _given(func, args)
    takes = func is torch.lstm and not given.sizes and _in_onednn(given)
    states = [tuple(each.unbind(0)) for each in given.hidden]
    data = given.data.transpose(0, 1) if given.batch_first else given.data
    directions = 2 if given.bidirectional else 1
    weights = _weights(given)
    if takes:
        data = data.contiguous()
    last: list[_State] = []
    for layer in range(given.layers):
        outputs = []
        for direction in range(directions):
            place = layer * directions + direction
            state = tuple(each[place] for each in states)
            run = _layer_of_onednn if takes else _packed if given.sizes else _steps
            own = weights[place]
            # The product of the other direction goes when this one is there.
            inputs = data if takes else F.linear(data, own.of_input, own.bias_input)
            out, state = run(_CELLS[func], given, inputs, state, own, bool(direction))
            if given.sizes:
                del inputs
            outputs.append(out)
            last.append(state)
        data = torch.cat(outputs, -1) if given.bidirectional else outputs[0]
        inputs = out = data
        if given.dropout and layer < given.layers - 1:
            data = F.dropout(data, given.dropout)
    if given.batch_first:
        data = data.transpose(0, 1)
    return data, *(torch.stack(parts) for parts in zip(*last, strict=True))


def _given(func: Any, args: Sequence[Any]) -> _Given:
    # A packed batch has the sizes of its steps after its data, and no `batch_first`.
    packed = isinstance(args[2 if func is torch.lstm else 3], list | tuple) and isinstance(args[1], Tensor)
    if func is not torch.lstm:
        packed = isinstance(args[2], Tensor)
    data, rest = args[0], args[2:] if packed else args[1:]
    hidden, weights, biases, layers, dropout, train, bidirectional = rest[:7]
    return _Given(
        data,
        tuple(args[1].tolist()) if packed else (),
        list(hidden) if func is torch.lstm else [hidden],
        list(weights),
        biases,
        layers,
        dropout if train else 0.0,
        bidirectional,
        False if packed else rest[7],
    )


def _weights(given: _Given) -> list[_Weights]:
    count = len(given.weights) // (given.layers * (2 if given.bidirectional else 1))
    found: list[_Weights] = []
    for start in range(0, len(given.weights), count):
        own: list[Tensor | None] = [*given.weights[start : start + count]]
        biases = own[2:4] if given.has_biases else [None, None]
        out = own[-1] if count == (5 if given.has_biases else 3) else None
        found.append(_Weights(given.weights[start], given.weights[start + 1], biases[0], biases[1], out))
    return found


# ---- step by step ----------------------------------------------------------------------------------------------------


def _lstm_cell(given: Tensor, state: _State, weights: _Weights) -> _State:
    hidden, cell = state
    gates = F.linear(hidden, weights.of_hidden, weights.bias_hidden).add_(given)
    into, forget, new, out = gates.unsafe_chunk(4, 1)
    into, forget, new, out = into.sigmoid_(), forget.sigmoid_(), new.tanh_(), out.sigmoid_()
    cell = (forget * cell).add_(into * new)
    hidden = out * cell.tanh()
    return hidden if weights.out is None else F.linear(hidden, weights.out), cell


def _gru_cell(given: Tensor, state: _State, weights: _Weights) -> _State:
    (hidden,) = state
    gates = given.unsafe_chunk(3, 1)
    own = F.linear(hidden, weights.of_hidden, weights.bias_hidden).unsafe_chunk(3, 1)
    reset = own[0].add_(gates[0]).sigmoid_()
    update = own[1].add_(gates[1]).sigmoid_()
    new = gates[2].add(own[2].mul_(reset)).tanh_()
    return ((hidden - new).mul_(update).add_(new),)


def _tanh_cell(given: Tensor, state: _State, weights: _Weights) -> _State:
    return (F.linear(state[0], weights.of_hidden, weights.bias_hidden).add_(given).tanh(),)


def _relu_cell(given: Tensor, state: _State, weights: _Weights) -> _State:
    return (F.linear(state[0], weights.of_hidden, weights.bias_hidden).add_(given).relu(),)


_CELLS: dict[Any, _Cell] = {
    torch.lstm: _lstm_cell,
    torch.gru: _gru_cell,
    torch.rnn_tanh: _tanh_cell,
    torch.rnn_relu: _relu_cell,
}
FUNCTIONS = frozenset(_CELLS)


def _steps(
    cell: _Cell, given: _Given, inputs: Tensor, state: _State, weights: _Weights, reverse: bool
) -> tuple[Tensor, _State]:
    outputs = []
    for each in inputs.unbind(0)[:: -1 if reverse else 1]:
        state = cell(each, state, weights)
        outputs.append(state[0])
    return torch.stack(outputs[::-1] if reverse else outputs), state


def _packed(
    cell: _Cell, given: _Given, inputs: Tensor, state: _State, weights: _Weights, reverse: bool
) -> tuple[Tensor, _State]:
    """Sequences end one after the other, the shortest first; in reverse they begin so."""
    ends = list(itertools.accumulate(given.sizes))
    first, outputs = state, []
    ended: list[_State] = []
    there = given.sizes[-1] if reverse else given.sizes[0]
    state = tuple(each[:there] for each in state)
    for size, end in list(zip(given.sizes, ends, strict=True))[:: -1 if reverse else 1]:
        if size > there:
            state = tuple(torch.cat([now, own[there:size]]) for now, own in zip(state, first, strict=True))
        elif size < there:
            ended.append(tuple(now[size:there] for now in state))
            state = tuple(now[:size] for now in state)
        there = size
        state = cell(inputs[end - size : end], state, weights)
        outputs.append(state[0])
    if not reverse:
        parts = zip(state, *reversed(ended), strict=True)
        state = tuple(torch.cat(part) for part in parts)
    return torch.cat(outputs[::-1] if reverse else outputs), state


# ---- layers of oneDNN ------------------------------------------------------------------------------------------------


def _in_onednn(given: _Given) -> bool:
    dtypes = {tensor.dtype for tensor in (given.data, *given.hidden, *given.weights)}
    known = dtypes == {torch.float32} or (dtypes == {torch.bfloat16} and is_bfloat16_in_onednn())
    return known and given.data.numel() > 0 and given.hidden[0].shape == given.hidden[1].shape


def _layer_of_onednn(
    cell: _Cell, given: _Given, data: Tensor, state: _State, weights: _Weights, reverse: bool
) -> tuple[Tensor, _State]:
    biases = [weights.bias_input, weights.bias_hidden]
    if not given.has_biases:
        # As large as the weights: so does torch.
        biases = [torch.zeros_like(each) for each in weights[:2]]
    width = weights.of_hidden.shape[1]
    kind = (_LSTM, width, given.layers, given.has_biases, given.bidirectional, given.batch_first, True)
    out, *state_after, _ = torch.ops.aten.mkldnn_rnn_layer(
        data, weights.of_input, weights.of_hidden, *biases, *state, reverse, [], *kind
    )
    return out, tuple(state_after)


def made(name: str, args: Sequence[Any]) -> tuple[Tensor, ...]:
    """The results of a layer of oneDNN, and of its backward, which is in float32."""
    data, hidden, cell = args[0], args[5], args[6]
    steps, samples, _ = data.shape
    width = hidden.shape[-1]
    if name == LAYER_BACKWARD:
        bias = args[1].shape[:1]
        shapes = [data.shape, args[1].shape, args[2].shape, bias, bias, hidden.shape, cell.shape]
        return tuple(data.new_empty(shape, dtype=torch.float32) for shape in shapes)
    kept = workspace_nbytes(steps, samples, data.shape[2], width, data.dtype)
    workspace = data.new_empty(kept, dtype=torch.uint8)
    return data.new_empty(steps, samples, width), torch.empty_like(hidden), torch.empty_like(cell), workspace


def flops(args: Sequence[Any], backward: bool) -> int:
    """The operations of a layer's products: of inputs and states with their weights. A backward has two of each."""
    steps, samples, _ = args[0].shape
    return int(2 * steps * samples * (args[1].numel() + args[2].numel()) * (2 if backward else 1))


def workspace_nbytes(steps: int, samples: int, inputs: int, width: int, dtype: torch.dtype) -> int:
    """The bytes that a layer of an LSTM keeps for its backward, as oneDNN says."""
    if steps * samples <= _ASKED:
        return _asked(steps, samples, inputs, width, dtype)
    one, two = (_asked(count, _WHOLE, inputs, width, dtype) for count in (1, 2))
    return (one + (two - one) * (steps - 1)) * samples // _WHOLE


@functools.cache
def _asked(steps: int, samples: int, inputs: int, width: int, dtype: torch.dtype) -> int:
    made = functools.partial(torch.zeros, dtype=dtype, device="cpu")
    weights = [made(4 * width, inputs), made(4 * width, width), made(4 * width), made(4 * width)]
    states, kind = [made(samples, width)] * 2, (_LSTM, width, 1, True, False, False, True)
    data = made(steps, samples, inputs)
    kept: Tensor = torch.ops.aten.mkldnn_rnn_layer(data, *weights, *states, False, [], *kind)[3]
    return kept.numel()
