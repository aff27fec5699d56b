"""How long a row may be by default, and what packages and the disk must have before anything is written."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from skipdecode import manifest as manifests
from skipdecode.errors import BundleError, SkipDecodeError, TargetError
from skipdecode.exporter import feasible
from skipdecode.exporter.export import ExportRequest, export
from skipdecode.exporter.targets import parse_targets
from tests.models import MAX_LENGTH
from tests.zoo import Zoo


@pytest.mark.parametrize(
    ("positions", "longest"), [(64, 64), (2048, 2048), (131_072, 2048), (None, 2048), (-1, 2048), ("many", 2048)]
)
def test_a_row_is_by_default_as_long_as_the_model_takes_and_at_most_2048_tokens(positions: object, longest: int) -> None:
    config = SimpleNamespace(model_type="llama", max_position_embeddings=positions)
    assert feasible.choose_max_length(ExportRequest(model="", out=Path()), config) == longest
    assert feasible.choose_max_length(ExportRequest(model="", out=Path(), max_length=4096), config) == 4096
    mpt = SimpleNamespace(model_type="mpt", max_seq_len=positions)
    assert feasible.choose_max_length(ExportRequest(model="", out=Path()), mpt) == longest


@pytest.mark.parametrize(
    ("targets", "changes", "most"),
    [
        (("cpu",), {}, 4),
        (("cuda",), {}, 32),
        (("cpu", "cuda"), {}, 4),
        (("cpu",), {"quantize": "int4"}, 25),
        (("cpu",), {"segment_bytes": 130 << 20}, 2),
        (("cpu",), {"segment_bytes": 1}, 1),
    ],
)
def test_a_segment_has_as_many_layers_as_its_bytes_take_of_the_largest(
    targets: tuple[str, ...], changes: dict[str, Any], most: int
) -> None:
    skeleton: Any = SimpleNamespace(layer_parameters=(1 << 20, 16 << 20), dtype=torch.float32)  # 64 MiB
    request = ExportRequest(model="", out=Path(), targets=targets, **changes)
    assert feasible.max_layers_per_segment(request, parse_targets(targets), skeleton) == most


@pytest.mark.parametrize(("target", "says"), [("cpu", "^too old$"), ("cuda", "the bundle needs")])
def test_an_onnx_runtime_that_packs_no_quantised_weights_is_refused_only_for_cpu(
    target: str, says: str, zoo: Zoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_old() -> None:
        raise TargetError("too old")

    monkeypatch.setattr(feasible, "check_packs_quantised", too_old)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=0))  # what is checked next
    request = ExportRequest(
        model=str(zoo.checkpoint("llama")), out=tmp_path / "b", quantize="int8", max_length=MAX_LENGTH, targets=(target,)
    )
    with pytest.raises(SkipDecodeError, match=says):
        export(request)


@pytest.mark.parametrize(
    ("targets", "dtype", "changes", "needed"),
    [
        (("cpu",), torch.float32, {}, 4000 + 8000 + 4000),  # source, plain and packed, a copy of the only segment
        (("cuda",), torch.float16, {"segment_bytes": 1}, 2000 + 2000 + 600),  # the largest layer
        (("cpu", "cuda"), torch.float16, {"segment_bytes": 700}, 2000 + 8000 + 2000 + 700),
        (("cpu",), torch.float32, {"quantize": "int8", "segment_bytes": 1}, 4000 + 2475 + 337.5),
        (("cuda",), torch.float16, {"quantize": "int4", "segment_bytes": 1}, 2000 + 625 + 1000 + 187.5),  # an embedding as it is
    ],
)
def test_the_disk_must_have_room_for_each_form_of_the_weights_and_a_copy_of_one_segment(
    targets: tuple[str, ...], dtype: torch.dtype, changes: dict[str, Any], needed: float, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    skeleton: Any = SimpleNamespace(num_parameters=1000, layer_parameters=(200, 300), dtype=dtype)
    (tmp_path / "file").touch()
    request = ExportRequest(model="", out=tmp_path / "file" / "new" / "b", targets=targets, **changes)
    free = {tmp_path: int(needed)}
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free[path]))
    feasible._check_disk(request, parse_targets(targets), skeleton)
    free[tmp_path] -= 1
    with pytest.raises(BundleError, match=f"^{request.out}: 0 MiB are free, but the bundle needs 0 MiB; free some or choose"):
        feasible._check_disk(request, parse_targets(targets), skeleton)


def test_a_disk_without_room_for_the_bundle_is_refused(zoo: Zoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ONNX Runtime keeps the weights of a cpu engine twice, as they are and packed."""
    size = sum(file.size for file in manifests.read(zoo.bundle("llama")).files)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=size - 1))
    with pytest.raises(BundleError, match="MiB are free, but the bundle needs"):
        export(ExportRequest(model=str(zoo.checkpoint("llama")), out=tmp_path / "b", max_length=MAX_LENGTH))
