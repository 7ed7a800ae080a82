"""Bytes per element by name are those that torch has."""

import pytest
import torch

from fullshard.layout import itemsize, known_dtypes


def torch_dtypes() -> dict[str, torch.dtype]:
    """Every dtype torch exports, by every name it exports it under."""
    return {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}


def test_every_known_name_has_torchs_itemsize() -> None:
    """Each canonical name is a torch dtype, and its bytes are torch's."""
    for name in known_dtypes():
        assert itemsize(name) == getattr(torch, name).itemsize
        assert itemsize(str(getattr(torch, name))) == getattr(torch, name).itemsize


def test_torchs_other_names_of_known_dtypes_are_known() -> None:
    """`half`, `cfloat` and their like mean the same dtype."""
    canonical = {getattr(torch, name) for name in known_dtypes()}
    for name, dtype in torch_dtypes().items():
        if dtype in canonical:
            assert itemsize(name) == dtype.itemsize


@pytest.mark.parametrize("name", ["float31", "", "torch.", "quint8", "Float32"])
def test_unknown_name_is_refused_with_the_known_ones(name: str) -> None:
    """The error says what was found and what there is."""
    with pytest.raises(ValueError, match="bfloat16") as error:
        itemsize(name)
    assert repr(name) in str(error.value)
