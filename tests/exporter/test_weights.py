"""Weights on their way into a bundle, and those of a model without a checkpoint."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from skipdecode.errors import ModelNotSupportedError, TargetError
from skipdecode.exporter.export import ExportRequest, export
from skipdecode.exporter.weights import WEIGHTS, random_source, write_weights
from tests.models import MAX_LENGTH
from tests.zoo import Zoo

SHAPE = (1500, 1000)  # drawn in several blocks, each by its own generator


def _write(folder: Path, given: torch.Tensor, dtype: torch.dtype, name: str = "w") -> torch.Tensor:
    write_weights(folder, {name: tuple(given.shape)}, dtype, lambda name, shape: given, lambda done: None, where="model")
    return load_file(folder / WEIGHTS)[name]


def test_a_number_that_fp16_cannot_hold_is_refused(tmp_path: Path) -> None:
    for kept in (torch.float32, torch.bfloat16):
        given = torch.tensor([1.0, -98304.0], dtype=kept)
        with pytest.raises(
            TargetError, match="--dtype: w holds 98304, but the largest number in fp16 is 65504; choose --dtype bf16"
        ):
            _write(tmp_path, given, torch.float16)
        torch.testing.assert_close(_write(tmp_path, given, torch.bfloat16).float(), given.float())
    largest = torch.tensor([65504.0, -65504.0, 65519.0])  # the last one rounds down
    assert _write(tmp_path, largest, torch.float16).tolist() == [65504.0, -65504.0, 65504.0]


@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_nan_and_infinite_weights_are_refused_by_name(
    number: float, dtype: torch.dtype, kept: torch.dtype, tmp_path: Path
) -> None:
    """Exported, they would make every logit NaN."""
    given = torch.zeros(300, 7, dtype=kept)
    given[123, 4] = number
    says = f"^model: w holds {number:g}, which makes logits NaN; download the checkpoint again, or repair it$"
    with pytest.raises(ModelNotSupportedError, match=says):
        _write(tmp_path, given, dtype)


def test_a_checkpoint_that_holds_nan_is_named_and_leaves_nothing(zoo: Zoo, tmp_path: Path) -> None:
    model = zoo.model("llama")
    with torch.no_grad():
        model.model.layers[3].mlp.up_proj.weight[7, 5] = math.nan
    model.save_pretrained(tmp_path / "model")
    with pytest.raises(ModelNotSupportedError, match=r"/model: model\.layers\.3\.mlp\.up_proj\.weight holds nan"):
        export(ExportRequest(model=str(tmp_path / "model"), out=tmp_path / "bundle", max_length=MAX_LENGTH))
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_what_no_dtype_can_fix_is_reported_before_what_another_dtype_can(tmp_path: Path) -> None:
    with pytest.raises(ModelNotSupportedError, match="w holds nan"):
        _write(tmp_path, torch.tensor([98304.0, math.nan]), torch.float16)
    with pytest.raises(ModelNotSupportedError, match=r"w holds 1e\+300"):
        _write(tmp_path, torch.tensor([1e300], dtype=torch.float64), torch.float32)


@pytest.mark.parametrize(
    "name", ["lm_head.bias", "model.layers.0.self_attn.sinks", "model.layers.0.mlp.gate.e_score_correction_bias"]
)
def test_a_token_a_sink_or_an_expert_may_have_a_bias_with_which_it_is_never_chosen(name: str, tmp_path: Path) -> None:
    given = torch.tensor([1.0, -math.inf])
    for dtype in (torch.float32, torch.float16):
        assert _write(tmp_path, given, dtype, name).tolist() == [1.0, -math.inf]
        with pytest.raises(ModelNotSupportedError, match="holds inf"):
            _write(tmp_path, -given, dtype, name)


def test_an_empty_tensor_is_written(tmp_path: Path) -> None:
    assert _write(tmp_path, torch.zeros(0, 3), torch.float16).shape == (0, 3)


def test_random_weights_depend_on_their_names_alone() -> None:
    source = random_source()
    first, other = source("one", SHAPE), source("two", SHAPE)
    assert torch.equal(random_source()("one", SHAPE), first)
    assert not torch.equal(other, first)


def test_random_weights_are_normal_and_no_block_repeats() -> None:
    drawn = random_source()("one", SHAPE)
    assert abs(drawn.mean()) < 1e-4 and abs(drawn.std() - 0.02) < 1e-4
    assert drawn.unique().numel() > 0.8 * drawn.numel()  # some normal numbers in fp32 coincide


@pytest.mark.parametrize("name", ["norm.weight", "layers.0.router.scale", "layers.0.router.per_expert_scale"])
def test_random_scales_are_one(name: str) -> None:
    """With zeros Gemma 4's experts would all weigh nothing and the first be chosen always: a step would be too fast."""
    source = random_source()
    assert bool((source(name, (8,)) == 1).all()) and not source("norm.bias", (8,)).any()
