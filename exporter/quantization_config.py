"""What a config.json says of weights that are quantised already: whether they can be read, and what reading them needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import FineGrainedFP8Config

from skipdecode.errors import ModelNotSupportedError
from skipdecode.exporter.architectures import IN_MXFP4
from skipdecode.exporter.config_json import taking_config

Settings = Mapping[str, Any]  # config.json's quantization_config


def quantization_config(config: Any) -> Settings:
    """What config.json says of how weights are quantised; empty: they are not."""
    return getattr(config, "quantization_config", None) or {}


def in_known_words(settings: Settings) -> Settings:
    """The same, said as the method says it whose tensors these are: AutoRound stores those of GPTQ or AWQ.

    bitsandbytes is named where older files do not.
    """
    if "quant_method" not in settings and (settings.get("load_in_4bit") or settings.get("load_in_8bit")):
        return {**settings, "quant_method": "bitsandbytes"}
    if settings.get("quant_method") == "auto-round":
        return {**settings, **_AUTO_ROUND.get(str(settings.get("packing_format")), {})}
    return settings


def check_quantised(settings: Settings, model_type: str, where: str) -> None:
    """Refuse weights that are quantised in another way than those that `dequantised` reads.

    Args:
        settings: in known words.

    Raises:
        ModelNotSupportedError: another method, another layout of a known one, or settings that transformers does not take.
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
    """Whether a checkpoint's matrices are integers of 4 bits or less: levels that `--quantize int4` keeps."""
    settings = quantization_config(config)
    method = settings.get("quant_method")
    if method == "compressed-tensors":
        return any(each.get("type", "int") == "int" and each.get("num_bits") in range(5) for each in _weights(settings))
    return method == "bitnet" or (method in ("gptq", "awq") and settings.get("bits", 4) in range(5))


def layouts(settings: Settings) -> set[str]:
    """What a checkpoint says of how it is stored, beside the method."""
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
        normed = {"use_rms_norm"} if settings.get("use_rms_norm") else set()  # of what a matrix multiplies, with weights
        return {str(settings.get("quantization_mode", "offline")), str(settings.get("linear_class", "bitlinear"))} | normed
    if method == "bitsandbytes":
        return {str(settings.get("bnb_4bit_quant_type", "fp4"))} if settings.get("load_in_4bit") else set()
    if method != "compressed-tensors":
        return set()
    parts = [settings, *_tables(settings.get("config_groups")).values(), _tables(settings).get("sparsity_config", {})]
    turned = {"transform_config"} if settings.get("transform_config") else set()  # rows would be rotated as they are computed
    return {str(part["format"]) for part in parts if part.get("format")} | turned


def block_structure(settings: Settings) -> Sequence[int]:
    """Rows and columns of compressed-tensors' blocks, which it says for groups of matrices."""
    sizes = [group["block_structure"] for group in _weights(settings) if group.get("block_structure")]
    first = sizes[0] if sizes else None
    if not isinstance(first, list) or len(first) != 2 or not all(isinstance(size, int) and size > 0 for size in first):
        raise ValueError(f"block_structure is {first!r}")
    if any(size != first for size in sizes):
        raise ValueError("there are blocks of several sizes")
    return first


def _weights(settings: Settings) -> list[dict[str, Any]]:
    """What compressed-tensors says of weights, for groups of matrices."""
    return [_tables(group).get("weights", {}) for group in _tables(settings.get("config_groups")).values()]


def _tables(settings: Any) -> dict[str, dict[str, Any]]:
    """Those of a table's entries that are tables."""
    entries = settings.items() if isinstance(settings, Mapping) else ()
    return {name: value for name, value in entries if isinstance(value, dict)}


_LAYOUTS: dict[str, set[str]] = {  # quant_method -> what of `layouts` is read
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
    "auto-round": set(),  # in other words than its own alone
}  # fmt: skip
_AUTO_ROUND: dict[str, dict[str, str]] = {  # packing_format -> whose tensors those are
    "auto_round": {"quant_method": "gptq", "checkpoint_format": "gptq_v2"},
    "auto_round:gptqmodel": {"quant_method": "gptq", "checkpoint_format": "gptq_v2"},
    "auto_round:auto_gptq": {"quant_method": "gptq", "checkpoint_format": "gptq"},
    "auto_round:auto_awq": {"quant_method": "awq"},
}
