"""The cuda target on a GPU: what tests/exporter/test_cuda_target.py checks on a CPU, and what only a GPU has."""

from __future__ import annotations

import dataclasses
import functools
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import skipdecode
from skipdecode.cli import validate
from skipdecode.decoder import Decoder
from skipdecode.device import HostDevice
from skipdecode.exporter import reference_run
from skipdecode.exporter.checkpoint_folder import Checkpoint
from skipdecode.exporter.export import ExportRequest, export
from skipdecode.exporter.reference import greedy_tokens
from skipdecode.sampling import Sampling, choose_tokens
from skipdecode.schedule_builders import ScheduleRequest
from skipdecode.targets import load_device_engines
from tests.agreement import (
    assert_every_route_is_a_graph,
    assert_gives_the_references_logits,
    assert_mostly_gives_the_references_logits,
    spoil,
)
from tests.models import CONFIGS, LAYERS, LEAST_LAYERS, MAX_LENGTH, RELATIVES, VARIATIONS
from tests.zoo import Zoo

PROMPTS = [[9, 8, 7, 6, 5, 4, 3], [5, 6], [11, 4, 50, 6]]
NEW = 12
NAMES = ["opt", "llama", "gpt_neox", "gemma3", "phi3"]
# weights that add up to 1; weights that do not, a shared expert, a layer without experts; biases; routers outside the operator
MIXTURES = ["mixtral", "qwen2_moe", "gpt_oss", "deepseek_v3", "nemotron_h"]
ROUGH_IN_BF16 = {"qwen3_next": 0.15, "qwen3_5_moe_text": 0.15}  # torch's own median error at full depth: 0.07 and 0.05
pytestmark = pytest.mark.usefixtures("provider")
SCHEDULE = ScheduleRequest(name="linear", max_layers=LAYERS, min_layers=2, span=9)


def _export(zoo: Zoo, name: str, out: Path, **changes: object) -> Path:
    schedule = dataclasses.replace(SCHEDULE, min_layers=LEAST_LAYERS.get(name, 2))
    given = {"schedule": schedule, "max_batch": 4, "max_length": MAX_LENGTH, "targets": ("cpu", "cuda"), **changes}
    export(ExportRequest(model=str(zoo.checkpoint(name)), out=out, **given))  # type: ignore[arg-type]
    return out


