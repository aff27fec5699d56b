"""The reference's weights are rounded as an export with the default method rounds them."""

from __future__ import annotations

import pytest
import torch

from skipdecode.exporter.round_weights import round_weights
from skipdecode.graph_passes.quantization import Quantization
from tests.graph_passes.running import quantised


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


def test_matrices_that_no_block_divides_stay_as_they_are() -> None:
    model = torch.nn.Linear(40, 8)
    before = model.weight.detach().clone()
    round_weights(model, 4, whole_rows=False)
    assert torch.equal(model.weight, before)
