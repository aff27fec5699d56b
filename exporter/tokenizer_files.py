"""A checkpoint's settings and tokenizer in a bundle: its own files, and what C++ needs to read the tokenizer's."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import tokenizers

from skipdecode.errors import ModelNotSupportedError, shortened
from skipdecode.exporter.checkpoint_folder import OLDER_TOKENIZERS
from skipdecode.exporter.config_json import first_line, read_bytes, read_settings

logger = logging.getLogger(__name__)

_SETTINGS = ("config.json", "generation_config.json")
_TOKENIZER = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.json", "merges.txt", "added_tokens.json",
    "chat_template.jinja",
)  # fmt: skip
# files of tokenizers that Mistral, Moonshot and Tencent publish, of which transformers reads some with other ids than their own
# libraries; and the settings of a tokenizer whose own file may not have been downloaded
_UNREAD_TOKENIZERS = ("tekken.json", "tokenizer.model.v*", "*.tiktoken", "tiktoken.model", "tokenizer_config.json")
# on which tokenizers are known to differ: runs of spaces, numbers, contractions, scripts, characters outside the vocabulary, code
_SAMPLES = (
    "", " The quick brown fox.", "  two   spaces\tand tabs\n\n\nlines ", "12345 3.14 1,000 9th", "don't I'LL we've (a)b [c]d",
    "Café naïve £30 “quotes”…", "日本語 한국어 русский", "🙂 👍🏽 e\u0301", "def f(x):\n    return x != 'y'  # z", "https://example.org/?a=1&b=2",
    "ALL CAPS MiXeD snake_case", "\u00a0\u200b",
)  # fmt: skip


def copy_settings(folder: Path | None, bundle: Path, config: Any) -> None:
    """Copy a checkpoint's settings into the bundle; without a checkpoint, write `config`."""
    if folder is None:
        config.to_json_file(bundle / "config.json")
    else:
        _copy(_SETTINGS, folder, bundle)


def copy_tokenizer(folder: Path, bundle: Path, config: Any, max_length: int) -> None:
    """Copy a tokenizer's files into the bundle, if there is one.

    ONNX Runtime GenAI's tokenizer, which C++ services use, reads the same files under two conditions. There must be a
    `genai_config.json`, with a length that it does not use. And the class in `tokenizer_config.json` must have its name from
    before transformers 5, which writes `TokenizersBackend` for what may still be called `PreTrainedTokenizerFast`. It knows few
    post-processors, so `tokenization.json` records the ids that encoding puts around a text, with samples by which C++ checks
    itself.

    A checkpoint from before `tokenizer.json` (OPT's) gets the one that transformers makes from its files, or none where only
    Python code tokenizes (BioGPT's). Tokens that are named only in another file (`<|im_end|>`, in `tokenizer_config.json`) are
    added to the bundle's `tokenizer.json`.

    Raises:
        ModelNotSupportedError: the tokenizer cannot be read.
    """
    _copy(_TOKENIZER, folder, bundle)
    hf_tokenizer, settings = None, read_settings(folder / "tokenizer_config.json")
    if not (folder / "tokenizer.json").exists() and any((folder / name).exists() for name in OLDER_TOKENIZERS):
        python_class = _python_class(settings, config.model_type)
        if python_class is None:
            _convert(folder, bundle / "tokenizer.json")
        else:
            logger.warning("its tokenizer is left out: %s is Python code, of which there is no tokenizer.json", python_class)
    elif (bundle / "tokenizer.json").exists():
        hf_tokenizer = _add_missing_tokens(folder, bundle / "tokenizer.json", config.vocab_size)
    else:
        _warn_of_unread(folder)
    if not (bundle / "tokenizer.json").exists():
        return
    if settings.get("tokenizer_class", "TokenizersBackend") == "TokenizersBackend":
        _write(bundle / "tokenizer_config.json", {**settings, "tokenizer_class": "PreTrainedTokenizerFast"})
    _write(bundle / "tokenization.json", tokenization := _tokenization(bundle / "tokenizer.json"))
    _write(bundle / "genai_config.json", {"model": {"type": config.model_type, "context_length": max_length}})
    if hf_tokenizer is not None:
        _warn_of_differences(bundle / "tokenizer.json", tokenization["samples"], hf_tokenizer)


def _copy(names: Iterable[str], folder: Path, bundle: Path) -> None:
    for name in names:
        if (folder / name).is_file():
            (bundle / name).write_bytes(read_bytes(folder / name))


