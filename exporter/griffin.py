"""Griffin's recurrent block (arXiv 2402.19427, section 2), which RecurrentGemma has in the place of attention.

transformers keeps its states inside the modules, and goes through the tokens one by one. `griffin_block` replaces the block's
`forward` during a trace.
"""

from __future__ import annotations

from typing import Any

import torch

from skipdecode.exporter.attention import emit_operator
from skipdecode.exporter.state_layers import (
    CONV_STATE,
    RECURRENT_STATE,
    StateCache,
    causal_conv,
    emit_linear_attention,
    softplus,
)
from skipdecode.graph_passes.conventions import OPSET


def griffin_block(
    self: Any, input_states: torch.Tensor, position_ids: torch.Tensor, cache: StateCache, **_: Any
) -> tuple[torch.Tensor, None]:
    """Rows [B,S,H] and position_ids [B,S] -> [B,S,H]: a causal convolution, then the RG-LRU in each of I channels, then a gate y.

    h_t = a_t h_(t-1) + sqrt(1 - a_t^2) i_t x_t, without the root for a row's first token: linear attention in which each channel
    is a head, and query y, key sqrt(1 - a^2) and value i x are one number each.
    """
    conv, lru = self.conv_1d, self.rg_lru
    rows, cache.states[CONV_STATE] = causal_conv(
        self.linear_x(input_states).mT, conv.weight, conv.bias, cache.states[CONV_STATE], "none"
    )
    rows = rows.mT
    query = self.act_fn(self.linear_y(input_states))
    # The shape of `rows`, asked of `query`, which has the same. Torch would make it from B, S and I, and of `rows` ONNX Runtime
    # would take it from the shape before the transpose; CUDA's provider leaves either to the CPU.
    shape = torch.onnx.ops.symbolic("Shape", (query,), dtype=torch.int64, shape=(3,), version=OPSET)
    value = rows * _gate(rows, shape, lru.input_gate_weight, lru.input_gate_bias)
    # in fp32, since a is close to 1
    rates = -8.0 * softplus(lru.recurrent_param.float())
    decays = rates * _gate(rows, shape, lru.recurrent_gate_weight, lru.recurrent_gate_bias).float()
    key = torch.where(position_ids[..., None] == 0, 1.0, torch.sqrt(1.0 - torch.exp(2.0 * decays)))
    out, cache.states[RECURRENT_STATE] = emit_linear_attention(
        (query, key, value), cache.states[RECURRENT_STATE], (decays,), self.lru_width, "gated", 1.0
    )
    return self.linear_out(out), None


def _gate(rows: torch.Tensor, shape: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """The sigmoid of rows [B,S,N*W] times a matrix of N blocks on its diagonal, weight [N,W,W], plus bias [N,W].

    `shape` [3] int64 is that of the rows.
    """
    blocks = rows.reshape(-1, *bias.shape).transpose(0, 1)  # [N,B*S,W], since with more axes a GPU would be given N*B products
    gates = torch.sigmoid(torch.matmul(blocks, weight) + bias[:, None]).transpose(0, 1)
    return emit_operator("Reshape", gates, shape, shape=rows.shape)
