"""Bundles for ONNX Runtime's CUDA provider, made and checked without a GPU: the same engines and runtime, on a CPU."""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

import skipdecode
from skipdecode import bindings
from skipdecode import manifest as manifests
from skipdecode.cli import inspect
from skipdecode.decoder import Decoder
from skipdecode.device import HostDevice
from skipdecode.engines import Engines, SharingEngine
from skipdecode.engines import ort as engines_ort
from skipdecode.errors import BundleError, CapacityError, SkipDecodeError, TargetError
from skipdecode.exporter import command
from skipdecode.exporter.export import ExportRequest, export
from skipdecode.exporter.reference import greedy_tokens
from skipdecode.schedule import Anchor
from skipdecode.schedule_builders import ScheduleRequest
from skipdecode.targets import load_device_engines
from skipdecode.trace import Trace
from skipdecode.validation.step_bytes import StepBytes
from tests.agreement import assert_gives_the_references_logits
from tests.exporter.quantised_checkpoints import compressed
from tests.models import MAX_LENGTH
from tests.zoo import Zoo

PROMPTS = [[9, 8, 7, 6, 5, 4, 3], [5, 6]]
NEW = 8


def _export(zoo: Zoo, name: str, out: Path, **changes: object) -> manifests.Manifest:
    schedule = ScheduleRequest(name="step", max_layers=6, min_layers=3, span=6, max_variants=2)
    given = {"schedule": schedule, "max_batch": 4, "max_length": MAX_LENGTH, "targets": ("cuda",), **changes}
    return export(ExportRequest(model=str(zoo.checkpoint(name)), out=out, **given))  # type: ignore[arg-type]


def _on_cpu(bundle: Path) -> tuple[manifests.Manifest, Engines]:
    made = manifests.read(bundle)
    engines_ort.use_threads(None)
    return made, load_device_engines(made, bundle, next(t for t in made.targets if t.name == "cuda"), HostDevice(), None)


