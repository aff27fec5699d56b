"""Skipping in torch: what the parity tests and fine-tuning rely on."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from typing import Any

import pytest
import torch
import transformers

from skipdecode.errors import CapacityError, ModelNotSupportedError, ScheduleError
from skipdecode.exporter.architectures import decoder_layers
from skipdecode.exporter.reference import greedy_tokens, skip_schedule
from skipdecode.schedule import Anchor, Schedule, full_depth
from skipdecode.schedule_builders import ScheduleRequest
from tests.models import CONFIGS, LAYERS, LEAST_LAYERS, MAX_LENGTH, VOCABULARY
from tests.zoo import Zoo

SCHEDULE = Schedule(name="table", num_layers=LAYERS, warmup_layers=1, layers=(5, 5, 3, 2), anchor=Anchor.ABSOLUTE)
FALLING = Schedule(name="table", num_layers=LAYERS, warmup_layers=1, layers=(5, 3, 2))  # anchored at the generated tokens
IDS = torch.tensor([[5, 6, 7, 8, 9, 10, 11]])


@pytest.mark.parametrize("name", CONFIGS)
def test_a_full_schedule_changes_nothing(name: str, zoo: Zoo) -> None:
    model = zoo.model(name)
    with torch.no_grad():
        plain = model(IDS, use_cache=False).logits
        with skip_schedule(model, full_depth(LAYERS)):
            torch.testing.assert_close(model(IDS, use_cache=False).logits, plain, rtol=0, atol=0)


@pytest.mark.parametrize("name", CONFIGS)
def test_each_layer_computes_exactly_its_positions_and_the_model_is_restored_afterwards(name: str, zoo: Zoo) -> None:
    model, lengths = zoo.model(name), {}
    for index, layer in enumerate(decoder_layers(model)):
        attention = getattr(layer, "self_attn", None) or getattr(layer, "attn", None) or layer.attention
        attention.register_forward_hook(
            lambda module, args, kwargs, out, index=index: lengths.__setitem__(index, out[0].shape[1]), with_kwargs=True
        )
    with torch.no_grad():
        plain = model(IDS, use_cache=False).logits
        lengths.clear()
        with skip_schedule(model, SCHEDULE):
            skipped = model(IDS, use_cache=False).logits
        caps = [SCHEDULE.cap(layer) for layer in range(LAYERS)]
        assert lengths == {layer: 7 if cap is None else cap for layer, cap in enumerate(caps) if cap != 0}
        assert not torch.allclose(skipped, plain)
        torch.testing.assert_close(model(IDS, use_cache=False).logits, plain, rtol=0, atol=0)


@pytest.mark.parametrize(
    "name",
    [
        "opt", "gpt2", "llama", "gemma3", "bloom", "gptj", "mpt", "bamba", "falcon_h1", "lfm2", "nemotron_h", "qwen3_5_text",
        "mamba", "recurrent_gemma",
    ],
)  # fmt: skip
def test_generating_with_a_cache_is_refused_and_without_one_gives_the_greedy_tokens(name: str, zoo: Zoo) -> None:
    model = zoo.model(name)
    wanted, _ = greedy_tokens(model, FALLING, IDS[0].tolist(), 6)
    model.generation_config.eos_token_id = None
    arguments = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    with skip_schedule(model, FALLING, prompt_length=IDS.shape[1]):
        held = "states of earlier tokens" if name == "mamba" else "7 earlier tokens"
        with pytest.raises(ScheduleError, match=f"a cache holds {held}; generate with use_cache=False"):
            model.generate(IDS, use_cache=True, **arguments)
        assert model.generate(IDS, use_cache=False, **arguments)[0, IDS.shape[1] :].tolist() == wanted
    assert model.generate(IDS, use_cache=True, **arguments).shape == (1, IDS.shape[1] + 6)


@pytest.mark.parametrize("name", ["llama", "bamba", "lfm2", "qwen3_5_text", "mamba"])
def test_a_cache_is_refused_though_its_first_layer_with_attention_holds_nothing(name: str, zoo: Zoo) -> None:
    """An absolute schedule with fewer layers than the model skips some from the first token on."""
    model = zoo.model(name)
    schedule = Schedule(name="table", num_layers=LAYERS, warmup_layers=1, layers=(3, 2), anchor=Anchor.ABSOLUTE)
    with skip_schedule(model, schedule), pytest.raises(ScheduleError, match=r"a cache holds .* generate with use_cache=False"):
        model.generate(IDS, use_cache=True, max_new_tokens=6, do_sample=False, pad_token_id=0)


def test_rows_that_are_padded_on_the_left_generate_as_they_do_alone(zoo: Zoo) -> None:
    model = zoo.model("llama")
    wanted, _ = greedy_tokens(model, FALLING, IDS[0, 3:].tolist(), 6)
    ids = torch.cat([IDS, torch.nn.functional.pad(IDS[:, 3:], (3, 0), value=0)])
    model.generation_config.eos_token_id = None
    with skip_schedule(model, FALLING, prompt_length=7):
        made = model.generate(
            ids, attention_mask=(ids != 0).long(), max_new_tokens=6, do_sample=False, pad_token_id=0, use_cache=False
        )
    assert made[1, 7:].tolist() == wanted


@pytest.mark.parametrize("name", CONFIGS)
def test_rows_with_prompts_of_several_lengths_compute_what_each_does_alone(name: str, zoo: Zoo) -> None:
    model, counts, lengths = zoo.model(name), [2, 5, 1], [7, 6, 7]
    ids = torch.randint(3, VOCABULARY, (3, 7), generator=torch.Generator().manual_seed(0))
    mask = torch.arange(7) < torch.tensor(lengths)[:, None]
    with torch.no_grad():
        with skip_schedule(model, FALLING, prompt_length=counts):
            together = model(ids, attention_mask=mask.long(), use_cache=False).logits
        for row, (count, length) in enumerate(zip(counts, lengths, strict=True)):
            with skip_schedule(model, FALLING, prompt_length=count):
                alone = model(ids[row : row + 1, :length], use_cache=False).logits[0]
            torch.testing.assert_close(together[row, :length], alone, atol=1e-4, rtol=1e-4)


def test_labels_say_where_prompts_end(zoo: Zoo) -> None:
    """Also where padding precedes a prompt; a row without labels is all prompt."""
    model = zoo.model("llama")
    ids = torch.randint(3, VOCABULARY, (4, 7), generator=torch.Generator().manual_seed(0))
    labels, mask = ids.clone(), torch.ones_like(ids)
    labels[0, :2] = labels[1, :5] = labels[2] = labels[3, :4] = -100
    labels[1, 6] = -100  # not learned, but not prompt either: it follows a token that is learned
    mask[3, :3] = 0
    with torch.no_grad():
        counts = torch.tensor([2, 5, 7, 4])
        with skip_schedule(model, FALLING, prompt_length=counts):
            counted = model(ids, attention_mask=mask, use_cache=False).logits
        with skip_schedule(model, FALLING, prompt_length=(narrow := counts.to(torch.int32))):
            narrow += 1  # which counts in a later block only
            torch.testing.assert_close(model(ids, attention_mask=mask, use_cache=False).logits, counted, rtol=0, atol=0)
        with skip_schedule(model, FALLING, prompt_length="labels"):
            for rows in (slice(0, 1), slice(0, 4)):  # read again in each pass
                read = model(ids[rows], attention_mask=mask[rows], labels=labels[rows], use_cache=False).logits
                torch.testing.assert_close(read, counted[rows])


def test_counts_that_do_not_fit_are_refused(zoo: Zoo) -> None:
    model, ids = zoo.model("llama"), IDS.repeat(3, 1)
    for given in (-1, 1.5, "label", [], [1, -1], [[1]], None):
        with pytest.raises(ScheduleError, match="give a count of tokens"), skip_schedule(model, FALLING, prompt_length=given):  # type: ignore[arg-type]
            pass
    for given in ([1, 2], [1, 1]):
        with (
            skip_schedule(model, FALLING, prompt_length=given),
            pytest.raises(ScheduleError, match="2 counts, but the batch has 3 rows"),
        ):
            model(ids, use_cache=False)
    with skip_schedule(model, FALLING, prompt_length="labels"):
        model(ids, labels=ids, use_cache=False)
        with pytest.raises(ScheduleError, match=r"without labels=\.\.\.; call it with labels"):
            model(ids, use_cache=False)


def test_attention_with_masks_that_cannot_be_cut_is_refused(zoo: Zoo) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(zoo.checkpoint("llama"), attn_implementation="flex_attention")
    with pytest.raises(ModelNotSupportedError, match='attn_implementation="sdpa"'), skip_schedule(model, SCHEDULE):
        pass


def test_attention_to_later_tokens_is_refused_as_by_the_exporter(zoo: Zoo) -> None:
    model = zoo.model("llama")
    model.config.is_causal = False
    with pytest.raises(ModelNotSupportedError, match="attends to later tokens"), skip_schedule(model, SCHEDULE):
        pass


def test_a_model_without_its_head_skips_as_with_it(zoo: Zoo) -> None:
    model = zoo.model("opt")
    with torch.no_grad():
        with skip_schedule(model, SCHEDULE):
            wanted = model(IDS, use_cache=False, output_hidden_states=True).hidden_states[-1]
        with skip_schedule(model.base_model, SCHEDULE):
            torch.testing.assert_close(model.base_model(IDS, use_cache=False).last_hidden_state, wanted)


def test_a_loss_that_balances_experts_is_refused_where_layers_are_skipped(zoo: Zoo) -> None:
    """Router logits cover all positions that a layer computes, of which some rows keep fewer."""
    model, mask = zoo.model("mixtral"), torch.ones_like(IDS)
    with skip_schedule(model, full_depth(LAYERS)):
        assert model(IDS, labels=IDS, output_router_logits=True, use_cache=False).aux_loss > 0
    with skip_schedule(model, SCHEDULE):
        assert model(IDS, attention_mask=mask, labels=IDS, use_cache=False).loss > 0
        with pytest.raises(ScheduleError, match="set output_router_logits=False, in TRL's settings router"):
            model(IDS, mask, labels=IDS, output_router_logits=True, use_cache=False)
        model.config.output_router_logits = True
        with pytest.raises(ScheduleError, match="set output_router_logits=False, in TRL's settings router"):
            model(IDS, labels=IDS, use_cache=False)


def test_a_static_cache_is_refused_though_it_holds_no_tokens_yet(zoo: Zoo) -> None:
    model = zoo.model("llama")
    cache = transformers.StaticCache(config=model.config, max_cache_len=14)
    with (
        skip_schedule(model, SCHEDULE),
        pytest.raises(ScheduleError, match="a cache holds slots for later tokens; generate with"),
    ):
        model(IDS, attention_mask=torch.ones_like(IDS), use_cache=True, cache=cache)


def test_a_cache_that_is_a_pair_with_one_for_cross_attention_is_refused_where_it_holds_tokens(zoo: Zoo) -> None:
    """Decoders that have cross-attention in other models take one, too."""
    model = zoo.model("gpt2")
    cache = transformers.EncoderDecoderCache(transformers.DynamicCache(), transformers.DynamicCache())
    with skip_schedule(model, SCHEDULE):
        model(IDS, cache=cache, use_cache=True)
        with pytest.raises(ScheduleError, match="a cache holds 7 earlier tokens"):
            model(IDS, cache=cache, use_cache=True)


def test_labels_of_only_the_last_tokens_are_refused_where_labels_say_where_prompts_end(zoo: Zoo) -> None:
    """transformers takes them together with `logits_to_keep`."""
    model = zoo.model("llama")
    embeddings = model.get_input_embeddings()(IDS)
    for args, given in (((IDS,), {}), ((), {"input_ids": IDS}), ((), {"inputs_embeds": embeddings})):
        with skip_schedule(model, FALLING, prompt_length="labels"):
            model(*args, **given, labels=IDS, use_cache=False)
            with pytest.raises(ScheduleError, match=r"labels of shape \[1, 4\] .* in rows of 7 tokens; label every token"):
                model(*args, **given, labels=IDS[:, -4:], logits_to_keep=4, use_cache=False)
        with skip_schedule(model, FALLING, prompt_length=3):
            model(*args, **given, labels=IDS[:, -4:], logits_to_keep=4, use_cache=False)


def test_labels_per_row_are_refused_where_labels_say_where_prompts_end(zoo: Zoo) -> None:
    config = transformers.AutoConfig.from_pretrained(zoo.checkpoint("llama"), num_labels=3)
    model = transformers.AutoModelForSequenceClassification.from_config(config)
    with (
        skip_schedule(model, FALLING, prompt_length="labels"),
        pytest.raises(ScheduleError, match=r"labels of shape \[1\] do not"),
    ):
        model(IDS, labels=torch.tensor([2]))


def test_the_package_exports_skip_schedule_and_imports_torch_only_for_it() -> None:
    code = """