def _python_class(settings: dict[str, Any], model_type: str) -> str | None:
    """The name of transformers' class for a tokenizer that has no other form than its Python code; None: it has one.

    mistral-common's, which transformers prefers where that library is installed, stands for one that has.
    """
    from transformers import TokenizersBackend
    from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES, tokenizer_class_from_name

    name = settings.get("tokenizer_class") or TOKENIZER_MAPPING_NAMES.get(model_type)
    found = tokenizer_class_from_name(name) if isinstance(name, str) else None
    if found is None or issubclass(found, TokenizersBackend) or found.__name__ == "MistralCommonBackend":
        return None
    return str(found.__name__)


def _warn_of_unread(folder: Path) -> None:
    """Warn, where there is no tokenizer that can be read, of the files of one that cannot."""
    names = sorted({path.name for pattern in _UNREAD_TOKENIZERS for path in folder.glob(pattern)})
    if names:
        logger.warning(
            "its tokenizer is left out, so the bundle takes only token ids: none can be read from %s; put a tokenizer.json there",
            " and ".join(names),
        )  # fmt: skip


def _read_with_transformers(folder: Path) -> Any:
    """transformers' tokenizer; without `mistral_format` it might be that of mistral-common, which has no tokenizer.json."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True, mistral_format=False)


def _convert(folder: Path, path: Path) -> None:
    try:
        with _panics_as_errors():
            _read_with_transformers(folder).backend_tokenizer.save(str(path))
    except Exception as error:  # tokenizers raises plain Exception, and what transformers raises depends on the tokenizer
        in_sentencepiece = any((folder / name).exists() for name in OLDER_TOKENIZERS if name.endswith(".model"))
        if in_sentencepiece and find_spec("sentencepiece") is None:
            raise ModelNotSupportedError(
                "its tokenizer cannot be converted", "`pip install sentencepiece protobuf`", where=str(folder)
            ) from error
        raise ModelNotSupportedError(
            f"its tokenizer cannot be converted ({first_line(error)})",
            "put a tokenizer.json there", where=str(folder),
        ) from error  # fmt: skip


def _add_missing_tokens(folder: Path, path: Path, vocab_size: int) -> Any:
    """Add to tokenizer.json the tokens that transformers adds from the files next to it, with the same ids.

    Tokens that those files make special (`eos_token`) become so, too: their text is left out of what a model says.

    Returns:
        transformers' tokenizer; None if it cannot be read, or if the two are known to differ.
    """
    tokenizer = _open_tokenizer(path, folder)
    try:
        with _panics_as_errors():
            hf_tokenizer = _read_with_transformers(folder)
            added_tokens = hf_tokenizer.backend_tokenizer.get_added_tokens_decoder()
    except Exception as error:  # as above; tokenizer.json is enough by itself, also with a class that transformers does not know
        logger.warning(
            "%s: used without tokens from the files next to it, which transformers cannot read (%s)",
            path.name, first_line(error),
        )  # fmt: skip
        return None
    present = {token.content: token.special for token in tokenizer.get_added_tokens_decoder().values()}
    # ids beyond the vocabulary are defaults of transformers' classes, and the model has no embedding for them
    missing = {token.content: id_ for id_, token in added_tokens.items() if token.content not in present and id_ < vocab_size}
    newly_special = [token for token in added_tokens.values() if token.special and present.get(token.content) is False]
    tokenizer.add_tokens([*(added_tokens[id_] for id_ in sorted(missing.values())), *newly_special])
    if all(tokenizer.token_to_id(content) == id_ for content, id_ in missing.items()):
        if missing or newly_special:
            tokenizer.save(str(path))
        return hf_tokenizer
    names = ", ".join(map(repr, missing))
    logger.warning(
        "%s: tokens found only in the files next to it are left out, since their ids would change (%s)",
        path.name,
        shortened(names, 200),
    )
    return None


def _warn_of_differences(path: Path, samples: list[dict[str, Any]], hf_tokenizer: Any) -> None:
    """Warn if transformers encodes a text differently: it rebuilds some classes' tokenizers from their settings."""
    with suppress(Exception), _panics_as_errors():  # a text that it cannot encode is reported when it is used
        encoded = [(sample["text"], sample["ids"]) for sample in samples[1:]]  # not the empty one
        for text, ids in [*encoded, *_encoded_around_tokens(path, hf_tokenizer)]:
            hf_ids = hf_tokenizer(text)["input_ids"]
            if hf_ids != ids:
                message = "tokenizer.json: used as it is, although transformers' %s gives other ids: for %r %s instead of %s"
                start = next((i for i, (one, two) in enumerate(zip(hf_ids, ids, strict=False)) if one != two), 0)
                logger.warning(message, type(hf_tokenizer).__name__, text, _excerpt(hf_ids, start), _excerpt(ids, start))
                return


