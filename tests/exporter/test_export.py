"""Exporting: what is written, what is refused, and that nothing half-written stays."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import skipdecode
from skipdecode import manifest as manifests
from skipdecode.errors import BundleError, ModelNotSupportedError, SkipDecodeError, TargetError
from skipdecode.exporter import cli, cpu_target
from skipdecode.exporter import export as exports
from skipdecode.exporter.export import ExportRequest, export
from skipdecode.schedule_builders import ScheduleRequest
from tests.conftest import CONFIGS, LAYERS, MAX_LENGTH, READING_OTHERS, Zoo


def _run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).parent / str(arguments[0])), *map(str, arguments[1:])]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def test_the_commands_export_inspect_and_run(zoo: Zoo, tmp_path: Path) -> None:
    out = tmp_path / "engines"
    done = _run("skip-export", zoo.checkpoint("llama"), "--schedule", "linear", "--speedup", 2, "--span", 8, "--out", out)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    same = ScheduleRequest(name="linear", speedup=2, span=8)
    here = export(ExportRequest(model=str(zoo.checkpoint("llama")), out=tmp_path / "here", schedule=same))
    assert here.files == manifests.read(out).files, "the traces that tests keep are those of a process of its own"
    ran = _run("skip-run", out, "--token-ids", "5,6,7", "--token-ids", "9", "--max-new-tokens", 6, "--json")
    result = json.loads(ran.stdout)
    assert [row["prompt_ids"] for row in result["sequences"]] == [[5, 6, 7], [9]]
    assert set(result["timings"]) == {"load_s", "prefill_s", "decode_s", "tokens_per_s"}
    assert result["layers"] == [skipdecode.load(out).manifest.schedule.layers_at(t) for t in range(len(result["layers"]))]
    again = _run("skip-export", zoo.checkpoint("llama"), "--out", out)
    assert again.returncode == 2
    assert "--force" in again.stderr
    assert again.stderr.count("\n") == 1


def test_every_weight_is_stored_once_as_the_checkpoint_has_it(zoo: Zoo) -> None:
    for name in ("llama", "opt", "gemma2"):
        stored = load_file(zoo.bundle(name) / "graphs" / "weights.safetensors")
        state = zoo.model(name).state_dict()
        tied = {parameter.data_ptr(): parameter for parameter in state.values()}
        assert len(stored) == len(tied)
        for key, tensor in stored.items():
            torch.testing.assert_close(tensor, state[key], rtol=0, atol=0)


@pytest.mark.parametrize("name", CONFIGS)
def test_standard_graphs_hold_no_weights_and_pass_the_onnx_checker(name: str, zoo: Zoo) -> None:
    graphs = zoo.bundle(name) / "graphs"
    for path in sorted(graphs.glob("*.onnx")):
        model = onnx.load(path, load_external_data=False)
        assert (model.ir_version, model.opset_import[0].version) == (10, 24)
        assert {entry.domain for entry in model.opset_import} == {""}
        onnx.checker.check_model(path)
        inside = sum(len(tensor.raw_data) for tensor in model.graph.initializer)
        assert inside < 4096, path


def test_a_whole_variant_graph_gives_the_logits_of_the_reference(zoo: Zoo) -> None:
    manifest = manifests.read(zoo.bundle("qwen3"))
    prompt = [9, 8, 7, 6, 5]
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.use_per_session_threads = False
    from skipdecode.engines.ort import use_threads

    use_threads(None)
    for variant in manifest.variants:
        assert variant.graph is not None
        session = onnxruntime.InferenceSession(str(zoo.bundle("qwen3") / variant.graph), options)
        feeds = {"input_ids": np.array([prompt]), "position_ids": np.arange(5)[None], "last": np.array([4])}
        for value in session.get_inputs():
            if value.name.startswith("past_"):
                feeds[value.name] = np.zeros((1, 2, 8, 32), np.float32)
        schedule = skipdecode.Schedule(
            name="table", num_layers=LAYERS, warmup_layers=1, layers=(variant.num_layers,), anchor=skipdecode.Anchor.ABSOLUTE
        )
        from skipdecode.exporter.reference import greedy_tokens

        expected = greedy_tokens(zoo.model("qwen3"), schedule, prompt, 1)[1][0].numpy()
        found = session.run(["logits"], feeds)[0][0]
        assert np.abs(found - expected).max() <= 1e-3 * np.abs(expected).max()


def test_a_sharded_half_precision_checkpoint_gives_the_same_bundle(zoo: Zoo, tmp_path: Path) -> None:
    model = zoo.model("llama").half()
    model.save_pretrained(tmp_path / "one")
    model.save_pretrained(tmp_path / "many", max_shard_size="100KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 1
    hashes = []
    for kind in ("one", "many"):
        made = export(ExportRequest(model=str(tmp_path / kind), out=tmp_path / f"{kind}.out", max_length=MAX_LENGTH))
        hashes.append({file.path: file.sha256 for file in made.files}["graphs/weights.safetensors"])
    assert hashes[0] == hashes[1]


def test_slim_leaves_out_the_graphs_and_runs_the_same(zoo: Zoo, tmp_path: Path) -> None:
    made = export(ExportRequest(model=str(zoo.checkpoint("opt")), out=tmp_path / "slim", slim=True, max_length=MAX_LENGTH))
    assert not any(file.path.startswith("graphs") for file in made.files)
    assert all(variant.graph is None for variant in made.variants)
    runs = [
        skipdecode.load(path).generate([5, 6, 7], schedule="full", max_new_tokens=9)
        for path in (tmp_path / "slim", zoo.bundle("opt"))
    ]
    assert runs[0].sequences == runs[1].sequences


def test_random_weights_need_no_checkpoint(zoo: Zoo, tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 48, "vocab_size": 50}
    transformers.LlamaConfig(num_hidden_layers=4, **sizes).save_pretrained(tmp_path / "bare")
    export(ExportRequest(model=str(tmp_path / "bare"), out=tmp_path / "out", random_weights=True, max_length=32))
    assert len(skipdecode.load(tmp_path / "out").generate([1, 2], max_new_tokens=5, ignore_eos=True).sequences[0].token_ids) == 5


def test_segments_are_as_large_as_their_compiled_weights_allow(zoo: Zoo, tmp_path: Path) -> None:
    bones = exports.skeleton(zoo.model("llama").config)
    for quantize, sizes in (("none", [2, 2, 2]), ("int8", [LAYERS]), ("int4", [LAYERS])):
        request = ExportRequest(
            model=str(zoo.checkpoint("llama")), out=tmp_path / quantize, schedule=ScheduleRequest(name="full"), quantize=quantize,
            segment_bytes=2 * bones.layer_bytes,
        )  # fmt: skip
        assert [len(layers) for layers in export(request).segments] == sizes


def test_segments_are_larger_where_no_cpu_engine_shares_them(zoo: Zoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layer_bytes = exports.skeleton(zoo.model("llama").config).layer_bytes // 2  # in fp16
    monkeypatch.setattr(exports, "SEGMENT_BYTES", layer_bytes)
    monkeypatch.setattr(exports, "CUDA_SEGMENT_BYTES", LAYERS * layer_bytes)
    for targets, count in ((("cuda",), 1), (("cpu", "cuda"), LAYERS)):
        request = ExportRequest(
            model=str(zoo.checkpoint("llama")), out=tmp_path / targets[0], schedule=ScheduleRequest(name="full"), dtype="fp16",
            targets=targets,
        )  # fmt: skip
        assert len(export(request).segments) == count


def _copy(zoo: Zoo, tmp_path: Path) -> Path:
    return Path(shutil.copytree(zoo.checkpoint("llama"), tmp_path / "model"))


def _edit_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def _refused(model: Path | str, out: Path, kind: type[SkipDecodeError], says: str, **changes: object) -> None:
    """The export stops with one line, and leaves nothing behind."""
    out.parent.mkdir(exist_ok=True)
    with pytest.raises(kind, match=says) as caught:
        export(ExportRequest(model=str(model), out=out, **{"max_length": MAX_LENGTH, **changes}))  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)
    assert list(out.parent.iterdir()) == []


def test_what_cannot_be_exported_faithfully_is_refused_before_anything_is_written(zoo: Zoo, tmp_path: Path) -> None:
    out = tmp_path / "outs" / "bundle"
    folder = _copy(zoo, tmp_path)
    for changes, says in (
        ({"model_type": "bert"}, "bert is not among"),
        ({"model_type": "t5"}, "encoder-decoder"),
        ({"model_type": "x", "auto_map": {"AutoConfig": "x.Y"}}, "custom code"),
        ({"use_bidirectional_attention": True}, "later tokens"),
        ({"model_type": "mixtral", "hidden_act": "gelu"}, "mixtral has experts with gelu"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}, "max_position_embeddings": 40}, "positions|rotary"),
    ):
        shutil.copyfile(zoo.checkpoint("llama") / "config.json", folder / "config.json")
        _edit_config(folder, **changes)
        _refused(folder, out, ModelNotSupportedError, says)


def test_a_broken_checkpoint_is_one_line_and_leaves_nothing(zoo: Zoo, tmp_path: Path) -> None:
    out = tmp_path / "outs" / "bundle"
    folder = _copy(zoo, tmp_path)
    weights = folder / "model.safetensors"
    tensors = {key: value.clone() for key, value in load_file(weights).items()}  # not mapped: the file changes below
    weights.write_bytes(weights.read_bytes()[:1000])
    _refused(folder, out, ModelNotSupportedError, "cannot be read")
    save_file({key: value for key, value in tensors.items() if "layers.3.mlp.up" not in key}, weights)
    _refused(folder, out, ModelNotSupportedError, "lacks model.layers.3.mlp.up_proj.weight")
    save_file({**tensors, "model.norm.weight": torch.ones(7)}, weights)
    _refused(folder, out, ModelNotSupportedError, r"has shape \(7,\)")
    weights.unlink()
    _refused(folder, out, ModelNotSupportedError, "holds no model.safetensors or pytorch_model.bin")
    (folder / "pytorch_model.bin").write_bytes(b"x")
    _refused(folder, out, ModelNotSupportedError, "cannot be read as plain tensors")
    (folder / "config.json").write_text("{")
    _refused(folder, out, ModelNotSupportedError, "cannot be read")
    _refused(tmp_path / "nowhere", out, ModelNotSupportedError, "is not a folder")


@pytest.mark.parametrize(
    ("changes", "kind", "says"),
    [
        ({"targets": ("vulkan",)}, TargetError, "choose from cpu"),
        ({"dtype": "fp16"}, TargetError, "choose fp32"),
        ({"quantize": "int3"}, TargetError, "choose one of none, int8, int4"),
        ({"quantize": "int4", "quantize_method": "guess"}, TargetError, "choose one of rtn, k-quant"),
        ({"quantize": "int4", "quantize_block": 48}, TargetError, "choose one of 32, 64, 128"),
        ({"quantize": "int4", "quantize_block": 128}, TargetError, "no multiple of 128"),
        ({"max_batch": 0}, TargetError, "choose 1 or more"),
        ({"max_length": 1}, ModelNotSupportedError, "choose 2 or more"),
        ({"max_length": 65}, ModelNotSupportedError, "the model has 64 positions"),
        ({"schedule": ScheduleRequest(name="wibble")}, SkipDecodeError, "choose one of"),
    ],
)
def test_options_out_of_range_are_refused(
    zoo: Zoo, tmp_path: Path, changes: dict[str, object], kind: type[SkipDecodeError], says: str
) -> None:
    _refused(zoo.checkpoint("llama"), tmp_path / "outs" / "bundle", kind, says, **changes)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"targets": ("cpu", "tensorrt-rtx:sm89")}, "which TensorRT has no layer for; choose cpu or cuda"),
        ({"quantize": "int4"}, "width of the experts 48 is no multiple of 32, .*; leave out --quantize"),
        ({"quantize": "int4", "targets": ("cuda",)}, "experts 48 is no multiple of 64, .*; leave out --quantize, or choose cpu"),
    ],
)
def test_what_experts_cannot_be_compiled_for_is_refused(zoo: Zoo, tmp_path: Path, changes: dict[str, object], says: str) -> None:
    _refused(zoo.checkpoint("qwen3_moe"), tmp_path / "outs" / "bundle", TargetError, says, **changes)


@pytest.mark.parametrize(
    ("name", "changes", "says"),
    [
        ("minimax_m2", {}, "minimax_m2 chooses its experts as no CUDA kernel of ONNX Runtime does; choose cpu"),
        ("mixtral", {"intermediate_size": 100}, "width of the experts 100 is no multiple of 8, as cuda needs it; choose cpu"),
    ],
)
def test_a_mixture_that_cudas_kernels_do_not_compute_is_refused(
    name: str, changes: dict[str, object], says: str, zoo: Zoo, tmp_path: Path
) -> None:
    shutil.copytree(zoo.checkpoint(name), tmp_path / "model")
    config = tmp_path / "model" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **changes}))
    _refused(tmp_path / "model", tmp_path / "outs" / "bundle", TargetError, says, targets=("cpu", "cuda"))


@pytest.mark.parametrize("target", ["cuda", "tensorrt-rtx:sm89"])
@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("minicpm3", "keys and values that are expanded from a latent"),
        ("gpt_oss", "attention sinks"),
        ("nemotron_h", "layers with linear attention"),
        ("lfm2", "layers with short convolutions"),
    ],
)
def test_attention_of_a_kind_that_no_gpu_has_run_is_refused_for_gpus(
    name: str, what: str, target: str, zoo: Zoo, tmp_path: Path
) -> None:
    says = f"--target: {name} has {what}, which is run on cpu alone; choose cpu"
    _refused(zoo.checkpoint(name), tmp_path / "outs" / "bundle", TargetError, says, targets=("cpu", target))


@pytest.mark.parametrize(("kind", "target"), [("mlp", "cuda"), ("mlp", "tensorrt-rtx:sm89"), ("moe", "cuda")])
def test_layers_without_attention_are_refused_for_gpus(kind: str, target: str, zoo: Zoo, tmp_path: Path) -> None:
    """Nemotron-H without Mamba was once taken, and had no keys for TensorRT to lay out."""
    shutil.copytree(zoo.checkpoint("nemotron_h"), tmp_path / "model")
    _edit_config(tmp_path / "model", layers_block_type=[kind, "full_attention"] * 3)
    says = "--target: nemotron_h has layers without attention, which is run on cpu alone; choose cpu"
    _refused(tmp_path / "model", tmp_path / "outs" / "bundle", TargetError, says, targets=("cpu", target))


def test_the_width_of_experts_whose_matrices_lie_the_other_way_round_is_seen(zoo: Zoo, tmp_path: Path) -> None:
    shutil.copytree(zoo.checkpoint("gpt_oss"), tmp_path / "model")
    _edit_config(tmp_path / "model", intermediate_size=100)
    says = "width of the experts 100 is no multiple of 32, .*; leave out --quantize"
    _refused(tmp_path / "model", tmp_path / "outs" / "bundle", TargetError, says, quantize="int4")


@pytest.mark.parametrize("quantize", ["none", "int8"])
def test_of_a_mixture_a_step_reads_the_experts_that_it_chooses(quantize: str, zoo: Zoo, tmp_path: Path) -> None:
    """Here 3 of 5, beside attention and router."""
    full = ScheduleRequest(name="full")
    made = export(
        ExportRequest(
            model=str(zoo.checkpoint("mixtral")), out=tmp_path / "b", schedule=full, max_length=MAX_LENGTH, quantize=quantize
        )
    )
    (target,) = made.targets
    stored = sum((tmp_path / "b" / path).with_suffix(".bin").stat().st_size for path in target.segments)
    experts = LAYERS * 5 * 3 * 64 * 128 * (4 if quantize == "none" else 1 + 4 / 32)
    assert 3 / 5 * experts < sum(target.segment_weight_bytes) < 4 / 5 * experts
    assert stored > experts


def test_a_full_disk_leaves_nothing_half_written(zoo: Zoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cpu_target, "compile_ort", full)
    _refused(zoo.checkpoint("llama"), tmp_path / "outs" / "bundle", BundleError, "No space left on device")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 10, 0))  # type: ignore[attr-defined]
    _refused(zoo.checkpoint("llama"), tmp_path / "outs" / "bundle", BundleError, "MiB are free")


def test_a_disk_need_not_have_more_room_for_a_segment_than_the_model_has_weights(
    zoo: Zoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A segment may have 256 MiB, this model has one."""
    free = 8 << 20
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(free, 0, free))  # type: ignore[attr-defined]
    full = ScheduleRequest(name="full")
    request = ExportRequest(model=str(zoo.checkpoint("llama")), out=tmp_path / "out", schedule=full, max_length=MAX_LENGTH)
    assert sum(file.size for file in export(request).files) < free


