"""skip-inspect's page to the letter, for a bundle of sparse files as large as a model's."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import pytest

from skipdecode import manifest as manifests
from skipdecode.cli.inspect import main
from skipdecode.schedule import Schedule
from tests.manifests import make_manifest

MIB = 1 << 20
FILES = {"embed.onnx": 40, "head.onnx": 2, **{f"segment_{index}.onnx": 3 + index for index in range(5)}, "segment_1.bin": 1200}


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    made = make_manifest(Schedule(name="table", num_layers=6, warmup_layers=1, layers=(5, 4, 4, 2)), tmp_path)
    for name, size in FILES.items():
        (tmp_path / name).touch()
        os.truncate(tmp_path / name, size * MIB)
    cpu = dataclasses.replace(
        made.targets[0], segment_weight_bytes=tuple(size * MIB for size in (2, 1200, 4, 5, 6)), head_weight_bytes=MIB * 3 // 2
    )
    plans = dataclasses.replace(
        cpu, name="tensorrt-rtx", weights="fp16", library="tensorrt_rtx", library_version="1.7", machine="sm86 sm89",
        cpu_features=(), head_weight_bytes=MIB // 2,
    )  # fmt: skip
    manifest = dataclasses.replace(
        made,
        dtype="float16",
        limits=manifests.Limits(max_length=4096, max_batch=4),
        model=dataclasses.replace(made.model, num_kv_heads=8, head_size=64, num_parameters=1_234_500_000),
        targets=(cpu, plans),
        files=tuple(manifests.File(path=name, size=size * MIB, sha256="0" * 64) for name, size in FILES.items()),
    )
    manifests.write(manifest, tmp_path)
    return tmp_path


SEGMENTS = [
    "  segment 0   layers 0       3.0 MiB",
    "  segment 1   layers 1       1,204.0 MiB",
    "  segment 2   layers 2       5.0 MiB",
    "  segment 3   layers 3-4     6.0 MiB",
    "  segment 4   layers 5       7.0 MiB",
]


def test_sizes_on_the_page_are_those_of_the_files_the_weights_and_a_rows_buffer(
    bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(bundle)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("vocabulary 9, 1,234.5 M parameters")
    assert lines[lines.index("target cpu: fp32, onnxruntime 1, x86_64 avx2") :] == [
        "target cpu: fp32, onnxruntime 1, x86_64 avx2",
        *SEGMENTS,
        "  weights 1,218.5 MiB a step at full depth, once for all 4 variants",
        "  KV buffer 56.0 MiB a row of 4096 tokens (half prompt), 96.0 MiB without skipping: 58%",
        "",
        "target tensorrt-rtx: fp16, tensorrt_rtx 1.7, sm86 sm89",
        *SEGMENTS,
        "  weights 1,217.5 MiB a step at full depth, once for all 4 variants",
        "  KV buffer 40.0 MiB a row of at most 4096 tokens",
        "",
        "bundle     1,267.0 MiB on disk",
    ]


def test_the_checkpoints_weights_have_the_bytes_of_its_dtype(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(bundle), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["weights_bytes"] == 2 * 1_234_500_000
