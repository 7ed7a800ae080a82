"""Tensors in arguments and outputs, and the copies that a conversion makes of the containers around them.

Containers are nested tuples, lists, dicts, named tuples and dataclasses, as in FSDP2. Sets and other objects are not
searched. A container without converted tensors is handed over as is, which keeps its identity and subclass. The others
are copied, and the caller keeps the original: what the forward writes into the copy is carried to it afterwards
(`Arguments.carry_back`), and where the forward returns the copy, the caller gets the original (`Arguments.returned`).

What is the same object before a conversion is the same object after it: models compute otherwise where `query is key`.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import operator
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .._torch.autograd import version_of
from ..policy.options import Chosen, argument_names

_MAX_DEPTH = 64


# What a container holds: keys (of a dict) and values in order, and the attributes of the object.
_Held = tuple[list[Any], list[Any], dict[str, Any]]


class _Copy(NamedTuple):
    """A container and the copy that the forward gets instead, with what each held before; None for tuples."""

    given: Any
    made: Any
    given_held: _Held | None
    made_held: _Held | None


# By the identity of the container that was given. The entries keep both alive, so that identities stay valid.
_Copies = dict[int, _Copy]


def map_tensors(
    function: Callable[[Tensor], Tensor],
    value: Any,
    depth: int = 0,
    copies: _Copies | None = None,
    own: Callable[[Any], bool] | None = None,
) -> Any:
    """`value` with `function` applied to its tensors; the same object if nothing changed. `copies` learns which
    containers were copied, and one that is met twice is copied once. Containers that are `own` are written instead."""
    if isinstance(value, Tensor):
        return function(value)
    if value is None or isinstance(value, (str, bytes, int, float)):
        return value
    if depth > _MAX_DEPTH:
        raise RuntimeError(
            f"arguments and outputs: expected at most {_MAX_DEPTH} levels of nesting, found more; flatten the structure"
        )
    if copies is not None and (known := copies.get(id(value))) is not None:
        return known.made
    if isinstance(value, (tuple, list)):
        items = [map_tensors(function, item, depth + 1, copies, own) for item in value]
        if all(map(operator.is_, items, value)):
            return value
        if own is not None and isinstance(value, list) and own(value):
            list.__setitem__(value, slice(None), items)
            return value
        made = _like_sequence(value, items)
    elif isinstance(value, dict):
        changed = {key: map_tensors(function, item, depth + 1, copies, own) for key, item in value.items()}
        if all(changed[key] is item for key, item in value.items()):
            return value
        made = value if own is not None and own(value) else _like_dict(value)
        for key, new in changed.items():
            if new is not value[key]:
                _set_item(made, key, new)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if hasattr(value, f.name)}
        changes = {
            name: new
            for name, old in fields.items()
            if (new := map_tensors(function, old, depth + 1, copies, own)) is not old
        }
        if not changes:
            return value
        # Neither `__init__` nor `__post_init__` runs again.
        made = value if own is not None and own(value) else copy.copy(value)
        for name, new in changes.items():
            object.__setattr__(made, name, new)  # also of a frozen one
    else:
        return value
    if copies is not None and made is not value:
        mutable = not isinstance(value, tuple)
        copies[id(value)] = _Copy(value, made, _held(value) if mutable else None, _held(made) if mutable else None)
    return made


def _set_item(made: dict[Any, Any], key: Any, new: Any) -> None:
    # Item by item: transformers' ModelOutput refuses `update`, and sets the attribute with the item.
    try:
        made[key] = new
    except Exception:
        dict.__setitem__(made, key, new)  # a class with rules of its own


def _like_sequence(value: Any, items: list[Any]) -> Any:
    if type(value) is list:
        return items
    if isinstance(value, tuple):
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    made = copy.copy(value)  # keeps a subclass and its attributes
    list.__setitem__(made, slice(None), items)
    return made


def _like_dict(value: dict[Any, Any]) -> dict[Any, Any]:
    kind = type(value)
    if kind is not dict and kind.copy is dict.copy:  # which makes a plain dict of a subclass
        made = kind.__new__(kind)
        dict.update(made, value)
    else:
        try:
            made = value.copy()  # keeps OrderedDict, ModelOutput and their defaults
        except Exception:
            made = dict(value)
    if type(made) is kind and (attributes := getattr(value, "__dict__", None)):
        vars(made).update(attributes)
    return made


def tensors_requiring_grad(value: Any) -> list[Tensor]:
    """The tensors in `value` that require a gradient, in order."""
    found: list[Tensor] = []

    def look(tensor: Tensor) -> Tensor:
        if tensor.requires_grad:
            found.append(tensor)
        return tensor

    for item in value if isinstance(value, (tuple, list)) else (value,):
        if not isinstance(item, Tensor):
            map_tensors(look, item)
        elif item.requires_grad:
            found.append(item)
    return found


def cast_outputs(value: Any, dtype: torch.dtype, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The outputs of a forward with these arguments, with floating-point tensors in `dtype`. A container that the
    caller handed over stays that container, and gets the cast tensors."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    made: dict[int, Tensor] = {}

    def cast_one(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point() or tensor.dtype is dtype:
            return tensor
        # Of `value`, so that identities stay valid.
        if id(tensor) not in made:
            made[id(tensor)] = tensor.to(dtype)
        return made[id(tensor)]

    def is_given(container: Any) -> bool:
        return any(_path(item, container, 1) is not None for item in (*args, *kwargs.values()))

    return map_tensors(cast_one, value, 0, _Copies(), is_given)


def _itself(tensor: Tensor) -> Tensor:
    return tensor


# ---- arguments of one forward ----------------------------------------------------------------------------------------


class Arguments:
    """The arguments of one forward, on `device` and with floating-point tensors in `dtype`; None leaves them alone.

    `args` and `kwargs` are for the forward, `given` is both as the caller handed them over: those containers are the
    caller's, and are not changed before `carry_back`.
    """

    __slots__ = (
        "_cast",
        "_chosen",
        "_copies",
        "_device",
        "_dtype",
        "_made",
        "_moved",
        "_name_now",
        "args",
        "given",
        "kwargs",
    )

    def __init__(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        device: torch.device | None,
        dtype: torch.dtype | None,
        chosen: Chosen | None = None,
        call: Callable[..., Any] | None = None,
    ) -> None:
        """`chosen`: which tensors are cast, by the names of the arguments of `call`; None: all."""
        self._device, self._dtype, self._chosen, self._name_now = device, dtype, chosen, ""
        self.given = args, kwargs
        # Tensors in another dtype, as given and as handed over, with the version before the forward.
        self._cast: list[tuple[Tensor, Tensor, int]] = []
        # Tensors on another device, likewise. An edit of such a copy stays there, as in FSDP2.
        self._moved: list[tuple[Tensor, Tensor]] = []
        # The converted tensors by the identity of those given, which the caller keeps alive: each is converted once.
        self._made: dict[tuple[int, bool], Tensor] = {}
        copies = self._copies = _Copies()
        convert = self._convert
        if chosen is not None:
            self.args, self.kwargs = self._by_name(args, kwargs, call)
            return
        self.args = tuple([map_tensors(convert, item, 1, copies) for item in args])
        self.kwargs = {name: map_tensors(convert, item, 1, copies) for name, item in kwargs.items()} if kwargs else {}

    def _by_name(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], call: Callable[..., Any] | None
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        positional = [] if call is None else argument_names(call, len(args))
        made = []
        for name, item in zip(positional or map(str, range(len(args))), args, strict=True):
            self._name_now = name
            made.append(map_tensors(self._convert, item, 1, self._copies))
        named = {}
        for name, item in kwargs.items():
            self._name_now = name
            named[name] = map_tensors(self._convert, item, 1, self._copies)
        return tuple(made), named

    def _convert(self, tensor: Tensor) -> Tensor:
        device, dtype = self._device, self._dtype
        moves = device is not None and tensor.device != device
        casts = dtype is not None and tensor.dtype is not dtype and tensor.is_floating_point()
        if casts and self._chosen is not None:
            casts = self._chosen(self._name_now, tensor)
        if not (moves or casts):
            return tensor
        known = self._made.get((id(tensor), casts))
        if known is not None:
            return known
        made = tensor.to(device, non_blocking=True) if moves else tensor
        if not casts:
            self._moved.append((tensor, made))
            self._made[id(tensor), casts] = made
            return made
        if torch.is_inference_mode_enabled():
            # Tensors made in inference mode do not count their edits.
            with torch.inference_mode(False), torch.no_grad():
                made = made.to(dtype)
        else:
            made = made.to(dtype)
        self._made[id(tensor), casts] = made
        self._cast.append((tensor, made, version_of(made)))
        return made

    @property
    def has_copies(self) -> bool:
        """Whether the forward could write into something that is not the caller's."""
        return bool(self._copies or self._cast)

    def returned(self, output: Any) -> Any:
        """`output` of the forward with the caller's containers where it has their copies, after `carry_back`."""
        back = {id(entry.made): entry._replace(made=entry.given) for entry in self._copies.values() if entry.made_held}
        if not back or isinstance(output, Tensor):
            return output
        return map_tensors(_itself, output, 0, back)

    def carry_back(self, unit: str, module: nn.Module | None, *, warn: bool) -> bool:
        """Write what the forward of `unit` added, replaced or removed in copies into the caller's containers; again,
        what was since the last time.

        `module`: whose forward it was, for the names of arguments, None for another method; `warn`: that a tensor
        argument itself was edited in place is a warning. Returns whether it warned. Raises `RuntimeError` for what
        cannot be carried, after everything else was: an edit in place of a cast tensor in a container would round all
        of it to the compute dtype.
        """
        refused = self._carry_containers()
        if refused:
            raise RuntimeError(
                f"{unit}: expected the caller's {self._name(refused[0], module)} ({type(refused[0]).__name__}) to stay "
                f"as it was until the forward ends, found it changed, and its copy with tensors in {self._dtype} too: "
                f"one of both would be lost; write into the argument alone, or use "
                f"MixedPrecisionPolicy(cast_forward_inputs=False) for this module"
            )
        for given, made, version in self._cast:
            if version_of(made) == version:
                continue
            inside = all(item is not given for item in (*self.given[0], *self.given[1].values()))
            if not (inside or warn):
                continue
            text = (
                f"{unit}: expected the tensor {self._name(given, module)} to be left as it is in forward, found it "
                f"edited in place: the mixed precision policy hands over a copy in {made.dtype}, so the caller's "
                f"{given.dtype} tensor does not have the edit; assign a new tensor instead, return it, or use "
                f"MixedPrecisionPolicy(cast_forward_inputs=False) for this module"
            )
            if inside:
                raise RuntimeError(text)
            warnings.warn(text, UserWarning, stacklevel=2)
            return True
        return False

    def _carry_containers(self) -> list[Any]:
        """Carry all containers; returns those of the caller that changed as well."""
        changed = []
        for entry in self._copies.values():
            if entry.made_held is not None and not _same(now := _held(entry.made), entry.made_held):
                changed.append((entry, now))
        if not changed:
            return []
        originals = {id(made): given for given, made, _ in self._cast}
        originals.update((id(made), given) for given, made in self._moved)
        originals.update((id(entry.made), entry.given) for entry in self._copies.values())
        refused = []
        for entry, now in changed:
            assert entry.given_held is not None
            if _same(_held(entry.given), entry.given_held):
                _carry(entry, now, originals)
                self._copies[id(entry.given)] = entry._replace(given_held=_held(entry.given), made_held=now)
            else:
                refused.append(entry.given)
        return refused

    def _name(self, wanted: Any, module: nn.Module | None) -> str:
        """Where `wanted` is in the arguments, as the callee would write it."""
        args, kwargs = self.given
        names = [f"argument {index}" for index in range(len(args))]
        if module is not None:
            try:
                parameters = list(inspect.signature(module.forward).parameters.values())
            except (TypeError, ValueError):
                parameters = []
            for index, parameter in enumerate(parameters[: len(args)]):
                if parameter.kind is parameter.VAR_POSITIONAL:
                    break
                names[index] = parameter.name
        for name, item in (*zip(names, args, strict=True), *kwargs.items()):
            path = _path(item, wanted, 1)
            if path is not None:
                return name + path
        return "argument"


