"""Write cases.json: inputs, and the tokens, layers and logits that every runtime must give. Run this when a case is added.

python -m tests.conformance.record
"""

from __future__ import annotations

import itertools
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import skipdecode
from skipdecode.generate import Generator
from tests.conformance.bundles import BUNDLES, make
from tests.conformance.cases import PATH, tolerance
from tests.models import VOCABULARY
from tests.zoo import Zoo

SHOWN = 4  # logits recorded per step
_NEW_TOKENS = 16  # of a greedy row, from as many logits
_MARGIN = 5e-3  # gap between the best two logits, or twice the tolerance, so that no greedy token depends on rounding
_LENGTHS = {"one": [5], "ragged": [2, 7, 1, 3], "long": [27]}  # of prompts
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"max_new_tokens": _NEW_TOKENS},
    "full_depth": {"max_new_tokens": 8, "full_depth": True},
    "sampled": {"max_new_tokens": 16, "do_sample": True, "temperature": 1.3, "top_k": 20, "top_p": 0.9, "seed": 17},
    "sampled_freely": {"max_new_tokens": 12, "do_sample": True, "seed": 2**63 + 5},
}


def run(generator: Generator, prompts: list[list[int]], options: dict[str, Any]) -> dict[str, Any]:
    """Tokens, finish reasons and layers, as cases.json has them."""
    options = dict(options)
    schedule = "full" if options.pop("full_depth", False) else None
    result = generator.generate(prompts, schedule=schedule, **options)
    return {
        "sequences": [{"token_ids": row.token_ids, "finish_reason": row.finish_reason} for row in result.sequences],
        "layers": list(result.layers),
    }


def logits_of(generator: Generator, prompts: list[list[int]]) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Logits [rows, new tokens, V] of greedy decoding, in the order of `prompts`."""
    order = sorted(range(len(prompts)), key=lambda row: -len(prompts[row]))
    decoder = generator.decoder([len(prompts[row]) for row in order], _NEW_TOKENS)
    decoder.prefill([prompts[row] for row in order])
    found = [decoder.logits.copy()]
    for _ in range(_NEW_TOKENS - 1):
        decoder.decode_step(decoder.logits.argmax(axis=1))
        found.append(decoder.logits.copy())
    ordered = np.stack(found, axis=1)
    return ordered[np.argsort(order)]


def clear_prompts(
    generator: Generator, lengths: list[int], margin: float
) -> tuple[list[list[int]], np.ndarray[Any, np.dtype[np.float32]]]:
    """Random prompts whose greedy tokens are never a close call, and their logits."""
    for seed in itertools.count():
        rng = np.random.default_rng(seed)
        prompts = [rng.integers(3, VOCABULARY, length).tolist() for length in lengths]
        logits = logits_of(generator, prompts)
        best = np.sort(logits, axis=2)[..., -2:]
        if (best[..., 1] - best[..., 0]).min() > margin:
            break
    return prompts, logits


def main() -> None:
    cases = []
    with tempfile.TemporaryDirectory() as folder:
        zoo = Zoo(Path(folder))
        for name in BUNDLES:
            generator = skipdecode.load(make(name, zoo, Path(folder) / f"{name}.engines"))
            for asked, lengths in _LENGTHS.items():
                prompts, logits = clear_prompts(generator, lengths, max(_MARGIN, 2 * tolerance(name)))
                # in int8, drawn tokens differ from processor to processor
                hows = {"greedy": OPTIONS["greedy"]} if name.endswith("int8") else OPTIONS
                for how, chosen in hows.items():
                    # Python runs ended rows until half of them have ended, which `layers` shows with absolute positions
                    options = {**chosen, "ignore_eos": True} if "absolute" in name else chosen
                    case = {"bundle": name, "name": f"{name}, {asked}, {how}", "prompts": prompts, "options": options}
                    cases.append({**case, "expected": run(generator, prompts, options)})
                cases[-len(hows)]["expected"]["logits"] = np.round(logits[..., :SHOWN], 4).tolist()
    lines = ",\n".join(json.dumps(case) for case in cases)
    PATH.write_text(f"[\n{lines}\n]\n", encoding="utf-8")


if __name__ == "__main__":
    main()
