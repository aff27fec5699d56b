"""Run the torch reference in its own process for `skip-validate --reference`: the runtime does not import torch.

    python -m skipdecode.exporter.reference_run OUT < request.json

Request: `parent` (the waiting process's id), `model`, `dtype` (the bundle's), `dimensions` (the bundle manifest's, which the
model must have), and `runs`. The last maps each run's name to `layers` and `warmup_layers` of a schedule anchored at the
generated tokens, `prompts` (token ids), and `new`, the number of tokens to generate. With `"check": true` only the dimensions
are compared. `rounding`, if the bundle is quantised: the arguments of `round_weights`.

OUT is a safetensors file. For run r, prompt p and layer l it holds `{r}.{p}.tokens` [new] int64, `{r}.{p}.logits` [new,V], and
what the layer keeps, named as its engine's inputs are (see skipdecode.bindings): `{r}.{p}.past_key.{l}` and
`{r}.{p}.past_value.{l}` [KVH, positions, D] float32, and past states. With `rounding` also `{r}.{p}.rounded` [new,V], the logits
of the rounded model for the same tokens.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from skipdecode.bindings import PAST_KEY, PAST_VALUE, of_layer, past
from skipdecode.child_process import end_with
from skipdecode.cli import guarded
from skipdecode.errors import ModelNotSupportedError
from skipdecode.exporter.architectures import INDEXED, decoder_layers, expands_latents, layer_keys, num_heads
from skipdecode.exporter.attention import pad_to_head_size
from skipdecode.exporter.checkpoint import TEXT_PART_NAMES, CheckpointSource, weight_files
from skipdecode.exporter.checkpoint_folder import Checkpoint
from skipdecode.exporter.conversions import whole_model_has_conversion_rules
from skipdecode.exporter.merge_adapter import AdaptedSource
from skipdecode.exporter.model_names import checkpoint_config, fetch_checkpoint, load_config
from skipdecode.exporter.reference import greedy_tokens, skip_schedule
from skipdecode.exporter.round_weights import round_weights
from skipdecode.exporter.skeleton import build_skeleton
from skipdecode.exporter.state_layers import CONV_STATE, RECURRENT_STATE, find_griffin, is_mamba, state_layers
from skipdecode.exporter.supported import check_supported
from skipdecode.exporter.weights import TensorSource
from skipdecode.model import layer_group
from skipdecode.schedule import Schedule


def main() -> int:
    """Read the request, write the arrays, and return the exit status."""
    request = json.load(sys.stdin)
    end_with(request.pop("parent"))
    return guarded(lambda: answer(request, Path(sys.argv[1])), debug=False)


def answer(request: dict[str, Any], out: Path) -> int:
    """Compare the dimensions, run every schedule on its prompts, write OUT; returns the exit status, 0."""
    config, checkpoint = load_config(request["model"])
    _check_dimensions(config, request["dimensions"], request["model"])
    if checkpoint is not None:
        file_format, files = weight_files(checkpoint.folder)
        for file in files:
            file_format.names(file)  # raises where it is damaged
    if request.get("check"):
        return 0
    model = _load(checkpoint or fetch_checkpoint(request["model"]), getattr(torch, request["dtype"]))
    arrays: dict[str, torch.Tensor] = {}
    schedules = {
        name: Schedule(
            name="table", num_layers=config.num_hidden_layers, warmup_layers=run["warmup_layers"], layers=tuple(run["layers"])
        )
        for name, run in request["runs"].items()
    }
    prompts = [(name, index, prompt) for name, run in request["runs"].items() for index, prompt in enumerate(run["prompts"])]
    for name, index, prompt in prompts:
        tokens, logits = greedy_tokens(model, schedules[name], prompt, request["runs"][name]["new"])
        arrays[f"{name}.{index}.tokens"] = torch.tensor(tokens)
        arrays[f"{name}.{index}.logits"] = logits
        for state, array in _states(model, schedules[name], prompt, tokens).items():
            arrays[f"{name}.{index}.{state}"] = array
    if request.get("rounding"):
        round_weights(model, **request["rounding"])
        for name, index, prompt in prompts:
            tokens = arrays[f"{name}.{index}.tokens"].tolist()
            arrays[f"{name}.{index}.rounded"] = _logits_of(model, schedules[name], prompt, tokens)
    save_file({name: array.contiguous() for name, array in arrays.items()}, out)
    return 0


@torch.no_grad()  # type: ignore[untyped-decorator]
def _logits_of(model: Any, schedule: Schedule, prompt: list[int], tokens: list[int]) -> torch.Tensor:
    """The logits [new,V] that each of the new tokens is chosen from, in one pass."""
    with skip_schedule(model, schedule, prompt_length=len(prompt)):
        logits: torch.Tensor = model(torch.tensor([[*prompt, *tokens[:-1]]]), use_cache=False).logits
    return logits[0, len(prompt) - 1 :]


def _load(checkpoint: Checkpoint, dtype: torch.dtype) -> Any:
    """The model in fp32, its weights rounded to what the bundle stores."""
    from transformers import AutoModelForCausalLM, logging

    logging.set_verbosity_error()  # it would list the vision part's weights as unexpected
    config = checkpoint_config(checkpoint)
    if config._attn_implementation not in (None, "eager", "sdpa"):  # others may need a package, or a GPU
        config._attn_implementation = "eager"
    if checkpoint.adapter or getattr(config, "quantization_config", None) or whole_model_has_conversion_rules(config):
        model = _load_as_exported(checkpoint, config)
    else:
        model, loading_info = AutoModelForCausalLM.from_pretrained(
            checkpoint.folder, config=config, key_mapping=TEXT_PART_NAMES, dtype=torch.float32, output_loading_info=True
        )
        if loading_info["missing_keys"]:  # transformers has drawn these at random
            model = _load_as_exported(checkpoint, config)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype).float()
    return model.eval()


@torch.no_grad()  # type: ignore[untyped-decorator]
def _load_as_exported(checkpoint: Checkpoint, config: Any) -> Any:
    """transformers' model with the weights as the exporter reads them.

    For quantised weights: transformers needs packages for most methods, rounds what it dequantises, and fails where the last
    block of an FP8 matrix is a smaller one. Also for adapters, and for a text part whose weights transformers converts or does
    not find.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.tie_weights()
    skeleton = build_skeleton(checkpoint_config(checkpoint))  # of a fresh configuration, whose attention it changes
    source: TensorSource = CheckpointSource(checkpoint.folder, skeleton)
    if checkpoint.adapter:
        source = AdaptedSource(source, checkpoint.adapter, skeleton)
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if name in skeleton.shapes:
            tensor.copy_(source(name, skeleton.shapes[name]))
    return model


