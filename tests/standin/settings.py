"""`python -m tests.standin.settings FOLDER [NAME ..]`: change one setting of an architecture at a time, and compare with torch.

Prints a line for the model as it is, and for each change that alters torch's logits: how far the logits of the cpu and cuda
engines are from torch's (both on a CPU, weights in fp16; the median over steps, as a share of the largest logit), or the error
that refuses it. Takes hours, some 10 s a line.
"""

from __future__ import annotations

import copy
import re
import shutil
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from skipdecode import manifest as manifests
from skipdecode.decoder import Decoder
from skipdecode.device import HostDevice
from skipdecode.engines.ort import use_threads
from skipdecode.errors import SkipDecodeError
from skipdecode.exporter.architectures import register_language_model
from skipdecode.exporter.config_json import allowing_empty_weights
from skipdecode.exporter.export import ExportRequest, export
from skipdecode.generate import load
from skipdecode.schedule_builders import ScheduleRequest
from skipdecode.targets import load_device_engines
from tests.agreement import errors_of
from tests.models import CONFIGS, MAX_LENGTH, RELATIVES, VARIATIONS

TOKENS = [9, 8, 7, 6, 5, 4, 3, 17, 23, 40, 41, 12, 60, 33]
PROMPT = 9
AGREES = 0.01  # a mixture is farther off where fp16 makes a router choose another expert: it gets other weights
# sizes that all models have, and what inference ignores
_LEFT_OUT = re.compile(
    r"^_|dropout|pdrop|drop_rate|layerdrop|aux_loss|z_loss|_coef|jitter|initializer|init_std|token_id|vocab_size|dtype|output_|"
    r"use_cache|return_dict|version|model_type|architectures|name_or_path|label|is_encoder|is_decoder|quantization|"
    r"num_hidden_layers|n_layer|max_position|max_seq_len|n_positions|hidden_size$|intermediate_size$|ffn_dim|n_embd|n_inner"
)


def main() -> None:
    every = CONFIGS | RELATIVES | VARIATIONS
    folder, names = Path(sys.argv[1]), sys.argv[2:] or [*every]
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    for name in names:
        settings = every[name]().to_dict()
        kind = settings.pop("model_type")
        seen = [_logits(_model(kind, settings))]
        print(f"{name:24} {_result(kind, settings, folder)}", flush=True)
        for key, value in _changes(settings):
            changed = {**settings, key: value}
            try:
                logits = _logits(_model(kind, changed))
            except Exception:  # whatever transformers raises for an invalid setting
                continue
            if any(torch.equal(logits, other) for other in seen) or not logits.isfinite().all():
                continue
            seen.append(logits)
            print(f"{name:24} {key}={value!r}: {_result(kind, changed, folder)}", flush=True)


def _changes(settings: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in settings.items():
        if not _LEFT_OUT.search(key):
            yield from ((key, other) for other in _others(key, value))


def _others(key: str, value: Any) -> list[Any]:
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [2 * value, value // 2]
    if isinstance(value, float):
        return [1.7 * value + 0.1]
    if isinstance(value, str):
        return ["gelu", "relu2"] if "act" in key else []
    if isinstance(value, dict):  # rotary embeddings, maybe one per kind of layer
        yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "attention_factor": 1.4}
        own = [{**value, **yarn}, {**value, "partial_rotary_factor": 0.5}] if "rope_type" in value else []
        return own + [{**value, inner: other} for inner, held in value.items() for other in _others(str(inner), held)]
    if isinstance(value, list):
        return [value[::-1]]
    return [5, 16, 0.7, True]  # instead of None


def _model(kind: str, settings: dict[str, Any], seed: int = 0) -> Any:
    """A model with large random weights, each seeded by its name: what a setting adds leaves the others as they are."""
    config = transformers.AutoConfig.for_model(kind, **copy.deepcopy(settings))
    register_language_model(config)
    torch.manual_seed(seed)  # RecurrentGemma's decays are drawn before noise is added
    with allowing_empty_weights(), torch.no_grad():
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
        for name, tensor in model.state_dict().items():
            if tensor.is_floating_point():
                noise = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
                drawn = torch.randn(tensor.shape, generator=noise) * 0.1
                tensor.copy_(tensor + drawn if tensor.ndim == 1 or name.endswith("_norm.weight") else drawn)
    return model.half().float()


@torch.no_grad()  # type: ignore[untyped-decorator]
def _logits(model: Any) -> torch.Tensor:
    """The logits after the prompt and after each later token, [steps,V]."""
    found: torch.Tensor = model(torch.tensor([TOKENS]), use_cache=False).logits[0, PROMPT - 1 :]
    return found


def _result(kind: str, settings: dict[str, Any], folder: Path) -> str:
    try:
        errors = _errors(_model(kind, settings), folder)
        for seed in (1, 2):
            if max(errors.values()) > AGREES:
                again = _errors(_model(kind, settings, seed), folder)
                errors = {target: min(error, again[target]) for target, error in errors.items()}
    except SkipDecodeError as error:
        return f"refused: {error}"
    except Exception as error:
        return f"FAILS: {error!r}"
    text = ", ".join(f"{target} {error:.4f}" for target, error in errors.items())
    return text if max(errors.values()) <= AGREES else f"DISAGREES: {text}"


def _errors(model: Any, folder: Path) -> dict[str, float]:
    """The error of a model's engines, by target."""
    shutil.rmtree(folder, ignore_errors=True)
    model.half().save_pretrained(folder / "checkpoint")
    wanted, bundle = _logits(model.float()), folder / "bundle"
    export(
        ExportRequest(
            model=str(folder / "checkpoint"), out=bundle, schedule=ScheduleRequest(name="full"), dtype="fp16",
            targets=("cpu", "cuda"), max_length=MAX_LENGTH,
        )
    )  # fmt: skip
    made, new = manifests.read(bundle), len(TOKENS) - PROMPT + 1
    use_threads(None)
    cuda = load_device_engines(made, bundle, made.targets[1], HostDevice(), None)
    decoders = {
        "cpu": load(bundle, target="cpu").decoder([PROMPT], new),
        "cuda": Decoder(cuda, made.model, made.schedule, [PROMPT], new, prefill_chunk=4),
    }
    expected = [(TOKENS[PROMPT:], wanted)]
    return {
        target: float(np.median([error for _, error in errors_of(decoder, [TOKENS[:PROMPT]], expected)]))
        for target, decoder in decoders.items()
    }


if __name__ == "__main__":
    main()
