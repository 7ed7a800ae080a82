"""Every entry of transformers' table of conversions that a small model can be made for: loaded after sharding, trained
for a step, exported, and compared with `save_pretrained` of the plain model. See `test_published_files` for two ranks.
"""

from __future__ import annotations

import tempfile
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fullshard
from fullshard import checkpoint, fully_shard
from fullshard.checkpoint.formats import export_full
from tests.harness.packages import offline
from tests.harness.pool import pool
from tests.harness.small_models import classes_of, small_model
from tests.procs.test_pretrained import equal_values, moved
from tests.procs.test_published_files import differences, meta_of

PARTS = 16


def _shard(model: Any) -> Any:
    """Each layer of a list a unit, then the model. Not the models inside, whose embeddings others read."""
    scalars = {parameter for parameter in model.parameters() if not parameter.ndim}
    for module in reversed(list(model.modules())):
        for child in module if isinstance(module, nn.ModuleList) else ():
            if any(True for _ in child.parameters()) and not scalars.intersection(child.parameters()):
                try:
                    fully_shard(child)
                except (ValueError, AssertionError):  # one without a forward, or in two lists
                    continue
    return fully_shard(model, ignored_params=scalars)


def _trained(model: Any) -> bool:
    """One step on text or on an image; False for a model that takes neither alone."""
    size = getattr(model.config, "image_size", 64)
    size = size if isinstance(size, int) else 64
    for batch in ({"input_ids": torch.arange(3, 12)[None]}, {"pixel_values": torch.ones(1, 3, size, size)}):
        torch.manual_seed(0)
        try:
            found = model(**batch).values()
            outputs = [t for t in found if isinstance(t, torch.Tensor) and t.is_floating_point() and t.requires_grad]
            torch.stack([output.float().pow(2).mean() for output in outputs]).sum().backward()
        except Exception:
            model.zero_grad()
            continue
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        optimizer.step()
        optimizer.zero_grad()
        return True
    return False


def _wrong(whole: Any, folder: Path) -> list[str]:
    nbytes = max(1000, sum(parameter.nbytes for parameter in whole.parameters()) // 3)
    try:
        whole.save_pretrained(folder / "plain", max_shard_size=nbytes)
        back = moved(type(whole).from_pretrained(folder / "plain").eval())
    except RuntimeError:
        return []  # transformers cannot load what it saved
    for parameter, made in zip(back.parameters(), whole.parameters(), strict=True):
        parameter.requires_grad_(made.requires_grad)  # which a load forgets of tables of positions
    model = _shard(meta_of(whole))
    fullshard.load_pretrained(model, folder / "plain", progress=False)
    said = [] if equal_values(model, back) else ["other values are loaded"]
    if _trained(back) and not _trained(model):
        said.append("the sharded model does not train")
    back.save_pretrained(folder / "again", max_shard_size=nbytes)
    export_full(checkpoint.get_state_dict(model)[0], folder / "live", "hf", max_file_nbytes=nbytes)
    return said + differences(folder / "live", folder / "again")


def _part(rank: int, part: int) -> tuple[int, int, dict[str, list[str]]]:
    """(classes, those that a small model was made of, what is wrong by the name of the class)"""
    offline()
    from transformers import conversion_mapping

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    count, made, wrong = 0, 0, {}
    table: Any = conversion_mapping
    for key in sorted(table._build_checkpoint_conversion_mapping())[part::PARTS]:
        try:
            kinds = list(classes_of(key))
        except (KeyError, ImportError):  # an entry without a class
            continue
        for kind in kinds:
            count += 1
            try:
                whole = small_model(kind)
            except Exception:  # sizes that do not fit together, a package that is not there, or too large
                continue
            made += 1
            with tempfile.TemporaryDirectory() as folder:
                if said := _wrong(whole, Path(folder)):
                    wrong[kind.__name__] = said[:5]
    return count, made, wrong


@pytest.mark.slow
@pytest.mark.sample(full=4)
@pytest.mark.hang_after(900)
@pytest.mark.parametrize("part", range(PARTS))
def test_the_whole_table_of_names(part: int) -> None:
    ((count, made, wrong),) = pool(1).run(_part, part, timeout=800.0)
    assert not wrong
    assert made >= count // 2, "small models are no longer made"
