"""The `forward` of layers inside a skip_schedule block, together with what other libraries do to layers."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, multiprocessing
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM

from skipdecode.exporter.architectures import decoder_layers
from skipdecode.exporter.reference import skip_schedule
from skipdecode.schedule import Anchor, Schedule
from tests.models import LAYERS, VOCABULARY
from tests.zoo import Zoo

SCHEDULE = Schedule(name="table", num_layers=LAYERS, warmup_layers=1, layers=(3, 2))  # some layers compute only prompts
IDS = torch.randint(3, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(0))
ABSOLUTE = Schedule(name="table", num_layers=LAYERS, warmup_layers=1, layers=(5, 5, 3, 2), anchor=Anchor.ABSOLUTE)
ROW = IDS[:1, :7]
PROMPTS = (4, 0)  # lengths, of either process's row


def test_a_layers_own_forward_is_restored_afterwards(zoo: Zoo) -> None:
    """As accelerate's hooks are, of a model that is spread over devices."""
    model = zoo.model("llama")
    layer = decoder_layers(model)[3]
    own = layer.forward = functools.partial(layer.forward)
    with skip_schedule(model, SCHEDULE):
        assert layer.forward is not own
    assert vars(layer)["forward"] is own


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    """A group of only this process, as of a script that torchrun starts."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def compiled(model: torch.nn.Module) -> Any:
    return torch.compile(model, backend="eager")


def sharded(model: torch.nn.Module) -> Any:
    """Shard a model with FSDP, each layer by itself."""
    for layer in decoder_layers(model):
        fully_shard(layer)
    return fully_shard(model)


@pytest.mark.parametrize("wrap", [compiled, DistributedDataParallel, sharded])
def test_a_wrapped_model_skips_the_same(wrap: Any, zoo: Zoo, process_group: None) -> None:
    model, wrapper = zoo.model("llama"), wrap(zoo.model("llama"))
    with torch.no_grad():
        with skip_schedule(model, ABSOLUTE):
            plain = model(ROW, use_cache=False).logits
        with skip_schedule(wrapper, ABSOLUTE):
            torch.testing.assert_close(wrapper(ROW, use_cache=False).logits, plain)
        for count in (2, 5):
            labels = torch.where(torch.arange(7) < count, -100, ROW)
            with skip_schedule(model, SCHEDULE, prompt_length=count):
                plain = model(ROW, use_cache=False).logits
            with skip_schedule(wrapper, SCHEDULE, prompt_length="labels"):
                torch.testing.assert_close(wrapper(ROW, labels=labels, use_cache=False).logits, plain)


def test_layers_sharded_inside_the_block_recompute_their_activations_as_others_do(zoo: Zoo, process_group: None) -> None:
    """Trainer shards in train(), which changes the layers' classes."""
    counts = []
    for inside in (False, True):
        model, runs = zoo.model("llama").train(), []
        model.activation_checkpointing_enable()
        for layer in decoder_layers(model):
            layer.mlp.register_forward_pre_hook(lambda *_, runs=runs: runs.append(1))
        with skip_schedule(model, SCHEDULE, prompt_length=4):
            if inside:
                sharded(model)
            loss = model(IDS, labels=IDS, use_cache=False).loss
            forward = len(runs)
            loss.backward()
        counts.append((forward, len(runs) - forward))
    assert counts == [(LAYERS, LAYERS)] * 2


def one_step(rank: int, kind: str, checkpoint: Path, folder: Path) -> None:
    """A process's share of a training step: the first one saves the gradients, averaged over both rows, by parameter."""
    torch.set_num_threads(1)
    meeting, patience = f"file://{folder / kind}", timedelta(seconds=60)
    distributed.init_process_group("gloo", init_method=meeting, timeout=patience, rank=rank, world_size=len(PROMPTS))
    model = AutoModelForCausalLM.from_pretrained(checkpoint).train()
    with skip_schedule(model, SCHEDULE, prompt_length=PROMPTS[rank]):
        outer = {"ddp": DistributedDataParallel, "fsdp": sharded}[kind](model)
        for _ in range(2):  # in the second DDP notices what the first has left out
            model.zero_grad()
            outer(IDS[rank : rank + 1], labels=IDS[rank : rank + 1], use_cache=False).loss.backward()
    found = {name: weight.grad for name, weight in model.named_parameters()}
    found = {name: grad.full_tensor() if kind == "fsdp" else grad for name, grad in found.items()}
    if rank == 0:
        torch.save(found, folder / f"{kind}.pt")
    os._exit(0)  # DDP's own exit waits for a thread of its process group, which may wait for the GIL


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_processes_whose_rows_have_no_prompt_do_not_stall_one_another(
    kind: str, zoo: Zoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They skip layers entirely that the other one computes, and gradients are those of one process with all rows."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2])  # they inherit it, and import this file by its name
    multiprocessing.spawn(one_step, args=(kind, zoo.checkpoint("llama"), tmp_path), nprocs=len(PROMPTS))
    model = zoo.model("llama").train()
    for row, prompt in enumerate(PROMPTS):
        with skip_schedule(model, SCHEDULE, prompt_length=prompt):
            (model(IDS[row : row + 1], labels=IDS[row : row + 1], use_cache=False).loss / len(PROMPTS)).backward()
    found = torch.load(tmp_path / f"{kind}.pt")
    for name, weight in model.named_parameters():
        torch.testing.assert_close(found[name], weight.grad, msg=name)
