"""What config.json may say about quantised weights."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from skipdecode.errors import ModelNotSupportedError
from skipdecode.exporter.model_names import load_config
from skipdecode.exporter.quantization_config import has_at_most_4_bits
from tests.zoo import Zoo


@pytest.mark.parametrize(
    ("size", "says"),
    [
        (128, "object of type 'int' has no len()"),
        ([0, 128], "weight_block_size must be a tuple of two positive integers"),
        ([128], "weight_block_size must be a tuple of two integers"),
        ("128", "weight_block_size must be a tuple of two integers"),
    ],
)
def test_a_malformed_block_size_gives_one_line(size: Any, says: str, zoo: Zoo, tmp_path: Path) -> None:
    config = json.loads((zoo.checkpoint("llama") / "config.json").read_text())
    quantised = {"quant_method": "fp8", "weight_block_size": size}
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": quantised}))
    with pytest.raises(ModelNotSupportedError, match=rf"rejects its config\.json \({re.escape(says)}\)") as caught:
        load_config(str(tmp_path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (
            {"quant_method": "hqq"},
            r"quantised \(hqq\); name the ",
        ),
        ({"bits": 4}, r"quantised \(some method\)"),
        ({"load_in_4bit": True, "bnb_4bit_quant_type": "int4"}, r"quantised \(bitsandbytes, int4\)"),  # as in older files
        ({"quant_method": "auto-round", "packing_format": "auto_round:fp8_static"}, r"quantised \(auto-round, auto_round:fp8"),
        ({"quant_method": "auto-round", "packing_format": ["auto_round"]}, "quantised"),
        ({"quant_method": ["gptq"]}, "quantised"),
        ({"quant_method": "bitnet", "quantization_mode": "online"}, r"quantised \(bitnet, online\)"),  # as in training
        ({"quant_method": "bitnet", "linear_class": "bitlinear", "use_rms_norm": True}, r"quantised \(bitnet, use_rms_norm\)"),
        ({"quant_method": "mxfp4"}, r"quantised \(mxfp4\)"),  # its layout is known only for gpt-oss
        ({"quant_method": "gptq", "checkpoint_format": "marlin"}, r"quantised \(gptq, marlin\)"),
        ({"quant_method": "awq", "version": "GEMV"}, r"quantised \(awq, gemv\)"),
        (
            {"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"},
            r"quantised \(modelopt, NVFP4_AWQ\)",
        ),  # which scales inputs as well
        ({"quant_method": "modelopt"}, "quantised"),
        ({"quant_method": "compressed-tensors", "format": "marlin-24"}, "compressed-tensors, marlin-24"),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"a": {"format": "mxfp6-pack-quantized"}}},
            "mxfp6-pack-quantized",
        ),
        ({"quant_method": "compressed-tensors", "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse-24-bitmask"),
        ({"quant_method": "compressed-tensors", "transform_config": {"config_groups": {}}}, "transform_config"),
    ],
)
def test_an_unsupported_way_of_quantising_gives_one_line(settings: dict[str, Any], says: str, zoo: Zoo, tmp_path: Path) -> None:
    config = json.loads((zoo.checkpoint("llama") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    with pytest.raises(ModelNotSupportedError, match=says) as caught:
        load_config(str(tmp_path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "few"),
    [
        ({"quant_method": "gptq", "bits": 4}, True),
        ({"quant_method": "gptq", "bits": 8}, False),
        ({"quant_method": "awq"}, True),
        ({"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": {"num_bits": 4, "type": "int"}}}}, True),
        ({"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": {"num_bits": 4, "type": "float"}}}}, False),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": {"num_bits": 8}}, "b": {"weights": None}}},
            False,
        ),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, False),
        ({"quant_method": "bitnet"}, True),
        ({"quant_method": "fp8"}, False),
        (None, False),
    ],
)
def test_int4_keeps_integers_of_at_most_4_bits(settings: dict[str, Any] | None, few: bool) -> None:
    assert has_at_most_4_bits(SimpleNamespace(quantization_config=settings)) is few