def _encoded_around_tokens(path: Path, hf_tokenizer: Any) -> list[tuple[str, list[int]]]:
    """A text with each added token that takes other spaces with it in transformers, and its ids by tokenizer.json."""
    tokenizer = _plain_tokenizer(path)
    own, theirs = (
        {each.content: (each.lstrip, each.rstrip, each.single_word) for each in one.get_added_tokens_decoder().values()}
        for one in (tokenizer, hf_tokenizer.backend_tokenizer)
    )
    texts = [f"a {token} b" for token, settings in own.items() if theirs.get(token, settings) != settings]
    return [(text, tokenizer.encode(text).ids) for text in texts]


def _excerpt(ids: list[int], start: int) -> str:
    shown = map(str, ids[start : start + 4])
    return f"[{'.., ' if start else ''}{', '.join(shown)}{', ..' if len(ids) > start + 4 else ''}]"


def _open_tokenizer(path: Path, folder: Path) -> tokenizers.Tokenizer:
    """Open the bundle's copy of the tokenizer in `folder`; an error names the original."""
    try:
        with _panics_as_errors():
            return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises plain Exception
        raise ModelNotSupportedError(f"cannot be read ({error})", "repair it", where=str(folder / path.name)) from error


def _plain_tokenizer(path: Path) -> tokenizers.Tokenizer:
    """The tokenizer in a file, for texts as they are: it neither pads nor cuts them."""
    tokenizer = tokenizers.Tokenizer.from_file(str(path))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def _tokenization(path: Path) -> dict[str, Any]:
    """`before` and `after`: the ids that encoding puts around a text's own; `special`: ids that are not text; `samples`."""
    try:
        with _panics_as_errors():
            tokenizer = _plain_tokenizer(path)
            _check_template(read_settings(path).get("post_processor"))
            text_ids, all_ids = tokenizer.encode("a", add_special_tokens=False).ids, tokenizer.encode("a").ids
            samples = [{"text": text, "ids": tokenizer.encode(text).ids} for text in _SAMPLES]
    except Exception as error:  # tokenizers raises plain Exception, also for a word missing from a vocabulary without <unk>
        raise ModelNotSupportedError(f"cannot be read ({error})", "repair the checkpoint's file", where=path.name) from error
    start = next((i for i in range(len(all_ids)) if all_ids[i : i + len(text_ids)] == text_ids), 0) if text_ids else 0
    special = sorted(id_ for id_, token in tokenizer.get_added_tokens_decoder().items() if token.special)
    return {"before": all_ids[:start], "after": all_ids[start + len(text_ids) :], "special": special, "samples": samples}


@contextmanager
def _panics_as_errors() -> Iterator[None]:
    """Turn a panic of tokenizers' Rust code, which is a BaseException, into an Exception, like all else that it raises."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ == "PanicException":  # by name: its module cannot be imported
            raise ValueError(str(error)) from error
        raise


def _check_template(processor: Any) -> None:
    """Refuse a template that names a special token without defining it: encoding would panic, and print that it did.

    Args:
        processor: the post-processor in a file that tokenizers has read.

    Raises:
        ValueError: there is such a token.
    """
    for inner in processor.get("processors", ()) if isinstance(processor, dict) else ():
        _check_template(inner)
    if not isinstance(processor, dict) or processor.get("type") != "TemplateProcessing":
        return
    for piece in (*processor.get("single", ()), *processor.get("pair", ())):
        token = piece.get("SpecialToken", {}).get("id") if isinstance(piece, dict) else None
        if token is not None and token not in processor.get("special_tokens", {}):
            raise ValueError(f"its template names {token!r}, which is not among its special_tokens")


def _write(path: Path, data: dict[str, Any]) -> None:
    text = json.dumps(data, indent=2, ensure_ascii=False) + "\n"
    path.write_text(text, encoding="utf-8", errors="backslashreplace")  # lone surrogates become JSON escapes
