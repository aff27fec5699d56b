"""Reads a peft adapter's `adapter_config.json`, without torch: which model it adapts, and whether it can be merged into it."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from skipdecode.errors import ModelNotSupportedError
from skipdecode.exporter.checkpoint_folder import ADAPTER_CONFIG, checkpoint_folder
from skipdecode.exporter.config_json import read_settings
from skipdecode.exporter.hub_config import fetch_config
from skipdecode.exporter.opt_sizes import opt_hub_id

MERGE = (
    "merge it yourself: `AutoPeftModelForCausalLM.from_pretrained(DIR).merge_and_unload().save_pretrained(NEW_DIR)`, "
    "and `AutoTokenizer.from_pretrained(DIR).save_pretrained(NEW_DIR)`"
)
_NAME_BASE = "set base_model_name_or_path there to the folder or hub id of the adapted model"
# those whose merged weights were compared with peft's; some others need the base model's weights when they are put on it
MERGED_KINDS = (
    "ADALORA", "BOFT", "C3A", "DEFT", "DELORA", "FOURIERFT", "GLORA", "GRALORA", "HIRA", "HRA", "IA3", "LN_TUNING", "LOHA",
    "LOKR", "LORA", "MISS", "OFT", "PEANUT", "PVERA", "RANDLORA", "ROAD", "SHIRA", "SUPERTUNING", "TINYLORA",
    "TRAINABLE_TOKENS", "UNILORA", "VERA", "WAVEFT",
)  # fmt: skip
# which leave the base model as it is; others (PiSSA, OLoRA, CorDA, LoftQ) start from weights that are in no checkpoint
_PLAIN_INITS = (None, True, False, "gaussian", "orthogonal", "eva")


def base_model(model: str) -> str | None:
    """The folder or hub id of the model that an adapter changes; None: `model` is no adapter. May download their settings.

    Raises:
        ModelNotSupportedError: there is no such model; or it is an adapter that cannot be merged, whose base model cannot be
            found or is an adapter, too, or that needs peft, which is missing.
    """
    folder = _adapter_folder(model)
    if folder is None:
        return None
    base = _checked_base(folder, model)
    where = str(folder / ADAPTER_CONFIG)
    try:
        is_adapter = _adapter_folder(base) is not None
    except ModelNotSupportedError as error:
        raise ModelNotSupportedError(
            f"its base model {base} {error.what}", f"{error.remedy}, or {_NAME_BASE}", where=where
        ) from error
    if is_adapter:
        remedy = "merge that into its own base first"
        raise ModelNotSupportedError(f"its base model {base} is an adapter, too", remedy, where=where)
    return base


def _adapter_folder(model: str) -> Path | None:
    """The folder that holds an adapter's settings; None: `model` is no adapter."""
    folder = checkpoint_folder(model)
    if folder is None and opt_hub_id(model) is None:
        folder = fetch_config(model)
    return folder if folder is not None and (folder / ADAPTER_CONFIG).is_file() else None


def _checked_base(folder: Path, model: str) -> str:
    """The base model's name, of an adapter whose settings allow a merge."""
    settings = read_settings(folder / ADAPTER_CONFIG)
    base, init, task = (settings.get(name) for name in ("base_model_name_or_path", "init_lora_weights", "task_type"))
    if not isinstance(base, str) or not base or not base.isprintable():
        raise ModelNotSupportedError("names no base model", _NAME_BASE, where=str(folder / ADAPTER_CONFIG))
    if task not in (None, "CAUSAL_LM"):
        raise ModelNotSupportedError(f"is an adapter for {task}", "give one for CAUSAL_LM", where=model)
    kind = settings.get("peft_type")
    if kind not in MERGED_KINDS:
        what = f"is an adapter of kind {kind}, which is not merged here"
        raise ModelNotSupportedError(what, f"give a LoRA adapter, or {MERGE}", where=model)
    if settings.get("revision") not in (None, "main"):
        raise _unmerged(f"adapts revision {settings['revision']} of {base}", model)
    if settings.get("layer_replication"):
        raise _unmerged("repeats its base model's layers (layer_replication)", model)
    if init not in _PLAIN_INITS:
        raise _unmerged(f"was trained from weights that are not its base model's (init_lora_weights {init!r})", model)
    if find_spec("peft") is None:
        raise ModelNotSupportedError("is a peft adapter", "`pip install peft`, with which it is merged", where=model)
    return base


def _unmerged(what: str, model: str) -> ModelNotSupportedError:
    return ModelNotSupportedError(what, MERGE, where=model)
