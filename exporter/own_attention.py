"""Attention that cannot be traced as transformers writes it: the same arithmetic by way of transformers' attention interface.

Most of these classes are older than that interface and multiply queries, keys and values by hand, each in its own way. GPT-J and
CodeGen rotate by rows of a stored table of all positions. Llama 4 asks the cache for one length that holds for all rows. Each
function here replaces the `forward` of one class while a layer is traced: its projections, its rotary embedding, the cache, then
`onnx_attention`. `_FORWARDS` also replaces the `forward` of modules of other kinds: indexers, Llama 4's mixture, Griffin's
recurrent block, Gemma 3n's MLP and whole layer, and XGLM's embedding of positions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.deepseek_v2.modeling_deepseek_v2 import apply_rotary_emb
from transformers.models.falcon.modeling_falcon import apply_rotary_pos_emb
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

from skipdecode.exporter.altup import gemma_3n_layer, gemma_3n_mlp
from skipdecode.exporter.attention import ScatterCache, emit_operator, onnx_attention
from skipdecode.exporter.experts import llama_4_mixture
from skipdecode.exporter.griffin import griffin_block

_Result = tuple[torch.Tensor, None]  # rows [B,S,H]; no attention weights


def replace_forwards(part: torch.nn.Module) -> torch.nn.Module:
    """Replace, in place, the `forward` of the modules of a layer or an embedding that `_FORWARDS` lists; returns `part`."""
    for module in part.modules():
        forward = _FORWARDS.get(type(module).__name__)
        if forward is not None:
            module.forward = MethodType(forward, module)
    return part


def _gpt_j(self: Any, hidden_states: torch.Tensor, **others: Any) -> _Result:
    return _attend_interleaved(self, *_project(self, hidden_states), **others)


def _codegen(self: Any, hidden_states: torch.Tensor, **others: Any) -> _Result:
    parts = self.qkv_proj(hidden_states).unflatten(-1, (4, 3, -1))  # trained on 4 cores, each with a quarter of the heads
    query, value, key = (_split_heads(self, parts[..., index, :].flatten(2)) for index in range(3))
    return _attend_interleaved(self, query, key, value, **others)


def _attend_interleaved(
    self: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    *, position_ids: torch.Tensor, attention_mask: torch.Tensor, cache: ScatterCache, **_: Any,
) -> _Result:  # fmt: skip
    """Attention after rotating elements 2i and 2i + 1 as a pair, within the first `rotary_dim` elements of each head."""
    frequencies = 10000.0 ** -(torch.arange(0, self.rotary_dim, 2, dtype=torch.float32) / self.rotary_dim)
    angles = position_ids[:, :, None].float() * frequencies
    tables = angles.cos().to(query.dtype), angles.sin().to(query.dtype)
    rotary_size = self.rotary_dim if self.rotary_dim < self.head_dim else 0  # 0: whole heads
    query, key = (
        emit_operator("RotaryEmbedding", each, *tables, interleaved=1, num_heads=each.shape[1], rotary_embedding_dim=rotary_size)
        for each in (query, key)
    )
    return _attend_and_project(self, query, cache.update(key, value), attention_mask, self.out_proj)


def _gpt_neo(self: Any, hidden_states: torch.Tensor, attention_mask: torch.Tensor, layer_past: Any, **_: Any) -> _Result:
    query, key, value = _project(self, hidden_states)
    return _attend_and_project(self, query, layer_past.update(key, value), attention_mask, self.out_proj, scaling=1.0)


def _falcon(
    self: Any, hidden_states: torch.Tensor, attention_mask: torch.Tensor, layer_past: Any,
    *, position_embeddings: tuple[torch.Tensor, torch.Tensor], **_: Any,
) -> _Result:  # fmt: skip
    """Falcon's fused projection lays out each group as its queries, their key and their value, whatever the number of groups."""
    groups = self.num_kv_heads
    rows = self.query_key_value(hidden_states).unflatten(-1, (groups, self.num_heads // groups + 2, self.head_dim))
    query = rows[:, :, :, :-2].flatten(2, 3).transpose(1, 2)
    key, value = (rows[:, :, :, index].transpose(1, 2) for index in (-2, -1))
    query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
    return _attend_and_project(self, query, layer_past.update(key, value), attention_mask, self.dense)


def _bloom(
    self: Any, hidden_states: torch.Tensor, residual: torch.Tensor, attention_mask: torch.Tensor, layer_past: Any, **_: Any
) -> _Result:
    query, key, value = self._reshape(self.query_key_value(hidden_states))
    slopes = build_alibi_tensor(torch.ones(1, 2), self.num_heads, torch.float32)[:, 0, 1]
    cached = layer_past.update(key, value)
    out, _weights = _attend_and_project(self, query, cached, attention_mask, self.dense, score_bias=_alibi(slopes, layer_past))
    return out + residual, None


def _mpt(self: Any, hidden_states: torch.Tensor, attention_mask: torch.Tensor, cache: Any, **_: Any) -> _Result:
    rows = self.Wqkv(hidden_states)
    rows = rows.clamp(-self.clip_qkv, self.clip_qkv) if self.clip_qkv else rows
    query, key, value = (_split_heads(self, each) for each in rows.chunk(3, dim=2))
    slopes = -build_mpt_alibi_tensor(self.n_heads, 2)[:, 0, 0]
    settings = {"scaling": self.softmax_scale, "score_bias": _alibi(slopes, cache)}
    return _attend_and_project(self, query, cache.update(key, value), attention_mask, self.out_proj, **settings)


def _llama_4(
    self: Any, hidden_states: torch.Tensor, position_embeddings: Any, attention_mask: torch.Tensor, cache: Any, **_: Any
) -> _Result:
    """Layers with rotary embeddings rotate queries and keys, then may normalise them; others may scale queries by position."""
    query, key, value = _project(self, hidden_states)
    if self.use_rope:
        query, key = apply_rotary_emb(query, key, position_embeddings)
        query, key = (self.qk_norm(each) if hasattr(self, "qk_norm") else each for each in (query, key))
    elif self.attn_temperature_tuning:
        scale = torch.log1p(torch.floor((cache.position_ids.float() + 1.0) / self.floor_scale)) * self.attn_scale + 1.0
        query = (query * scale[:, None, :, None]).to(query.dtype)
    return _attend_and_project(self, query, cache.update(key, value), attention_mask, self.o_proj, scaling=self.scaling)


def _xglm(self: Any, hidden_states: torch.Tensor, attention_mask: torch.Tensor, cache: Any, **_: Any) -> _Result:
    query, key, value = _project(self, hidden_states)
    return _attend_and_project(self, query, cache.update(key, value), attention_mask, self.out_proj, scaling=self.scaling)


def _xglm_positions(self: Any, position_ids: torch.Tensor, _cache_length: int) -> torch.Tensor:
    """Sinusoids [B,S,H] of positions [B,S], computed: no checkpoint holds transformers' table of them, 8 MB in XGLM 564M."""
    half = self.embedding_dim // 2
    frequencies = torch.exp(torch.arange(half, dtype=torch.float32) * -(math.log(10000) / (half - 1)))
    rows = position_ids[:, :, None] + self.offset
    angles = rows.float() * frequencies
    sinusoids = torch.cat((angles.sin(), angles.cos()), dim=-1)  # H is even, since heads have a multiple of 8
    if self.padding_idx is not None and self.padding_idx >= self.offset:  # transformers' table has zeros in this row
        sinusoids = torch.where(rows == self.padding_idx, 0.0, sinusoids)
    return sinusoids.to(self.weights.dtype)


def _attend_to_all(self: Any, *_: Any, **__: Any) -> None:
    """Choose no tokens: `check_supported` allows no more tokens than the indexer would choose, so all are attended to."""


def _project(self: Any, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Query, key and value [B,N,S,D] of rows [B,S,H]."""
    return tuple(_split_heads(self, projection(rows)) for projection in (self.q_proj, self.k_proj, self.v_proj))


def _split_heads(self: Any, rows: torch.Tensor) -> torch.Tensor:
    """[B,S,N*D] -> [B,N,S,D]."""
    return rows.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


def _alibi(slopes: torch.Tensor, cache: ScatterCache) -> torch.Tensor:
    """Linear biases [B,NH,S,C] (ALiBi, arXiv 2108.12409, section 3): a head's slope [NH] times the distance from query to slot.

    The models themselves multiply by the slot's number instead. The difference is constant along a query's slots, so softmax
    does not see it. In narrow floats, biases by slot number would grow too large to tell neighbouring slots apart.
    """
    slots = torch.arange(cache.present_key.shape[2])
    return slopes[:, None, None] * (slots - cache.position_ids[:, None, :, None])


def _attend_and_project(
    self: Any, query: torch.Tensor, cached: tuple[torch.Tensor, torch.Tensor], mask: torch.Tensor, projection: Any,
    **settings: Any,
) -> _Result:  # fmt: skip
    """Attention to `cached`, the keys and values of all slots, and the output projection."""
    rows, _ = onnx_attention(self, query, *cached, mask, **settings)
    return projection(rows.flatten(2)), None


_FORWARDS: dict[str, Callable[..., torch.Tensor | tuple[torch.Tensor, torch.Tensor | None] | None]] = {
    "AXK2Indexer": _attend_to_all,
    "BloomAttention": _bloom,
    "CodeGenAttention": _codegen,
    "DeepseekV32Indexer": _attend_to_all,
    "FalconAttention": _falcon,
    "GPTJAttention": _gpt_j,
    "GPTNeoSelfAttention": _gpt_neo,
    "Gemma3nTextDecoderLayer": gemma_3n_layer,
    "Gemma3nTextMLP": gemma_3n_mlp,
    "GlmMoeDsaIndexer": _attend_to_all,
    "Llama4TextAttention": _llama_4,
    "Llama4TextMoe": llama_4_mixture,
    "MptAttention": _mpt,
    "RecurrentGemmaRecurrentBlock": griffin_block,
    "XGLMAttention": _xglm,
    "XGLMSinusoidalPositionalEmbedding": _xglm_positions,
}
