"""The models that benchmarks measure, as checkpoints and bundles."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from skipdecode.validation.step_bytes import StepBytes


def hybrid_layers(count: int, kind: str, period: int) -> list[str]:
    """`layer_types` of a model in which every `period`th layer has attention and the others are of `kind`."""
    return ["full_attention" if layer % period == period - 1 else kind for layer in range(count)]


_SIZES: dict[str, dict[str, Any]] = {
    "opt": {
        "num_hidden_layers": 24, "hidden_size": 1024, "ffn_dim": 4096, "num_attention_heads": 16, "word_embed_proj_dim": 1024,
        "vocab_size": 8192,
    },
    "llama": {
        "num_hidden_layers": 16, "hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16,
        "num_key_value_heads": 4, "vocab_size": 8192,
    },
    "mixtral": {  # many small experts, as in today's mixtures
        "num_hidden_layers": 4, "hidden_size": 2048, "intermediate_size": 1024, "num_attention_heads": 16,
        "num_key_value_heads": 4, "num_local_experts": 32, "num_experts_per_tok": 4, "vocab_size": 8192,
    },
    # as wide as the Llama-like model, with short convolutions or Mamba-2 in place of attention in most layers
    "lfm2": {
        "num_hidden_layers": 16, "hidden_size": 1024, "intermediate_size": 2816, "block_auto_adjust_ff_dim": False,
        "num_attention_heads": 16, "num_key_value_heads": 4, "vocab_size": 8192, "layer_types": hybrid_layers(16, "conv", 3),
    },
    "granitemoehybrid": {
        "num_hidden_layers": 16, "hidden_size": 1024, "shared_intermediate_size": 2816, "num_local_experts": 0,
        "num_attention_heads": 16, "num_key_value_heads": 4, "vocab_size": 8192,
        "layer_types": hybrid_layers(16, "linear_attention", 8), "mamba_n_heads": 32, "mamba_d_head": 64, "mamba_d_state": 128,
    },
    # like the small Gemma 4 models: per-layer inputs, and an upper half that reads the keys and values of two lower layers
    "gemma4_text": {
        "num_hidden_layers": 16, "hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 8,
        "num_key_value_heads": 1, "head_dim": 128, "global_head_dim": 256, "sliding_window": 512, "num_kv_shared_layers": 9,
        "layer_types": hybrid_layers(16, "sliding_attention", 4), "hidden_size_per_layer_input": 128, "vocab_size": 8192,
        "vocab_size_per_layer_input": 8192,
    },
}  # fmt: skip
_TINY: dict[str, dict[str, Any]] = {
    "opt": {
        "num_hidden_layers": 6, "hidden_size": 64, "ffn_dim": 128, "num_attention_heads": 4, "word_embed_proj_dim": 64,
        "vocab_size": 512,
    },
    "llama": {
        "num_hidden_layers": 6, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2,
        "vocab_size": 512,
    },
}  # fmt: skip
SHAPES = tuple(_SIZES)
SHIPPED = Path(__file__).parents[1] / "examples" / "e2e" / "model"
_SHARED = {"max_position_embeddings": 2048, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "tie_word_embeddings": True}


def checkpoint_config(name: str, tiny: bool) -> Any:
    """The model's shape as a transformers config."""
    import transformers

    return transformers.AutoConfig.for_model(name, **(_TINY if tiny else _SIZES)[name], **_SHARED)


def make_checkpoint(name: str, folder: Path, tiny: bool) -> None:
    """Write a copy of the shipped model (`e2e`), or random weights with a word-level tokenizer for CTranslate2's converter."""
    import torch
    import transformers

    if name == "e2e":
        shutil.copytree(SHIPPED, folder)
        return
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.manual_seed(0)
    config = checkpoint_config(name, tiny)
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    _make_tokenizer(config.vocab_size).save_pretrained(folder)


def make_bundles(checkpoint: Path, bundles: Sequence[tuple[str, float | None, Path]], span: int, block: int) -> list[StepBytes]:
    """Export a bundle for each (kind of weights, speedup, folder)."""
    return [make_bundle(checkpoint, out, speedup, span, kind, block) for kind, speedup, out in bundles]


def make_bundle(checkpoint: Path, out: Path, speedup: float | None, span: int, kind: str = "fp32", block: int = 32) -> StepBytes:
    """Export a bundle; a speedup of None is full depth. Returns what the bundle's steps read."""
    from skipdecode.exporter.export import ExportRequest, export
    from skipdecode.schedule_builders import ScheduleRequest

    schedule = ScheduleRequest(name="full") if speedup is None else ScheduleRequest(name="linear", speedup=speedup, span=span)
    quantized = {} if kind == "fp32" else {"quantize": kind, "quantize_block": block}
    manifest = export(ExportRequest(model=str(checkpoint), out=out, schedule=schedule, slim=True, **quantized))
    (target,) = manifest.targets
    return StepBytes(manifest=manifest, target=target)


def _make_tokenizer(vocabulary: int) -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = WordLevel({f"t{i}": i for i in range(vocabulary)}, unk_token="t3")
    special = {"bos_token": "t0", "pad_token": "t1", "eos_token": "t2", "unk_token": "t3"}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), **special)
