"""From what a user types to a configuration and a checkpoint folder: local folder, hub id, or short OPT name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.filesize import decimal

from skipdecode.errors import ModelNotSupportedError
from skipdecode.exporter.checkpoint import lacks_head
from skipdecode.exporter.checkpoint_folder import adapter_error, checkpoint_folder, missing_config_error
from skipdecode.exporter.config_json import reason, taking_config
from skipdecode.exporter.download import download
from skipdecode.exporter.hub_errors import explain
from skipdecode.exporter.quantization_config import check_quantised
from skipdecode.exporter.supported import check_single_stack

# Zhang et al. 2022 (arXiv 2205.01068), table 1: layers, width, heads; so that --random-weights needs no network
_OPT_SIZES = {
    "125m": (12, 768, 12), "350m": (24, 1024, 16), "1.3b": (24, 2048, 32), "2.7b": (32, 2560, 32), "6.7b": (32, 4096, 32),
    "13b": (40, 5120, 40), "30b": (48, 7168, 56), "66b": (64, 9216, 72),
}  # fmt: skip
# The text parts of models that also see, which transformers has no language model of -> the decoder that computes the same.
# They rotate queries and keys by three positions of a token, in time, height and width, which are one and the same for text.
_DECODERS = {"qwen2_vl_text": "qwen2", "qwen2_5_vl_text": "qwen2", "qwen3_vl_text": "qwen3"}


def load_config(model: str) -> tuple[Any, Path | None]:
    """The model's configuration and, where it is on this machine, its folder; there what the checkpoint ties is seen as well.

    Raises:
        ModelNotSupportedError: no such folder or hub id, a path that is no UTF-8, a config.json that cannot be read, needs remote
            code, or tells of an encoder or of weights that are quantised as `dequantize` does not read them; an adapter.
    """
    folder = checkpoint_folder(model)
    if folder is None and (size := _short_opt(model)) is not None:
        return _opt_config(size), None
    return _read_config(model), folder


def _check_config_on_hub(model: str) -> None:
    """Refuse a hub id without a config.json, which transformers takes for an unknown model: an adapter's, or of GGUF files."""
    from transformers.utils import cached_file, find_adapter_config_file

    if find_adapter_config_file(model) is not None:
        raise adapter_error(model)
    if cached_file(model, "config.json", _raise_exceptions_for_missing_entries=False) is None:
        raise missing_config_error(model)


def _read_config(model: str) -> Any:
    from transformers import AutoConfig

    try:
        with taking_config(model):
            config = AutoConfig.from_pretrained(model, trust_remote_code=False)  # None would ask at the terminal
    except OSError as error:
        if Path(model).is_dir():
            raise ModelNotSupportedError(f"cannot be read ({reason(error)})", "repair its config.json", where=model) from error
        what, remedy = explain(error)
        raise ModelNotSupportedError(what, remedy, where=model) from error
    except ModelNotSupportedError:
        if not Path(model).is_dir():
            _check_config_on_hub(model)
        raise
    check_single_stack(config)
    text = _text_part(config, Path(model))
    settings = dict(getattr(config, "quantization_config", None) or {})
    if settings:
        check_quantised(settings, config.model_type, model)
        text.quantization_config = settings
    return text


def _text_part(config: Any, folder: Path) -> Any:
    """Of a model that also sees; else the configuration itself.

    Where the whole is tied, some checkpoints hold a head all the same, and then the text part's own word counts.
    """
    with taking_config(str(folder)):
        text = _as_decoder(config.get_text_config())
        text.dtype = config.dtype if text.dtype is None else text.dtype
    text.name_or_path = config.name_or_path
    text.return_dict = True  # how a model hands out what it computes, which whoever calls it here counts on
    if text is not config and getattr(config, "tie_word_embeddings", False) and lacks_head(folder):
        text.tie_word_embeddings = True
    return text


def _as_decoder(text: Any) -> Any:
    from transformers import AutoConfig

    decoder = _DECODERS.get(text.model_type)
    if decoder is None:
        return text
    settings = {name: value for name, value in text.to_dict().items() if name not in ("model_type", "architectures")}
    rotary = settings.pop("rope_parameters", None) or {}
    plain = {name: value for name, value in rotary.items() if name not in ("mrope_section", "mrope_interleaved")}
    return AutoConfig.for_model(decoder, **settings, rope_parameters=plain)


def fetch_checkpoint(model: str, report: Callable[[str], None] = lambda what: None) -> Path:
    """Download a hub id's config, tokenizer and weights, and return the folder that huggingface_hub keeps them in.

    Args:
        report: is told how much is here; what it raises ends the download.

    Raises:
        ModelNotSupportedError: the hub cannot be reached or has no such model.
    """

    def told(done: int, total: int) -> None:
        report(f"downloading {model}, {decimal(done)} of {decimal(total)}")

    report(f"downloading {model}")
    size = _short_opt(model)
    try:
        return download(f"facebook/opt-{size}" if size else model, told)
    except ModelNotSupportedError as error:
        if size is None:
            raise
        raise ModelNotSupportedError(error.what, f"{error.remedy}, or export with --random-weights", where=model) from error


def _short_opt(model: str) -> str | None:
    size = model.lower().removeprefix("facebook/").removeprefix("opt-")
    return size if size in _OPT_SIZES and "opt-" in model.lower() else None


def _opt_config(size: str) -> Any:
    from transformers import OPTConfig

    layers, width, heads = _OPT_SIZES[size]
    post_norm = size == "350m"
    return OPTConfig(
        num_hidden_layers=layers, hidden_size=width, ffn_dim=4 * width, num_attention_heads=heads,
        do_layer_norm_before=not post_norm, word_embed_proj_dim=512 if post_norm else width, name_or_path=f"facebook/opt-{size}",
    )  # fmt: skip
