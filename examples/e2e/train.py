"""Train one model of the experiment: OPT architecture, 24 layers, through the reference with or without a schedule.

    python examples/e2e/train.py --data DIR --out DIR --steps 900                                      from scratch, full depth
    python examples/e2e/train.py --data DIR --out DIR --steps 450 --start MODEL --speedups 1,2,3,4,5   fine-tuned to skip

The DIR of --data holds the E2E data's `trainset.csv`. Each batch draws one of the speedups, so that one model serves
all of them. (SkipDecode, arXiv 2307.02628, section 3, trains one model per speedup; drawing per batch is this project's own.)
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from data import SPAN, prompt, read_pairs, shuffled
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import OPTConfig, OPTForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from skipdecode.errors import SkipDecodeError
from skipdecode.exporter import skip_schedule
from skipdecode.schedule import Schedule, active_layers
from skipdecode.schedule_builders import ScheduleRequest, build_schedule

LAYERS, WIDTH, HEADS, VOCABULARY, POSITIONS = 24, 128, 4, 2048, 256
BATCH = 32
PAD, BOS, EOS = 1, 0, 2

Pairs = list[tuple[str, str]]
Batch = list[tuple[list[int], list[int]]]  # (prompt ids, sentence ids) per row; the prompts of a batch have one length


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How one model is trained."""

    steps: int
    speedups: tuple[float, ...]  # each batch draws one; (1.0,) is training without skipping
    warmup_layers: int  # of the schedules; LAYERS: early exit
    learning_rate: float  # at its peak
    bf16: bool  # matrix products in bfloat16; weights and optimizer stay in float32
    seed: int  # for the order of the data and of the speedups

    def schedules(self, num_layers: int) -> list[Schedule]:
        """The schedules of all speedups, of which each batch draws one."""
        skipping = ScheduleRequest(span=SPAN, warmup_layers=self.warmup_layers)
        requests = [ScheduleRequest(name="full") if s == 1 else replace(skipping, speedup=s) for s in self.speedups]
        return [build_schedule(request, num_layers) for request in requests]


def train_tokenizer(pairs: Pairs) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE of 2048 entries on prompts and sentences; it adds no start token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=["<s>", "<pad>", "</s>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator((prompt(mr) + " " + text for mr, text in pairs), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", pad_token="<pad>", eos_token="</s>")


def new_model() -> OPTForCausalLM:
    """OPT with weights initialised as transformers does."""
    config = OPTConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, num_hidden_layers=LAYERS, ffn_dim=4 * WIDTH, num_attention_heads=HEADS,
        max_position_embeddings=POSITIONS, word_embed_proj_dim=WIDTH, dropout=0.0,
        bos_token_id=BOS, pad_token_id=PAD, eos_token_id=EOS,
    )  # fmt: skip
    return OPTForCausalLM(config)


def truncate(model: OPTForCausalLM, count: int) -> None:
    """Keep the layers that a position with `count` layers computes: the first one and the last ones."""
    kept = active_layers(len(model.model.decoder.layers), 1, count)
    model.model.decoder.layers = torch.nn.ModuleList(model.model.decoder.layers[layer] for layer in kept)
    model.config.num_hidden_layers = count


def batches(pairs: Pairs, tokenizer: PreTrainedTokenizerFast, rng: random.Random) -> list[Batch]:
    """One epoch of batches whose rows have the same prompt length, so that no padding precedes a sentence."""
    groups: dict[int, Batch] = defaultdict(list)
    prompts = tokenizer([prompt(shuffled(mr, rng)) for mr, _ in pairs])["input_ids"]
    sentences = tokenizer([" " + text for _, text in pairs])["input_ids"]
    for prompt_ids, sentence_ids in zip(prompts, sentences, strict=True):
        groups[len(prompt_ids)].append((prompt_ids, [*sentence_ids, EOS]))
    epoch = []
    for group in groups.values():
        rng.shuffle(group)
        epoch += [group[i : i + BATCH] for i in range(0, len(group), BATCH)]
    rng.shuffle(epoch)
    return epoch


