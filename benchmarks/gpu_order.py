"""The order in which gpu.py measures, and the processes of the systems that take turns. A failure is reported, the rest runs."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from gpu_figures import Cells
from worker import Worker


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Systems that take turns at a point."""

    batch: int  # rows
    context: int  # valid positions of each
    systems: tuple[str, ...]

    @property
    def point(self) -> str:
        """As on the command line: 8x128."""
        return f"{self.batch}x{self.context}"


def stages(points: Sequence[str], systems: Sequence[str], takes_part: Callable[[str, str], bool]) -> list[Stage]:
    """Most important first: one row, by the first system alone, then with each of the others; then the points of more rows."""

    def stage(point: str, chosen: Sequence[str]) -> Stage:
        batch, context = map(int, point.split("x"))
        return Stage(batch=batch, context=context, systems=tuple(chosen))

    first, *others = systems
    of_one_row = [point for point in points if point.startswith("1x")]
    ordered = [stage(point, [first]) for point in of_one_row]
    for other in others:
        ordered += [stage(point, [first, other]) for point in of_one_row if takes_part(other, point)]
    of_more_rows = [point for point in points if point not in of_one_row]
    return ordered + [stage(point, [system for system in systems if takes_part(system, point)]) for point in of_more_rows]


class Processes:
    """One model's systems, each in a process that lives from the first stage that needs it to the last.

    Args:
        makers: by system, what starts its process.
        not_measured: filled in with what failed, and why.
        deadline: on the monotonic clock; nothing is started after it.
    """

    def __init__(
        self, model: str, makers: dict[str, Callable[[], Worker]], not_measured: dict[str, str], deadline: float
    ) -> None:
        self._model, self._makers, self._not_measured, self._deadline = model, makers, not_measured, deadline
        self._workers: dict[str, Worker] = {}
        self._broken: dict[str, str] = {}  # system that could not be started -> why

    def take_turns(self, stage: Stage, rounds: int) -> Cells:
        """What each system's turns gave, as far as they went."""
        cells: Cells = {}
        failed: set[str] = set()
        for _ in range(rounds):
            for system in stage.systems:
                if system in failed:
                    continue
                try:
                    cell = self._cell(system, stage)
                except Exception as error:  # whatever it is, the other systems' measurements must survive it
                    failed.add(system)
                    self._report_failure(system, stage, error, len(cells.get(system, ())))
                else:
                    cells.setdefault(system, []).append(cell)
        return cells

    def _cell(self, system: str, stage: Stage) -> dict[str, Any]:
        if time.monotonic() > self._deadline:
            raise TimeoutError("the time was over (--minutes)")
        worker = self._worker(system)
        try:
            cell: dict[str, Any] = worker.call("cell", stage.batch, stage.context)
        except Exception:
            self._workers.pop(system).close()  # a process that failed no longer answers; the next stage starts a new one
            raise
        return cell

    def keep(self, systems: Collection[str]) -> None:
        """End the processes of all others: the GPU lacks room for everything at once."""
        for system in [*self._workers]:
            if system not in systems:
                self._workers.pop(system).close()

    def _worker(self, system: str) -> Worker:
        if system in self._broken:
            raise RuntimeError(self._broken[system])
        if system not in self._workers:
            try:
                self._workers[system] = self._makers[system]()
            except Exception as error:
                self._broken[system] = reason(error)
                raise
        return self._workers[system]

    def _report_failure(self, system: str, stage: Stage, error: Exception, turns: int) -> None:
        after = f"after {turns} of its turns: " if turns else ""
        self._not_measured[f"{self._model}, {system}, {stage.point}"] = after + reason(error)
        print(f"\n{self._model}, {system}, {stage.point}: not measured\n{error}", file=sys.stderr, flush=True)


def reason(error: Exception) -> str:
    """An error as one line; for a worker's traceback, that of its last exception."""
    lines = str(error).strip().splitlines() or [f"{type(error).__name__}: its process ended (killed, for want of memory?)"]
    named = [line for line in lines if re.match(r"[\w.]+(Error|Exception|Interrupt)\b", line)]
    return (named or lines)[-1][:300]
