"""What an export writes."""

from __future__ import annotations

import json
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
from safetensors.torch import load_file

import skipdecode
from skipdecode import manifest as manifests
from skipdecode.errors import BundleError, ScheduleError
from skipdecode.exporter import command, feasible
from skipdecode.exporter.export import ExportRequest, export
from skipdecode.exporter.skeleton import build_skeleton
from skipdecode.schedule_builders import ScheduleRequest
from tests.models import CONFIGS, LAYERS, MAX_LENGTH
from tests.zoo import Zoo


def _run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).parent / str(arguments[0])), *map(str, arguments[1:])]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def test_the_commands_export_and_run(zoo: Zoo, tmp_path: Path) -> None:
    out = tmp_path / "engines"
    done = _run("skip-export", zoo.checkpoint("llama"), "--schedule", "linear", "--speedup", 2, "--span", 8, "--out", out)
    (warning,) = done.stderr.splitlines()
    assert done.returncode == 0 and "llama has no tokenizer, so the bundle takes only token ids; save one there" in warning
    same = ScheduleRequest(name="linear", speedup=2, span=8)
    here = export(ExportRequest(model=str(zoo.checkpoint("llama")), out=tmp_path / "here", schedule=same))
    assert here.files == manifests.read(out).files, "traces that tests share are those of a process of its own"
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


@pytest.mark.parametrize("name", ["qwen3", "gpt_oss"])  # the graphs leave out some outputs of their attention
def test_a_whole_variant_graph_gives_the_logits_of_the_reference(name: str, zoo: Zoo) -> None:
    manifest = manifests.read(zoo.bundle(name))
    prompt = [9, 8, 7, 6, 5]
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.use_per_session_threads = False
    from skipdecode.engines.ort import use_threads

    use_threads(None)
    for variant in manifest.variants:
        assert variant.graph is not None
        session = onnxruntime.InferenceSession(str(zoo.bundle(name) / variant.graph), options)
        feeds = {"input_ids": np.array([prompt]), "position_ids": np.arange(5)[None], "last": np.array([4])}
        for value in session.get_inputs():
            if value.name.startswith("past_"):
                feeds[value.name] = np.zeros((1, value.shape[1], 8, value.shape[3]), np.float32)
        schedule = skipdecode.Schedule(
            name="table", num_layers=LAYERS, warmup_layers=1, layers=(variant.num_layers,), anchor=skipdecode.Anchor.ABSOLUTE
        )
        from skipdecode.exporter.reference import greedy_tokens

        expected = greedy_tokens(zoo.model(name), schedule, prompt, 1)[1][0].numpy()
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


def test_random_weights_need_no_checkpoint(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 48, "vocab_size": 50}
    transformers.LlamaConfig(num_hidden_layers=4, **sizes).save_pretrained(tmp_path / "bare")
    export(ExportRequest(model=str(tmp_path / "bare"), out=tmp_path / "out", random_weights=True, max_length=32))
    assert len(skipdecode.load(tmp_path / "out").generate([1, 2], max_new_tokens=5, ignore_eos=True).sequences[0].token_ids) == 5


def test_segments_are_as_large_as_their_compiled_weights_allow(zoo: Zoo, tmp_path: Path) -> None:
    skeleton = build_skeleton(zoo.model("llama").config)
    for quantize, sizes in (("none", [2, 2, 2]), ("int8", [LAYERS]), ("int4", [LAYERS])):
        request = ExportRequest(
            model=str(zoo.checkpoint("llama")), out=tmp_path / quantize, schedule=ScheduleRequest(name="full"), quantize=quantize,
            segment_bytes=2 * 4 * max(skeleton.layer_parameters),
        )  # fmt: skip
        assert [len(layers) for layers in export(request).segments] == sizes


