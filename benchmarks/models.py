"""The models that are measured, with random weights, in each system's own form; and the bytes a decode step must read."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from skipdecode.manifest import Manifest

_SIZES: dict[str, dict[str, Any]] = {
    "opt": {
        "num_hidden_layers": 24, "hidden_size": 1024, "ffn_dim": 4096, "num_attention_heads": 16, "word_embed_proj_dim": 1024,
        "vocab_size": 8192,
    },
    "llama": {
        "num_hidden_layers": 16, "hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16,
        "num_key_value_heads": 4, "vocab_size": 8192,
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


def make_files(
    name: str, folder: Path, speedups: Sequence[float | None], span: int, quantize: str, tiny: bool
) -> tuple[Shape, list[int]]:
    """Write `checkpoint`, `bundle-0 ...` (one a speedup; None: full depth), `ctranslate2-float32` and `ctranslate2-int8`.

    Returns:
        What a step of this runtime reads, and each bundle's number of variants.
    """
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    checkpoint = folder / "checkpoint"
    shape = make_checkpoint(name, checkpoint, tiny)
    bundles = [make_bundle(checkpoint, folder / f"bundle-{i}", speedup, span, quantize) for i, speedup in enumerate(speedups)]
    (target,) = bundles[0].targets
    shape = dataclasses.replace(
        shape, layer_bytes=sum(target.segment_weight_bytes) // shape.num_layers, head_bytes=target.head_weight_bytes
    )
    for quantization in ("float32", "int8"):
        _convert_to_ctranslate2(checkpoint, folder / f"ctranslate2-{quantization}", quantization)
    return shape, [len(bundle.variants) for bundle in bundles]


def checkpoint_config(name: str, tiny: bool) -> Any:
    """The shape, as transformers writes it."""
    import transformers

    kind = {"opt": transformers.OPTConfig, "llama": transformers.LlamaConfig}[name]
    return kind(**(_TINY if tiny else _SIZES)[name], **_SHARED)


def make_checkpoint(name: str, folder: Path, tiny: bool) -> Shape:
    """Random weights and a word-level tokenizer (CTranslate2's converter wants one): token 7 is "t7"."""
    import torch
    import transformers

    from skipdecode.exporter.architectures import decoder_layers

    torch.manual_seed(0)
    config = checkpoint_config(name, tiny)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    _make_tokenizer(config.vocab_size).save_pretrained(folder)
    kv_heads = getattr(config, "num_key_value_heads", config.num_attention_heads)
    return Shape(
        num_layers=config.num_hidden_layers,
        layer_bytes=sum(parameter.nbytes for parameter in decoder_layers(model)[0].parameters()),
        head_bytes=model.get_output_embeddings().weight.nbytes,
        kv_bytes=2 * 4 * kv_heads * config.hidden_size // config.num_attention_heads,
    )


def make_bundle(checkpoint: Path, out: Path, speedup: float | None, span: int, quantize: str = "none") -> Manifest:
    from skipdecode.exporter.export import ExportRequest, export
    from skipdecode.schedule_builders import ScheduleRequest

    schedule = ScheduleRequest(name="full") if speedup is None else ScheduleRequest(name="linear", speedup=speedup, span=span)
    return export(ExportRequest(model=str(checkpoint), out=out, schedule=schedule, quantize=quantize))


def _convert_to_ctranslate2(checkpoint: Path, out: Path, quantization: str) -> None:
    from ctranslate2.converters import TransformersConverter

    TransformersConverter(str(checkpoint)).convert(str(out), quantization=quantization)


def _make_tokenizer(vocabulary: int) -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = WordLevel({f"t{i}": i for i in range(vocabulary)}, unk_token="t3")
    special = {"bos_token": "t0", "pad_token": "t1", "eos_token": "t2", "unk_token": "t3"}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), **special)
