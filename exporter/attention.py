"""Replacements for transformers' attention and cache during a trace; each call leaves one ONNX operator."""

from __future__ import annotations

from typing import Any

import torch
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from skipdecode.graph_passes.conventions import OPSET

ATTENTION_NAME = "skipdecode_onnx"


def onnx_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    kv_buffer: ScatterCache | None = None,
    score_bias: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """ONNX Attention-24 on the whole KV buffer: query [B,NH,S,D], key and value [B,KVH,C,D], bool mask [B,1,S,C].

    `s_aux` [NH]: attention sinks, one score per head that takes part in the softmax but has no value (gpt-oss).
    With `kv_buffer`, key and value hold only the new tokens, and values may be narrower than D. `score_bias` [B,NH,S,C] fp32
    is added to the scores (ALiBi).

    Returns:
        Rows [B,S,NH,D], or as wide as the values where those are narrower; None in place of attention weights.
    """
    value_size = value.shape[-1]
    if kv_buffer is not None:
        key, value = kv_buffer.update(key, pad_to_head_size(value, key.shape[-1]))
    attrs: dict[str, Any] = {"scale": float(scaling if scaling is not None else query.shape[-1] ** -0.5)}
    if softcap:
        attrs["softcap"] = float(softcap)
    if score_bias is not None:
        attention_mask = torch.where(attention_mask, score_bias.to(query.dtype), float("-inf"))
    inputs = (query, key, value, attention_mask)
    out = emit_operator("Attention", *inputs, **attrs) if s_aux is None else _with_sinks(inputs, attrs, s_aux)
    rows = out.transpose(1, 2)
    return (rows if value_size == rows.shape[-1] else rows[..., :value_size]).contiguous(), None  # some models `view` the rows


def emit_operator(name: str, *inputs: torch.Tensor, shape: tuple[int, ...] | None = None, **attributes: Any) -> torch.Tensor:
    """Emit one ONNX operator. Its output has the dtype of the first input, and its shape unless `shape` is given."""
    first = inputs[0]
    output: torch.Tensor = torch.onnx.ops.symbolic(
        name, inputs, attributes, dtype=first.dtype, shape=first.shape if shape is None else shape, version=OPSET
    )
    return output


def pad_to_head_size(value: torch.Tensor, size: int) -> torch.Tensor:
    """Pad values with zeros to the keys' head size, which a KV buffer uses for both; a weighted sum of zeros is zero."""
    return torch.nn.functional.pad(value, (0, size - value.shape[-1]))


def _with_sinks(inputs: tuple[torch.Tensor, ...], attrs: dict[str, Any], sinks: torch.Tensor) -> torch.Tensor:
    """Attention [B,NH,S,D] without sinks, times what the sinks [NH] leave of the softmax.

    That is E / (E + e^sink), where E is the sum of e^score over all slots.
    """
    query, key, value, _ = inputs
    scores_shape = (*query.shape[:3], key.shape[2])
    out, _, _, scores = torch.onnx.ops.symbolic_multi_out(
        "Attention",
        inputs,
        {**attrs, "qk_matmul_output_mode": 2},  # the fourth output: scaled, capped and masked scores, the softmax's input
        dtypes=(query.dtype,) * 4,
        shapes=(query.shape, key.shape, value.shape, scores_shape),
        version=OPSET,
    )
    remaining: torch.Tensor = torch.sigmoid(torch.logsumexp(scores, -1, keepdim=True) - sinks.view(-1, 1, 1))
    return out * remaining


ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, onnx_attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, lambda *args, **kwargs: None)  # `trace._Layer` makes the mask


class ScatterCache:
    """Stands in for transformers' cache during a trace: `update` writes new keys and values into the KV buffer in place."""

    def __init__(self, past_key: torch.Tensor, past_value: torch.Tensor, position_ids: torch.Tensor) -> None:
        self.present_key, self.present_value, self.position_ids = past_key, past_value, position_ids

    def update(self, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """TensorScatter-24: write new keys and values [B,KVH,S,D] into [B,KVH,C,D], from each row's first position on."""
        first = self.position_ids[:, 0]
        self.present_key = emit_operator("TensorScatter", self.present_key, key, first, axis=2)
        self.present_value = emit_operator("TensorScatter", self.present_value, value, first, axis=2)
        return self.present_key, self.present_value

    def get_seq_length(self, *_: Any) -> int:
        """Required by transformers; positions come only from `position_ids`."""
        return 0
