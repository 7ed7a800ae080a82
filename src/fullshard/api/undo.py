"""`unchanged_on_error`: a `fully_shard` call that raises leaves modules as they were, however far it had come."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import nn

# What torch's registries are: parameters, buffers, hooks, and the states that composable APIs publish.
_REGISTRIES = (dict, OrderedDict)


@contextmanager
def unchanged_on_error(modules: Iterable[nn.Module], moved: Iterable[nn.Parameter]) -> Iterator[None]:
    """Put class, attributes and registries of `modules` back if the block raises, and the data of `moved`.

    Registries keep their identity, because the handles of hooks refer to them.
    """
    before = [(module, type(module), dict(vars(module))) for module in modules]
    registries = [
        (registry, registry.copy())
        for _, _, state in before
        for registry in state.values()
        if type(registry) in _REGISTRIES
    ]
    places = [(parameter, parameter.data) for parameter in moved]
    try:
        yield
    except BaseException:
        for module, cls, state in before:
            module.__class__ = cls
            vars(module).clear()
            vars(module).update(state)
        for registry, copied in registries:
            registry.clear()
            registry.update(copied)
        for parameter, data in places:
            parameter.data = data
        raise
