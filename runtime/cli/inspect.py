"""examples:
  skip-inspect engines/
  skip-inspect engines/ --json
  skip-inspect engines/ --check-hashes      (reads the whole bundle)

exit status: 0 done, 2 bad input (one line: what, where, what to do)
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from skipdecode import manifest as manifests
from skipdecode.bundle_facts import facts
from skipdecode.cli import Parser, folder, guarded
from skipdecode.manifest import Manifest
from skipdecode.model import LayerGroup, Model
from skipdecode.schedule import Anchor, Schedule
from skipdecode.text import printable

_COLUMNS = 64
_WARM_UP, _ACTIVE, _SKIPPED = _MARKS = "▓█·"
_PLAIN_MARKS = "%#."  # where standard output cannot encode block characters


def main(argv: list[str] | None = None) -> int:
    """The `skip-inspect` command."""
    parser = Parser(
        prog="skip-inspect",
        description="Show what is inside a bundle: schedule, variants, segments, memory, targets.",
        epilog=__doc__,
    )
    parser.add_argument("bundle", type=folder, metavar="DIR", help="the folder that skip-export wrote")
    parser.add_argument("--json", action="store_true", help="print one JSON object on standard output")
    parser.add_argument("--check-hashes", action="store_true", help="compare every file's SHA-256 with the manifest")
    parser.add_argument(
        "--quiet",
        action="store_true",
        help="print no page; the exit status says whether every file has its size, with --check-hashes also its SHA-256",
    )
    parser.add_argument("--debug", action="store_true", help="show a traceback on errors")
    options = parser.parse_args(argv)
    return guarded(lambda: _inspect(options), debug=options.debug)


def _inspect(options: argparse.Namespace) -> int:
    manifest = manifests.read(options.bundle)
    if options.check_hashes:
        manifests.check_hashes(manifest, options.bundle)
    if options.json:
        print(json.dumps(facts(manifest)))
    elif not options.quiet:
        print(_printable(_page(manifest)))
    return 0


def picture(schedule: Schedule) -> list[str]:
    """Draw layers (top layer first) against positions; a character stands for one position or a few."""
    width = min(_COLUMNS, schedule.span)
    last = max(1, width - 1)
    columns = [schedule.active(i * (schedule.span - 1) // last) for i in range(width)]
    rows = []
    for layer in reversed(range(schedule.num_layers)):
        active = _WARM_UP if layer < schedule.warmup_layers < schedule.num_layers else _ACTIVE
        rows.append(f"{layer:>5} " + "".join(active if layer in column else _SKIPPED for column in columns))
    left, right = "0", f"{schedule.span - 1} and on"
    rows.append(" " * 6 + left + right.rjust(max(width - len(left), len(right) + 1)))
    return rows


def _page(manifest: Manifest) -> list[str]:
    data, model, schedule = facts(manifest), manifest.model, manifest.schedule
    return [
        f"{model.name}: {model.model_type}, {model.num_layers} layers x {model.hidden_size}, {_heads(model)}, "
        f"vocabulary {model.vocab_size}, {model.num_parameters / 1e6:,.1f} M parameters",
        *map(_states_line, model.state_layers),
        f"limits: {manifest.limits.max_length} tokens a row, {manifest.limits.max_batch} rows",
        "",
        f"schedule {schedule.name}, anchor {schedule.anchor.value}: {schedule.layers[0]} -> {schedule.layers[-1]} layers over "
        f"{schedule.span} positions, mean {schedule.mean_layers:.1f} ({data['schedule']['speedup']:.2f}x fewer)",
        f"layer  ({_WARM_UP} warm-up, {_ACTIVE} active, {_SKIPPED} skipped; positions to the right)",
        *picture(schedule),
        "",
        "variants",
        *(
            f"  {v['name']:<5} {_span_text(v['positions'], schedule.anchor):<22} segments {' '.join(map(str, v['segments']))}"
            for v in data["variants"]
        ),
        "",
        *(line for target in data["targets"] for line in _target_lines(target, manifest)),
        f"bundle     {_mib(data['bundle_bytes'])} on disk",
    ]


def _heads(model: Model) -> str:
    if not model.num_heads:
        return "no attention"
    return f"{model.num_heads} heads ({model.num_kv_heads} key/value) of {model.head_size}"


def _states_line(group: LayerGroup) -> str:
    """Such as: 36 layers keep conv_state [3328,3], recurrent_state [48,128,64] instead of keys and values"""
    states = ", ".join(f"{state.name} [{','.join(map(str, state.shape))}]" for state in group.states) or "nothing"
    who = "1 layer" if len(group.layers) == 1 else f"{len(group.layers)} layers"
    s = "s" if len(group.layers) == 1 else ""
    if group.keys_of is not None:
        return f"{who} read{s} the keys and values of layer {group.keys_of} and keep{s} {states}"
    if group.keys is None:
        return f"{who} keep{s} {states} instead of keys and values"
    and_states = f"{states} and " if group.states else ""
    return f"{who} keep{s} {and_states}{group.keys.num_heads} key/value heads of {group.keys.head_size}"


def _target_lines(target: dict[str, Any], manifest: Manifest) -> list[str]:
    lines = [
        " ".join(["target {name}: {weights}, {library} {library_version}, {machine}".format(**target), *target["cpu_features"]])
    ]
    for index, (layers, size) in enumerate(zip(manifest.segments, target["segment_bytes"], strict=True)):
        name = str(layers[0]) if len(layers) == 1 else f"{layers[0]}-{layers[-1]}"
        lines.append(f"  segment {index:<3} layers {name:<7} {_mib(size)}")
    weights = sum(target["segment_weight_bytes"]) + target["head_weight_bytes"]
    kv, whole = target["kv_bytes_per_row"], target["kv_bytes_per_row_without_skipping"]
    if target["fixed_kv_buffer"]:
        of_run = f"at most {manifest.limits.max_length} tokens"
    else:
        of_run = f"{manifest.limits.max_length} tokens (half prompt), {_mib(whole)} without skipping: {kv / whole:.0%}"
    return [
        *lines,
        f"  weights {_mib(weights)} a step at full depth, once for all {len(manifest.variants)} variants",
        f"  KV buffer {_mib(kv)} a row of {of_run}",
        "",
    ]


def _printable(lines: list[str]) -> str:
    """Text that a terminal only displays, whatever names the bundle holds."""
    text = "\n".join(map(printable, lines))
    try:
        _MARKS.encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        text = text.translate(str.maketrans(_MARKS, _PLAIN_MARKS))
    return text


def _span_text(positions: list[int | None] | None, anchor: Anchor) -> str:
    if positions is None:
        return "prefill and baseline" if anchor is Anchor.GENERATED else "baseline"
    first, last = positions
    return f"positions {first} and on" if last is None else f"positions {first} .. {last}"


def _mib(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"


if __name__ == "__main__":
    sys.exit(main())