def test_a_folder_whose_name_is_no_utf_8_is_refused_by_that_name(zoo: Zoo, tmp_path: Path) -> None:
    """ONNX Runtime takes no such path; what failed first was the tokenizer, which was told to be repaired."""
    odd = tmp_path / os.fsdecode(b"caf\xe9")
    _refused(zoo.checkpoint("llama"), odd / "bundle", BundleError, "bundle: is no UTF-8, .*; choose another --out")
    model = shutil.copytree(zoo.checkpoint("llama"), odd / "model")
    _refused(model, tmp_path / "outs" / "bundle", ModelNotSupportedError, "model: is no UTF-8, .*; rename the folder")


def test_force_replaces_a_bundle_and_nothing_else(zoo: Zoo, tmp_path: Path) -> None:
    out = tmp_path / "mine"
    out.mkdir()
    (out / "thesis.tex").write_text("years of work")
    with pytest.raises(BundleError, match="is not a bundle"):
        export(ExportRequest(model=str(zoo.checkpoint("llama")), out=out, force=True, max_length=MAX_LENGTH))
    assert (out / "thesis.tex").read_text() == "years of work"


def test_a_bundle_with_many_variants_weighs_what_one_with_a_single_variant_weighs(zoo: Zoo, tmp_path: Path) -> None:
    one = export(
        ExportRequest(
            model=str(zoo.checkpoint("llama")), out=tmp_path / "one", schedule=ScheduleRequest(name="full"), max_length=MAX_LENGTH
        )
    )
    many = manifests.read(zoo.bundle("llama"))

    def weights(manifest: manifests.Manifest) -> int:
        return sum(file.size for file in manifest.files if file.path.endswith((".bin", ".safetensors")))

    assert len(many.variants) == 5
    assert weights(many) <= 1.1 * weights(one)


