"""Names and shapes of files for all architectures of transformers that its defaults build, on the meta device."""

from __future__ import annotations

import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from fullshard.api.classes import sharded_class
from fullshard.checkpoint.companions import tied_names
from fullshard.checkpoint.formats.source import LeavesSource
from fullshard.checkpoint.formats.writings import published
from fullshard.checkpoint.state import named_tensors
from tests.harness.packages import offline
from tests.harness.pool import pool

PARTS = 16
LAYERS = "num_hidden_layers n_layer num_layers encoder_layers decoder_layers num_encoder_layers depth n_layers".split()


def _shrink(config: Any, package: Any) -> Any:
    """Fewer layers and experts; sizes may stay, because nothing is allocated."""
    for name, value in list(vars(config).items()):
        if isinstance(value, package.PreTrainedConfig):
            _shrink(value, package)
        elif type(value) is int and name in LAYERS:
            setattr(config, name, min(value, 2))
        elif type(value) is int and "experts" in name and "per" not in name:
            setattr(config, name, min(value, 8))
    return config


def _built(cls: Any, package: Any) -> Any:
    """With defaults, smaller where that is possible; None if they build nothing, or another package is missing."""
    for change in (lambda config: _shrink(config, package), lambda config: config):
        try:
            with torch.device("meta"):
                return cls(change(cls.config_class()))
        except Exception:
            continue
    return None


def _compare(rank: int, part: int) -> tuple[dict[str, int], list[str]]:
    """(counts, what differs) of the architectures of every `PARTS`-th model type from `part` on."""
    offline()
    warnings.simplefilter("ignore")
    import transformers
    from transformers.core_model_loading import revert_weight_conversion
    from transformers.modeling_utils import remove_tied_weights_from_state_dict
    from transformers.models.auto import modeling_auto

    names: dict[str, dict[str, None]] = {}
    for table, content in vars(modeling_auto).items():
        is_table = table.startswith("MODEL") and table.endswith("_MAPPING_NAMES")
        for kind, found in content.items() if is_table else ():
            names.setdefault(kind, {}).update(dict.fromkeys(found if isinstance(found, (list, tuple)) else [found]))
    counts, wrong = Counter[str](), []
    for name in [name for kind in sorted(names)[part::PARTS] for name in list(names[kind])[:4]]:
        if not hasattr(transformers, name):
            continue
        model = _built(getattr(transformers, name), transformers)
        if model is None:
            counts["not built"] += 1
            continue
        counts["compared"] += 1
        state = model.state_dict()
        for key in model._keys_to_ignore_on_save or ():
            state.pop(key, None)
        state = revert_weight_conversion(model, remove_tied_weights_from_state_dict(state, model))
        expected = {key: tuple(tensor.shape) for key, tensor in state.items()}
        named = named_tensors(model)
        source = LeavesSource(Path(name), [((key,), tensor) for key, tensor in named.items()])
        source.kind, source.tied = "state", tied_names(named, model)
        for module in model.modules():
            if isinstance(module, transformers.PreTrainedModel):
                module.__class__ = sharded_class(type(module))
        ours = {key: info.shape for key, info in published(source, model).tensors.items()}
        if ours != expected or list(ours) != list(expected):
            wrong.append(f"{name}: {sorted(ours.items() ^ expected.items())[:6]}")
    return dict(counts), wrong


@pytest.mark.slow
@pytest.mark.sample(full=4)
@pytest.mark.parametrize("part", range(PARTS))
def test_names_shapes_and_order_are_those_of_transformers(part: int) -> None:
    ((counts, wrong),) = pool(1).run(_compare, part, timeout=110.0)
    assert not wrong, wrong
    assert counts["compared"] > 2 * counts.get("not built", 0)
