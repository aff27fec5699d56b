"""How long a row may be by default, and what packages and the disk must have before anything is written."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from skipdecode import manifest as manifests
from skipdecode.errors import BundleError, SkipDecodeError, TargetError
from skipdecode.exporter import feasible
from skipdecode.exporter.export import ExportRequest, export
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


def test_a_disk_without_room_for_the_bundle_is_refused(zoo: Zoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ONNX Runtime keeps the weights of a cpu engine twice, as they are and packed."""
    size = sum(file.size for file in manifests.read(zoo.bundle("llama")).files)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=size - 1))
    with pytest.raises(BundleError, match="MiB are free, but the bundle needs"):
        export(ExportRequest(model=str(zoo.checkpoint("llama")), out=tmp_path / "b", max_length=MAX_LENGTH))
