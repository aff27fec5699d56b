"""Layers that keep states: what each keeps of a row, and what a trace calls instead of transformers' functions.

Linear attention (Gated DeltaNet, arXiv 2412.06464; Kimi Delta Attention, arXiv 2510.26692; Mamba-2, arXiv 2405.21060) keeps one
matrix per head, which sums up keys and values, and the last inputs of a causal convolution. A short convolution (LFM2) keeps
only its last inputs. In Mamba (arXiv 2312.00752) each channel is a head, whose value is one number; in Griffin (arXiv 2402.19427)
so is its key. Both operators in a trace, LinearAttention and CausalConvWithState, are standard since opset 27.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers

from skipdecode.errors import ModelNotSupportedError
from skipdecode.exporter.architectures import key_source, layer_keys, layer_kind
from skipdecode.exporter.attention import ScatterCache, emit_operator
from skipdecode.model import KeyValueSizes, LayerGroup, State

LINEAR_OPSET = 27  # of both operators; set on a graph once it is traced, since torch traces to OPSET
CONV_STATE, RECURRENT_STATE = "conv_state", "recurrent_state"
_CONVOLUTION, _CHANNEL_SCAN, _HEAD_SCAN = "causal_conv1d_fn", "mamba_selective_scan", "mamba2_chunk_scan"
_DELTA_RULE, _KIMI_DELTA_RULE = "torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention"
# kinds of layers that have attention; None: the model's layers are all alike
_WITH_ATTENTION = (None, "full_attention", "sliding_attention", "chunked_attention", "indexed_attention", "hybrid")


def state_layers(config: Any, layers: torch.nn.ModuleList) -> tuple[LayerGroup, ...]:
    """The layers that keep anything other than just keys and values of layer 0's sizes, grouped by what they keep."""
    groups: dict[tuple[KeyValueSizes | None, int | None, tuple[State, ...]], list[int]] = {}
    default = (layer_keys(config, 0), None, ())
    for index, layer in enumerate(layers):
        source = key_source(config, index)
        has_own_keys = layer_kind(config, index) in _WITH_ATTENTION and source is None
        group_key = (layer_keys(config, index) if has_own_keys else None, source, tuple(_states(layer)))
        if group_key != default:
            groups.setdefault(group_key, []).append(index)
    return tuple(
        LayerGroup(layers=tuple(indices), keys=keys, keys_of=source, states=states)
        for (keys, source, states), indices in groups.items()
    )


def is_mamba(layer: torch.nn.Module) -> bool:
    """Whether it is a Mamba or Mamba-2: transformers transposes their states, [heads, value size, key size] or [channels, .]."""
    return hasattr(_find_mixer(layer), "ssm_state_size")


def forgets_by_channel(module: torch.nn.Module) -> bool:
    """Whether each channel has its own decay (Kimi Delta Attention, Mamba, Griffin), where others have one decay per head."""
    return hasattr(module, "forget_gate") or _scans_channels(module) or _is_griffin(module)


def find_griffin(layer: torch.nn.Module) -> Any:
    """Griffin's recurrent block, in which transformers keeps its states, not in a cache; None: the layer has none."""
    mixer = _find_mixer(layer)
    return mixer if _is_griffin(mixer) else None


def _is_griffin(module: torch.nn.Module | None) -> bool:
    return hasattr(module, "rg_lru")


def _scans_channels(module: torch.nn.Module) -> bool:
    """Whether it is the mixer of a Mamba, not of a Mamba-2."""
    return hasattr(module, "dt_proj")


def _states(layer: torch.nn.Module) -> Iterator[State]:
    mixer = _find_mixer(layer)
    if mixer is None:
        return
    conv = _find_convolution(mixer)
    yield State(name=CONV_STATE, shape=(conv.in_channels, conv.kernel_size[0] - 1))
    if _is_griffin(mixer):  # it calls no functions to replace: `griffin_block` replaces it as a whole
        yield State(name=RECURRENT_STATE, shape=(mixer.lru_width, 1, 1))
        return
    _check_calls(mixer, _CONVOLUTION)
    if _scans_channels(mixer):
        _check_calls(mixer, _CHANNEL_SCAN)
        yield State(name=RECURRENT_STATE, shape=(mixer.ssm_state_size, mixer.intermediate_size))
    elif is_mamba(layer):
        _check_calls(mixer, _HEAD_SCAN)
        yield State(name=RECURRENT_STATE, shape=(mixer.num_heads, mixer.ssm_state_size, mixer.head_dim))
    elif hasattr(mixer, "num_v_heads"):
        _check_calls(mixer, _DELTA_RULE)
        yield State(name=RECURRENT_STATE, shape=(mixer.num_v_heads, mixer.head_k_dim, mixer.head_v_dim))
    elif forgets_by_channel(mixer):
        _check_calls(mixer, _KIMI_DELTA_RULE)
        yield State(name=RECURRENT_STATE, shape=(mixer.num_heads, mixer.head_dim, mixer.head_dim))


