"""The standard graphs of a model."""

from __future__ import annotations

import pytest

from skipdecode.exporter.graphs import _structure, build_skeleton
from tests.models import CONFIGS, RELATIVES


@pytest.mark.parametrize(("name", "structures"), [("llama", 1), ("mixtral", 1), ("gpt_neo", 2), ("gemma3", 2), ("lfm3", 3)])
def test_layers_of_one_structure_are_traced_once_whatever_their_layer_index(name: str, structures: int) -> None:
    """Nearly all of an export is tracing."""
    layers = build_skeleton((CONFIGS | RELATIVES)[name]()).parts.layers
    assert len({_structure(layer) for layer in layers}) == structures < len(layers)
