"""Runs transformers' own forward pass on fake tensors, to find faults of a configuration that building its modules does not."""

from __future__ import annotations

import copy
import logging
from contextlib import suppress
from typing import Any

import torch
from torch._subclasses import fake_tensor
from transformers import AutoModelForCausalLM
from transformers.initialization import no_init_weights

from skipdecode.exporter.architectures import decoder_parts
from skipdecode.exporter.config_json import blaming_config, config_origin
from skipdecode.exporter.rotary import freeze_rotary

_TOKENS = 2  # every row has at least two, and a model may have no more positions
_DATA_DEPENDENT_ERRORS = (fake_tensor.DataDependentOutputException, fake_tensor.DynamicOutputShapeException)


def check_runs(config: Any) -> None:
    """Let transformers run the model on fake tensors, which takes no memory, and a few seconds for the deepest models.

    A fault found here would otherwise appear while a layer is traced, after all weights have been written, and look like a fault
    of the tracing. Of this project's code only `freeze_rotary` runs here.

    Raises:
        ModelNotSupportedError: transformers itself cannot run the model of this configuration.
    """
    logging.getLogger(fake_tensor.__name__).setLevel(logging.CRITICAL)  # it logs a traceback when shapes do not fit
    config = copy.deepcopy(config)
    config._attn_implementation = "eager"
    config._experts_implementation = "batched_mm"  # the default counts the tokens of each expert, which takes numbers
    with fake_tensor.FakeTensorMode(), torch.no_grad(), blaming_config(config_origin(config)):
        with no_init_weights():  # ModernBERT's draws numbers until they lie in a range, which fake tensors cannot
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        rotary = decoder_parts(model).rotary
        if rotary is not None:
            freeze_rotary(rotary)
        with suppress(*_DATA_DEPENDENT_ERRORS):  # run as far as shapes allow; no supported model's forward needs numbers
            model(torch.zeros(1, _TOKENS, dtype=torch.int64), use_cache=False)