@pytest.fixture(scope="module")
def bundle(zoo: Zoo, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Bundles by architecture, each made on first use."""
    folder = tmp_path_factory.mktemp("gpu")
    return functools.cache(lambda name: _export(zoo, name, folder / name))


@pytest.fixture(scope="module")
def llama(bundle: Callable[[str], Path]) -> Path:
    return bundle("llama")


@pytest.mark.parametrize(("dtype", "tolerance"), [("fp16", 0.02), ("bf16", 0.1)])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("schedule", ["full", None])
def test_every_variant_agrees_with_the_reference(
    name: str, schedule: str | None, dtype: str, tolerance: float, zoo: Zoo, tmp_path: Path
) -> None:
    generator = skipdecode.load(_export(zoo, name, tmp_path / "b", dtype=dtype), target="cuda")
    chosen = generator.manifest.schedule if schedule is None else skipdecode.schedule.full_depth(LAYERS)
    prompts = sorted(PROMPTS, key=len, reverse=True)
    decoder = generator.decoder([len(prompt) for prompt in prompts], NEW, chosen)
    assert_gives_the_references_logits(decoder, zoo.model(name), prompts, NEW, tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), [("fp16", 0.02), ("bf16", 0.05)], ids=["fp16", "bf16"])
@pytest.mark.parametrize(
    "name", [name for name in (*CONFIGS, *RELATIVES, *VARIATIONS) if name != "gemma4_moe"]
)  # gemma4_moe is refused
def test_every_architecture_agrees_with_the_reference_and_its_steps_are_captured(
    name: str, dtype: str, tolerance: float, zoo: Zoo, tmp_path: Path
) -> None:
    """A mixture may choose another expert because of one rounded bit; in bf16, torch itself is off by up to 0.2."""
    generator = skipdecode.load(_export(zoo, name, tmp_path / "b", dtype=dtype, targets=("cuda",)))
    model = zoo.model(name)
    model = (model.half() if dtype == "fp16" else model.bfloat16()).float()
    mixture = any(".experts." in weight for weight in model.state_dict())
    mostly = mixture or dtype == "bf16"
    agrees = assert_mostly_gives_the_references_logits if mostly else assert_gives_the_references_logits
    prompts = sorted(PROMPTS, key=len, reverse=True)
    decoder = generator.decoder([len(prompt) for prompt in prompts], NEW)
    agrees(decoder, model, prompts, NEW, ROUGH_IN_BF16.get(name, tolerance) if dtype == "bf16" else tolerance)
    made = [generator.generate(prompts, max_new_tokens=NEW, ignore_eos=True).sequences for _ in range(4)]
    tokens = np.array([[row.token_ids for row in each] for each in made])
    assert mixture or (tokens == tokens[0]).all()
    assert_every_route_is_a_graph(generator)


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("cuda_graphs", [True, False])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", [*NAMES, "qwen3_5_text", "lfm2"])
def test_tokens_chosen_on_the_gpu_match_those_chosen_on_the_host(
    name: str, rows: int, cuda_graphs: bool, sampled: bool, bundle: Callable[[str], Path]
) -> None:
    """The schedule's variants switch under CUDA graphs: the second generation captures each, the third replays all."""
    generator = skipdecode.load(bundle(name), target="cuda", cuda_graphs=cuda_graphs)
    how = Sampling(do_sample=sampled, top_k=20, seed=5)
    order = np.argsort([-len(prompt) for prompt in PROMPTS[:rows]], kind="stable")
    decoder = generator.decoder([len(PROMPTS[row]) for row in order], NEW)
    decoder.prefill([PROMPTS[row] for row in order])
    steps = [choose_tokens(decoder.logits, how, order, 0)]
    for step in range(1, NEW):
        decoder.decode_step(steps[-1])
        steps.append(choose_tokens(decoder.logits, how, order, step))
    for _ in range(3):
        made = generator.generate(PROMPTS[:rows], max_new_tokens=NEW, ignore_eos=True, do_sample=sampled, top_k=20, seed=5)
        assert [made.sequences[row].token_ids for row in order] == np.array(steps).T.tolist()
    assert_every_route_is_a_graph(generator, cuda_graphs)


@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_quantised_engines_agree_with_a_cpu(quantize: str, zoo: Zoo, tmp_path: Path) -> None:
    bundle = _export(zoo, "opt", tmp_path / "b", quantize=quantize, targets=("cuda",))
    on_gpu = skipdecode.load(bundle)
    made = on_gpu.manifest
    on_host = load_device_engines(made, bundle, made.targets[0], HostDevice(), None)
    logits = []
    for engines in (on_host, on_gpu.engines):
        decoder = Decoder(engines, made.model, made.schedule, [len(PROMPTS[0])], 2)
        decoder.prefill(PROMPTS[:1])
        logits.append(decoder.logits[0].copy())
    assert np.linalg.norm(logits[1] - logits[0]) <= 0.05 * np.linalg.norm(logits[0])  # the CPU rounds activations to int8


@pytest.mark.parametrize(("dtype", "tolerance"), [("fp16", 0.01), ("bf16", 0.05)])
@pytest.mark.parametrize("quantize", ["int8", "int4"])
@pytest.mark.parametrize("name", ["opt", "llama"])
def test_cutlass_multiplies_quantised_weights_like_the_providers_other_kernels(
    name: str, quantize: str, dtype: str, tolerance: float, zoo: Zoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts of several lengths, then steps of one row and of all."""
    bundle = _export(zoo, name, tmp_path / "b", quantize=quantize, dtype=dtype, targets=("cuda",))
    prompts = sorted(PROMPTS, key=len, reverse=True)

    def logits() -> np.ndarray:
        found, generator = [], skipdecode.load(bundle)
        for rows in (1, len(prompts)):
            decoder = generator.decoder([len(prompt) for prompt in prompts[:rows]], NEW)
            decoder.prefill(prompts[:rows])
            found.append(decoder.logits.copy())
            for token in range(5, 5 + NEW - 1):
                decoder.decode_step(np.full(rows, token))
                found.append(decoder.logits.copy())
        return np.concatenate(found)

    by_others = logits()
    monkeypatch.setenv("ORT_FPA_INTB_GEMM", "1")
    by_cutlass = logits()
    assert (np.linalg.norm(by_cutlass - by_others, axis=-1) <= tolerance * np.linalg.norm(by_others, axis=-1)).all()


def test_layers_in_int4_run_with_a_head_in_int8(zoo: Zoo, tmp_path: Path) -> None:
    """As exported from a checkpoint that has 4 bits."""
    pytest.importorskip("compressed_tensors", reason="quantised checkpoints are written with compressed-tensors")
    from tests.exporter.quantised_checkpoints import awq, rewritten

    settings = {"quant_method": "awq", "bits": 4, "version": "gemm"}
    folder = rewritten(zoo.checkpoint("llama"), tmp_path / "awq", settings, awq([]))
    schedule = ScheduleRequest(name="full")
    request = ExportRequest(model=str(folder), out=tmp_path / "b", schedule=schedule, max_length=MAX_LENGTH, targets=("cuda",))
    export(dataclasses.replace(request, quantize="int4", dtype="fp16"))
    decoder = skipdecode.load(tmp_path / "b").decoder([len(PROMPTS[0])], NEW)
    assert_gives_the_references_logits(decoder, reference_run._load(Checkpoint(folder), torch.float32), PROMPTS[:1], NEW, 0.05)


@pytest.mark.parametrize(("dtype", "tolerance"), [("fp16", 0.02), ("bf16", 0.1)])
@pytest.mark.parametrize("name", MIXTURES)
def test_a_mixture_mostly_agrees_with_the_reference(name: str, dtype: str, tolerance: float, zoo: Zoo, tmp_path: Path) -> None:
    generator = skipdecode.load(_export(zoo, name, tmp_path / "b", dtype=dtype), target="cuda")
    prompts = sorted(PROMPTS, key=len, reverse=True)
    decoder = generator.decoder([len(prompt) for prompt in prompts], NEW)
    assert_mostly_gives_the_references_logits(decoder, zoo.model(name), prompts, NEW, tolerance)


@pytest.mark.parametrize("name", MIXTURES)
def test_a_mixtures_steps_are_captured_and_first_tokens_match_those_of_calls(name: str, bundle: Callable[[str], Path]) -> None:
    """Later tokens may differ, because the kernels add up in any order and a rounded bit may choose another expert."""
    made = []
    for cuda_graphs in (True, False):
        generator = skipdecode.load(bundle(name), target="cuda", cuda_graphs=cuda_graphs)
        for _ in range(3):
            made.append(generator.generate(PROMPTS, max_new_tokens=NEW, ignore_eos=True).sequences)
        assert_every_route_is_a_graph(generator, cuda_graphs)
    for sequences in made[1:]:
        same = [one.token_ids[:3] == other.token_ids[:3] for one, other in zip(sequences, made[0], strict=True)]
        assert sum(same) >= 2, [row.token_ids for row in sequences]


@pytest.mark.parametrize(
    ("quantize", "method", "tolerance"), [("int8", "rtn", 0.2), ("int4", "rtn", 0.6), ("int4", "k-quant", 0.6)]
)
def test_a_quantised_mixture_stays_near_the_reference(
    quantize: str, method: str, tolerance: float, zoo: Zoo, tmp_path: Path
) -> None:
    """It may differ more from a CPU, which rounds activations to int8 and may choose another expert."""
    bundle = _export(zoo, "mixtral", tmp_path / "b", quantize=quantize, quantize_method=method, targets=("cuda",))
    decoder = skipdecode.load(bundle).decoder([len(PROMPTS[0])], NEW)
    decoder.prefill(PROMPTS[:1])
    _, logits = greedy_tokens(zoo.model("mixtral"), decoder.schedule, PROMPTS[0], 1)
    wanted = logits[0].numpy()
    assert 0 < np.linalg.norm(decoder.logits[0] - wanted) < tolerance * np.linalg.norm(wanted)


def test_keys_and_values_are_updated_in_place(llama: Path) -> None:
    decoder = skipdecode.load(llama, target="cuda").decoder([3], NEW)
    layer = LAYERS - 1
    decoder.prefill([[5, 6, 7]])
    before = decoder.memory.to_host(decoder.kv.layers[layer][f"past_key.{layer}"]).copy()
    decoder.decode_step(np.array([8]))
    after = decoder.memory.to_host(decoder.kv.layers[layer][f"past_key.{layer}"])
    assert (after[:, :, :3] == before[:, :, :3]).all() and (after[:, :, 3] != before[:, :, 3]).any()
    assert (after[:, :, 4:] == before[:, :, 4:]).all()


def test_what_an_earlier_run_left_in_the_kv_buffer_does_no_harm(llama: Path) -> None:
    generator = skipdecode.load(llama, target="cuda")
    first = generator.generate(PROMPTS, max_new_tokens=NEW, ignore_eos=True)
    spoil(generator)
    assert generator.generate(PROMPTS, max_new_tokens=NEW, ignore_eos=True).sequences == first.sequences


def test_five_hundred_loops_leave_the_devices_memory_as_it_was(llama: Path) -> None:
    generator = skipdecode.load(llama, target="cuda")
    used = []
    for round_ in range(500):
        generator.generate(PROMPTS[: 2 + round_ % 2], max_new_tokens=4, ignore_eos=True)  # a new loop each time
        generator.generate(PROMPTS[: 2 + round_ % 2], max_new_tokens=4, ignore_eos=True)  # and the loop's graphs
        if round_ in (49, 499):
            used.append(_memory_of_this_process())
    assert used[1] - used[0] <= 8, f"{used} MiB"


def _memory_of_this_process() -> int:
    """MiB of GPU memory that this process has; other tests' processes may be on the GPU too."""
    command = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    rows = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    found = dict(row.split(", ") for row in rows)
    if not found.get(str(os.getpid()), "").isdigit():
        pytest.skip("the driver does not tell how much memory this process has")
    return int(found[str(os.getpid())])


def test_validate_measures_the_cuda_target(llama: Path, zoo: Zoo) -> None:
    quick = ["--batch", "1", "--context", "16", "--prompt-tokens", "8", "--new-tokens", "6", "--target", "cuda"]
    assert validate.main([str(llama), "--reference", str(zoo.checkpoint("llama")), *quick, "--json"]) == 0
