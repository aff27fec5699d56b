"""Train the model that ships in examples/e2e: OPT architecture, 12 layers, through the reference with the schedule on.

    python examples/e2e/train.py --data DIR --out DIR

DIR holds the E2E data's `trainset.csv` and `devset.csv`. Each batch draws a speedup from 1x to 4x, so that one model serves
full depth and every schedule up to 4x (SkipDecode, arXiv 2307.02628, section 3; the draw per batch is ours).
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections import defaultdict
from pathlib import Path

import torch
from data import prompt, read_pairs, shuffled
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import OPTConfig, OPTForCausalLM, PreTrainedTokenizerFast

from skipdecode.exporter.reference import skip_schedule
from skipdecode.schedule_builders import ScheduleRequest, build_schedule

LAYERS, WIDTH, HEADS, VOCABULARY, POSITIONS = 12, 192, 6, 2048, 256
SPAN = 48  # positions until the schedule reaches its least count; the sentences' 90th percentile
SPEEDUPS = (1.0, 2.0, 2.0, 3.0, 4.0)
BATCH = 64
PAD, BOS, EOS = 1, 0, 2


def train_tokenizer(pairs: list[tuple[str, str]], out: Path) -> Tokenizer:
    """A byte-level BPE of 2048 entries over prompts and sentences; no start token is added."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=["<s>", "<pad>", "</s>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator((prompt(mr) + " " + text for mr, text in pairs), trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", pad_token="<pad>", eos_token="</s>").save_pretrained(out)
    return tokenizer


def batches(pairs: list[tuple[str, str]], tokenizer: Tokenizer, rng: random.Random) -> list[list[tuple[list[int], list[int]]]]:
    """One epoch of batches whose rows have the same prompt length, so that no position is padding before the sentence."""
    groups: dict[int, list[tuple[list[int], list[int]]]] = defaultdict(list)
    asked = tokenizer.encode_batch([prompt(shuffled(mr, rng)) for mr, _ in pairs])
    said = tokenizer.encode_batch([" " + text for _, text in pairs])
    for question, answer in zip(asked, said, strict=True):
        groups[len(question.ids)].append((question.ids, [*answer.ids, EOS]))
    rows = []
    for group in groups.values():
        rng.shuffle(group)
        rows += [group[i : i + BATCH] for i in range(0, len(group), BATCH)]
    rng.shuffle(rows)
    return rows


def loss_of(model: OPTForCausalLM, batch: list[tuple[list[int], list[int]]], request: ScheduleRequest) -> torch.Tensor:
    """Mean cross-entropy of the sentences' tokens, each position computing what the schedule says."""
    start = len(batch[0][0])
    length = min(POSITIONS, max(len(q) + len(a) for q, a in batch))
    ids = torch.full((len(batch), length), PAD)
    labels = torch.full((len(batch), length), -100)
    for row, (question, answer) in enumerate(batch):
        tokens = torch.tensor([*question, *answer][:length])
        ids[row, : len(tokens)] = tokens
        labels[row, start : len(tokens)] = tokens[start:]
    with skip_schedule(model, build_schedule(request, LAYERS), prompt_length=start):
        hidden = model.model.decoder(ids, use_cache=False).last_hidden_state
    logits = model.lm_head(hidden[:, start - 1 : -1])
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, start:].flatten())


def train(model: OPTForCausalLM, pairs: list[tuple[str, str]], tokenizer: Tokenizer, minutes: float) -> dict[str, float]:
    """AdamW with a cosine over the time that is allowed; returns what the model card tells."""
    rng = random.Random(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, betas=(0.9, 0.98), weight_decay=0.05)
    began, step, epochs, smooth = time.monotonic(), 0, 0.0, 0.0
    while epochs == int(epochs):
        rows = batches(pairs, tokenizer, rng)
        for index, batch in enumerate(rows):
            done = (time.monotonic() - began) / 60 / minutes
            if done >= 1:
                epochs += index / len(rows)
                return {"epochs": round(epochs, 2), "steps": step, "minutes": round(minutes, 1), "last_loss": round(smooth, 3)}
            for group in optimizer.param_groups:
                group["lr"] = 1.2e-3 * min(1.0, (step + 1) / 300) * (0.02 + 0.98 * (1 + math.cos(math.pi * done)) / 2)
            request = ScheduleRequest(name="linear", speedup=rng.choice(SPEEDUPS), span=SPAN)
            loss = loss_of(model, batch, request)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            step += 1
            smooth = loss.item() if step == 1 else 0.98 * smooth + 0.02 * loss.item()
            if step % 100 == 0:
                print(f"step {step} epoch {epochs + index / len(rows):.2f} loss {smooth:.3f} {done:.0%}", flush=True)
        epochs += 1
    return {}


@torch.no_grad()
def dev_losses(model: OPTForCausalLM, pairs: list[tuple[str, str]], tokenizer: Tokenizer) -> dict[str, float]:
    """Loss per token on the first development batches at each speedup."""
    model.eval()
    rows = batches(pairs, tokenizer, random.Random(1))[:24]
    losses = {}
    for speedup in sorted(set(SPEEDUPS)):
        request = ScheduleRequest(name="linear", speedup=speedup, span=SPAN)
        losses[f"{speedup:g}x"] = round(sum(loss_of(model, batch, request).item() for batch in rows) / len(rows), 4)
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with trainset.csv and devset.csv")
    parser.add_argument("--out", type=Path, required=True, help="where the model goes")
    parser.add_argument("--minutes", type=float, default=40, help="training time")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(options.threads)
    pairs = read_pairs(options.data / "trainset.csv")
    tokenizer = train_tokenizer(pairs, options.out)
    config = OPTConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, num_hidden_layers=LAYERS, ffn_dim=4 * WIDTH, num_attention_heads=HEADS,
        max_position_embeddings=POSITIONS, word_embed_proj_dim=WIDTH, dropout=0.0,
        bos_token_id=BOS, pad_token_id=PAD, eos_token_id=EOS,
    )  # fmt: skip
    model = OPTForCausalLM(config)
    record = {"training": train(model, pairs, tokenizer, options.minutes), "threads": options.threads}
    record["dev_loss"] = dev_losses(model, read_pairs(options.data / "devset.csv"), tokenizer)
    model.half().save_pretrained(options.out)
    (options.out / "training.json").write_text(json.dumps(record, indent=2) + "\n")
    print(json.dumps(record))


if __name__ == "__main__":
    main()
