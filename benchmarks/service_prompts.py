"""How long do long prompts keep a row waiting that the C++ service decodes, and how long do they take themselves?

The service runs prompts in parts, between which other rows step. A row decodes; a request with one long prompt comes, or with
four, in turn. Random weights (Llama, 22 x 2048) in int4 at 2x, clients on the same machine. `--against` measures another build of
skd_service too, in turn with this one.

    make cpp && .venv/bin/python benchmarks/service_prompts.py [--prompt-tokens 500] [--rounds 5] [--against FILE] [--smoke]
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import tempfile
import time
from pathlib import Path

import openai
import service
import transformers
from machine import facts, write_results

from skipdecode.exporter.export import ExportRequest, export
from skipdecode.schedule_builders import ScheduleRequest

_SHAPE = {
    "num_hidden_layers": 22, "hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 32, "num_key_value_heads": 4,
    "vocab_size": 32000, "max_position_embeddings": 4096,
}  # fmt: skip
_TINY = {**_SHAPE, "num_hidden_layers": 6, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
_PROMPTS = (1, 4)  # of the request


async def arrivals(api: openai.AsyncOpenAI, prompts: list[list[int]], max_tokens: int, seen: list[float]) -> None:
    """Ask, and append when each piece of the answer came."""
    stream = await api.completions.create(
        model="model", prompt=prompts, max_tokens=max_tokens, temperature=0, stream=True, extra_body={"ignore_eos": True}
    )
    async for _ in stream:
        seen.append(time.monotonic())


async def measure(url: str, prompts: int, prompt_tokens: int) -> dict[str, float]:
    """Seconds: the running row's usual and longest wait for a token, and the request's for its first and its last."""
    api = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    running: list[float] = []
    row = asyncio.create_task(arrivals(api, [list(range(5, 21))], 2000, running))
    while len(running) < 100:  # beyond the schedule's span
        await asyncio.sleep(0.01)
    answered: list[float] = []
    asked = time.monotonic()
    await arrivals(api, [[5 + index % 1000 for index in range(prompt_tokens)]] * prompts, 2, answered)
    row.cancel()
    await asyncio.wait([row])
    waits = [(later, later - earlier) for earlier, later in itertools.pairwise(running)]
    return {
        "usual_wait_s": statistics.median(wait for when, wait in waits if when < asked),
        "longest_wait_s": max(wait for when, wait in waits if when >= asked),
        "first_token_s": answered[0] - asked,
        "last_token_s": answered[-1] - asked,
    }


def _name(build: str, prompts: int) -> str:
    return f"{build}, prompts: {prompts}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt-tokens", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--against", type=Path, help="another skd_service, measured in turn; without it nothing is written")
    parser.add_argument("--smoke", action="store_true", help="a tiny model, once; nothing is written")
    options = parser.parse_args()
    services = {"this": service.PROGRAM} | ({"other": options.against} if options.against else {})
    ways = list(itertools.product(services, _PROMPTS))
    rounds: dict[str, list[dict[str, float]]] = {_name(*way): [] for way in ways}
    with tempfile.TemporaryDirectory() as folder:
        checkpoint, bundle = Path(folder) / "model", Path(folder) / "engines"
        transformers.LlamaConfig(**(_TINY if options.smoke else _SHAPE)).save_pretrained(checkpoint)
        export(
            ExportRequest(
                model=str(checkpoint), out=bundle, random_weights=True, schedule=ScheduleRequest(speedup=2, span=64),
                quantize="int4", slim=True, max_length=4096,
            )
        )  # fmt: skip
        for number in range(1 if options.smoke else options.rounds):
            for build, prompts in reversed(ways) if number % 2 else ways:
                with service.serving(bundle, "--rows", "8", "--max-prompt-tokens", "2048", program=services[build]) as (_, url):
                    rounds[_name(build, prompts)].append(asyncio.run(measure(url, prompts, options.prompt_tokens)))
    medians = {way: {name: statistics.median(each[name] for each in found) for name in found[0]} for way, found in rounds.items()}
    result = {"machine": facts(), "prompt_tokens": options.prompt_tokens, "medians": medians, "rounds": rounds}
    print(json.dumps(result))
    if options.against and not options.smoke:  # the documented figures are a comparison
        write_results("service-prompts", result)


if __name__ == "__main__":
    main()
