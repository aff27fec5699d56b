"""The E2E restaurant data (Novikova, Dusek and Rieser, 2017): attribute list in, sentence out."""

from __future__ import annotations

import csv
import random
from collections import defaultdict
from pathlib import Path

from skipdecode.validation.quality import Example

END_OF_PROMPT = " =>"
SPAN = 48  # positions until a schedule reaches its fewest layers: the sentences' 90th percentile, in tokens


def read_pairs(path: Path) -> list[tuple[str, str]]:
    """(attributes, sentence) of each row of an E2E CSV file."""
    with path.open(encoding="utf-8", newline="") as lines:
        return [(row["mr"], " ".join(row["ref"].split())) for row in csv.DictReader(lines)]


def prompt(attributes: str) -> str:
    """The prompt for these attributes: `name[...], area[...] =>`."""
    return attributes + END_OF_PROMPT


def examples_of(path: Path) -> list[Example]:
    """The distinct inputs of an E2E CSV file, each with all its sentences."""
    references: dict[str, list[str]] = defaultdict(list)
    for attributes, text in read_pairs(path):
        references[attributes].append(text)
    return [Example(prompt=prompt(key), references=tuple(texts)) for key, texts in references.items()]


def shuffled(attributes: str, rng: random.Random) -> str:
    """The same attributes in another order: they are a set, so this is free augmentation."""
    items = attributes.replace("], ", "]\n").split("\n")
    rng.shuffle(items)
    return ", ".join(items)
