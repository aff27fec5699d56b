"""The `quantization_config` of a checkpoint whose weights are already quantised: whether, and how, they can be read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import FineGrainedFP8Config

from skipdecode.errors import ModelNotSupportedError
from skipdecode.exporter.architectures import IN_MXFP4
from skipdecode.exporter.config_json import taking_config

Settings = Mapping[str, Any]  # config.json's quantization_config


def quantization_config(config: Any) -> Settings:
    """How config.json says that the weights are quantised; empty: they are not."""
    return getattr(config, "quantization_config", None) or {}


def in_known_words(settings: Settings) -> Settings:
    """The same settings under the method whose tensor layout they describe: AutoRound stores tensors as GPTQ or AWQ do.

    Adds bitsandbytes' name, which older files leave out.
    """
    if "quant_method" not in settings and (settings.get("load_in_4bit") or settings.get("load_in_8bit")):
        return {**settings, "quant_method": "bitsandbytes"}
    if settings.get("quant_method") == "auto-round":
        return {**settings, **_AUTO_ROUND.get(str(settings.get("packing_format")), {})}
    return settings


def check_quantised(settings: Settings, model_type: str, where: str) -> None:
    """Refuse weights that are quantised in a way that `dequantised` does not read.

    Args:
        settings: as `in_known_words` returns them.

    Raises:
        ModelNotSupportedError: an unknown method, an unknown layout of a known one, or settings that transformers rejects.
    """
    method = str(settings.get("quant_method", "some method"))
    if method == "fp8":
        with taking_config(where):
            FineGrainedFP8Config.from_dict(dict(settings))
    known = method in _LAYOUTS and (method != "mxfp4" or model_type in IN_MXFP4)
    other = sorted(layouts(settings) - _LAYOUTS[method]) if known else [method]
    if other:
        named = ", ".join(dict.fromkeys([method, *other]))
        raise ModelNotSupportedError(
            f"its weights are quantised ({named})", "name the checkpoint that it was made from, and use --quantize", where=where
        )


def in_few_bits(config: Any) -> bool:
    """Whether a checkpoint's matrices are integers of at most 4 bits, whose levels `--quantize int4` keeps."""
    settings = quantization_config(config)
    method = settings.get("quant_method")
    if method == "compressed-tensors":
        return any(each.get("type", "int") == "int" and each.get("num_bits") in range(5) for each in _weights(settings))
    return method == "bitnet" or (method in ("gptq", "awq") and settings.get("bits", 4) in range(5))


def layouts(settings: Settings) -> set[str]:
    """The storage formats that a checkpoint's settings name in addition to the method; `_LAYOUTS` lists those that are read."""
    method = settings.get("quant_method")
    if method == "gptq":
        return {str(settings.get("checkpoint_format") or settings.get("format") or "gptq").lower()}
    if method == "awq":
        return {str(settings.get("version") or settings.get("format") or "gemm").lower()}
    if method == "modelopt":
        return {str(settings.get("quant_algo"))}
    if method == "auto-round":
        return {str(settings.get("packing_format"))}
    if method == "bitnet":
        normed = {"use_rms_norm"} if settings.get("use_rms_norm") else set()  # norms, with weights, of the matrices' inputs
        return {str(settings.get("quantization_mode", "offline")), str(settings.get("linear_class", "bitlinear"))} | normed
    if method == "bitsandbytes":
        return {str(settings.get("bnb_4bit_quant_type", "fp4"))} if settings.get("load_in_4bit") else set()
    if method != "compressed-tensors":
        return set()
    parts = [settings, *_tables(settings.get("config_groups")).values(), _tables(settings).get("sparsity_config", {})]
    turned = {"transform_config"} if settings.get("transform_config") else set()  # activations would have to be rotated
    return {str(part["format"]) for part in parts if part.get("format")} | turned


def block_structure(settings: Settings) -> Sequence[int]:
    """Rows and columns of compressed-tensors' blocks, which all groups of matrices must agree on.

    Raises:
        ValueError: the sizes are missing, malformed or different.
    """
    sizes = [group["block_structure"] for group in _weights(settings) if group.get("block_structure")]
    first = sizes[0] if sizes else None
    if not isinstance(first, list) or len(first) != 2 or not all(isinstance(size, int) and size > 0 for size in first):
        raise ValueError(f"block_structure is {first!r}")
    if any(size != first for size in sizes):
        raise ValueError("there are blocks of several sizes")
    return first


def _weights(settings: Settings) -> list[dict[str, Any]]:
    """compressed-tensors' settings for weights, one entry per group of matrices."""
    return [_tables(group).get("weights", {}) for group in _tables(settings.get("config_groups")).values()]


def _tables(settings: Any) -> dict[str, dict[str, Any]]:
    """The entries of a table that are tables themselves."""
    entries = settings.items() if isinstance(settings, Mapping) else ()
    return {name: value for name, value in entries if isinstance(value, dict)}


_LAYOUTS: dict[str, set[str]] = {  # quant_method -> the `layouts` that are read
    "fp8": set(),
    "mxfp4": set(),
    "compressed-tensors": {
        "dense", "int-quantized", "float-quantized", "naive-quantized", "pack-quantized", "mixed-precision",
        "mxfp4-pack-quantized", "mxfp8-quantized", "nvfp4-pack-quantized",
    },
    "modelopt": {"FP8", "NVFP4"},
    "gptq": {"gptq", "gptq_v2"},
    "awq": {"gemm"},
    "bitnet": {"offline", "bitlinear", "autobitlinear"},
    "bitsandbytes": {"nf4", "fp4"},
    "auto-round": set(),  # only once `in_known_words` has renamed it
}  # fmt: skip
_AUTO_ROUND: dict[str, dict[str, str]] = {  # packing_format -> the method whose tensor layout it is
    "auto_round": {"quant_method": "gptq", "checkpoint_format": "gptq_v2"},
    "auto_round:gptqmodel": {"quant_method": "gptq", "checkpoint_format": "gptq_v2"},
    "auto_round:auto_gptq": {"quant_method": "gptq", "checkpoint_format": "gptq"},
    "auto_round:auto_awq": {"quant_method": "awq"},
}