@pytest.mark.parametrize(("dtype", "warned"), [("fp16", True), ("auto", False)])
def test_a_model_that_overflows_in_fp16_draws_a_warning_there(
    dtype: str, warned: bool, zoo: Zoo, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--target", "cuda", "--dtype", dtype, "--schedule", "full", "--out", str(tmp_path / "b")]
    assert command.main([str(zoo.checkpoint("gemma2")), *arguments]) == 0
    assert ("warning: gemma2 is known to overflow in fp16; use --dtype bf16" in capsys.readouterr().err) is warned
    assert manifests.read(tmp_path / "b").dtype == ("float16" if warned else "bfloat16")


def test_what_a_cuda_graph_captures_has_no_split_into_uneven_parts(zoo: Zoo, tmp_path: Path) -> None:
    """CUDA's Split into such parts reads host memory that is gone at the next replay; loading could make one from slices."""
    made = _export(zoo, "phi3", tmp_path / "b")
    engines_ort.use_threads(None)
    trace = Trace()
    engines = load_device_engines(made, tmp_path / "b", made.targets[0], HostDevice(), None, trace)
    Decoder(engines, made.model, made.schedule, [2], NEW).prefill([[5, 6]])
    trace.write(tmp_path / "trace.json")
    run = [event["args"] for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"] if "args" in event]
    splits = [facts["output_type_shape"] for facts in run if facts.get("op_name") == "Split"]
    assert splits, "gate and up, of one size"
    assert [parts for parts in splits if any(part != parts[0] for part in parts)] == []


def test_an_absolute_anchor_skips_in_the_prompt_too(zoo: Zoo, tmp_path: Path) -> None:
    line = ScheduleRequest(name="linear", max_layers=6, min_layers=2, span=5, anchor=Anchor.ABSOLUTE)
    _export(zoo, "llama", tmp_path / "b", schedule=line)
    made, engines = _on_cpu(tmp_path / "b")
    decoder = Decoder(engines, made.model, made.schedule, [len(PROMPTS[0])], NEW)
    assert_gives_the_references_logits(decoder, zoo.model("llama").half().float(), PROMPTS[:1], NEW, 0.02)


def test_a_row_may_fill_the_bundles_length(zoo: Zoo, tmp_path: Path) -> None:
    _export(zoo, "llama", tmp_path / "b")
    made, engines = _on_cpu(tmp_path / "b")
    prompt = [5 + 7 * position % 90 for position in range(MAX_LENGTH - NEW)]
    decoder = Decoder(engines, made.model, made.schedule, [len(prompt)], NEW)
    assert_gives_the_references_logits(decoder, zoo.model("llama").half().float(), [prompt], NEW, 0.02)


@pytest.mark.parametrize(("quantize", "tolerance"), [("int8", 0.05), ("int4", 0.5)])
@pytest.mark.parametrize("name", ["opt", "mixtral"])
def test_quantised_engines_stay_close_to_the_reference(
    name: str, quantize: str, tolerance: float, zoo: Zoo, tmp_path: Path
) -> None:
    made = _export(zoo, name, tmp_path / "b", quantize=quantize)
    assert made.targets[0].weights == quantize
    manifest, engines = _on_cpu(tmp_path / "b")
    decoder = Decoder(engines, manifest.model, manifest.schedule, [len(PROMPTS[0])], NEW)
    decoder.prefill(PROMPTS[:1])
    _, logits = greedy_tokens(zoo.model(name), manifest.schedule, PROMPTS[0], 1)
    wanted = logits[0].numpy()
    assert 0 < np.linalg.norm(decoder.logits[0] - wanted) / np.linalg.norm(wanted) < tolerance


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_a_layer_is_few_operators_all_in_the_narrow_dtype(dtype: str, zoo: Zoo, tmp_path: Path) -> None:
    """bf16 has no kernels on a CPU, so its graph is only inspected."""
    made = _export(zoo, "llama", tmp_path / "b", dtype=dtype)
    graph = ir.load(tmp_path / "b" / made.targets[0].segments[0]).graph
    layers = len(made.segments[0])
    counts = Counter(node.op_type for node in graph)
    assert counts == Counter(
        {
            "GroupQueryAttention": layers, "SkipSimplifiedLayerNormalization": 2 * layers - 1, "RMSNormalization": 1,
            "MatMul": 5 * layers, "Transpose": 5 * layers, "Sigmoid": layers, "Mul": 2 * layers, "Add": 1,
        }
    )  # fmt: skip
    narrow = {"fp16": ir.DataType.FLOAT16, "bf16": ir.DataType.BFLOAT16}[dtype]
    assert {value.dtype for value in graph.initializers.values()} - {ir.DataType.INT64} == {narrow}
    assert made.targets[0].weights == dtype
    assert ir.load(tmp_path / "b" / made.targets[0].head).graph.outputs[0].dtype == ir.DataType.FLOAT


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("quantize", ["none", "int4"])
def test_a_layers_experts_are_one_operator_in_the_narrow_dtype_with_its_router_inside(
    dtype: str, quantize: str, zoo: Zoo, tmp_path: Path
) -> None:
    made = _export(zoo, "mixtral", tmp_path / "b", dtype=dtype, quantize=quantize)
    graph = ir.load(tmp_path / "b" / made.targets[0].segments[0]).graph
    layers, plain = len(made.segments[0]), quantize == "none"
    counts = Counter(node.op_type for node in graph)
    products = {"MatMul": 2, "Transpose": 2, "MoE": 1} if plain else {"MatMulNBits": 2, "QMoE": 1}
    assert counts == Counter(
        {
            "GroupQueryAttention": layers, "SkipSimplifiedLayerNormalization": 2 * layers - 1, "RMSNormalization": 1,
            "Reshape": layers, "Gemm": layers, "Add": 1, **{name: layers * count for name, count in products.items()},
        }
    )  # fmt: skip
    mixture = next(node for node in graph if node.op_type in ("MoE", "QMoE"))
    narrow = {"fp16": ir.DataType.FLOAT16, "bf16": ir.DataType.BFLOAT16}[dtype]
    given = [value for value in mixture.inputs if value is not None]
    assert {value.dtype for value in given} == ({narrow} if plain else {narrow, ir.DataType.UINT8})


def test_the_head_of_a_4_bit_checkpoint_is_in_8_bits(zoo: Zoo, tmp_path: Path) -> None:
    """The checkpoint has the head in full precision; in 4 bits it would cause nearly all of the error."""
    checkpoint = compressed(zoo.checkpoint("llama"), tmp_path / "llama", "W4A16")
    full = ScheduleRequest(name="full")
    request = ExportRequest(model=str(checkpoint), out=tmp_path / "b", schedule=full, targets=("cuda",), quantize="int4")
    (target,) = export(request).targets
    bits = [
        {node.attributes["bits"].as_int() for node in ir.load(tmp_path / "b" / path).graph if node.op_type == "MatMulNBits"}
        for path in (target.embed, *target.segments, target.head)
    ]
    assert bits == [set(), {4}, {8}]


def test_keys_and_values_are_counted_in_the_narrow_dtype(both: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert inspect.main([str(both), "--json"]) == 0
    cpu, cuda = json.loads(capsys.readouterr().out)["targets"]
    assert cuda["kv_bytes_per_row"] * 2 == cpu["kv_bytes_per_row"] > 0
    made = manifests.read(both)
    counted = [StepBytes(manifest=made, target=target) for target in made.targets]
    kv = [each.of(6, batch=2, context=10) - each.of(6, batch=2, context=0) for each in counted]
    assert kv[1] * 2 == kv[0] > 0


@pytest.fixture(scope="module")
def both(zoo: Zoo, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """OPT, whose embedding and head are tied, for cpu and cuda."""
    out = tmp_path_factory.mktemp("both") / "bundle"
    _export(zoo, "opt", out, targets=("cpu", "cuda"), slim=True)
    return out


def test_a_tied_embedding_and_head_share_one_matrix(both: Path, zoo: Zoo) -> None:
    cuda = manifests.read(both).targets[1]
    assert cuda.tied_weight is not None
    wanted = zoo.model("opt").lm_head.weight.detach().half().numpy()
    stored = np.fromfile(both / cuda.tied_weight, np.float16).reshape(104, -1)
    assert stored[: len(wanted)].tobytes() == wanted.tobytes() and not stored[len(wanted) :].any()
    for path in (cuda.embed, cuda.head):
        graph = ir.load(both / path).graph
        assert bindings.TIED_WEIGHT in [value.name for value in graph.inputs]
        assert all(value.shape != wanted.shape for value in graph.initializers.values()), "the engine has a copy of its own"
    _, engines = _on_cpu(both)
    assert isinstance(engines.embed, SharingEngine) and isinstance(engines.head, SharingEngine)
    assert engines.embed.weights[bindings.TIED_WEIGHT] is engines.head.weights[bindings.TIED_WEIGHT]
    assert cuda.head_weight_bytes >= stored.nbytes


def test_untied_and_quantised_models_have_no_tied_weight(zoo: Zoo, tmp_path: Path) -> None:
    assert _export(zoo, "llama", tmp_path / "llama").targets[0].tied_weight is None
    assert _export(zoo, "opt", tmp_path / "opt", quantize="int8").targets[0].tied_weight is None


def test_a_tied_weight_without_whole_rows_is_refused(both: Path, tmp_path: Path) -> None:
    shutil.copytree(both, tmp_path / "b")
    made = json.loads((tmp_path / "b" / "bundle.json").read_text())
    (file,) = [file for file in made["files"] if file["path"] == made["targets"][1]["tied_weight"]]
    file["size"] -= 2
    (tmp_path / "b" / "bundle.json").write_text(json.dumps(made))
    os.truncate(tmp_path / "b" / file["path"], file["size"])
    with pytest.raises(BundleError, match=r"tied\.bin: is not a whole number of rows; export the model again"):
        _on_cpu(tmp_path / "b")


def test_a_bundle_for_cpu_and_cuda_runs_its_cpu_engines_by_default(both: Path, zoo: Zoo) -> None:
    generator = skipdecode.load(both)
    assert [target.name for target in generator.manifest.targets] == ["cpu", "cuda"] and generator.target.name == "cpu"
    exact = generator.generate(PROMPTS[0], max_new_tokens=NEW, ignore_eos=True).sequences[0].token_ids
    assert exact == greedy_tokens(zoo.model("opt").half().float(), generator.manifest.schedule, PROMPTS[0], NEW)[0]


def test_keys_values_and_logits_are_those_of_the_cpu_engines(both: Path) -> None:
    made, engines = _on_cpu(both)
    exact = skipdecode.load(both).decoder([7, 2], NEW)
    narrow = Decoder(engines, made.model, made.schedule, [7, 2], NEW)
    for decoder in (exact, narrow):
        decoder.prefill(PROMPTS)
        decoder.decode_step(np.array([5, 6]))
    np.testing.assert_allclose(narrow.logits, exact.logits, rtol=0, atol=0.02 * np.abs(exact.logits).max())
    for row in range(2):
        others = narrow.kv.layer_arrays(5, slice(row, row + 1))
        for name, one in exact.kv.layer_arrays(5, slice(row, row + 1)).items():
            np.testing.assert_allclose(narrow.memory.to_host(others[name]), exact.memory.to_host(one), rtol=0.02, atol=0.02)


def test_cuda_is_refused_where_onnxruntime_has_no_cuda_provider(both: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines_ort.ort, "get_available_providers", lambda: ["CPUExecutionProvider"])
    with pytest.raises(
        TargetError, match="is built without CUDA; pip uninstall -y onnxruntime onnxruntime-gpu && pip install onnxruntime-gpu"
    ):
        skipdecode.load(both, target="cuda")


class _Gpu(HostDevice):
    stream = 1


@pytest.mark.skipif(
    "AzureExecutionProvider" not in engines_ort.ort.get_available_providers(), reason="onnxruntime-gpu has no other provider"
)
def test_nodes_that_cuda_cannot_run_are_an_error_and_do_not_fall_back_to_the_cpu(
    both: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Azure's provider, which comes with onnxruntime and has no kernels, stands in for CUDA's."""
    monkeypatch.setattr(engines_ort, "_provider", lambda device: ("AzureExecutionProvider", {}))
    with pytest.raises(
        TargetError, match=r"head\.onnx: onnxruntime .* cannot run all of it with CUDA \(it would leave .*\); install a newer"
    ):
        engines_ort.OrtEngine(both / "targets" / "cuda" / "head.onnx", device=_Gpu())


ARENA = "[ONNXRuntimeError] : 6 : RUNTIME_EXCEPTION : BFCArena: Failed to allocate memory for requested buffer of size 3221225472"
CUDA = "CUDA failure 2: out of memory ; GPU=0 ; hostname=gpu ; expr=cudaMalloc((void**)&p, size);"
CUBLAS = "CUBLAS failure 3: CUBLAS_STATUS_ALLOC_FAILED ; GPU=0 ; expr=cublasCreate(&cublas_handle_);"


@pytest.mark.parametrize(("message", "size"), [(ARENA, " for 3072 MiB"), (CUDA, ""), (CUBLAS, "")])
def test_running_out_of_gpu_memory_is_reported_as_such(
    message: str, size: str, both: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As ONNX Runtime words it when a session is made, and when it runs."""

    def fails(*_: object, **__: object) -> None:
        raise engines_ort.ort.capi.onnxruntime_pybind11_state.RuntimeException(message)

    _, engines = _on_cpu(both)
    engine = engines.segments[0].engine
    assert isinstance(engine, engines_ort.OrtEngine)
    run = engine.bind({}, {})
    monkeypatch.setattr(engines_ort.ort.InferenceSession, "run_with_iobinding", fails)
    with pytest.raises(CapacityError, match=f"^no memory is left{size}; send fewer rows .* a smaller --prefill-chunk$"):
        run()
    monkeypatch.setattr(engines_ort.ort, "InferenceSession", fails)
    with pytest.raises(CapacityError, match=rf"head\.onnx: no memory is left{size}; free some, or export with --quantize int4$"):
        engines_ort.OrtEngine(both / "targets" / "cuda" / "head.onnx", device=_Gpu())


def test_a_run_that_onnxruntime_aborts_gives_one_line(both: Path) -> None:
    _, engines = _on_cpu(both)
    run = engines.segments[0].engine.bind({}, {})  # nothing is bound
    with pytest.raises(TargetError, match=r"\.onnx: ONNX Runtime stopped \(.*\); check nvidia-smi, and start again$") as caught:
        run()
    assert "\n" not in str(caught.value)


def test_cudas_libraries_are_loaded_silently(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    loaded: list[str] = []
    monkeypatch.setattr(engines_ort.ort, "get_available_providers", lambda: ["CUDAExecutionProvider"])
    monkeypatch.setattr(engines_ort.ort, "preload_dlls", lambda: (loaded.append("all"), print("Failed to load libcudnn.so.9")))
    for name, value in engines_ort.ENVIRONMENT.items():  # prepare_cuda sets these for the whole process
        monkeypatch.setenv(name, value)
    engines_ort.prepare_cuda()
    assert loaded == ["all"] and capsys.readouterr() == ("", "")


@pytest.mark.parametrize("name", engines_ort.ENVIRONMENT)
@pytest.mark.parametrize("own", [None, "the user's"])
def test_environment_variables_of_cudas_libraries_keep_the_users_values(
    name: str, own: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines_ort.ort, "get_available_providers", lambda: ["CUDAExecutionProvider"])
    monkeypatch.setattr(engines_ort.ort, "preload_dlls", lambda: None)
    for each in engines_ort.ENVIRONMENT:  # set before it is deleted, so that it is restored after the test
        monkeypatch.setenv(each, own or "")
        if own is None:
            monkeypatch.delenv(each)
    engines_ort.prepare_cuda()
    assert os.environ[name] == (own or engines_ort.ENVIRONMENT[name])


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"dtype": "fp32"}, "--dtype: cuda has no fused attention in fp32; choose fp16 or bf16"),
        ({"targets": ("cuda:sm90",)}, "--target: target 'cuda:sm90': cuda has no compute capabilities; write cuda"),
    ],
)
def test_what_cuda_cannot_do_is_refused_before_anything_is_written(
    changes: dict[str, object], says: str, zoo: Zoo, tmp_path: Path
) -> None:
    with pytest.raises(SkipDecodeError) as caught:
        _export(zoo, "opt", tmp_path / "b", **changes)
    assert str(caught.value) == says
    assert list(tmp_path.iterdir()) == []