import sys
import skipdecode.exporter
assert "torch" not in sys.modules
from skipdecode.exporter import skip_schedule
assert skip_schedule is sys.modules["skipdecode.exporter.reference"].skip_schedule
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_prompt_runs_at_full_depth_under_the_anchor_generated(zoo: Zoo) -> None:
    model = zoo.model("llama")
    schedule = Schedule(name="table", num_layers=LAYERS, warmup_layers=1, layers=(3, 2))
    with torch.no_grad():
        plain = model(IDS, use_cache=False).logits
        with skip_schedule(model, schedule, prompt_length=4):
            skipped = model(IDS, use_cache=False).logits
    torch.testing.assert_close(skipped[:, :4], plain[:, :4])
    assert not torch.allclose(skipped[:, 4:], plain[:, 4:])


@pytest.mark.parametrize("given", [5, [5], "labels"])
def test_an_absolute_anchor_ignores_where_prompts_end(given: int | list[int] | str, zoo: Zoo) -> None:
    model = zoo.model("llama")
    with torch.no_grad():
        with skip_schedule(model, SCHEDULE):
            wanted = model(IDS, use_cache=False).logits
        with skip_schedule(model, SCHEDULE, prompt_length=given):  # type: ignore[arg-type]
            torch.testing.assert_close(model(IDS, use_cache=False).logits, wanted, rtol=0, atol=0)


