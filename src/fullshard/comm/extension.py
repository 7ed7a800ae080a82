"""The gather of a parameter that says itself what is sent and what becomes of it (`param.extension`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from .data_group import drain
from .group import ShardGroup, Work


class Extension(Protocol):
    """The parameter, as its channel sees it."""

    def messages(self) -> Sequence[tuple[Tensor, Tensor]]:
        """Ask the parameter what to send, and allocate where it arrives: (out, piece), `piece` (n,) of every rank into
        `out` (world * n,). As bytes (uint8), because a backend need not know the dtype. The same sizes on every rank.
        """
        ...

    def assemble(self) -> None:
        """Everything arrived: make, or fill, the full parameter."""
        ...

    def release(self) -> None:
        """Give back the memory of the full parameter."""
        ...


class ExtensionGather:
    """One message for each tensor that the parameter sends; one rank copies."""

    def __init__(self, group: ShardGroup, extension: Extension) -> None:
        self._group = group
        self._extension = extension
        self._works: list[Work] = []
        # What is sent has to live until it was.
        self._messages: Sequence[tuple[Tensor, Tensor]] = ()

    def issue(self) -> None:
        self._messages = self._extension.messages()
        for out, piece in self._messages:
            if self._group.world == 1:
                out.copy_(piece)
            else:
                self._works.append(self._group.gather_into(out, piece))

    def complete(self) -> None:
        self._wait()
        self._extension.assemble()

    def cancel(self) -> None:
        for work in self._works:
            drain(work)
        self._works.clear()
        self._messages = ()
        self._extension.release()

    def _wait(self) -> None:
        # Given up also where one of them raises: they are of no use to whoever tries again.
        works, self._works = self._works, []
        for work in works:
            work.wait()
        self._messages = ()
