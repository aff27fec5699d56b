"""The dry run before every export: transformers' own forward pass on tensors without numbers."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from skipdecode.errors import ModelNotSupportedError
from skipdecode.exporter import dry_run
from skipdecode.exporter.architectures import register_language_model
from skipdecode.exporter.dry_run import check_runs
from tests.models import CONFIGS, EACH_RELATIVE, RELATIVES

LONGROPE = {"rope_type": "longrope", "factor": 2.0, "short_factor": [1.0] * 8, "long_factor": [1.0] * 8}


def _config(name: str, rope: dict[str, Any] | None = None) -> Any:
    config = (CONFIGS | RELATIVES)[name]()
    register_language_model(config)
    if rope is not None:
        config.rope_parameters = {"rope_theta": 100.0, "original_max_position_embeddings": 32, **rope}
    return config


@pytest.mark.parametrize(
    ("name", "rope"),
    [
        # these read a run's length unless the dry run freezes them
        ("llama", {"rope_type": "dynamic", "factor": 2.0}),
        ("llama", LONGROPE),
        ("phimoe", {**LONGROPE, "short_mscale": 1.25, "long_mscale": 7.0}),
    ],
)
def test_no_rotary_scaling_needs_numbers_or_memory_in_a_forward_pass(
    name: str, rope: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    _assert_runs_without_numbers(_config(name, rope), monkeypatch)


@pytest.mark.parametrize("name", [*CONFIGS, *EACH_RELATIVE])
def test_no_supported_model_needs_numbers_or_memory_in_a_forward_pass(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise later faults would be found only when a layer is traced."""
    _assert_runs_without_numbers(_config(name), monkeypatch)


def _assert_runs_without_numbers(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dry_run, "_DATA_DEPENDENT_ERRORS", ())
    before = made.to_dict()
    check_runs(made)
    assert made.to_dict() == before


def test_a_forward_pass_that_needs_numbers_is_left_to_the_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dry_run, "freeze_rotary", lambda rotary: rotary)
    check_runs(_config("llama", {"rope_type": "dynamic", "factor": 2.0}))
    assert torch.zeros(1).item() == 0  # fake tensors are off again


def test_mismatched_shapes_give_one_line_and_nothing_in_torchs_log(caplog: pytest.LogCaptureFixture) -> None:
    torch_logs = logging.getLogger("torch")
    torch_logs.addHandler(caplog.handler)  # it does not propagate
    try:
        config = _config("codegen")
        config.rotary_dim = 3
        with pytest.raises(ModelNotSupportedError, match="Attempting to broadcast a dimension of length 4") as caught:
            check_runs(config)
    finally:
        torch_logs.removeHandler(caplog.handler)
    assert "\n" not in str(caught.value) and not caplog.records
