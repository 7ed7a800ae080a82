"""While a root forms the others can know what it is: those who wait for this rank on another mesh (comm/roster.py)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ..comm import Absence, control
from .describe import mesh_text, meshes_of, ranks_of, signature

if TYPE_CHECKING:
    from .root import Root
    from .unit import Unit


def expect(unit: Unit) -> None:
    """`unit` was made, and will be a part of a root: nobody who waits for it on one of its meshes waits in vain."""
    here = control()
    if here is not None:
        here.roster.expect(unit, {ranks_of(group.placing.mesh) for group in unit.groups})


@contextmanager
def announced(root: Root) -> Iterator[None]:
    """`root` forms inside. A wait for ranks that have it on another mesh raises `RanksDisagree`."""
    here = control()
    meshes = meshes_of(root.units, least=1) if here is not None and root.options.agree != "none" else {}
    if here is None or not meshes:
        yield
        return
    first, scopes = root.units[0], {ranks: mesh_text(mesh, names=True) for ranks, mesh in meshes.items()}
    entry = here.roster.begin(first, first.record.name, *signature(root), scopes)
    domains = {domain: domain.refuse_absence for domain in (here.domain(ranks) for ranks in scopes if len(ranks) > 1)}
    for domain in domains:
        domain.refuse_absence = Absence(here, entry, domain)
    try:
        yield
    except BaseException:
        here.roster.fail(entry)
        raise
    finally:
        for domain, before in domains.items():
            domain.refuse_absence = before
    here.roster.end(entry, () if root.provisional else root.units)
