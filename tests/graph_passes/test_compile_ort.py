"""Compiling for ONNX Runtime's CPU provider."""

from __future__ import annotations

import onnxruntime
import pytest

from skipdecode.errors import TargetError
from skipdecode.graph_passes.compile_ort import check_packs_quantised


@pytest.mark.parametrize("version", ["1.31.1", "1.9.0"])
def test_an_onnxruntime_that_cannot_store_packed_quantised_weights_is_refused(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onnxruntime, "__version__", version)
    with pytest.raises(TargetError, match=r"install onnxruntime 1\.32 or newer"):
        check_packs_quantised()


@pytest.mark.parametrize("version", ["1.32.0", "1.40.0", "2.0.0"])
def test_a_newer_onnxruntime_is_accepted(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnxruntime, "__version__", version)
    check_packs_quantised()
