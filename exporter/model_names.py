"""Resolve MODEL (a local folder, a hub id or a short OPT name) to a configuration and a checkpoint folder."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import Any

from rich.filesize import decimal

from skipdecode.errors import ModelNotSupportedError
from skipdecode.exporter.adapter_config import base_model
from skipdecode.exporter.architectures import register_language_model
from skipdecode.exporter.checkpoint import lacks_head, stored_dtype
from skipdecode.exporter.checkpoint_folder import Checkpoint, checkpoint_folder
from skipdecode.exporter.config_json import blaming_config, read_settings, reason
from skipdecode.exporter.download import download
from skipdecode.exporter.load_adapter import load_adapter
from skipdecode.exporter.opt_sizes import opt_config, opt_hub_id
from skipdecode.exporter.quantization_config import check_quantised, modelopt_settings, normalised_settings
from skipdecode.exporter.supported import check_single_stack

# Text parts of models that also see or hear, for which transformers has no language-model class -> the decoder that computes the
# same, and settings that override config.json's, some of them by functions of it. Most of these text parts rotate queries and
# keys by three or four positions per token (time, height, width, ..), which are equal for text.
DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "emu3_text_model": ("llama", {}),
    "ernie4_5_vl_moe_text": (
        "ernie4_5_moe",
        {  # for images it has other experts
            "moe_intermediate_size": lambda text: text.moe_intermediate_size[0],
            "moe_layer_start_index": lambda text: text.mlp_layer_types.count("dense"),
        },
    ),
    "glm4v_moe_text": ("glm4_moe", {"use_qk_norm": False}),
    "glm4v_text": ("glm4", {"attention_bias": True}),
    "glm_ocr_text": ("glm4", {"attention_bias": False}),
    "granite4_vision_text": ("granite", {}),
    "granite_docling_text": ("granite", {}),
    "hunyuan_vl_text": ("hunyuan_v1_dense", {}),
    "paddleocr_vl_text": ("llama", dict.fromkeys(("attention_bias", "mlp_bias"), attrgetter("use_bias"))),
    "phi4_multimodal": ("phi3", {}),
    "qwen2_5_omni_text": ("qwen2", {}),
    "qwen2_5_vl_text": ("qwen2", {}),
    "qwen2_vl_text": ("qwen2", {}),
    "qwen3_omni_moe_text": ("qwen3_moe", {}),
    "qwen3_vl_moe_text": ("qwen3_moe", {"norm_topk_prob": True}),
    "qwen3_vl_text": ("qwen3", {}),
}


def load_config(model: str) -> tuple[Any, Checkpoint | None]:
    """Read a model's configuration: its config.json, or `opt_sizes`' for an OPT model that is not a folder.

    Returns:
        The configuration, of an adapter that of its base model, and the files if all are on this machine. In a folder, the
        checkpoint's tensor names also decide whether embedding and head are tied.

    Raises:
        ModelNotSupportedError: there is no such folder or hub id; the path is not UTF-8; the config.json cannot be read, needs
            remote code, or describes an encoder-decoder or weights quantised in a way that `dequantize` does not read; or it is
            an adapter that `base_model` refuses.
    """
    base, folder = base_model(model), checkpoint_folder(model)
    if base is not None:
        config, checkpoint = load_config(base)
        adapter = _fetch_folder(model, lambda what: None)  # it is small, and may change the configuration
        _add_tokens(config, adapter)
        return config, None if checkpoint is None else Checkpoint(checkpoint.folder, adapter=adapter)
    opt_id = opt_hub_id(model) if folder is None else None
    if opt_id is not None:
        return opt_config(opt_id), None
    return _read_config(model), None if folder is None else Checkpoint(folder)


def checkpoint_config(checkpoint: Checkpoint) -> Any:
    """The configuration of a model whose files are on this machine. An adapter may have added tokens to its vocabulary.

    Raises:
        ModelNotSupportedError: as `load_config`, or the adapter cannot be read.
    """
    config = _read_config(str(checkpoint.folder))
    if checkpoint.adapter is not None:
        _add_tokens(config, checkpoint.adapter)
    return config


def _add_tokens(config: Any, adapter: Path) -> None:
    config.vocab_size = load_adapter(adapter).vocabulary(config.vocab_size)


def _read_config(model: str) -> Any:
    from transformers import AutoConfig

    try:
        with blaming_config(model):
            # a hub id's file is in the cache by now; trust_remote_code=None would ask at the terminal
            config = AutoConfig.from_pretrained(model, trust_remote_code=False, local_files_only=True)
    except OSError as error:
        raise ModelNotSupportedError(f"cannot be read ({reason(error)})", "repair its config.json", where=model) from error
    check_single_stack(config)
    text = _text_part(config, Path(model))
    settings = normalised_settings(dict(getattr(config, "quantization_config", None) or modelopt_settings(Path(model))))
    if settings:
        check_quantised(settings, config.model_type, model)
        text.quantization_config = settings
    elif hasattr(text, "quantization_config"):  # transformers would look for the method in an empty one
        del text.quantization_config
    if text.dtype is None:
        text.dtype = stored_dtype(Path(model))
    return text


def _text_part(config: Any, folder: Path) -> Any:
    """The text part's configuration if the model also sees or hears, else the configuration itself.

    `tie_word_embeddings` of the whole model applies to the text part only if the checkpoint has no head: some are declared tied
    and hold one all the same. With a head, the text part's own setting counts.
    """
    with blaming_config(str(folder)):
        text = _as_decoder(config.get_text_config())
        register_language_model(text)
        text.dtype = config.dtype if text.dtype is None else text.dtype
    if text is not config:
        text.whole_type = config.model_type
    text.name_or_path = config.name_or_path
    text.return_dict = True  # callers here read a model's outputs by name
    if text is not config and lacks_head(folder):
        text.tie_word_embeddings |= getattr(config, "tie_word_embeddings", False)
    elif text is not config and _unties_flatly(folder):
        text.tie_word_embeddings = False
    return text


def _unties_flatly(folder: Path) -> bool:
    """Whether config.json has the text part's settings among the whole model's, and a `tie_word_embeddings` of false.

    transformers leaves that one with the whole model, and then takes the text part's default (PaddleOCR-VL's is true).
    """
    settings = read_settings(folder / "config.json")
    return "text_config" not in settings and settings.get("tie_word_embeddings") is False


def _as_decoder(text: Any) -> Any:
    from transformers import AutoConfig

    kind = type(text).model_type  # the instance may have the whole model's (HunyuanOCR's)
    if kind not in DECODERS:
        return text
    decoder, overrides = DECODERS[kind]
    own = ("model_type", "architectures", "audio_config", "vision_config")  # Phi-4 multimodal's text part is the whole
    settings = {name: value for name, value in text.to_dict().items() if name not in own}
    overrides = {name: value(text) if callable(value) else value for name, value in overrides.items()}
    rotary = settings.pop("rope_parameters", None) or {}
    plain_rotary = {name: value for name, value in rotary.items() if name not in ("mrope_section", "mrope_interleaved")}
    plain_rotary.setdefault("partial_rotary_factor", 1.0)  # GLM-4's own default is half of each head
    if settings.get("head_dim") is None:
        settings["head_dim"] = text.hidden_size // text.num_attention_heads
    decoder_config = AutoConfig.for_model(decoder, **{**settings, **overrides}, rope_parameters=plain_rotary)
    decoder_config.text_part_of = kind.removesuffix("_text")
    return decoder_config


def fetch_checkpoint(model: str, report: Callable[[str], None] = lambda what: None) -> Checkpoint:
    """Download a hub id's config, tokenizer and weights to huggingface_hub's cache; of an adapter, also its base model's.

    Args:
        report: called with the progress so far; an exception from it ends the download.

    Raises:
        ModelNotSupportedError: the hub cannot be reached or has no such model.
    """
    folder = _fetch_folder(model, report)
    base = base_model(str(folder))
    return Checkpoint(folder) if base is None else Checkpoint(_fetch_folder(base, report), adapter=folder)


def _fetch_folder(model: str, report: Callable[[str], None]) -> Path:
    """The folder of a model or adapter, which is downloaded if it is not on this machine."""

    def report_bytes(done: int, total: int) -> None:
        report(f"downloading {model}, {decimal(done)} of {decimal(total)}")

    folder = checkpoint_folder(model)
    if folder is not None:
        return folder
    report(f"downloading {model}")
    opt_id = opt_hub_id(model)
    try:
        return download(opt_id or model, report_bytes)
    except ModelNotSupportedError as error:
        if opt_id is None:
            raise
        raise ModelNotSupportedError(error.what, f"{error.remedy}, or export with --random-weights", where=model) from error