@pytest.mark.parametrize(("quantize", "tolerance"), [("int8", 0.03), ("int4", 0.4)])
def test_quantised_engines_stay_near_the_exact_ones_and_are_smaller(
    zoo: Zoo, tmp_path: Path, quantize: str, tolerance: float
) -> None:
    made = export(ExportRequest(model=str(zoo.checkpoint("opt")), out=tmp_path / "q", quantize=quantize, max_length=MAX_LENGTH))
    assert made.targets[0].weights == quantize
    sizes = {file.path: file.size for file in made.files}
    exact = {file.path: file.size for file in manifests.read(zoo.bundle("opt")).files}
    assert sizes["targets/cpu/segment_000.bin"] < 0.6 * exact["targets/cpu/segment_000.bin"]
    logits = []
    for path in (tmp_path / "q", zoo.bundle("opt")):
        generator = skipdecode.load(path)
        decoder = generator.decoder([5], 2, skipdecode.schedule.full_depth(LAYERS))
        decoder.prefill([[9, 8, 7, 6, 5]])
        decoder.decode_step(np.array([4]))
        logits.append(decoder.logits[0].copy())
    error = np.linalg.norm(logits[0] - logits[1]) / np.linalg.norm(logits[1])
    assert 0 < error < tolerance


@pytest.mark.parametrize(("name", "tied"), [("opt", True), ("llama", False)])
def test_a_quantised_embedding_is_stored_once_with_a_tied_head(zoo: Zoo, tmp_path: Path, name: str, tied: bool) -> None:
    export(ExportRequest(model=str(zoo.checkpoint(name)), out=tmp_path / "q", quantize="int8", max_length=MAX_LENGTH, slim=True))
    table = [
        value.const_value
        for value in ir.load(tmp_path / "q/targets/cpu/embed.onnx").graph.initializers.values()
        if str(value.name).endswith("embed_tokens.weight.quantised.weight")
    ]
    assert [tensor.location for tensor in table] == ["head.bin" if tied else "embed.bin"]
    assert len(skipdecode.load(tmp_path / "q").generate([[5, 6]], max_new_tokens=3).sequences[0].token_ids) == 3


