"""Peers with a model format of their own: ONNX Runtime GenAI and llama.cpp. The interface is that of `peers.py`."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
from peers import Clock, Prompts, Run


class GenAi:
    """ONNX Runtime GenAI on the output of its own builder."""

    def __init__(self, folder: Path, threads: int) -> None:
        import onnxruntime_genai

        self._genai = onnxruntime_genai
        self._model = onnxruntime_genai.Model(str(folder))  # its configuration sets the threads

    def generate(self, prompts: Prompts, tokens: int) -> Run:
        clock = Clock()
        length = len(prompts[0]) + tokens
        parameters = self._genai.GeneratorParams(self._model)
        parameters.set_search_options(batch_size=len(prompts), max_length=length, min_length=length, do_sample=False)
        generator = self._genai.Generator(self._model, parameters)
        generator.append_tokens(np.array(prompts, dtype=np.int32))
        for _ in range(tokens):
            generator.generate_next_token()
            clock.put(None)
        return clock.run(generator.get_sequence(0)[-tokens:].tolist())


class LlamaCpp:
    """llama.cpp through the C API that its Python package exposes: a step is one batch of all rows, numpy chooses greedily."""

    def __init__(self, path: Path, threads: int) -> None:
        import llama_cpp

        self._api, self._threads = llama_cpp, threads
        self._silent = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(self._silent, ctypes.c_void_p(0))
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
        self._vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))

    def generate(self, prompts: Prompts, tokens: int) -> Run:
        api, rows, length = self._api, len(prompts), len(prompts[0])
        options = api.llama_context_default_params()
        options.n_ctx, options.n_seq_max = rows * (length + tokens + 8), rows
        options.n_batch = options.n_ubatch = max(512, rows)
        options.n_threads = options.n_threads_batch = self._threads
        options.type_k = options.type_v = api.GGML_TYPE_F32  # keys and values as in the other systems
        context = api.llama_init_from_model(self._model, options)
        batch = api.llama_batch_init(options.n_batch, 0, 1)
        clock = Clock()
        newest = [self._prefill(context, batch, row, prompt) for row, prompt in enumerate(prompts)]
        token_ids = [newest[0]]
        clock.put(None)
        for position in range(length, length + tokens - 1):
            self._fill(batch, [(token, position, row, True) for row, token in enumerate(newest)])
            self._decode(context, batch)
            newest = [self._best(context, row) for row in range(rows)]
            token_ids.append(newest[0])
            clock.put(None)
        run = clock.run(token_ids)
        api.llama_batch_free(batch)
        api.llama_free(context)
        return run

    def _prefill(self, context: object, batch: object, row: int, prompt: list[int]) -> int:
        for start in range(0, len(prompt), 512):
            part = prompt[start : start + 512]
            last = len(prompt) - 1 - start
            self._fill(batch, [(token, start + i, row, i == last) for i, token in enumerate(part)])
            self._decode(context, batch)
        return self._best(context, (len(prompt) - 1) % 512)

    def _fill(self, batch: object, entries: list[tuple[int, int, int, bool]]) -> None:
        batch.n_tokens = len(entries)  # type: ignore[attr-defined]
        for i, (token, position, row, needs_logits) in enumerate(entries):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, needs_logits  # type: ignore[attr-defined]
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, row  # type: ignore[attr-defined]

    def _decode(self, context: object, batch: object) -> None:
        assert self._api.llama_decode(context, batch) == 0, "llama.cpp could not decode"

    def _best(self, context: object, index: int) -> int:
        logits = self._api.llama_get_logits_ith(context, index)
        return int(np.ctypeslib.as_array(logits, shape=(self._vocabulary,)).argmax())
