"""The stream of a model on a device, and its order with the streams that reports come from.

All commands of a root run on one stream, that of its forward. Memory of full parameters, messages and reduced gradients
comes from it and goes back to it, and messages come after what it computed: so on one stream order needs no events.

Autograd runs a node, with its hooks, on the stream that was current when the node was made. A report may therefore come
under another stream: a backward of another stream's forward, a node that accumulates gradients and that a held graph of
a warm-up kept, a module that the user runs beside the others. Then

    report       the model's stream waits for the stream of the report, runs the commands, and is waited for in turn
    gradient     also the gradient's memory goes back to its stream only when the model's stream has read it

which costs events, only where the streams differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from .._torch import capturing, current_stream_of, local_of, settled


class ModelStream:
    """The stream of one root. `current`: the stream of this thread; compare it with `stream`."""

    def __init__(self, device: torch.device) -> None:
        self.current = current_stream_of(device)
        self._capturing = capturing(device)
        # None before the first forward or command.
        self.stream: torch.Stream | None = None
        # While commands run for another stream: that one, which will read what they leave.
        self.reader: torch.Stream | None = None

    def begins(self, held: Iterable[bool]) -> None:
        """A forward of the root begins, or an `unshard` outside of one. Unless some of its units hold memory of the
        present stream (`held`), the current stream becomes the model's."""
        current = self.current()
        if current == self.stream or any(held):
            return
        # A capture may not wait for work outside of it; it began when the device was idle.
        if self.stream is not None and not self._capturing():
            current.wait_stream(self.stream)
        self.stream = current

    @contextmanager
    def ordered(self) -> Iterator[None]:
        """Work inside runs on the model's stream: after the current one, which continues after it."""
        current = self.current()
        if self.stream is None:
            self.stream = current
        if current == self.stream:
            yield
            return
        self.stream.wait_stream(current)
        outer, self.reader = self.reader, current
        try:
            with self.stream:
                yield
        finally:
            self.reader = outer
            current.wait_stream(self.stream)

    def follow(self) -> None:
        """The model's stream comes after the current one."""
        current = self.current()
        if self.stream is not None and current != self.stream:
            self.stream.wait_stream(current)

    def lead(self) -> bool:
        """The current stream comes after the model's. Returns whether it is another one."""
        current = self.current()
        if self.stream is None or current == self.stream:
            return False
        current.wait_stream(self.stream)
        return True

    def reads(self, gradient: Tensor | None) -> None:
        """The model's stream reads `gradient`, whose memory may belong to the current one."""
        if self.stream is not None:
            _record(gradient, self.stream)

    def leaves(self, gradients: Iterable[Tensor | None]) -> None:
        """`gradients` are handed over to the user, who reads them on the stream of the report."""
        if self.reader is not None:
            for gradient in gradients:
                _record(gradient, self.reader)


def _record(gradient: Tensor | None, stream: torch.Stream) -> None:
    if gradient is not None and gradient.device.type != "cpu":  # with offload it is on the host
        local = settled(local_of(gradient)) if isinstance(gradient, DTensor) else gradient
        local.record_stream(stream)
