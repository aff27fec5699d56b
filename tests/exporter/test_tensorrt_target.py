"""Bundles with TensorRT plans, built by the real builder on a machine that may have no GPU."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx_ir as ir
import pytest
import torch
import transformers
from safetensors import safe_open

import skipdecode
from skipdecode import manifest as manifests
from skipdecode.cli import inspect, run, validate
from skipdecode.errors import SkipDecodeError, TargetError
from skipdecode.exporter import tensorrt_target
from skipdecode.exporter.export import ExportRequest, export
from skipdecode.exporter.reference import greedy_tokens
from skipdecode.exporter.skeleton import build_skeleton
from skipdecode.graph_passes.compile_tensorrt import BuilderOptions
from skipdecode.graph_passes.quantization import Quantization
from skipdecode.kv_buffer import MIN_SLOTS
from skipdecode.model import KeyValueSizes, LayerGroup
from skipdecode.schedule import full_depth
from skipdecode.schedule_builders import ScheduleRequest
from skipdecode.validation import parity
from tests.agreement import assert_gives_the_references_logits
from tests.exporter.plan_requests import SCHEDULE, longer_checkpoint, plan_request
from tests.models import MAX_LENGTH, RELATIVES
from tests.runtime.validation.conftest import answer_here
from tests.zoo import Zoo

pytestmark = pytest.mark.usefixtures("built_here")
TARGET = "targets/tensorrt-rtx"
NO_LAYERS = SimpleNamespace(layers=())


@pytest.fixture(scope="module")
def both(zoo: Zoo, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A grouped-query model for cpu and for two kinds of GPU."""
    out = tmp_path_factory.mktemp("both") / "bundle"
    export(plan_request(zoo, "llama", out, targets=("cpu", "tensorrt-rtx:sm86,sm89")))
    return out