# three kinds of arguments, BLOOM's with heads first; values that a layer passes to the one above; several streams
@pytest.mark.parametrize("name", ["gpt2", "falcon", "bloom", "mpt", "glm_moe_dsa", "gemma3n_text"])
def test_later_positions_do_not_change_earlier_ones_so_training_and_decoding_agree(name: str, zoo: Zoo) -> None:
    model, least = zoo.model(name), LEAST_LAYERS.get(name, 2)
    schedule = dataclasses.replace(
        SCHEDULE, warmup_layers=least - 1, layers=tuple(max(count, least) for count in SCHEDULE.layers)
    )
    with torch.no_grad(), skip_schedule(model, schedule):
        whole = model(IDS, use_cache=False).logits
        for length in range(1, 7):
            torch.testing.assert_close(
                model(IDS[:, :length], use_cache=False).logits[:, -1], whole[:, length - 1], atol=1e-5, rtol=1e-4
            )


def test_rows_are_refused_in_which_layers_would_reuse_a_choice_of_fewer_than_all_tokens(zoo: Zoo) -> None:
    model = zoo.model("glm_moe_dsa")
    rows = torch.ones(2, model.config.index_topk + 1, dtype=torch.int64)
    refused = rf"layers attend to the {MAX_LENGTH} tokens .* has {MAX_LENGTH + 1}; cut rows to {MAX_LENGTH} tokens"
    with torch.no_grad(), skip_schedule(model, SCHEDULE):
        model(rows[:, :-1], use_cache=False)
        with pytest.raises(ScheduleError, match=refused):
            model(rows, use_cache=False)


