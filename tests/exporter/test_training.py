"""Fine-tuning through a schedule: a plain PyTorch loop and transformers' Trainer, on every architecture of the exporter."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments

import skipdecode
from skipdecode.errors import ScheduleError
from skipdecode.exporter.architectures import decoder_layers
from skipdecode.exporter.export import export
from skipdecode.exporter.reference import greedy_tokens, skip_schedule
from skipdecode.exporter.request import ExportRequest
from skipdecode.schedule import Anchor, Schedule, full_depth
from tests.models import CONFIGS, LAYERS, VOCABULARY
from tests.zoo import Zoo

SCHEDULE = Schedule(name="table", num_layers=LAYERS, warmup_layers=1, layers=(5, 5, 4, 4, 4, 3), anchor=Anchor.ABSOLUTE)
LENGTH, ROWS, STEPS = 8, 4, 6
PROMPTS = [2, 5, 1, 7]  # their lengths
CAPS = [LENGTH if cap is None else cap for cap in map(SCHEDULE.cap, range(LAYERS))]


def rows() -> list[dict[str, torch.Tensor]]:
    """The same four sequences, so that a few steps lower the loss."""
    ids = torch.randint(3, VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row, "attention_mask": torch.ones_like(row)} for row in ids]


def batch() -> dict[str, torch.Tensor]:
    """The same sequences as one batch."""
    return {key: torch.stack([row[key] for row in rows()]) for key in rows()[0]}


def positions_computed(model: torch.nn.Module) -> dict[int, set[int]]:
    """How many positions the attention of each layer saw, filled in when the model runs."""
    seen: dict[int, set[int]] = defaultdict(set)
    for index, layer in enumerate(decoder_layers(model)):
        attention = getattr(layer, "self_attn", None) or getattr(layer, "attn", None) or layer.attention
        attention.register_forward_hook(
            lambda module, args, kwargs, out, index=index: seen[index].add(out[0].shape[1]), with_kwargs=True
        )
    return seen


def weights(model: torch.nn.Module) -> list[torch.Tensor]:
    """The weights of each layer as one vector."""
    return [torch.cat([p.detach().flatten() for p in layer.parameters()]).clone() for layer in decoder_layers(model)]


def assert_trained_as_scheduled(before: list[torch.Tensor], model: torch.nn.Module, seen: dict[int, set[int]]) -> None:
    assert dict(seen) == {layer: {cap} for layer, cap in enumerate(CAPS) if cap}
    changed = [not torch.equal(old, new) for old, new in zip(before, weights(model), strict=True)]
    assert changed == [cap > 0 for cap in CAPS]


@pytest.mark.parametrize("name", CONFIGS)
def test_a_plain_loop_trains_the_layers_that_the_schedule_computes(name: str, zoo: Zoo) -> None:
    model = zoo.model(name).train()
    before, seen = weights(model), positions_computed(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    losses = []
    with skip_schedule(model, SCHEDULE):
        for _ in range(STEPS):
            loss = model(**batch(), use_cache=False).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert_trained_as_scheduled(before, model, seen)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_trainer_trains_the_layers_that_the_schedule_computes(name: str, zoo: Zoo, tmp_path: Path) -> None:
    model = zoo.model(name)
    before, seen = weights(model), positions_computed(model)
    with skip_schedule(model, SCHEDULE):
        losses = [entry["loss"] for entry in trained(model, tmp_path).state.log_history if "loss" in entry]
    assert len(losses) == STEPS and losses[-1] < losses[0]
    assert_trained_as_scheduled(before, model, seen)


@pytest.mark.parametrize("name", ["opt", "llama"])
def test_activation_checkpointing_gives_the_same_weights(name: str, zoo: Zoo, tmp_path: Path) -> None:
    plain, checkpointed = zoo.model(name), zoo.model(name)
    for model, on in ((plain, False), (checkpointed, True)):
        with skip_schedule(model, SCHEDULE):
            trained(model, tmp_path, activation_checkpointing=on)
    torch.testing.assert_close(weights(checkpointed), weights(plain))


def test_the_trainer_trains_prompts_of_several_lengths_as_each_row_alone(zoo: Zoo, tmp_path: Path) -> None:
    model, alone = zoo.model("llama"), zoo.model("llama").train()
    schedule = Schedule(name="table", num_layers=LAYERS, warmup_layers=1, layers=(4, 3, 2))
    data = rows()
    for row, count in zip(data, PROMPTS, strict=True):
        row["labels"] = torch.where(torch.arange(LENGTH) < count, -100, row["input_ids"])
    with skip_schedule(model, schedule, prompt_length="labels"):
        trained(model, tmp_path, data=data, max_steps=1, max_grad_norm=0.0)
    learned = sum(LENGTH - count for count in PROMPTS)
    for row, count in zip(data, PROMPTS, strict=True):
        with skip_schedule(alone, schedule, prompt_length=count):
            logits = alone(row["input_ids"][None], use_cache=False).logits[0, count - 1 : -1]
        (torch.nn.functional.cross_entropy(logits, row["labels"][count:], reduction="sum") / learned).backward()
    torch.optim.SGD(alone.parameters(), lr=0.02).step()
    torch.testing.assert_close(weights(model), weights(alone))


def test_several_sequences_packed_into_a_row_are_refused(zoo: Zoo) -> None:
    model = zoo.model("llama").train()
    packed = DataCollatorWithFlattening()([{"input_ids": row["input_ids"].tolist()} for row in rows()])
    with (
        skip_schedule(model, SCHEDULE),
        pytest.raises(ScheduleError, match="position_ids restart within one; train without packing"),
    ):
        model(**packed, use_cache=False)
    with skip_schedule(model, full_depth(LAYERS)):
        model(**packed, use_cache=False)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_activations_are_recomputed_as_scheduled_though_the_block_has_ended(reentrant: bool, zoo: Zoo) -> None:
    gradients = []
    for checkpointing in (False, True):
        model = zoo.model("llama").train()
        if checkpointing:
            model.activation_checkpointing_enable({"use_reentrant": reentrant})
        with skip_schedule(model, SCHEDULE):
            loss = model(**batch(), use_cache=False).loss
        loss.backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    torch.testing.assert_close(gradients[1], gradients[0])


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft asks for it
@pytest.mark.parametrize("activation_checkpointing", [False, True])
def test_an_adapter_is_trained_as_scheduled_and_exported(activation_checkpointing: bool, zoo: Zoo, tmp_path: Path) -> None:
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    model = peft.get_peft_model(zoo.model("llama"), lora)
    decoder = model.get_base_model()
    before, seen = weights(decoder), positions_computed(decoder)
    with skip_schedule(model, SCHEDULE):
        trained(model, tmp_path / "logs", activation_checkpointing=activation_checkpointing)
    assert_trained_as_scheduled(before, decoder, seen)

    model.save_pretrained(tmp_path / "adapter")
    export(ExportRequest(model=str(tmp_path / "adapter"), out=tmp_path / "bundle"))
    prompt = [5, 6, 7]
    tokens, _ = greedy_tokens(model.merge_and_unload().eval(), full_depth(LAYERS), prompt, 8)
    made = skipdecode.load(tmp_path / "bundle").generate([prompt], max_new_tokens=8, schedule="full", ignore_eos=True)
    assert list(made.sequences[0].token_ids) == tokens != greedy_tokens(zoo.model("llama"), full_depth(LAYERS), prompt, 8)[0]


def trained(
    model: Any, folder: Path, *, data: list[dict[str, torch.Tensor]] | None = None, max_steps: int = STEPS, **arguments: Any
) -> Trainer:
    """A Trainer that has run a few steps over the same batch."""
    settings = TrainingArguments(
        output_dir=str(folder), max_steps=max_steps, per_device_train_batch_size=ROWS, learning_rate=0.02, optim="sgd",
        logging_steps=1, save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True, lr_scheduler_type="constant",
        dataloader_pin_memory=False, **arguments,
    )  # fmt: skip
    trainer = Trainer(model=model, args=settings, train_dataset=data or rows())
    trainer.train()
    return trainer