def test_segments_are_larger_where_no_cpu_engine_shares_them(zoo: Zoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layer_bytes = 2 * max(build_skeleton(zoo.model("llama").config).layer_parameters)  # in fp16
    monkeypatch.setattr(feasible, "SEGMENT_BYTES", layer_bytes)
    monkeypatch.setattr(feasible, "CUDA_SEGMENT_BYTES", LAYERS * layer_bytes)
    for targets, count in ((("cuda",), 1), (("cpu", "cuda"), LAYERS)):
        request = ExportRequest(
            model=str(zoo.checkpoint("llama")), out=tmp_path / targets[0], schedule=ScheduleRequest(name="full"), dtype="fp16",
            targets=targets,
        )  # fmt: skip
        assert len(export(request).segments) == count


def test_progress_is_reported_with_the_fraction_that_is_done(zoo: Zoo, tmp_path: Path) -> None:
    reported: list[tuple[str, float]] = []
    request = ExportRequest(
        model=str(zoo.checkpoint("llama")), out=tmp_path / "b", schedule=ScheduleRequest(name="full"), max_length=MAX_LENGTH,
        dtype="fp16", targets=("cpu", "cuda"), segment_bytes=1,
    )  # fmt: skip
    export(request, lambda what, done: reported.append((what, done)))
    segments = [what for what, _ in reported if what.startswith("compiling segment")]
    counts = range(1, LAYERS + 1)
    assert segments == [f"compiling segment {n} of {LAYERS} for {target}" for target in ("cpu", "cuda") for n in counts]
    done = [each for _, each in reported]
    assert done == sorted(done) and done[0] == 0 and done[-1] == 1
    assert [each for what, each in reported if what.startswith("compiling segment 4 ")] == pytest.approx([0.625, 0.875])


@pytest.mark.parametrize("quantize", ["none", "int8"])
def test_a_step_of_a_mixture_reads_only_the_experts_that_it_chooses(quantize: str, zoo: Zoo, tmp_path: Path) -> None:
    """Here 3 of 5, besides attention and router."""
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


def test_a_disk_need_not_have_more_room_for_a_segment_than_the_model_has_weights(
    zoo: Zoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A segment may have 256 MiB; this model has 1 MiB."""
    free = 8 << 20
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(free, 0, free))  # type: ignore[attr-defined]
    full = ScheduleRequest(name="full")
    request = ExportRequest(model=str(zoo.checkpoint("llama")), out=tmp_path / "out", schedule=full, max_length=MAX_LENGTH)
    assert sum(file.size for file in export(request).files) < free


@pytest.mark.parametrize("target", ["cuda", "tensorrt-rtx:sm89"])
def test_the_disk_space_that_is_required_suffices_for_an_embedding_that_is_not_quantised(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nearly all of this model is its embedding, which is also its head."""
    config = CONFIGS["qwen2"]()
    config.vocab_size = 400_000
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    request = ExportRequest(model=str(tmp_path / "model"), out=tmp_path / "out", schedule=ScheduleRequest(name="full"),
                            max_length=MAX_LENGTH, targets=(target,), quantize="int4")  # fmt: skip
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(0, 0, 0))  # type: ignore[attr-defined]
        with pytest.raises(BundleError, match="the bundle needs") as caught:
            export(request)
    asked = int(str(caught.value).split("needs ")[1].split()[0]) << 20
    assert 0.7 * asked < sum(file.size for file in export(request).files) <= asked


def test_force_replaces_a_bundle_and_nothing_else(zoo: Zoo, tmp_path: Path) -> None:
    out = tmp_path / "mine"
    out.mkdir()
    (out / "thesis.tex").write_text("years of work")
    with pytest.raises(BundleError, match="is not a bundle"):
        export(ExportRequest(model=str(zoo.checkpoint("llama")), out=out, force=True, max_length=MAX_LENGTH))
    assert (out / "thesis.tex").read_text() == "years of work"


def test_a_bundle_with_many_variants_is_no_larger_than_one_with_a_single_variant(zoo: Zoo, tmp_path: Path) -> None:
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
def test_quantised_engines_stay_close_to_the_exact_ones_and_are_smaller(
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
    assert command.main([str(zoo.checkpoint("llama")), *options]) == 0
    assert ("warning: without layer 0 an untuned model breaks" in capsys.readouterr().err) is warned


@pytest.mark.parametrize(("table", "warned"), [('{"layers": [6, 5], "warmup_layers": 4}', False), ('{"layers": [6, 5]}', True)])
def test_warm_up_layers_beyond_those_requested_are_warned_of(
    zoo: Zoo, tmp_path: Path, capsys: pytest.CaptureFixture[str], table: str, warned: bool
) -> None:
    """The model's layers read the keys and values of others, so there must be 3, whatever is requested."""
    (tmp_path / "t.json").write_text(table)
    options = ["--schedule", f"table:{tmp_path / 't.json'}", "--max-length", "48", "--out", str(tmp_path / "bundle")]
    assert command.main([str(zoo.checkpoint("reading_others")), *options]) == 0
    warning = "warning: 3 warm-up layers, since later layers read the keys and values of layer 2 and below"
    assert [line for line in capsys.readouterr().err.splitlines() if "warm-up layers, since" in line] == [
        f"skip-export: {warning}"
    ] * warned


@pytest.mark.parametrize(("span", "warned"), [(48, False), (100, True)])
def test_a_schedule_whose_end_no_row_reaches_is_warned_of(
    zoo: Zoo, tmp_path: Path, capsys: pytest.CaptureFixture[str], span: int, warned: bool
) -> None:
    options = ["--schedule", "step", "--span", str(span), "--max-variants", str(span), "--max-layers", "6", "--min-layers", "2"]
    assert command.main([str(zoo.checkpoint("llama")), *options, "--max-length", "48", "--out", str(tmp_path / "bundle")]) == 0
    assert ("none reaches 2 layers" in capsys.readouterr().err) is warned


def test_warm_up_layers_below_0_are_refused(zoo: Zoo, tmp_path: Path) -> None:
    schedule = ScheduleRequest(warmup_layers=-1)
    with pytest.raises(ScheduleError, match=r"--warmup-layers -1: the model has 6 layers; choose 0\.\.5"):
        export(ExportRequest(model=str(zoo.checkpoint("llama")), out=tmp_path / "bundle", schedule=schedule))


def test_a_model_in_the_current_folder_is_named_after_it(zoo: Zoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(shutil.copytree(zoo.checkpoint("llama"), tmp_path / "my-llama"))
    assert export(ExportRequest(model=".", out=tmp_path / "bundle", max_length=48)).model.name == "my-llama"
