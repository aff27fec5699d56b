"""Random checkpoints of the tests' models and their bundles, on the disk, made once for all of pytest's processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers

from skipdecode.exporter.architectures import register_language_model
from skipdecode.exporter.export import ExportRequest, export
from skipdecode.schedule_builders import ScheduleRequest
from tests.models import CONFIGS, LAYERS, LEAST_LAYERS, MAX_LENGTH, RELATIVES, VARIATIONS
from tests.once import made_once


def edit_config(folder: Path, **changes: object) -> None:
    """Change these settings in a checkpoint's config.json."""
    edit_settings(folder / "config.json", **changes)


def edit_settings(path: Path, **changes: object) -> None:
    """Change these settings in a JSON file."""
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


class Zoo:
    """Checkpoints and bundles by architecture, made on first use."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def checkpoint(self, name: str) -> Path:
        """A random checkpoint, fp32, with weights large enough that greedy tokens vary."""

        def make(path: Path) -> None:
            torch.manual_seed(0)
            config = (CONFIGS | RELATIVES | VARIATIONS)[name]()
            config.initializer_range = 0.1
            register_language_model(config)
            model = transformers.AutoModelForCausalLM.from_config(config)
            with torch.no_grad():
                for parameter, tensor in model.state_dict().items():
                    # biases and norms' scales (also of heads) differ from 0 and 1, so that mixing them up shows
                    if tensor.ndim == 1 or parameter.endswith(("_proj_bias", "_gate_bias", "_norm.weight")):
                        tensor.add_(torch.randn_like(tensor) * 0.1)
            model.save_pretrained(path)

        return made_once(self._folder / name, make)

    def bundle(self, name: str) -> Path:
        """A bundle with one segment per layer, so that any schedule with one warm-up layer fits it."""

        def make(path: Path) -> None:
            schedule = ScheduleRequest(name="linear", max_layers=LAYERS, min_layers=LEAST_LAYERS.get(name, 2), span=10)
            export(
                ExportRequest(model=str(self.checkpoint(name)), out=path, schedule=schedule, max_batch=4, max_length=MAX_LENGTH)
            )

        return made_once(self._folder / f"{name}.bundle", make)

    def model(self, name: str) -> Any:
        """The torch model in evaluation mode."""
        return transformers.AutoModelForCausalLM.from_pretrained(self.checkpoint(name)).eval()
