"""skip_schedule's blocks: nested ones, copies of a model made inside one, and passes that are refused."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module

from skipdecode.errors import ScheduleError
from skipdecode.exporter.architectures import decoder_layers
from skipdecode.exporter.reference import greedy_tokens, skip_schedule
from skipdecode.exporter.skip_block import _check_positions
from skipdecode.schedule import Anchor, Schedule, full_depth
from tests.models import LAYERS, VOCABULARY
from tests.zoo import Zoo

FALLING = Schedule(name="table", num_layers=LAYERS, warmup_layers=1, layers=(5, 3, 2))
ABSOLUTE = Schedule(name="table", num_layers=LAYERS, warmup_layers=1, layers=(5, 5, 3, 2), anchor=Anchor.ABSOLUTE)
IDS = torch.randint(3, VOCABULARY, (3, 9), generator=torch.Generator().manual_seed(0))
LABELS = torch.where(torch.arange(9) < torch.tensor([[2], [5], [1]]), -100, IDS)


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        made: torch.Tensor = model(IDS, labels=LABELS, use_cache=False).logits
    return made


@pytest.mark.parametrize("layers", [(2,), (6, 5, 5, 4), (LAYERS,)])
def test_a_block_inside_another_takes_its_place_until_it_ends(layers: tuple[int, ...], zoo: Zoo) -> None:
    model = zoo.model("llama")
    inner = Schedule(name="table", num_layers=LAYERS, warmup_layers=1, layers=layers, anchor=Anchor.ABSOLUTE)
    plain = logits(model)
    with skip_schedule(model, inner):
        wanted = logits(model)
    with skip_schedule(model, FALLING, prompt_length="labels"):
        outer = logits(model)
        with skip_schedule(model, inner):
            torch.testing.assert_close(logits(model), wanted, rtol=0, atol=0)
            with skip_schedule(model, full_depth(LAYERS)):
                torch.testing.assert_close(logits(model), plain, rtol=0, atol=0)
            torch.testing.assert_close(logits(model), wanted, rtol=0, atol=0)
        torch.testing.assert_close(logits(model), outer, rtol=0, atol=0)
    torch.testing.assert_close(logits(model), plain, rtol=0, atol=0)


def test_a_model_that_trains_by_labels_generates_in_an_inner_block_with_counts(zoo: Zoo) -> None:
    model, prompt = zoo.model("llama"), IDS[:1, :4]
    wanted, _ = greedy_tokens(model, FALLING, prompt[0].tolist(), 4)
    model.generation_config.eos_token_id = None
    with skip_schedule(model, FALLING, prompt_length="labels"), skip_schedule(model, FALLING, prompt_length=4):
        made = model.generate(prompt, max_new_tokens=4, do_sample=False, pad_token_id=0, use_cache=False)
    assert made[0, 4:].tolist() == wanted


def test_an_inner_block_replaces_an_outer_one_though_a_trainer_has_wrapped_its_layers(zoo: Zoo) -> None:
    model = zoo.model("llama")
    plain = logits(model)
    with skip_schedule(model, FALLING, prompt_length="labels"):
        for layer in decoder_layers(model):
            add_hook_to_module(layer, ModelHook())
        with skip_schedule(model, full_depth(LAYERS)):
            torch.testing.assert_close(logits(model), plain, rtol=0, atol=0)
        assert not torch.allclose(logits(model), plain)
    torch.testing.assert_close(logits(model), plain, rtol=0, atol=0)


def test_blocks_that_end_in_the_order_in_which_they_began_leave_nothing_behind(zoo: Zoo) -> None:
    model = zoo.model("llama")
    plain, first, second = logits(model), skip_schedule(model, ABSOLUTE), skip_schedule(model, FALLING, prompt_length="labels")
    with skip_schedule(model, FALLING, prompt_length="labels"):
        wanted = logits(model)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    torch.testing.assert_close(logits(model), wanted, rtol=0, atol=0)
    second.__exit__(None, None, None)
    torch.testing.assert_close(logits(model), plain, rtol=0, atol=0)
    assert not [module for module in model.modules() if "forward" in vars(module)]


def test_a_deep_copy_has_its_own_weights_and_skips_until_the_block_ends(zoo: Zoo) -> None:
    """As a training loop copies its best model."""
    model = zoo.model("llama")
    plain = logits(model)
    with skip_schedule(model, FALLING, prompt_length="labels"):
        wanted, best = logits(model), copy.deepcopy(model)
        with skip_schedule(best, full_depth(LAYERS)):
            torch.testing.assert_close(logits(best), plain, rtol=0, atol=0)
            torch.testing.assert_close(logits(model), wanted, rtol=0, atol=0)
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(1.5)
        torch.testing.assert_close(logits(best), wanted, rtol=0, atol=0)
        assert not torch.allclose(logits(model), wanted)
        with skip_schedule(best, full_depth(LAYERS)):
            torch.testing.assert_close(logits(copy.deepcopy(best)), plain, rtol=0, atol=0)
    torch.testing.assert_close(logits(best), plain, rtol=0, atol=0)
    with skip_schedule(best, FALLING, prompt_length="labels"):
        torch.testing.assert_close(logits(best), wanted, rtol=0, atol=0)


def test_a_model_can_be_pickled_after_the_block_but_not_inside(zoo: Zoo) -> None:
    model = zoo.model("llama")
    with skip_schedule(model, FALLING):
        best = copy.deepcopy(model)
        with pytest.raises(ScheduleError, match="use save_pretrained, or do it after the block"):
            pickle.dumps(model)
    for ended in (model, best):
        torch.testing.assert_close(logits(pickle.loads(pickle.dumps(ended))), logits(model), rtol=0, atol=0)


def test_replicas_of_dataparallel_are_refused(zoo: Zoo) -> None:
    """Trainer makes them where one process sees several GPUs."""
    model = zoo.model("llama")
    with skip_schedule(model, FALLING), pytest.raises(ScheduleError, match="start one process per GPU with torchrun"):
        model._replicate_for_data_parallel()(IDS, use_cache=False)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("fill", [0, 1])
def test_positions_of_padding_do_not_matter(side: str, fill: int, zoo: Zoo) -> None:
    model, mask = zoo.model("llama"), torch.ones_like(IDS)
    mask[1, slice(0, 3) if side == "left" else slice(-3, None)] = 0
    positions = (mask.cumsum(1) - 1).masked_fill(mask == 0, fill)
    with torch.no_grad(), skip_schedule(model, FALLING, prompt_length=[2, 5, 1]):
        made = model(IDS, attention_mask=mask, position_ids=positions, use_cache=False).logits
        seen = IDS[1:2, mask[1].bool()]
        with skip_schedule(model, FALLING, prompt_length=2 if side == "left" else 5):
            alone = model(seen, use_cache=False).logits[0]
    torch.testing.assert_close(made[1, mask[1].bool()], alone, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("positions", "mask"),
    [
        ([0, 1, 2, 3, 0, 1, 2, 3, 4], None),
        ([0, 1, 2, 3, 0, 1, 2, 3, 4], [1] * 9),
        ([0, 0, 1, 2, 3, 4, 5, 6, 7], None),  # the first has one token
        ([0, 0, 1, 2, 3, 4, 5, 6, 7], [1] * 9),
        ([0, 1, 2, 3, 1, 0, 1, 2, 3], [1, 1, 1, 1, 0, 1, 1, 1, 1]),  # and padding between them
    ],
)
def test_several_sequences_packed_into_a_row_are_refused(positions: list[int], mask: list[int] | None, zoo: Zoo) -> None:
    given = None if mask is None else torch.tensor([mask] * 3)
    model = zoo.model("llama")
    with skip_schedule(model, FALLING), pytest.raises(ScheduleError, match="position_ids restart within one"):
        model(IDS, attention_mask=given, position_ids=torch.tensor([positions] * 3), use_cache=False)


def test_positions_in_time_and_space_may_repeat_but_positions_of_text_may_not() -> None:
    """An image's patches share them in Qwen's; of the four that some pass the first are the text's, which packing restarts."""
    image = torch.tensor([[[0, 1, 1, 2, 2]]]).expand(3, 1, 5)
    _check_positions(image, torch.ones(1, 5))
    _check_positions(torch.cat((torch.arange(5).expand(1, 1, 5), image)), None)
    with pytest.raises(ScheduleError, match="position_ids restart within one"):
        _check_positions(torch.cat((torch.tensor([[[0, 1, 2, 0, 1]]]), image)), None)
