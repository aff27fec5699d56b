"""Compiling for ONNX Runtime's CPU provider."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest

from skipdecode.errors import TargetError
from skipdecode.graph_passes.compile_ort import check_packs_quantised, compile_ort


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


@pytest.mark.parametrize("file", ["engine.bin", "engine.onnx"])
def test_a_disk_that_fills_up_while_an_engine_is_written_is_an_oserror_about_that_engine(file: str, tmp_path: Path) -> None:
    model = ir.from_onnx_text(
        """<ir_version: 10, opset_import: ["" : 24]>
        g (float[1,64] x, float[64,64] w) => (float[1,64] y) { y = MatMul(x, w) }"""
    )
    weight = model.graph.inputs.pop()
    weight.const_value = ir.tensor(np.ones((64, 64), np.float32))  # large enough to lie in the .bin
    model.graph.register_initializer(weight)
    ir.save(model, tmp_path / "source.onnx")
    (tmp_path / file).symlink_to("/dev/full")
    with pytest.raises(OSError, match="could not write an engine") as caught:
        compile_ort(tmp_path / "source.onnx", tmp_path / "engine.onnx")
    assert caught.value.filename == str(tmp_path / "engine.onnx")
