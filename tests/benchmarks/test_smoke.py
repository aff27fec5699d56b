"""The benchmarks run, on tiny models; of most figures only their presence is checked."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
PEERS = {"ctranslate2": "ctranslate2", "onnxruntime_genai": "ort-genai", "llama_cpp": "llama.cpp"}  # package -> its systems' name


def _run(script: str, *options: str) -> str:
    command = [sys.executable, str(ROOT / "benchmarks" / script), "--smoke", *options]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=300).stdout


def test_training_measures_both_models() -> None:
    lines = _run("training.py").splitlines()
    cases = ["full depth", "2x", "2x, prompts of 32", "2x, prompts of 8 to 56"]
    assert [line.split(":")[0] for line in lines] == [f"{model} {case}" for model in ("opt", "llama") for case in cases]


def test_service_prompts_measures_one_prompt_and_several_of_each_service() -> None:
    service = ROOT / "build" / "cpp" / "release" / "cpp_service" / "skd_service"
    if not service.exists():
        pytest.skip("the C++ service is not built: make cpp")
    medians = json.loads(_run("service_prompts.py", "--against", str(service)).splitlines()[-1])["medians"]
    assert set(medians) == {f"{which}, prompts: {prompts}" for which in ("this", "other") for prompts in (1, 4)}
    assert all(seconds > 0 for figures in medians.values() for seconds in figures.values())


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_choosing_measures_every_case(device: str) -> None:
    cases = json.loads(_run("choosing.py", "--device", device).splitlines()[-1])["cases"]
    assert len(cases) == 2 * 2 * 4 and all(case["times_as_fast_as_transformers"] > 0 for case in cases)


def test_decode_measures_every_system_that_is_installed() -> None:
    # one thread: with more, a third of this test's time goes to threads that spin while others wait for a core
    figures = json.loads(_run("decode.py", "--threads", "1").splitlines()[-1])["models"]["llama"]
    assert [(point["batch"], point["context"]) for point in figures["points"]] == [(1, 8), (2, 8)]
    installed = {name for package, name in PEERS.items() if importlib.util.find_spec(package)}
    for point in figures["points"]:
        assert {row["system"].split()[0] for row in point["systems"]} == {"skipdecode", "transformers", *installed}
    assert all(row["decode_ms_per_step"] > 0 for row in figures["points"][1]["systems"])
    exact = {row["system"]: row["tokens_as_transformers"] for row in figures["points"][0]["systems"] if row["kind"] == "fp32"}
    assert all(same == 6 for name, same in exact.items() if not name.endswith("2x")), exact


def test_decode_refuses_points_that_leave_a_model_without_any() -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "decode.py"), "--models", "opt,e2e", "--points", "1x512"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    error = "--points: none has room for 48 new tokens in the 256 of e2e; choose shorter prompts, or leave the model out"
    assert done.stderr.splitlines()[-1] == f"decode.py: error: {error}"


@pytest.mark.survey
def test_hybrid_quality_trains_a_model_and_measures_it(tmp_path: Path) -> None:
    lines = (ROOT / "examples" / "e2e" / "sample.csv").read_text("utf-8").splitlines(keepends=True)[:3]
    for name in ("trainset.csv", "devset.csv"):
        (tmp_path / name).write_text("".join(lines), "utf-8")
    main = "import hybrid_quality; hybrid_quality._KINDS = hybrid_quality._KINDS[:1]; hybrid_quality.main()"
    options = ["--data", str(tmp_path), "--out", str(tmp_path / "models"), "--models", "llama", "--steps", "1"]
    command = [sys.executable, "-c", main, *options]
    done = subprocess.run(command, cwd=ROOT / "benchmarks", check=True, capture_output=True, text=True, timeout=300)
    (row,) = json.loads(done.stdout.splitlines()[-1])["models"]["llama"]
    assert row["same_texts"] == 2 and (tmp_path / "models" / "llama" / "model.safetensors").exists()


def test_cpp_measures_both_runtimes() -> None:
    if not (ROOT / "build" / "cpp" / "release" / "cpp_bench" / "skd_bench").exists():
        pytest.skip("the C++ benchmark is not built: make cpp")
    result = json.loads(_run("cpp.py"))
    assert result["cpp"]["full"]["token_ms"] > 0 and result["python"]["full"]["vs_python"] == 1


def test_gpu_measures_every_variant_on_the_engines_that_gpus_get(tmp_path: Path) -> None:
    out, bundles = tmp_path / "out", tmp_path / "bundles"
    result = json.loads(_run("gpu.py", "--out", str(out), "--bundles", str(bundles)).splitlines()[-1])
    (written,) = out.glob("*.json")
    assert json.loads(written.read_text()) == result and not result["not_measured"]
    one, two = result["models"]["opt"]["points"]
    assert [(point["batch"], point["context"]) for point in (one, two)] == [(1, 8), (2, 8)]
    rows = {row["system"]: row for point in (two, one) for row in point["systems"]}
    layers = [row["layers"] for name, row in rows.items() if name.startswith("skipdecode cuda v")]
    assert layers == sorted(layers, reverse=True) and len(layers) > 2
    assert one["price_of_segments"] > 0 and two["prefill_ms"]["cuda"] > 0
    assert all(row["decode_ms_per_step"] > 0 for row in rows.values())
    quantized = [row for name, row in rows.items() if name.startswith("skipdecode cuda int4 v")]
    assert [row["layers"] for row in quantized] == layers
    assert all(row["kind"] == "int4" and row["times_as_fast_as_fp16"] > 0 for row in quantized)
    compiled = rows["transformers static cache, torch.compile"]
    assert (compiled["graphs"], compiled["graph_breaks"]) == (1, 0), "the peer is not what it claims to be"
    assert compiled["skipdecode_full_depth_ms"] > 0
    assert {path.parent.name for path in bundles.glob("opt/*/bundle.json")} == {"cuda", "cuda-int4", "one-engine"}


def test_gpu_reports_what_there_was_no_time_for() -> None:
    result = json.loads(_run("gpu.py", "--minutes", "0").splitlines()[-1])
    assert result["models"]["opt"]["points"] == []
    assert result["not_measured"]["opt, cuda, 1x8"] == "the time was over (--minutes)"


def test_gpu_says_in_one_line_what_is_missing() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    done = subprocess.run([sys.executable, str(ROOT / "benchmarks" / "gpu.py")], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert "torch finds no GPU; run this on a machine with one" in done.stderr


def test_gpu_says_of_each_target_why_it_is_not_measured() -> None:
    script = "from gpu_systems import refused; print(*map(refused, ['cuda', 'tensorrt-rtx:sm90', 'tensorrt']), sep='\\n')"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT / "benchmarks", capture_output=True, text=True, check=True)
    cuda, rtx, tensorrt = done.stdout.splitlines()
    assert "CUDAExecutionProvider" in cuda or "onnxruntime-gpu" in cuda
    assert "does not build for 'sm90'" in rtx and "needs the Python package tensorrt; docs/tensorrt.md" in tensorrt
