"""The reference's weights are rounded as an export with the default method rounds them."""

from __future__ import annotations

import re

import pytest
import torch
from transformers.pytorch_utils import Conv1D

from skipdecode.exporter.round_weights import round_weights
from skipdecode.graph_passes.quantization import Quantization
from tests.graph_passes.running import quantised
from tests.zoo import Zoo


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("inputs", "block"), [(256, 128), (192, 64), (96, 32)])
def test_matrices_get_an_engines_numbers_in_the_largest_blocks_that_divide_them(bits: int, inputs: int, block: int) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(inputs, 8)
    expected = quantised(model.weight.detach().numpy().copy(), Quantization(bits=bits, block_size=block))
    bias = model.bias.detach().clone()
    round_weights(model, bits, whole_rows=False)
    torch.testing.assert_close(model.weight.detach(), torch.tensor(expected), rtol=0, atol=1e-6)
    assert torch.equal(model.bias, bias)


def test_a_row_may_have_one_step_and_a_row_of_zeros_stays() -> None:
    model = torch.nn.Embedding(2, 40)
    with torch.no_grad():
        model.weight.copy_(torch.stack((torch.linspace(-1.0, 0.9, 40), torch.zeros(40))))
    round_weights(model, 4, whole_rows=True)
    assert model.weight[0].unique().tolist() == [step / 8 for step in range(-8, 8)]
    assert not model.weight[1].any()


@pytest.mark.parametrize("whole_rows", [False, True])
def test_inputs_share_a_scale_also_where_a_matrix_is_stored_the_other_way_round(whole_rows: bool) -> None:
    """As GPT-2's and the experts of gpt-oss are."""
    torch.manual_seed(0)
    linear, turned = torch.nn.Linear(96, 64, bias=False), Conv1D(64, 96)
    with torch.no_grad():
        linear.weight[:, 5] *= 40
        turned.weight.copy_(linear.weight.T)
    for module in (linear, turned):
        round_weights(module, 8, whole_rows=whole_rows)
    assert torch.equal(turned.weight.T, linear.weight)


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("gpt2", r"wpe|bias|ln_"),
        ("opt", "embed_positions|bias|layer_norm"),
        ("gpt_oss", "bias|norm|sinks|router"),
        ("recurrent_gemma", "_gate_|conv_1d|norm|bias|recurrent_param"),
        ("mamba", r"A_log|conv1d|norm|bias|\.D"),
    ],
)
def test_positions_biases_convolutions_and_routers_that_are_no_linear_modules_stay(name: str, kept: str, zoo: Zoo) -> None:
    model = zoo.model(name)
    before = {path: weight.clone() for path, weight in model.named_parameters()}
    round_weights(model, 4, whole_rows=True)
    changed = {path for path, weight in model.named_parameters() if not torch.equal(weight, before[path])}
    assert changed == {path for path in before if not re.search(kept, path)}


def test_matrices_that_no_block_divides_stay_as_they_are() -> None:
    model = torch.nn.Linear(40, 8)
    before = model.weight.detach().clone()
    round_weights(model, 4, whole_rows=False)
    assert torch.equal(model.weight, before)
