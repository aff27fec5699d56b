"""The models that are measured, as checkpoints and bundles; and the bytes a decode step must read."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_SIZES: dict[str, dict[str, Any]] = {
    "opt": {
        "num_hidden_layers": 24, "hidden_size": 1024, "ffn_dim": 4096, "num_attention_heads": 16, "word_embed_proj_dim": 1024,
        "vocab_size": 8192,
    },
    "llama": {
        "num_hidden_layers": 16, "hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16,
        "num_key_value_heads": 4, "vocab_size": 8192,
    },
    "mixtral": {  # small experts, and more of them, as mixtures have them today
        "num_hidden_layers": 4, "hidden_size": 2048, "intermediate_size": 1024, "num_attention_heads": 16,
        "num_key_value_heads": 4, "num_local_experts": 32, "num_experts_per_tok": 4, "vocab_size": 8192,
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
SHIPPED = Path(__file__).parents[1] / "examples" / "e2e" / "model"
_SHARED = {"max_position_embeddings": 2048, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "tie_word_embeddings": True}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What a decode step must read, keys and values in fp32."""

    num_layers: int
    layer_bytes: int  # one layer's weights
    head_bytes: int  # final norm and output projection; of the embedding a step reads one row
    kv_bytes: int  # keys and values of one position in one layer

    def step_bytes(self, layers: int, positions: int) -> int:
        """Bytes of one decode step that computes `layers` layers over `positions` valid ones, of all rows together."""
        return layers * (self.layer_bytes + positions * self.kv_bytes) + self.head_bytes


def checkpoint_config(name: str, tiny: bool) -> Any:
    """The shape, as transformers writes it."""
    import transformers

    return transformers.AutoConfig.for_model(name, **(_TINY if tiny else _SIZES)[name], **_SHARED)


def make_checkpoint(name: str, folder: Path, tiny: bool) -> None:
    """A copy of the shipped model (`e2e`), or random weights with a word-level tokenizer (CTranslate2's converter wants one)."""
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


def make_bundles(
    checkpoint: Path, wanted: Sequence[tuple[str, float | None, Path]], span: int, block: int
) -> list[tuple[int, Shape]]:
    """Export each (kind of weights, speedup, folder)."""
    return [make_bundle(checkpoint, out, speedup, span, kind, block) for kind, speedup, out in wanted]


def make_bundle(
    checkpoint: Path, out: Path, speedup: float | None, span: int, kind: str = "fp32", block: int = 32
) -> tuple[int, Shape]:
    """Export; a speedup of None is full depth. Returns the bundle's count of variants, and what its steps read."""
    from skipdecode.exporter.export import ExportRequest, export
    from skipdecode.schedule_builders import ScheduleRequest

    schedule = ScheduleRequest(name="full") if speedup is None else ScheduleRequest(name="linear", speedup=speedup, span=span)
    quantize = "none" if kind == "fp32" else kind
    made = export(
        ExportRequest(model=str(checkpoint), out=out, schedule=schedule, quantize=quantize, quantize_block=block, slim=True)
    )
    (target,), model = made.targets, made.model
    return len(made.variants), Shape(
        num_layers=model.num_layers,
        layer_bytes=sum(target.segment_weight_bytes) // model.num_layers,
        head_bytes=target.head_weight_bytes,
        kv_bytes=2 * 4 * model.num_kv_heads * model.head_size,
    )


def _make_tokenizer(vocabulary: int) -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = WordLevel({f"t{i}": i for i in range(vocabulary)}, unk_token="t3")
    special = {"bos_token": "t0", "pad_token": "t1", "eos_token": "t2", "unk_token": "t3"}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), **special)
