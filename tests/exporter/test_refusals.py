"""What an export refuses: one line, and nothing half-written stays."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from skipdecode.errors import BundleError, ModelNotSupportedError, ScheduleError, SkipDecodeError, TargetError
from skipdecode.exporter import cpu_target
from skipdecode.exporter.export import ExportRequest, export
from skipdecode.graph_passes.compile_tensorrt import BuilderOptions
from skipdecode.schedule_builders import ScheduleRequest
from tests.models import MAX_LENGTH
from tests.zoo import Zoo, edit_config


def _copy(zoo: Zoo, tmp_path: Path) -> Path:
    return Path(shutil.copytree(zoo.checkpoint("llama"), tmp_path / "model"))


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
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}, "max_position_embeddings": 40}, "the model has 40 positions"),
    ):
        shutil.copyfile(zoo.checkpoint("llama") / "config.json", folder / "config.json")
        edit_config(folder, **changes)
        _refused(folder, out, ModelNotSupportedError, says)


def test_a_broken_checkpoint_gives_one_line_and_leaves_nothing(zoo: Zoo, tmp_path: Path) -> None:
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
    _refused("", out, ModelNotSupportedError, "^MODEL: is empty; name a checkpoint folder, a hub id or opt-SIZE$")


def test_a_model_of_one_position_is_refused_where_no_length_is_given(zoo: Zoo, tmp_path: Path) -> None:
    edit_config(folder := _copy(zoo, tmp_path), max_position_embeddings=1)
    says = "max_position_embeddings is 1, which leaves no token to generate"
    _refused(folder, tmp_path / "outs" / "bundle", ModelNotSupportedError, says, max_length=None)


@pytest.mark.parametrize(
    ("changes", "kind", "says"),
    [
        ({"targets": ("vulkan",)}, TargetError, "choose from cpu"),
        ({"dtype": "fp16"}, TargetError, "choose fp32"),
        ({"quantize": "int3"}, TargetError, "choose one of none, int8, int4"),
        ({"quantize": "int4", "quantize_method": "guess"}, TargetError, "choose one of rtn, k-quant"),
        ({"quantize": "int4", "quantize_block": 48}, TargetError, "choose one of 32, 64, 128"),
        ({"quantize": "int4", "quantize_block": 128}, TargetError, "not a multiple of 128"),
        ({"quantize_block": 64}, TargetError, "--quantize-block: has no effect without --quantize; add --quantize int8 or int4"),
        ({"quantize_method": "k-quant"}, TargetError, "--quantize-method: has no effect without --quantize"),
        ({"max_batch": 0}, TargetError, r"choose 1\.\.2147483647"),
        ({"max_batch": 10**23}, TargetError, "--max-batch: 10{23} is out of range"),
        ({"max_length": 1}, TargetError, "--max-length: 1 leaves no token to generate; choose 2 or more"),
        ({"max_length": 2**24 + 1}, TargetError, "--max-length: 16777217 is longer than any row; choose 16777216 or less"),
        ({"builder": BuilderOptions(workspace_mib=0)}, TargetError, r"^--workspace: 0 MiB is out of range; choose 1\.\."),
        ({"builder": BuilderOptions(optimization_level=6)}, TargetError, "^--optimization-level: 6 is unknown; choose 0 "),
        ({"max_length": 65}, ModelNotSupportedError, "the model has 64 positions"),
        ({"schedule": ScheduleRequest(name="wibble")}, SkipDecodeError, "choose one of"),
    ],
)
def test_options_out_of_range_are_refused(
    zoo: Zoo, tmp_path: Path, changes: dict[str, object], kind: type[SkipDecodeError], says: str
) -> None:
    _refused(zoo.checkpoint("llama"), tmp_path / "outs" / "bundle", kind, says, **changes)


def test_an_unknown_schedule_is_refused_before_the_model_is_looked_for(tmp_path: Path) -> None:
    _refused("", tmp_path / "outs" / "bundle", ScheduleError, "choose one of", schedule=ScheduleRequest(name="wibble"))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"quantize": "int4"}, "width of the experts 48 is not a multiple of 32, .*; leave out --quantize"),
        (
            {"quantize": "int4", "targets": ("cuda",)},
            "experts 48 is not a multiple of 64, .*; leave out --quantize, or choose cpu",
        ),
    ],
)
def test_experts_whose_width_does_not_divide_into_blocks_are_refused(
    zoo: Zoo, tmp_path: Path, changes: dict[str, object], says: str
) -> None:
    _refused(zoo.checkpoint("qwen3_moe"), tmp_path / "outs" / "bundle", TargetError, says, **changes)


def test_a_mixture_that_cudas_kernels_cannot_compute_is_refused(zoo: Zoo, tmp_path: Path) -> None:
    shutil.copytree(zoo.checkpoint("mixtral"), tmp_path / "model")
    edit_config(tmp_path / "model", intermediate_size=100)
    says = "width of the experts 100 is not a multiple of 8, as cuda requires; choose cpu"
    _refused(tmp_path / "model", tmp_path / "outs" / "bundle", TargetError, says, targets=("cpu", "cuda"))


def test_experts_with_another_activation_than_cudas_kernels_have_are_refused(zoo: Zoo, tmp_path: Path) -> None:
    says = "--target: the experts use gelu_pytorch_tanh, but cuda supports only silu; choose cpu or tensorrt-rtx"
    _refused(zoo.checkpoint("gemma4_moe"), tmp_path / "outs" / "bundle", TargetError, says, targets=("cpu", "cuda"))


def test_the_width_of_experts_with_transposed_matrices_is_checked(zoo: Zoo, tmp_path: Path) -> None:
    shutil.copytree(zoo.checkpoint("gpt_oss"), tmp_path / "model")
    edit_config(tmp_path / "model", intermediate_size=100)
    says = "width of the experts 100 is not a multiple of 32, .*; leave out --quantize"
    _refused(tmp_path / "model", tmp_path / "outs" / "bundle", TargetError, says, quantize="int4")


def test_a_full_disk_leaves_nothing_half_written(zoo: Zoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cpu_target, "compile_ort", full)
    _refused(zoo.checkpoint("llama"), tmp_path / "outs" / "bundle", BundleError, "No space left on device")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 10, 0))  # type: ignore[attr-defined]
    _refused(zoo.checkpoint("llama"), tmp_path / "outs" / "bundle", BundleError, "MiB are free")


def test_a_folder_whose_name_is_not_utf_8_is_refused_by_name(zoo: Zoo, tmp_path: Path) -> None:
    """ONNX Runtime's Python package takes no such path; otherwise the tokenizer would fail first, and be called damaged."""
    odd = tmp_path / os.fsdecode(b"caf\xe9")
    _refused(zoo.checkpoint("llama"), odd / "bundle", BundleError, "bundle: is not UTF-8, .*; choose another --out")
    model = shutil.copytree(zoo.checkpoint("llama"), odd / "model")
    _refused(model, tmp_path / "outs" / "bundle", ModelNotSupportedError, "model: is not UTF-8, .*; rename the folder")


def test_a_graph_that_a_pass_does_not_know_gives_one_line_and_leaves_nothing(
    zoo: Zoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_pass: object, _model: object) -> None:
        raise AssertionError("an unknown mask")

    monkeypatch.setattr(cpu_target.LowerAttentionPass, "call", refuse)
    says = r"^segment_000: LowerAttentionPass does not know this graph \(an unknown mask\); report"
    _refused(zoo.checkpoint("llama"), tmp_path / "outs" / "bundle", ModelNotSupportedError, says)