def loss_of(model: PreTrainedModel, batch: Batch, schedule: Schedule) -> torch.Tensor:
    """Mean cross-entropy of the sentences' tokens, each position computing the layers that the schedule says."""
    start = len(batch[0][0])
    length = min(POSITIONS, max(len(prompt_ids) + len(sentence_ids) for prompt_ids, sentence_ids in batch))
    ids = torch.full((len(batch), length), PAD)
    labels = torch.full((len(batch), length), -100)
    for row, (prompt_ids, sentence_ids) in enumerate(batch):
        tokens = torch.tensor([*prompt_ids, *sentence_ids][:length])
        ids[row, : len(tokens)] = tokens
        labels[row, start : len(tokens)] = tokens[start:]
    with skip_schedule(model, schedule, prompt_length=start):
        hidden = model.base_model(ids, use_cache=False).last_hidden_state
    logits = model.lm_head(hidden[:, start - 1 : -1]).float()
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, start:].flatten())


def train(model: PreTrainedModel, pairs: Pairs, tokenizer: PreTrainedTokenizerFast, recipe: Recipe) -> dict[str, float]:
    """Train with AdamW, a short warm-up, then a cosine to 2 % of the peak rate; returns what the model card reports."""
    rng = random.Random(recipe.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, betas=(0.9, 0.98), weight_decay=0.05)
    began, smooth = time.monotonic(), 0.0
    schedules = recipe.schedules(model.config.num_hidden_layers)
    waiting: list[Batch] = []
    for step in range(recipe.steps):
        waiting = waiting or batches(pairs, tokenizer, rng)
        rising, falling = min(1.0, (step + 1) / 60), (1 + math.cos(math.pi * step / recipe.steps)) / 2
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate * rising * (0.02 + 0.98 * falling)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=recipe.bf16):
            loss = loss_of(model, waiting.pop(), rng.choice(schedules))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        smooth = loss.item() if step == 0 else 0.98 * smooth + 0.02 * loss.item()
        if (step + 1) % 50 == 0:
            print(f"step {step + 1} of {recipe.steps} loss {smooth:.3f} {time.monotonic() - began:.0f} s", flush=True)
    return {"steps": recipe.steps, "minutes": round((time.monotonic() - began) / 60, 1), "last_loss": round(smooth, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with trainset.csv")
    parser.add_argument("--out", type=Path, required=True, help="folder for the model")
    parser.add_argument("--steps", type=int, required=True, help=f"batches of {BATCH} rows")
    parser.add_argument("--start", type=Path, help="the model to fine-tune (a new one)")
    parser.add_argument("--keep-layers", type=int, help="first truncate the model to this many layers")
    parser.add_argument("--speedups", type=lambda text: tuple(map(float, text.split(","))), default=(1.0,))
    parser.add_argument("--warmup-layers", type=int, default=1, help=f"warm-up layers of the schedules; {LAYERS} is early exit")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--bf16", action="store_true", help="matrix products in bfloat16, where the processor has them")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0, help="for a new model's weights and the order of the data")
    options = parser.parse_args()
    table = options.data / "trainset.csv"
    for option, path in (("--data", table), ("--start", options.start)):
        if path is not None and not path.exists():
            parser.error(f"{option}: there is no {path}")
    torch.manual_seed(options.seed)
    torch.set_num_threads(options.threads)
    pairs = read_pairs(table)
    start = options.start
    tokenizer = PreTrainedTokenizerFast.from_pretrained(start) if start else train_tokenizer(pairs)
    model = OPTForCausalLM.from_pretrained(start, dtype=torch.float32) if start else new_model()
    if options.keep_layers is not None:
        depth = model.config.num_hidden_layers
        if not 2 <= options.keep_layers <= depth:
            parser.error(f"--keep-layers: {options.keep_layers} is out of range; choose 2..{depth}")
        truncate(model, options.keep_layers)
    recipe = Recipe(
        steps=options.steps, speedups=options.speedups, warmup_layers=options.warmup_layers,
        learning_rate=options.learning_rate, bf16=options.bf16, seed=options.seed,
    )  # fmt: skip
    try:
        recipe.schedules(model.config.num_hidden_layers)
        options.out.mkdir(parents=True, exist_ok=True)
    except (SkipDecodeError, OSError) as error:  # now rather than hours later
        parser.error(str(error))
    record = {"command": vars(options) | {"data": None, "out": None, "start": start and start.name}}
    record["training"] = train(model, pairs, tokenizer, recipe)
    tokenizer.save_pretrained(options.out)
    model.half().save_pretrained(options.out)
    (options.out / "training.json").write_text(json.dumps(record, indent=2) + "\n")
    print(json.dumps(record))


if __name__ == "__main__":
    main()
