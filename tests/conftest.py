"""What tests share: tiny random checkpoints of every supported architecture, and their bundles, made once a session."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from skipdecode.exporter.export import ExportRequest, export
from skipdecode.schedule_builders import ScheduleRequest

LAYERS, VOCABULARY, MAX_LENGTH = 6, 99, 48
_SIZES = {
    "num_hidden_layers": LAYERS,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
}
_GATED = {**_SIZES, "intermediate_size": 96}
_GROUPED = {**_GATED, "num_key_value_heads": 2}
_IDS = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}
_OPT = {**_SIZES, **_IDS, "ffn_dim": 96, "word_embed_proj_dim": 64, "init_std": 0.1}

CONFIGS: dict[str, Callable[[], Any]] = {
    "opt": lambda: transformers.OPTConfig(**_OPT),
    "opt-350m": lambda: transformers.OPTConfig(**{**_OPT, "word_embed_proj_dim": 32, "do_layer_norm_before": False}),
    "gpt2": lambda: transformers.GPT2Config(
        n_layer=LAYERS, n_embd=64, n_head=4, vocab_size=VOCABULARY, n_positions=64, initializer_range=0.1
    ),
    "gpt_neox": lambda: transformers.GPTNeoXConfig(**_GATED, **_IDS),
    "llama": lambda: transformers.LlamaConfig(**_GROUPED, **_IDS),
    "mistral": lambda: transformers.MistralConfig(**_GROUPED, **_IDS, sliding_window=None),
    "qwen2": lambda: transformers.Qwen2Config(**_GROUPED, **_IDS),
    "qwen3": lambda: transformers.Qwen3Config(**_GROUPED, **_IDS, head_dim=32),
    "gemma2": lambda: transformers.Gemma2Config(**_GROUPED, **_IDS, head_dim=16),
    "gemma3": lambda: transformers.Gemma3TextConfig(**_GROUPED, **_IDS, head_dim=16),
    "phi3": lambda: transformers.Phi3Config(**_GROUPED, **_IDS),
}


class Zoo:
    """Checkpoints and bundles by architecture, made when first asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def checkpoint(self, name: str) -> Path:
        """A random checkpoint, fp32, with weights large enough that greedy tokens vary."""
        path = self._folder / name
        if not path.exists():
            torch.manual_seed(0)
            config = CONFIGS[name]()
            config.initializer_range = 0.1
            model = transformers.AutoModelForCausalLM.from_config(config)
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.ndim == 1:  # biases and norms' scales that differ from 0 and 1, so that mixing them up shows
                        parameter.add_(torch.randn_like(parameter) * 0.1)
            model.save_pretrained(path)
        return path

    def bundle(self, name: str) -> Path:
        """A bundle with one segment a layer, so that any schedule with one warm-up layer fits it."""
        path = self._folder / f"{name}.bundle"
        if not path.exists():
            schedule = ScheduleRequest(name="linear", max_layers=LAYERS, min_layers=2, span=10)
            export(
                ExportRequest(model=str(self.checkpoint(name)), out=path, schedule=schedule, max_batch=4, max_length=MAX_LENGTH)
            )
        return path

    def model(self, name: str) -> Any:
        """The torch model in evaluation mode."""
        return transformers.AutoModelForCausalLM.from_pretrained(self.checkpoint(name)).eval()


@pytest.fixture(scope="session")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return Zoo(tmp_path_factory.mktemp("zoo"))


@pytest.fixture(scope="session")
def conformance_bundle(zoo: Zoo, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """By name, made when first asked for: a bundle of tests/conformance/bundles.py."""
    from tests.conformance.bundles import make

    folder = tmp_path_factory.mktemp("conformance")
    return functools.cache(lambda name: make(name, zoo, folder / name))
