"""What do skipping and quantised weights cost models whose layers keep states? Small models, trained alike on the E2E data.

Each has 12 layers of width 128: attention in all of them (Llama), or in every third one between short convolutions (LFM2),
Gated DeltaNet (Qwen3.5) or Mamba-2 (Granite 4). Each training batch draws a schedule of 1x, 2x or 3x. Then texts, BLEU and logits
are measured as in quantized_quality.py, on the development set's inputs.

examples:
  hybrid_quality.py --data DIR --out DIR                             (trainset.csv and devset.csv in DIR: half an hour)
  hybrid_quality.py --data DIR --out DIR --models lfm2 --steps 100
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from machine import facts, write_results
from models import hybrid_layers
from quantized_quality import EXAMPLE, measure
from transformers import AutoConfig, AutoModelForCausalLM

sys.path.insert(0, str(EXAMPLE))
from data import examples_of, read_pairs
from train import Recipe, train, train_tokenizer

_LAYERS = 12
_SIZES = {
    "vocab_size": 2048, "hidden_size": 128, "num_hidden_layers": _LAYERS, "num_attention_heads": 4, "num_key_value_heads": 4,
    "head_dim": 32, "intermediate_size": 384, "max_position_embeddings": 256, "tie_word_embeddings": True,
    "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2,
}  # fmt: skip
_DELTA_NET_OR_MAMBA = {"layer_types": hybrid_layers(_LAYERS, "linear_attention", 3)}
_MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "lfm2": {"layer_types": hybrid_layers(_LAYERS, "conv", 3), "block_auto_adjust_ff_dim": False},
    "qwen3_5_text": {
        **_DELTA_NET_OR_MAMBA, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
    },
    "granitemoehybrid": {
        **_DELTA_NET_OR_MAMBA, "num_local_experts": 0, "shared_intermediate_size": 384,
        "position_embedding_type": "rope", "mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 32, "mamba_chunk_size": 32,
    },
}  # fmt: skip
_KINDS = (("none", "rtn", 32), ("int8", "rtn", 32), ("int4", "rtn", 32), ("int4", "k-quant", 32))


def main() -> int:
    """Train and measure one model after the other; prints one JSON line, and writes results/ if no model was left out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with trainset.csv and devset.csv")
    parser.add_argument(
        "--out", type=Path, required=True, help="folder for the models; those already there are not trained again"
    )
    parser.add_argument("--models", nargs="+", choices=_MODELS, default=list(_MODELS))
    parser.add_argument("--steps", type=int, default=600, help="batches of 32 rows")
    options = parser.parse_args()
    torch.set_num_threads(2)
    examples = examples_of(options.data / "devset.csv")
    rows: dict[str, Any] = {}
    for name in options.models:
        folder = options.out / name
        if not folder.exists():
            _train(name, folder, options.data / "trainset.csv", options.steps)
        print(name, flush=True)
        rows[name] = measure(folder, examples, _KINDS)
    result = {"machine": facts(), "steps": options.steps, "models": rows}
    print(json.dumps(result))
    if options.models == list(_MODELS):  # a part of them would replace the results of all
        write_results("hybrid-quality", result)
    return 0


def _train(name: str, folder: Path, data: Path, steps: int) -> None:
    began = time.monotonic()
    torch.manual_seed(0)
    pairs = read_pairs(data)
    tokenizer = train_tokenizer(pairs)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **_SIZES, **_MODELS[name]), dtype=torch.float32)
    recipe = Recipe(steps=steps, speedups=(1.0, 2.0, 3.0), warmup_layers=1, learning_rate=2e-3, bf16=False, seed=0)
    trained = train(model, pairs, tokenizer, recipe)
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
    print(f"{name}: trained in {(time.monotonic() - began) / 60:.1f} minutes, loss {trained['last_loss']}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
