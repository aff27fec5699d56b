"""The C++ library on a GPU gives Python's tokens, with CUDA graphs and without."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import torch

import skipdecode
from skipdecode.engines.ort import ENVIRONMENT
from skipdecode.exporter.export import ExportRequest, export
from skipdecode.schedule import Anchor
from skipdecode.schedule_builders import ScheduleRequest
from tests.cpp.conftest import Driver, skip_unless_built
from tests.models import LAYERS, MAX_LENGTH
from tests.zoo import Zoo

PROMPTS = [[9, 8, 7, 6, 5, 4, 3], [5, 6], [11, 4, 50, 6]]
NEW = 12


@pytest.fixture(scope="module")
def driver(provider: None) -> Iterator[Driver]:
    skip_unless_built()
    libraries = (Path(torch.__file__).parents[1] / "nvidia").glob("*/lib")  # cuBLAS and cuDNN, where they came with pip
    path = ":".join([*map(str, libraries), os.environ.get("LD_LIBRARY_PATH", "")])
    opened = Driver(LD_LIBRARY_PATH=path, **ENVIRONMENT)  # as in the Python runtime
    yield opened
    opened.close()


@pytest.fixture(
    scope="module",
    params=[
        ("opt", Anchor.GENERATED, "none"), ("llama", Anchor.ABSOLUTE, "none"), ("phi3", Anchor.GENERATED, "none"),
        ("lfm2", Anchor.GENERATED, "none"), ("qwen3_5_text", Anchor.ABSOLUTE, "none"), ("llama", Anchor.GENERATED, "int8"),
    ],
    ids=str,
)  # fmt: skip
def bundle(zoo: Zoo, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    name, anchor, quantize = request.param
    out = tmp_path_factory.mktemp("cpp") / name
    schedule = ScheduleRequest(name="linear", max_layers=LAYERS, min_layers=2, span=9, anchor=anchor)
    limits: dict[str, Any] = {"max_batch": 4, "max_length": MAX_LENGTH}
    model = str(zoo.checkpoint(name))
    export(ExportRequest(model=model, out=out, schedule=schedule, targets=("cuda",), quantize=quantize, **limits))
    return out


def _asked(bundle: Path, **more: Any) -> dict[str, Any]:
    (library,) = Path(onnxruntime.__file__).parent.glob("capi/libonnxruntime.so.1.*")
    return {"bundle": bundle, "target": "cuda", "onnxruntime_library": library, "max_new_tokens": NEW, "ignore_eos": True, **more}


@pytest.mark.parametrize("cuda_graphs", [True, False])
@pytest.mark.parametrize("sampling", [{}, {"do_sample": True, "top_k": 20, "seed": 5}], ids=["greedy", "sampled"])
def test_tokens_match_the_python_runtime(cuda_graphs: bool, sampling: dict[str, Any], bundle: Path, driver: Driver) -> None:
    """One prompt at a time, since both run it in one pass. In a batch, tokens may differ where two are equally likely."""
    generator = skipdecode.load(bundle)
    for prompt in PROMPTS:
        made = generator.generate([prompt], max_new_tokens=NEW, ignore_eos=True, **sampling)
        found = driver.ask(command="generate", prompts=[prompt], **_asked(bundle, cuda_graphs=cuda_graphs, **sampling))
        assert found["sequences"][0]["token_ids"] == made.sequences[0].token_ids, found


def test_graphs_replace_the_calls_and_give_the_same_logits(bundle: Path, driver: Driver) -> None:
    """Rows of different lengths. With at most three variants, most of the twelve steps are graphs."""
    asked = {cuda_graphs: _asked(bundle, cuda_graphs=cuda_graphs, prompts=PROMPTS) for cuda_graphs in (True, False)}
    found = {cuda_graphs: driver.ask(command="session", **asked[cuda_graphs]) for cuda_graphs in asked}
    assert found[True]["logits"] == found[False]["logits"]
    assert found[True]["graph_launches"] > NEW and found[False]["graph_launches"] == 0