def _check_calls(mixer: Any, function: str) -> None:
    """Refuse a mixer whose module lacks `function`, which `emitting_operators` replaces: a trace would leave the state out."""
    if function not in _namespace(mixer):
        raise ModelNotSupportedError(
            f"{type(mixer).__name__} of transformers {transformers.__version__} does not call {function}",
            "install transformers 5.24, the version tested",
        )


def _namespace(mixer: Any) -> dict[str, Any]:
    """The namespace in which the mixer's `forward` looks up the functions it calls."""
    return vars(sys.modules[type(mixer).__module__])


def _find_mixer(layer: torch.nn.Module) -> Any:
    """The module around the layer's convolution, which goes by several names; None: the layer has none."""
    return next((module for module in layer.modules() if _find_convolution(module) is not None), None)


def _find_convolution(module: torch.nn.Module) -> Any:
    return next((child for child in module.children() if isinstance(child, torch.nn.Conv1d)), None)


class StateCache:
    """Stands for transformers' cache in a trace: `states` before, then after the new tokens; keys and values in `attention`."""

    def __init__(self, states: dict[str, torch.Tensor], attention: ScatterCache | None) -> None:
        self.states = states
        if attention is not None:
            self.update, self.get_seq_length = attention.update, attention.get_seq_length

    def get_conv_state(self, *_: Any, **__: Any) -> torch.Tensor:
        """[B, channels, kernel size - 1]; never None, by which the layer sees that there is a past."""
        return self.states[CONV_STATE]

    def get_recurrent_state(self, *_: Any, **__: Any) -> torch.Tensor:
        """[B, heads, key size, value size]; for Mamba [B, key size, channels]."""
        return self.states[RECURRENT_STATE]

    def update_conv_state(self, inputs: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """The convolution's input: only the new tokens, since its operator itself puts the state in front of them."""
        return inputs

    def update_recurrent_state(self, *_: Any, **__: Any) -> None:
        """Do nothing: `emitting_operators` has stored the state already, and some layers hand it back widened."""


@contextmanager
def emitting_operators(layer: torch.nn.Module, cache: StateCache) -> Iterator[None]:
    """Inside, `layer`'s convolution and recurrence leave one operator each in a trace; both read and update `cache.states`."""
    mixer = _find_mixer(layer)
    conv = _find_convolution(mixer)

    def convolution(inputs: torch.Tensor, *_: Any, activation: str = "none", **__: Any) -> torch.Tensor:
        out, cache.states[CONV_STATE] = causal_conv(inputs, conv.weight, conv.bias, cache.states[CONV_STATE], activation)
        return out

    def storing(recurrence: Callable[..., tuple[torch.Tensor, torch.Tensor]]) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
        def wrapped(*rows: torch.Tensor, **others: Any) -> tuple[torch.Tensor, torch.Tensor]:
            out, cache.states[RECURRENT_STATE] = recurrence(*rows, **others)
            return out, cache.states[RECURRENT_STATE]

        return wrapped

    namespace = _namespace(mixer)

    def channel_scan(*rows: torch.Tensor, **others: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return _channel_scan(*rows, **others, initial_states=cache.states[RECURRENT_STATE])  # transformers' starts at 0

    functions = {_CONVOLUTION: convolution, _CHANNEL_SCAN: storing(channel_scan), _HEAD_SCAN: storing(_head_scan)}
    functions |= dict.fromkeys((_DELTA_RULE, _KIMI_DELTA_RULE), storing(_gated_delta_rule))
    replaced = {name: namespace[name] for name in functions if name in namespace}
    namespace.update({name: functions[name] for name in replaced})
    try:
        yield
    finally:
        namespace.update(replaced)


def causal_conv(
    inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, state: torch.Tensor, activation: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """CausalConvWithState-27: inputs [B,C,S], weight [C,1,K], state [B,C,K-1] -> [B,C,S] and the new state."""
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
    """Query and key [B,S,KH,DK], value [B,S,VH,DV], g (log of the decay) and beta [B,S,VH] -> [B,S,VH,DV] and the new state.

    For Kimi Delta Attention g is [B,S,VH,DK].
    """
    if use_qk_l2norm_in_kernel:
        query, key = _l2_normalised(query), _l2_normalised(key)
    return _linear_attention((query, key, value), initial_state, (g.flatten(2), beta), "gated_delta", query.shape[3] ** -0.5)


def _channel_scan(
    inputs: torch.Tensor, dt: torch.Tensor, A: torch.Tensor, B: torch.Tensor, C: torch.Tensor, *, D: torch.Tensor,
    z: torch.Tensor, delta_bias: torch.Tensor, initial_states: torch.Tensor, **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Mamba's scan: inputs, dt and z [B,I,S], A [I,N], B and C [B,N,S], D [I] -> [B,I,S] and the new state [B,N,I].

    Written as Mamba-2's with I heads: each number of a key has its own decay, and a value is one number (arXiv 2312.00752,
    section 3).
    """
    rows, channels = inputs.mT, inputs.shape[1]
    dt = softplus(dt.mT + delta_bias.to(dt.dtype))
    query, key = (each.mT[:, :, None].expand(-1, -1, channels, -1).flatten(2) for each in (C, B))
    decays = (dt[..., None] * A).flatten(2)
    out, present = emit_linear_attention((query, key, rows * dt), initial_states.mT[..., None], (decays,), channels, "gated", 1.0)
    return (out + D * rows).mT * torch.nn.functional.silu(z), present.squeeze(-1).mT


def _head_scan(
    inputs: torch.Tensor, dt: torch.Tensor, A: torch.Tensor, B: torch.Tensor, C: torch.Tensor, *, D: torch.Tensor,
    dt_bias: torch.Tensor, initial_states: torch.Tensor, dt_limit: tuple[float, float] = (0.0, float("inf")), **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Mamba-2's scan: inputs [B,S,NH,P], dt [B,S,NH], A and D [NH], B and C [B,S,G,N] -> [B,S,NH,P], new state [B,NH,N,P].

    h_t = exp(A dt_t) h_(t-1) + B_t (x) dt_t x_t and y_t = C_t h_t + D x_t: linear attention whose query is C, whose key is B and
    whose value is dt x (arXiv 2405.21060, section 7).
    """
    dt = softplus(dt + dt_bias)
    if tuple(dt_limit) != (0.0, float("inf")):  # the default range, which softplus never leaves
        dt = torch.clamp(dt, *dt_limit)
    out, present = _linear_attention((C, B, inputs * dt[..., None]), initial_states, (A * dt,), "gated", 1.0)
    return out + D[:, None] * inputs, present


def softplus(rows: torch.Tensor) -> torch.Tensor:
    """Softplus as one operator; torch's own has a threshold."""
    return emit_operator("Softplus", rows)


def _linear_attention(
    qkv: tuple[torch.Tensor, ...], state: torch.Tensor, gates: tuple[torch.Tensor, ...], rule: str, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """LinearAttention-27: query and key [B,S,KH,DK], value [B,S,VH,DV], gates [B,S,..] -> [B,S,VH,DV] and the new state.

    Each head of query and key serves VH / KH heads of the values.
    """
    query, key, value = qkv
    heads = value.shape[2]
    query, key = (each[:, :, :, None].expand(-1, -1, -1, heads // each.shape[2], -1).flatten(2) for each in (query, key))
    out, present = emit_linear_attention((query, key, value.flatten(2)), state, gates, heads, rule, scale)
    return out.unflatten(-1, (heads, -1)), present


def emit_linear_attention(
    qkv: tuple[torch.Tensor, ...], state: torch.Tensor, gates: tuple[torch.Tensor, ...], heads: int, rule: str, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The operator itself: query, key, value and gates [B,S,heads * size]."""
    query, key, rows = qkv
    out, present = torch.onnx.ops.symbolic_multi_out(
        "LinearAttention",
        (query, key, rows, state, *gates),
        {"q_num_heads": heads, "kv_num_heads": heads, "update_rule": rule, "scale": scale},
        dtypes=(rows.dtype, state.dtype),
        shapes=(rows.shape, state.shape),
    )
    return out, present


def _l2_normalised(rows: torch.Tensor) -> torch.Tensor:
    """x / sqrt(sum(x^2) + 1e-6), written as RMSNormalization-23, which divides by the root of the mean."""
    size = rows.shape[-1]
    scale = torch.full((size,), size**-0.5, dtype=rows.dtype)
    return emit_operator("RMSNormalization", rows, scale, axis=-1, epsilon=1e-6 / size)
