"""The manifest of the page of large clusters has the form that Kubeflow Trainer publishes."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.hosts.test_training import PAGE

pytestmark = pytest.mark.slow


def manifest() -> dict[str, Any]:
    yaml = pytest.importorskip("yaml", reason="the manifest needs PyYAML")
    [text] = re.findall(r'```yaml title="trainjob.yaml"[^\n]*\n(.*?)```', PAGE.read_text(), re.DOTALL)
    found: dict[str, Any] = yaml.safe_load(text)
    return found


def unknown(given: Any, kept: Any, path: str = "") -> list[str]:
    """Fields of `given` that the schema does not keep."""
    if isinstance(given, dict):
        known = kept if isinstance(kept, dict) else {}
        return [each for key in given for each in unknown(given[key], known.get(key), f"{path}.{key}")]
    if isinstance(given, list):
        rows = kept if isinstance(kept, list) else []
        pairs = zip(given, [*rows, *[None] * len(given)], strict=False)
        return [each for i, (one, other) in enumerate(pairs) for each in unknown(one, other, f"{path}[{i}]")]
    return [] if given == kept else [path]


def test_the_manifest_follows_the_published_schema() -> None:
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="the schema needs kubeflow-trainer-api")
    given = manifest()
    schema = models.TrainerV1alpha1TrainJob
    assert unknown(given, schema.from_dict(given).to_dict()) == []
    # And the check notices a name that is none, and a number that is text.
    given["spec"]["trainer"]["nodes"] = 8
    assert unknown(given, schema.from_dict(given).to_dict()) == [".spec.trainer.nodes"]
    given["spec"]["trainer"]["numNodes"] = "8"
    with pytest.raises(ValueError, match="numNodes"):
        schema.from_dict(given)