def _check_dimensions(config: Any, expected: dict[str, Any], model: str) -> None:
    check_supported(config, 2)
    skeleton = build_skeleton(config)
    actual = {
        "model_type": config.model_type, "num_layers": config.num_hidden_layers, "hidden_size": skeleton.hidden_size,
        "num_heads": num_heads(config), "num_kv_heads": skeleton.keys.num_heads, "head_size": skeleton.keys.head_size,
        "vocab_size": skeleton.vocab_size,
        "state_layers": json.loads(json.dumps([dataclasses.asdict(group) for group in skeleton.state_layers])),
    }  # fmt: skip
    for name, value in expected.items():
        if actual[name] != value:
            raise ModelNotSupportedError(
                f"has {name} {actual[name]}, but the bundle has {value}",
                "name the model that was exported",
                where=f"--reference {model}",
            )


@torch.no_grad()  # type: ignore[untyped-decorator]
def _states(model: Any, schedule: Schedule, prompt: list[int], tokens: list[int]) -> dict[str, torch.Tensor]:
    """What each layer keeps after all tokens but the last were fed: keys and values of the positions that computed it, states."""
    layers = decoder_layers(model)
    groups = state_layers(model.config, layers)
    cache = _cache(model.config, any(group.states for group in groups), len(prompt) + len(tokens))
    for layer in layers:
        _clear_states(layer)
    with skip_schedule(model, schedule, prompt_length=len(prompt)):
        model(torch.tensor([[*prompt, *tokens[:-1]]]), use_cache=True, cache=cache)
    arrays: dict[str, torch.Tensor] = {}
    for index, layer in enumerate(layers):
        keys = layer_keys(model.config, index)
        group = layer_group(groups, keys, index)
        parts = _keys_and_values(layer, cache.layers[index], keys.num_heads) if group.keys else {}
        for state in group.states:
            parts[past(state.name)] = _STATES[state.name](layer, cache.layers[index])
        arrays |= {of_layer(name, index): array for name, array in parts.items()}
    return arrays


def _cache(config: Any, with_states: bool, max_positions: int) -> Any:
    """transformers' cache; sliding windows are widened to `max_positions` positions, so that all of a run's are kept."""
    from transformers.cache_utils import DynamicCache, DynamicLayer

    if not with_states and config.model_type not in INDEXED:
        return DynamicCache()
    cache = DynamicCache(config=config)
    for layer in cache.layers:
        if getattr(layer, "is_sliding", False):
            layer.sliding_window = max_positions
    cache.layers.append(DynamicLayer())  # transformers asks the first attention layer how long a run is; there may be none
    return cache


def _clear_states(layer: torch.nn.Module) -> None:
    """Zero the states that transformers keeps in Griffin's modules; its own would be as wide as the hidden state."""
    block = find_griffin(layer)
    if block is not None:
        block.conv1d_state = torch.zeros(1, block.lru_width, block.conv1d_width - 1)
        block.rg_lru.recurrent_states = torch.zeros(1, block.lru_width)


def _conv_state(layer: torch.nn.Module, cached: Any) -> torch.Tensor:
    """The first row's state, [channels, K - 1] for a kernel of K; transformers' cache keeps K inputs, Griffin's block K - 1."""
    block = find_griffin(layer)
    state: torch.Tensor = cached.conv_states[0][0, :, 1:] if block is None else block.conv1d_state[0]
    return state


def _recurrent_state(layer: torch.nn.Module, cached: Any) -> torch.Tensor:
    """The first row's state, [heads, key size, value size]; for Mamba [key size, channels]."""
    block = find_griffin(layer)
    states = cached.recurrent_states[0] if block is None else block.rg_lru.recurrent_states[:, :, None, None]
    state: torch.Tensor = states[0]
    return state.mT if is_mamba(layer) else state


_STATES = {CONV_STATE: _conv_state, RECURRENT_STATE: _recurrent_state}


def _keys_and_values(layer: torch.nn.Module, cached: Any, heads: int) -> dict[str, torch.Tensor]:
    """The first row's keys and values in transformers' cache, as the runtime's KV buffer holds them."""
    keys, values = cached.keys, cached.values
    if expands_latents(layer):
        keys, values = layer.self_attn.expand_kv(keys, values)
    values = pad_to_head_size(values, keys.shape[-1])
    repeats = keys.shape[1] // heads  # Falcon caches them once per query head
    return {PAST_KEY: keys[0, ::repeats], PAST_VALUE: values[0, ::repeats]}


if __name__ == "__main__":
    sys.exit(main())
