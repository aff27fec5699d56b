"""Transformers' own forward pass, without numbers: what a configuration has wrong that no module asks for when it is made."""

from __future__ import annotations

import copy
import logging
from contextlib import suppress
from typing import Any

import torch
from torch._subclasses import fake_tensor
from transformers import AutoModelForCausalLM

from skipdecode.exporter.architectures import decoder_parts, settle
from skipdecode.exporter.config_json import place, taking_config

_TOKENS = 2  # every run has as many, and a model may have no more positions
_ASKS_FOR_NUMBERS = (fake_tensor.DataDependentOutputException, fake_tensor.DynamicOutputShapeException)


def check_runs(config: Any) -> None:
    """Let transformers run the model on tensors that are shapes alone: no memory, a few seconds for the deepest.

    What fails here would fail while a layer is traced, after all weights have been written, and could not be told from a fault
    of the tracing: here nothing of ours is called but `settle`.

    Raises:
        ModelNotSupportedError: a configuration whose model transformers itself cannot run.
    """
    logging.getLogger(fake_tensor.__name__).setLevel(logging.CRITICAL)  # it prints a traceback of shapes that do not fit
    config = copy.deepcopy(config)
    config._attn_implementation = "eager"
    config._experts_implementation = "batched_mm"  # its default counts how many tokens chose each expert
    with fake_tensor.FakeTensorMode(), torch.no_grad(), taking_config(place(config)):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        rotary = decoder_parts(model).rotary
        if rotary is not None:
            settle(rotary)
        with suppress(*_ASKS_FOR_NUMBERS):  # as far as shapes lead; no supported model's forward asks for more
            model(torch.zeros(1, _TOKENS, dtype=torch.int64), use_cache=False)
