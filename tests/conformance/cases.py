"""The recorded cases."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

CASES: list[dict[str, Any]] = json.loads((Path(__file__).parent / "cases.json").read_text(encoding="utf-8"))
TOLERANCE = 1e-3  # of logits of size 1: matrix products add up in another order on other processors