def _attributes(value: Any) -> dict[str, Any]:
    attributes = dict(getattr(value, "__dict__", ()))
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                attributes[name] = getattr(value, name)
    return attributes


_NOTHING: dict[str, Any] = {}


def _held(value: Any) -> _Held:
    attributes = _NOTHING if type(value) is list or type(value) is dict else _attributes(value)
    if isinstance(value, list):
        return [], list(value), attributes
    if isinstance(value, dict):
        return list(value), list(value.values()), attributes
    return [], [], attributes


def _same(one: _Held, other: _Held) -> bool:
    (keys, values, attributes), (other_keys, other_values, other_attributes) = one, other
    if len(values) != len(other_values) or not all(map(operator.is_, values, other_values)):
        return False
    if not all(map(operator.is_, keys, other_keys)):
        return False
    if attributes is other_attributes:
        return True
    return attributes.keys() == other_attributes.keys() and all(
        map(operator.is_, attributes.values(), map(other_attributes.__getitem__, attributes))
    )


def _carry(entry: _Copy, now: _Held, originals: dict[int, Any]) -> None:
    """Give the caller's container what its copy holds, with the caller's own objects where copies of them are held.

    By the methods of the base class: what a subclass keeps beside its items is in its attributes, which are carried
    too, and transformers' ModelOutput refuses some methods of a dict.
    """
    given, made, _, held = entry
    assert held is not None
    before, (keys, values, attributes) = held[2], now
    values = [originals.get(id(item), item) for item in values]
    if isinstance(given, list):
        list.__setitem__(given, slice(None), values)
    elif isinstance(given, dict):
        base: type[dict[Any, Any]] = OrderedDict if isinstance(given, OrderedDict) else dict
        base.clear(given)
        for key, item in zip(keys, values, strict=True):
            base.__setitem__(given, key, item)
    for name in before.keys() - attributes.keys():
        object.__delattr__(given, name)
    own, inside = getattr(given, "__dict__", {}), getattr(made, "__dict__", {})
    for name, item in attributes.items():
        if name in before and item is before[name]:
            continue
        if name in inside:
            own[name] = originals.get(id(item), item)  # as in the copy: not through a property or a frozen class
        else:
            object.__setattr__(given, name, originals.get(id(item), item))


def _path(value: Any, wanted: Any, depth: int) -> str | None:
    if value is wanted:
        return ""
    for name, item in _children(value) if depth <= _MAX_DEPTH else ():
        below = _path(item, wanted, depth + 1)
        if below is not None:
            return name + below
    return None


def _children(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, (tuple, list)):
        yield from ((f"[{index}]", item) for index, item in enumerate(value))
    elif isinstance(value, dict):
        yield from ((f"[{key!r}]", item) for key, item in value.items())
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from ((f".{name}", item) for name, item in _attributes(value).items())