def test_gradients_reach_every_layer_that_was_computed_and_no_other(zoo: Zoo) -> None:
    model = zoo.model("opt").train()
    with skip_schedule(model, SCHEDULE):
        model(IDS, labels=IDS, use_cache=False).loss.backward()
    reached = [layer.fc1.weight.grad is not None for layer in decoder_layers(model)]
    assert reached == [SCHEDULE.cap(layer) != 0 for layer in range(LAYERS)]


@pytest.mark.parametrize("schedule", ["full", ScheduleRequest(speedup=2)])
def test_a_name_or_a_request_is_not_a_schedule_to_train_with(zoo: Zoo, schedule: Any) -> None:
    block = skip_schedule(zoo.model("opt"), schedule)
    with pytest.raises(ScheduleError, match="is not a Schedule; make one with build_schedule"):
        block.__enter__()


def test_a_schedule_of_another_depth_and_an_empty_prompt_are_refused(zoo: Zoo) -> None:
    model = zoo.model("opt")
    with pytest.raises(ScheduleError, match="the model has 6"), skip_schedule(model, full_depth(5)):
        pass
    with (
        pytest.raises(ModelNotSupportedError, match="Linear is not a transformers model"),
        skip_schedule(torch.nn.Linear(2, 2), full_depth(LAYERS)),
    ):
        pass
    with pytest.raises(CapacityError, match="empty"):
        greedy_tokens(model, full_depth(LAYERS), [], 3)
