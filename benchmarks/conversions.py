"""Converts a checkpoint to each peer's own format."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

GGUF_KINDS = {"fp32": "F32", "int8": "Q8_0", "int4": "Q4_0"}  # llama.cpp's nearest formats: symmetric blocks of 32


def to_ctranslate2(checkpoint: Path, out: Path, kind: str) -> None:
    """Convert with CTranslate2's own converter; `kind` is fp32 or int8."""
    from ctranslate2.converters import TransformersConverter

    TransformersConverter(str(checkpoint)).convert(str(out), quantization={"fp32": "float32", "int8": "int8"}[kind])
    path = out / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config["unk_token"] = config["unk_token"] or config["eos_token"]  # byte-level tokenizers have none, but CTranslate2 needs one
    path.write_text(json.dumps(config), encoding="utf-8")


def to_genai(checkpoint: Path, out: Path, kind: str, threads: int, block: int) -> None:
    """Convert with ONNX Runtime GenAI's own builder. `kind`: fp32, or int4 in blocks of `block` and int8 activations, as here."""
    command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", str(checkpoint), "-o", str(out), "-p", kind]
    command += ["-e", "cpu", "-c", str(out / "cache")]
    if kind == "int4":
        command += ["--extra_options", f"block_size={block}", "accuracy_level=4", "is_symmetric=true"]
    subprocess.run(command, check=True, capture_output=True)
    path = out / "genai_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config["model"]["decoder"]["session_options"]["intra_op_num_threads"] = threads
    path.write_text(json.dumps(config), encoding="utf-8")


def to_gguf(checkpoint: Path, out: Path, kind: str) -> None:
    """Write a Llama or Mixtral as GGUF with llama.cpp's own writer and quantiser; without a tokenizer, since prompts are ids."""
    import gguf
    from safetensors.numpy import load_file

    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(str(out), "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(config["hidden_size"] // heads)
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    if "num_local_experts" in config:
        writer.add_expert_count(config["num_local_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_tokenizer_model("no_vocab")
    quantization = gguf.GGMLQuantizationType[GGUF_KINDS[kind]]
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    for name, weight in _experts_together(load_file(checkpoint / "model.safetensors")).items():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            weight = _interleaved(weight, heads if "q_proj" in name else kv_heads)
        title = names.get_name(name, try_suffixes=(".weight",))
        if weight.ndim == 1 or kind == "fp32" or ".gate." in name:  # a mixture's router stays in fp32
            writer.add_tensor(title, weight)
        else:
            writer.add_tensor(title, gguf.quants.quantize(weight, quantization), raw_dtype=quantization)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _experts_together(tensors: dict[str, Any]) -> dict[str, Any]:
    """Stack the matrices of a layer's experts as one [E,N,K] array under their common name."""
    together: dict[str, list[Any]] = {}
    for name in sorted(tensors, key=lambda name: (len(name), name)):  # expert 9 before expert 10
        together.setdefault(re.sub(r"\.experts\.\d+\.", ".experts.", name), []).append(tensors[name])
    return {name: np.stack(parts) if ".experts." in name else parts[0] for name, parts in together.items()}


def _interleaved(weight: Any, heads: int) -> Any:
    """Put rotary pairs side by side, as llama.cpp's `llama` architecture expects; Hugging Face keeps them half a head apart."""
    outputs, inputs = weight.shape
    return weight.reshape(heads, 2, outputs // heads // 2, inputs).swapaxes(1, 2).reshape(outputs, inputs)
