"""The standard graphs of a model."""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir
import pytest
import torch
import transformers

from skipdecode.exporter.checkpoint import CheckpointSource
from skipdecode.exporter.graphs import _structure, layer_graphs
from skipdecode.exporter.skeleton import build_skeleton
from skipdecode.exporter.weights import write_weights
from tests.models import CONFIGS, RELATIVES
from tests.zoo import Zoo


@pytest.mark.parametrize(("name", "structures"), [("llama", 1), ("mixtral", 1), ("gpt_neo", 2), ("gemma3", 2), ("lfm3", 3)])
def test_layers_of_one_structure_are_traced_once_whatever_their_layer_index(name: str, structures: int) -> None:
    """Nearly all of an export is tracing."""
    layers = build_skeleton((CONFIGS | RELATIVES)[name]()).parts.layers
    assert len({_structure(layer) for layer in layers}) == structures < len(layers)


def test_frequencies_of_a_rotary_embedding_inside_a_layer_stay_fp32(zoo: Zoo, tmp_path: Path) -> None:
    """Rounded, the angles of RecurrentGemma 2B would be off by 2.5 at position 2047."""
    graphs = _narrow_graphs(zoo.checkpoint("recurrent_gemma"), tmp_path)
    assert {graph.opset_imports[""] for graph in graphs} == {24, 27}  # layers with attention, and those that keep states
    initializers = [value for graph in graphs for value in graph.graph.initializers.values()]
    assert {value.dtype for value in initializers if "inv_freq" in str(value.name)} == {ir.DataType.FLOAT}
    assert {value.dtype for value in initializers if str(value.name).endswith("q_proj.weight")} == {ir.DataType.BFLOAT16}


def test_a_routers_softmax_is_in_fp32_as_its_model_asks(zoo: Zoo, tmp_path: Path) -> None:
    """From bf16 shares it could choose other experts."""
    graphs = _narrow_graphs(zoo.checkpoint("qwen2_moe"), tmp_path)
    softmaxes = [node for graph in graphs for node in graph.graph if node.op_type == "Softmax"]
    assert {value.dtype for node in softmaxes for value in (*node.inputs, *node.outputs) if value} == {ir.DataType.FLOAT}


def _narrow_graphs(checkpoint: Path, folder: Path) -> list[ir.Model]:
    """The layers' graphs in bf16, with weights in `folder`."""
    skeleton = build_skeleton(transformers.AutoConfig.from_pretrained(checkpoint), torch.bfloat16)
    source = CheckpointSource(checkpoint, skeleton)
    weights = write_weights(folder, skeleton.shapes, torch.bfloat16, source, lambda count: None)
    return [*layer_graphs(skeleton, weights)]
