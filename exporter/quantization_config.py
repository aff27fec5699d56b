"""The `quantization_config` of a checkpoint whose weights are already quantised: whether, and how, they can be read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import FineGrainedFP8Config

from skipdecode.errors import ModelNotSupportedError
from skipdecode.exporter.architectures import MXFP4_EXPERTS
from skipdecode.exporter.config_json import blaming_config, read_settings

Settings = Mapping[str, Any]  # config.json's quantization_config


def quantization_config(config: Any) -> Settings:
    """How config.json says that the weights are quantised; empty: they are not."""
    return getattr(config, "quantization_config", None) or {}


def modelopt_settings(folder: Path) -> Settings:
    """What NVIDIA's ModelOpt before 0.31 wrote into a file of its own instead of config.json; empty: weights are not quantised.

    Raises:
        ModelNotSupportedError: the file cannot be read.
    """
    settings = read_settings(folder / "hf_quant_config.json").get("quantization")
    if not isinstance(settings, dict) or not settings.get("quant_algo"):  # null: only keys and values are
        return {}
    return {**settings, "quant_method": "modelopt"}


def normalised_settings(settings: Settings) -> Settings:
    """The same settings under the method whose tensor layout they describe: AutoRound stores tensors as GPTQ or AWQ do.

    Adds bitsandbytes' name, which older files leave out.
    """
    if "quant_method" not in settings and (settings.get("load_in_4bit") or settings.get("load_in_8bit")):
        return {**settings, "quant_method": "bitsandbytes"}
    if settings.get("quant_method") == "auto-round":
        return {**settings, **_AUTO_ROUND_SETTINGS.get(str(settings.get("packing_format")), {})}
    return settings


def check_quantised(settings: Settings, model_type: str, where: str) -> None:
    """Refuse weights that are quantised in a way that `dequantise_lazily` does not read.

    Args:
        settings: as `normalised_settings` returns them.

    Raises:
        ModelNotSupportedError: an unknown method, an unknown layout of a known one, or settings that transformers rejects.
    """
    method = str(settings.get("quant_method", "some method"))
    if method == "fp8":
        with blaming_config(where):
            FineGrainedFP8Config.from_dict(dict(settings))
    is_known = method in _LAYOUTS and (method != "mxfp4" or model_type in MXFP4_EXPERTS)
    unread = sorted(layouts(settings) - _LAYOUTS[method]) if is_known else [method]
    if unread:
        schemes = ", ".join(dict.fromkeys([method, *unread]))
        raise ModelNotSupportedError(
            f"its weights are quantised ({schemes})", "name the checkpoint that it was made from, and use --quantize", where=where
        )


def has_at_most_4_bits(config: Any) -> bool:
    """Whether a checkpoint's matrices are integers of at most 4 bits, whose levels `--quantize int4` keeps."""
    settings = quantization_config(config)
    method = settings.get("quant_method")
    if method == "compressed-tensors":
        return any(each.get("type", "int") == "int" and each.get("num_bits") in range(5) for each in _weight_settings(settings))
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
        norms = {"use_rms_norm"} if settings.get("use_rms_norm") else set()  # norms, with weights, of the matrices' inputs
        return {str(settings.get("quantization_mode", "offline")), str(settings.get("linear_class", "bitlinear"))} | norms
    if method == "bitsandbytes":
        return {str(settings.get("bnb_4bit_quant_type", "fp4"))} if settings.get("load_in_4bit") else set()
    if method != "compressed-tensors":
        return set()
    parts = [settings, *_dict_entries(settings.get("config_groups")).values(), _dict_entries(settings).get("sparsity_config", {})]
    rotated = {"transform_config"} if settings.get("transform_config") else set()  # activations would have to be rotated
    return {str(part["format"]) for part in parts if part.get("format")} | rotated


def block_structure(settings: Settings) -> Sequence[int]:
    """Rows and columns of compressed-tensors' blocks, which all groups of matrices must agree on.

    Raises:
        ValueError: the sizes are missing, malformed or different.
    """
    sizes = [group["block_structure"] for group in _weight_settings(settings) if group.get("block_structure")]
    first = sizes[0] if sizes else None
    if not isinstance(first, list) or len(first) != 2 or not all(isinstance(size, int) and size > 0 for size in first):
        raise ValueError(f"block_structure is {first!r}")
    if any(size != first for size in sizes):
        raise ValueError("there are blocks of several sizes")
    return first


def _weight_settings(settings: Settings) -> list[dict[str, Any]]:
    """compressed-tensors' settings for weights, one entry per group of matrices."""
    return [_dict_entries(group).get("weights", {}) for group in _dict_entries(settings.get("config_groups")).values()]


def _dict_entries(settings: Any) -> dict[str, dict[str, Any]]:
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
    "auto-round": set(),  # only once `normalised_settings` has renamed it
}  # fmt: skip
_AUTO_ROUND_SETTINGS: dict[str, dict[str, str]] = {  # packing_format -> the method whose tensor layout it is
    "auto_round": {"quant_method": "gptq", "checkpoint_format": "gptq_v2"},
    "auto_round:gptqmodel": {"quant_method": "gptq", "checkpoint_format": "gptq_v2"},
    "auto_round:auto_gptq": {"quant_method": "gptq", "checkpoint_format": "gptq"},
    "auto_round:auto_awq": {"quant_method": "awq"},
}
