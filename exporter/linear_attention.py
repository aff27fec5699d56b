"""Layers with linear attention (Gated DeltaNet, arXiv 2412.06464): what a trace calls instead of transformers' functions.

Of such a layer the past is a state of one size: the last inputs of a causal convolution, and a matrix a head that sums up keys
and values. Both are standard operators since opset 27.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from skipdecode.exporter.attention import OPSET

LINEAR_OPSET = 27  # of both operators; a graph is told when it has been traced, since torch traces to OPSET


class StateCache:
    """Stands for transformers' cache: the two states before the new tokens, and after them."""

    def __init__(self, conv_state: torch.Tensor, recurrent_state: torch.Tensor) -> None:
        self.conv_state, self.recurrent_state = conv_state, recurrent_state

    def get_conv_state(self, *_: Any, **__: Any) -> torch.Tensor:
        """[B, channels, kernel size - 1]; that there is one tells the layer of a cache."""
        return self.conv_state

    def get_recurrent_state(self, *_: Any, **__: Any) -> torch.Tensor:
        """[B, heads, key size, value size]."""
        return self.recurrent_state

    def update_conv_state(self, inputs: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """What the convolution is given: the new tokens alone, as its operator joins them to the state."""
        return inputs

    def update_recurrent_state(self, state: torch.Tensor, *_: Any, **__: Any) -> None:
        """The layer hands back what `_gated_delta_rule` gave it."""
        self.recurrent_state = state


@contextmanager
def as_operators(layer: torch.nn.Module, cache: StateCache) -> Iterator[None]:
    """Inside, the convolution and the delta rule of `layer` leave one operator each in a trace, on the states of `cache`."""
    linear: Any = layer.linear_attn

    def convolution(inputs: torch.Tensor, *_: Any, activation: str, **__: Any) -> torch.Tensor:
        out, cache.conv_state = _causal_conv(inputs, linear.conv1d.weight, linear.conv1d.bias, cache.conv_state, activation)
        return out

    module = vars(sys.modules[type(linear).__module__])  # which its forward looks both functions up in
    functions = {"causal_conv1d_fn": convolution, "torch_chunk_gated_delta_rule": _gated_delta_rule}
    kept = {name: module[name] for name in functions}
    module.update(functions)
    try:
        yield
    finally:
        module.update(kept)


def _causal_conv(
    inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, state: torch.Tensor, activation: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """CausalConvWithState-27: inputs [B,C,S], weight [C,1,K], state [B,C,K-1] -> [B,C,S], the state after them."""
    out, present = torch.onnx.ops.symbolic_multi_out(
        "CausalConvWithState",
        (inputs, weight, bias, state),
        {"activation": activation},
        dtypes=(inputs.dtype, state.dtype),
        shapes=(inputs.shape, state.shape),
    )
    return out, present


def _gated_delta_rule(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, g: torch.Tensor, beta: torch.Tensor,
    initial_state: torch.Tensor, use_qk_l2norm_in_kernel: bool, **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """LinearAttention-27: query and key [B,S,KH,DK], value [B,S,VH,DV], g (log of the decay) and beta [B,S,VH] -> [B,S,VH,DV].

    Each head of query and key serves VH / KH heads of the values.
    """
    heads, size = value.shape[2], query.shape[3]
    if use_qk_l2norm_in_kernel:
        query, key = _l2_normalised(query), _l2_normalised(key)
    query, key = (each[:, :, :, None].expand(-1, -1, -1, heads // each.shape[2], -1).flatten(2) for each in (query, key))
    packed = value.flatten(2)
    out, present = torch.onnx.ops.symbolic_multi_out(
        "LinearAttention",
        (query, key, packed, initial_state, g, beta),
        {"q_num_heads": heads, "kv_num_heads": heads, "update_rule": "gated_delta", "scale": size**-0.5},
        dtypes=(packed.dtype, initial_state.dtype),
        shapes=(packed.shape, initial_state.shape),
    )
    return out.unflatten(-1, (heads, -1)), present


def _l2_normalised(rows: torch.Tensor) -> torch.Tensor:
    """x / sqrt(sum(x^2) + 1e-6), said as RMSNormalization-23, which divides by the root of the mean."""
    size = rows.shape[-1]
    scale = torch.full((size,), size**-0.5, dtype=rows.dtype)
    normalised: torch.Tensor = torch.onnx.ops.symbolic(
        "RMSNormalization", (rows, scale), {"axis": -1, "epsilon": 1e-6 / size}, dtype=rows.dtype, shape=rows.shape, version=OPSET
    )
    return normalised