@pytest.mark.parametrize(("table", "warned"), [('{"layers": [6, 4], "warmup_layers": 0}', True), ('{"layers": [6, 4]}', False)])
def test_a_schedule_that_skips_layer_0_is_warned_of(
    zoo: Zoo, tmp_path: Path, capsys: pytest.CaptureFixture[str], table: str, warned: bool
) -> None:
    (tmp_path / "t.json").write_text(table)
    options = ["--schedule", f"table:{tmp_path / 't.json'}", "--max-length", "48", "--out", str(tmp_path / "bundle")]
    assert cli.main([str(zoo.checkpoint("llama")), *options]) == 0
    assert ("warning: without layer 0 an untuned model breaks" in capsys.readouterr().err) is warned


@pytest.mark.parametrize(("table", "warned"), [('{"layers": [6, 5], "warmup_layers": 4}', False), ('{"layers": [6, 5]}', True)])
def test_warm_up_layers_that_nobody_asked_for_are_warned_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], table: str, warned: bool
) -> None:
    """The model's layers read the keys and values of others: 3 there must be, whatever is asked."""
    transformers.AutoModelForCausalLM.from_config(READING_OTHERS()).save_pretrained(tmp_path / "model")
    (tmp_path / "t.json").write_text(table)
    options = ["--schedule", f"table:{tmp_path / 't.json'}", "--max-length", "48", "--out", str(tmp_path / "bundle")]
    assert cli.main([str(tmp_path / "model"), *options]) == 0
    said = "warning: 3 warm-up layers, since later layers read the keys and values of layer 2 and below"
    assert [line for line in capsys.readouterr().err.splitlines() if "warm-up layers, since" in line] == [
        f"skip-export: {said}"
    ] * warned
