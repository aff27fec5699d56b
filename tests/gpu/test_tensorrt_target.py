"""Plans on a GPU that TensorRT-RTX or TensorRT supports: what tests/runtime/engines checks with a stand-in for the library."""

from __future__ import annotations

from pathlib import Path

import pytest

import skipdecode
from skipdecode.cuda import CudaDevice
from skipdecode.engines import tensorrt_library
from skipdecode.errors import TargetError
from skipdecode.exporter.export import ExportRequest, export
from skipdecode.exporter.targets import parse_targets
from skipdecode.generate import Generator
from skipdecode.schedule import Anchor
from skipdecode.schedule_builders import ScheduleRequest
from tests.agreement import (
    assert_every_route_is_a_graph,
    assert_gives_the_references_logits,
    assert_mostly_gives_the_references_logits,
    on_levels,
)
from tests.models import LAYERS, LEAST_LAYERS, MAX_LENGTH
from tests.zoo import Zoo

MIXTURES = ("mixtral", "gpt_oss")
PROMPTS = [[9, 8, 7, 6, 5, 4, 3], [11, 4, 50], [5, 6]]
NEW = 14
# grouped queries; biases in the mask; capped logits, sinks, keys of two sizes and of other layers, whose attention is written
# out; states of a convolution, of Gated DeltaNet, of Mamba-2; experts
NAMES = ["llama", "mpt", "gemma2", "granite_swa", "gemma4_text", "reading_others", "lfm2", "qwen3_5_text", "bamba", *MIXTURES]
KINDS = [*((name, "none") for name in NAMES), *((name, how) for name in ("llama", "opt", "mixtral") for how in ("int8", "int4"))]


@pytest.fixture(scope="module", params=tensorrt_library.LIBRARIES)
def target(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    if name == "tensorrt-rtx":
        name += f":{CudaDevice().capability}"
    try:
        parse_targets([name])
    except TargetError as error:
        pytest.skip(str(error))
    return name


@pytest.fixture(scope="module", params=KINDS, ids="-".join)
def kind(request: pytest.FixtureRequest) -> tuple[str, str]:
    """Architecture, and how its weights are quantised."""
    name, quantize = request.param
    return name, quantize


@pytest.fixture(scope="module", params=Anchor, ids=str)
def generator(
    kind: tuple[str, str], zoo: Zoo, target: str, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Generator:
    out: Path = tmp_path_factory.mktemp("plans") / "bundle"
    name, quantize = kind
    least = LEAST_LAYERS.get(name, 2)
    line = ScheduleRequest(name="linear", max_layers=LAYERS, min_layers=least, span=12, max_variants=3, anchor=request.param)
    export(
        ExportRequest(
            model=str(zoo.checkpoint(name)), out=out, schedule=line, dtype="fp16", max_batch=4, max_length=MAX_LENGTH,
            quantize=quantize, targets=(target,),
        )
    )  # fmt: skip
    return skipdecode.load(out, target=target.partition(":")[0])


def test_every_variant_agrees_with_the_reference(kind: tuple[str, str], generator: Generator, zoo: Zoo) -> None:
    name, quantize = kind
    model = zoo.model(name).half().float() if quantize == "none" else on_levels(zoo.model(name), quantize)
    decoder = generator.decoder([len(prompt) for prompt in PROMPTS], NEW)
    agrees = assert_mostly_gives_the_references_logits if name in MIXTURES else assert_gives_the_references_logits
    agrees(decoder, model, PROMPTS, NEW, 0.02)


def test_repeated_generations_under_graphs_are_identical(generator: Generator) -> None:
    made = [generator.generate(PROMPTS, max_new_tokens=NEW, ignore_eos=True) for _ in range(4)]
    assert len({str([row.token_ids for row in each.sequences]) for each in made}) == 1
    assert_every_route_is_a_graph(generator)