@pytest.fixture(scope="module")
def plans_only(zoo: Zoo, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("plans") / "bundle"
    export(plan_request(zoo, "opt", out, slim=True))
    return out


def test_the_manifest_says_what_the_plans_are_for(both: Path) -> None:
    manifest = manifests.read(both)
    target = manifest.targets[1]
    assert (target.name, target.machine, target.weights, target.library) == ("tensorrt-rtx", "sm86 sm89", "fp16", "tensorrt_rtx")
    assert manifest.dtype == "float16"
    sizes = {file.path: file.size for file in manifest.files}
    for path, weights in zip(target.segments, target.segment_weight_bytes, strict=True):
        assert sizes[path] > weights, "a plan holds its weights"
    assert [path for path in sizes if "lowered" in path] == []
    with safe_open(both / "graphs" / "weights.safetensors", framework="pt") as stored:
        assert {stored.get_tensor(name).dtype for name in stored.keys()} == {torch.float16}  # noqa: SIM118


def test_the_same_graphs_run_on_cpu_and_agree_with_the_reference(both: Path, zoo: Zoo) -> None:
    """What the plans were built from, computed in fp32: the reference has the weights that fp16 leaves."""
    generator, model = skipdecode.load(both), zoo.model("llama").half().float()
    assert generator.target.name == "cpu"
    prompt = [9, 8, 7, 6, 5]
    tokens, _ = greedy_tokens(model, generator.manifest.schedule, prompt, 8)
    assert generator.generate(prompt, max_new_tokens=8, ignore_eos=True).sequences[0].token_ids == tokens
    assert_gives_the_references_logits(generator.decoder([len(prompt)], 8), model, [prompt], 8, 1e-3)


def test_validate_checks_what_runs_and_says_what_does_not(
    both: Path, zoo: Zoo, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parity, "_run_reference", answer_here)
    reference = ["--reference", str(zoo.checkpoint("llama"))]  # in fp32, where the bundle is rounded
    quick = ["--batch", "1", "--context", "16", "--prompt-tokens", "8", "--new-tokens", "6"]
    assert validate.main([str(both), *reference, *quick, "--json"]) == 0
    cpu, plans = json.loads(capsys.readouterr().out)["targets"]
    assert cpu["runs"] and all(variant["holds"] for variant in cpu["parity"])
    assert not plans["runs"] and "there is no NVIDIA driver here" in plans["why"]


def test_a_bundle_of_only_plans_is_refused_in_one_line_where_there_is_no_gpu(
    plans_only: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run.main([str(plans_only), "--token-ids", "5,6", "--max-new-tokens", "2"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "there is no NVIDIA driver here; choose a machine with a GPU" in error


def test_inspect_shows_plans_and_their_static_buffers(plans_only: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert inspect.main([str(plans_only), "--check-hashes"]) == 0
    page = capsys.readouterr().out
    assert "target tensorrt-rtx: fp16, tensorrt_rtx" in page and "sm89" in page
    assert f"a row of at most {MAX_LENGTH} tokens" in page
    assert inspect.main([str(plans_only), "--json"]) == 0
    (target,) = json.loads(capsys.readouterr().out)["targets"]
    assert target["kv_bytes_per_row"] == 6 * MIN_SLOTS * 2 * 64 * 2  # layers, slots, key and value, width, fp16


def test_a_slim_bundle_of_plans_holds_no_graphs(plans_only: Path) -> None:
    names = {path.name for path in plans_only.rglob("*") if path.is_file()}
    plans = {name for name in names if name.endswith(".plan")}
    assert {"embed.plan", "head.plan", "segment_000.plan"} <= plans
    others = {"bundle.json", "config.json", "generation_config.json", "genai_config.json", "keys.json", "tied.bin"}
    assert names - plans <= others
    (target,) = manifests.read(plans_only).targets
    assert target.head_weight_bytes > (plans_only / TARGET / "tied.bin").stat().st_size, "a step also reads the tied weight"


def test_a_plan_of_the_same_content_is_taken_from_the_bundle_that_is_replaced(plans_only: Path, zoo: Zoo, tmp_path: Path) -> None:
    out = tmp_path / "bundle"
    shutil.copytree(plans_only, out)

    def inodes() -> dict[str, int]:
        return {path.name: path.stat().st_ino for path in (out / TARGET).glob("*.plan")}

    before = inodes()
    damaged = out / TARGET / "head.plan"
    damaged.write_bytes(damaged.read_bytes()[::-1])
    export(plan_request(zoo, "opt", out, slim=True, force=True))
    changed = {name for name, inode in inodes().items() if inode != before[name]}
    assert changed == {"head.plan"}, "a damaged plan is built again"
    before = inodes()
    # another schedule cuts layers 1 and 2 apart: the other segments, the embedding and the head stay
    table = tmp_path / "table.json"
    table.write_text(json.dumps({"layers": [6, 5, 3], "warmup_layers": 1}))
    export(plan_request(zoo, "opt", out, slim=True, force=True, schedule=ScheduleRequest(name=f"table:{table}")))
    after = inodes()
    assert {before["embed.plan"], before["head.plan"], before["segment_000.plan"]} <= set(after.values())
    assert len(set(after.values()) - set(before.values())) == 2
    # other weights: nothing is taken over
    other = tmp_path / "other"
    shutil.copytree(zoo.checkpoint("opt"), other)
    torch.manual_seed(1)
    transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(other)).save_pretrained(other)
    export(ExportRequest(model=str(other), out=out, force=True, slim=True, schedule=SCHEDULE, max_batch=4, max_length=MAX_LENGTH,
                         targets=("tensorrt-rtx:sm89",)))  # fmt: skip
    assert not set(inodes().values()) & set(after.values())


@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_quantised_plans_are_smaller_and_are_taken_over_too(quantize: str, plans_only: Path, zoo: Zoo, tmp_path: Path) -> None:
    wanted = {"quantize": quantize, "slim": True}
    made = export(plan_request(zoo, "opt", tmp_path / "bundle", **wanted))
    (target,), (wide,) = made.targets, manifests.read(plans_only).targets
    assert (target.weights, target.tied_weight) == (quantize, None)
    share = {"int8": 0.5, "int4": 0.25 * 36 / 32}[quantize]  # of 16 bits; in int4 with a scale of 16 bits per 32 weights
    for mine, theirs in zip(target.segment_weight_bytes, wide.segment_weight_bytes, strict=True):
        assert share < mine / theirs < share + 0.05, "norms and biases stay"
    assert {path.suffix for path in (tmp_path / "bundle" / TARGET).iterdir()} == {".plan", ".json"}
    before = {path.name: path.stat().st_ino for path in (tmp_path / "bundle" / TARGET).glob("*.plan")}
    export(plan_request(zoo, "opt", tmp_path / "bundle", force=True, **wanted))
    assert {path.name: path.stat().st_ino for path in (tmp_path / "bundle" / TARGET).glob("*.plan")} == before


@pytest.mark.parametrize("quantize", ["none", "int4"])
def test_what_a_step_of_a_mixture_reads_is_counted_as_it_is_for_cuda(quantize: str, zoo: Zoo, tmp_path: Path) -> None:
    targets, full = ("cuda", "tensorrt-rtx:sm89"), ScheduleRequest(name="full")
    made = export(
        plan_request(zoo, "mixtral", tmp_path / "bundle", targets=targets, dtype="fp16", quantize=quantize, schedule=full)
    )
    cuda, plans = (sum(target.segment_weight_bytes) for target in made.targets)
    assert plans == pytest.approx(cuda, rel=0.15 if quantize == "int4" else 0.02), "scales of 32 bits, and of 16"


def test_a_block_size_for_cpu_may_be_chosen_alongside_plans_without_blocks(zoo: Zoo, tmp_path: Path) -> None:
    made = export(
        plan_request(
            zoo, "llama", tmp_path / "bundle", targets=("cpu", "tensorrt-rtx:sm89"), quantize="int8", quantize_block=64,
            schedule=ScheduleRequest(name="full"),
        )
    )  # fmt: skip
    assert [target.weights for target in made.targets] == ["int8", "int8"]
    assert not list((tmp_path / "bundle" / "graphs").glob("lowered*"))


@pytest.mark.parametrize(
    ("name", "changes", "says"),
    [
        ("llama", {"dtype": "fp32"}, "--dtype: tensorrt-rtx has no fused attention in fp32"),
        (
            "llama",
            {"quantize": "int8", "quantize_method": "k-quant"},
            "--quantize-method: k-quant has zero points, which tensorrt-rtx does not support in int8; "
            "choose rtn, or --quantize int4",
        ),
        (
            "llama",
            {"quantize": "int8", "quantize_block": 64},
            "--quantize-block: in int8 tensorrt-rtx has one scale per output, not blocks; "
            "leave it out, or choose --quantize int4",
        ),
        ("llama", {"quantize": "int4", "quantize_block": 128}, "--quantize-block: the hidden size 64 is not a multiple of 128"),
        (
            "llama",
            {"max_batch": 10**7},
            "--max-length: a KV buffer of 10000000 rows of 128 slots .*; choose a smaller --max-batch",
        ),
        (
            "mixtral",
            {"max_batch": 10**5},
            "--max-batch: the experts that a step of 100000 rows .*; choose --max-batch 43690",
        ),
        (
            "llama",
            {"targets": ("tensorrt-rtx:sm75,sm89",), "quantize": "int4"},
            "--target: plans for sm75 have no int4; leave sm75 out, or choose --quantize int8",
        ),
        (
            "llama",
            {"targets": ("tensorrt-rtx:sm75",), "dtype": "bf16"},
            "--target: sm75 has no bf16; leave sm75 out, or choose --dtype fp16",
        ),
        ("llama", {"targets": ("tensorrt",)}, "--target: target tensorrt needs the Python package tensorrt; docs/tensorrt.md"),
        ("llama", {"builder": BuilderOptions(workspace_mib=0)}, "--workspace: 0 MiB is out of range; choose 1.."),
        ("llama", {"builder": BuilderOptions(workspace_mib=10**14)}, "--workspace: 100000000000000 MiB is out of range"),
        ("llama", {"builder": BuilderOptions(optimization_level=6)}, "--optimization-level: 6 is unknown; choose 0"),
        (
            "llama",
            {"builder": BuilderOptions(workspace_mib=9), "targets": ("cpu",), "dtype": "fp32"},
            "add --target tensorrt-rtx",
        ),
    ],
)
def test_what_cannot_be_built_is_refused_before_anything_is_written(
    zoo: Zoo, tmp_path: Path, name: str, changes: dict[str, object], says: str
) -> None:
    with pytest.raises(SkipDecodeError, match=says) as caught:
        export(plan_request(zoo, name, tmp_path / "outs" / "bundle", **changes))
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "outs").exists()


def test_the_length_that_an_error_suggests_fits_once_rounded_up_to_slots() -> None:
    keys = KeyValueSizes(num_heads=2, head_size=16)
    skeleton: Any = SimpleNamespace(keys=keys, state_layers=(), shapes={"model.norm.weight": (32,)}, parts=NO_LAYERS)
    for length in (2000, 671):
        with pytest.raises(TargetError, match="choose --max-length 640 or less, or a smaller --max-batch"):
            tensorrt_target.check_tensorrt(skeleton, manifests.Limits(max_length=length, max_batch=10**5), full_depth(6))
    tensorrt_target.check_tensorrt(skeleton, manifests.Limits(max_length=640, max_batch=10**5), full_depth(6))
    skeleton.state_layers = (LayerGroup(layers=(5,), keys=KeyValueSizes(num_heads=2, head_size=32), keys_of=None, states=()),)
    with pytest.raises(TargetError, match="choose --max-length 256 or less"):
        tensorrt_target.check_tensorrt(skeleton, manifests.Limits(max_length=640, max_batch=10**5), full_depth(6))


def test_a_weight_larger_than_a_tensor_may_be_is_refused_and_a_table_that_can_be_split_is_not() -> None:
    """Command R+ has the one, Gemma 4's E2B the other."""
    limits, embedding = manifests.Limits(max_length=64, max_batch=1), {"model.embed_tokens.weight": (256000, 12288)}
    keys = KeyValueSizes(num_heads=2, head_size=16)
    skeleton: Any = SimpleNamespace(keys=keys, state_layers=(), shapes=embedding, parts=NO_LAYERS)
    with pytest.raises(TargetError, match=r"--target: model\.embed_tokens\.weight has more than .*; choose cpu or cuda"):
        tensorrt_target.check_tensorrt(skeleton, limits, full_depth(6))
    skeleton.shapes = {"model.layers.3.mlp.experts.gate_up_proj": (256, 4096, 7168)}  # DeepSeek-V3's
    with pytest.raises(TargetError, match=r"--target: model\.layers\.3\.mlp\.experts\.gate_up_proj has more than"):
        tensorrt_target.check_tensorrt(skeleton, limits, full_depth(6))
    skeleton.shapes = {"model.norm.weight": (1536,), "model.embed_tokens_per_layer.weight": (262144, 8960)}
    tensorrt_target.check_tensorrt(skeleton, limits, full_depth(6))


def test_the_product_in_front_of_a_convolution_is_split_where_it_is_not_quantised(zoo: Zoo) -> None:
    layer = ir.load(zoo.bundle("mamba2") / "graphs" / "layer_000.onnx")
    parts = {}
    for how in (None, Quantization(bits=8)):
        lowered = tensorrt_target.lower(layer, MAX_LENGTH, None, how)
        parts[how] = [name for name in lowered.graph.initializers if ".from_" in str(name)]
    assert [len(names) for names in parts.values()] == [3, 0]


@pytest.mark.parametrize("name", ["kimi_linear", "bailing_hybrid", "jamba", "recurrent_gemma"])
def test_linear_attention_with_a_decay_per_channel_is_refused(name: str) -> None:
    with pytest.raises(TargetError, match=rf"--target: {name}'s linear attention has a decay per channel.*; choose cpu or cuda"):
        _check_tensorrt(RELATIVES[name]())
    _check_tensorrt(RELATIVES["qwen3_5_text"]())


def _check_tensorrt(config: Any) -> None:
    skeleton = build_skeleton(config)
    limits = manifests.Limits(max_length=64, max_batch=1)
    tensorrt_target.check_tensorrt(skeleton, limits, full_depth(config.num_hidden_layers))


def test_more_scores_than_a_tensor_may_have_are_refused_where_attention_is_written_out(zoo: Zoo, tmp_path: Path) -> None:
    """As Gemma 2's, whose scores are capped: 4 heads for 512 tokens and 2^20 slots."""
    changes = {"max_length": 2**20, "max_batch": 1, "model": str(longer_checkpoint(zoo, "gemma2", tmp_path))}
    says = (
        r"--max-length: the scores of 4 heads for 512 tokens and 1048576 slots are more .*; choose --max-length 1048448 or less"
    )
    with pytest.raises(TargetError, match=says):
        export(plan_request(zoo, "gemma2", tmp_path / "outs" / "bundle", **changes))
    assert not [*(tmp_path / "outs").iterdir()]


@pytest.mark.parametrize("max_length", [32, MAX_LENGTH])
def test_short_buffers_build_in_bf16_too(max_length: int, zoo: Zoo, tmp_path: Path) -> None:
    """TensorRT-RTX 1.7.1 fails on two layers where a prompt's pass has 64 tokens or fewer."""
    made = export(plan_request(zoo, "llama", tmp_path / "bundle", dtype="bf16", max_length=max_length))
    assert max(map(len, made.segments)) > 1


def test_tampered_keys_do_not_make_one_plan_stand_for_another(plans_only: Path, zoo: Zoo, tmp_path: Path) -> None:
    out = shutil.copytree(plans_only, tmp_path / "bundle")
    path = out / TARGET / "keys.json"
    good = {file.name: file.read_bytes() for file in (out / TARGET).glob("*.plan")}
    keys = json.loads(path.read_text())
    keys["segment_000.plan"], keys["head.plan"] = keys["head.plan"], keys["segment_000.plan"]
    for wrong in (json.dumps(keys, indent=1) + "\n", json.dumps({"head.plan": ["x"]}), "[]"):
        path.write_text(wrong)
        export(plan_request(zoo, "opt", out, slim=True, force=True))
        found = {file.name: file.stat().st_size for file in (out / TARGET).glob("*.plan")}
        assert found == {name: pytest.approx(len(plan), rel=0.02) for name, plan in good.items()}
        assert len({*found.values()}) > 1
