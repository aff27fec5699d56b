"""Changes to a manifest of six layers and what both runtimes say about each: one malformation for every rule."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

DEPTH = 6

STATES = {"layers": [0, 2], "keys": None, "keys_of": None, "states": [{"name": "conv_state", "shape": [5, 3]}]}
NO_STATES = "model.state_layers have layers out of range or twice, or parts without a size"


KEYS = {"num_heads": 1, "head_size": 4}
READS = {"layers": [1, 2], "keys": None, "keys_of": 0, "states": []}
NO_SOURCE = "model.state_layers read keys of layers that have none, or are above"


NO_HEADS = {"num_heads": 0, "num_kv_heads": 0, "head_size": 0}  # a model whose layers all keep states


def _keep(data: dict[str, Any], *groups: dict[str, Any]) -> None:
    data["model"]["state_layers"] = list(groups)


def _add_this_file(data: dict[str, Any], before: str) -> None:
    """Add this file with its real size, so that nothing but its place is wrong."""
    here = Path(__file__).resolve()
    data["files"].append({"path": f"{before}{here}", "size": here.stat().st_size, "sha256": ""})


CHANGES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "unknown_key": (lambda d: d.update(extra=1), "unknown key 'extra'"),
    "missing_key": (lambda d: d.pop("limits"), "missing key 'limits'"),
    "unknown_key_in_model": (lambda d: d["model"].update(extra=1), "model has unknown key 'extra'"),
    "missing_key_in_target": (lambda d: d["targets"][0].pop("head"), r"targets\[0\] has missing key 'head'"),
    "bool_for_number": (lambda d: d["limits"].update(max_batch=True), "limits.max_batch is True, not a whole number"),
    "float_for_number": (lambda d: d["limits"].update(max_batch=2.0), "not a whole number"),
    "text_for_number": (lambda d: d["model"].update(num_layers="6"), "not a whole number"),
    "number_for_text": (lambda d: d["model"].update(name=6), "not a string"),
    "object_for_list": (lambda d: d.update(segments={}), "not a list"),
    "list_for_object": (lambda d: d.update(model=[]), "not an object"),
    "unknown_dtype": (lambda d: d.update(dtype="float8"), "dtype is none of float32, float16, bfloat16"),
    "unknown_weights": (
        lambda d: d["targets"][0].update(weights="int2"),
        "targets have weights that are none of fp32, fp16, bf16, int8, int4",
    ),
    "unknown_anchor": (lambda d: d["schedule"].update(anchor="elsewhere"), "generated or absolute"),
    "rising_schedule": (lambda d: d["schedule"].update(layers=[2, 5]), "rises from 2 to 5"),
    "empty_schedule": (lambda d: d["schedule"].update(layers=[]), "empty"),
    "schedule_of_another_depth": (lambda d: d["schedule"].update(num_layers=7), "num_layers differs"),
    "zero_limit": (lambda d: d["limits"].update(max_length=0), "not positive"),
    "negative_limit": (lambda d: d["limits"].update(max_batch=-1), "not positive"),
    "limit_beyond_64_bits": (lambda d: d["limits"].update(max_length=2**63), "below"),
    "model_without_heads": (lambda d: d["model"].update(num_kv_heads=0), "model has sizes that are not positive"),
    "model_without_heads_whose_layers_have_keys": (
        lambda d: [_keep(d, STATES), d["model"].update(NO_HEADS)],
        "model has sizes that are not positive",
    ),
    "model_with_heads_of_no_size": (
        lambda d: [_keep(d, {**STATES, "layers": [*range(DEPTH)]}), d["model"].update(head_size=0)],
        "model has sizes that are not positive",
    ),
    "model_of_negative_width": (lambda d: d["model"].update(hidden_size=-8), "model has sizes that are not positive"),
    "more_parameters_than_a_float_can_hold": (lambda d: d["model"].update(num_parameters=10**400), "below"),
    "depth_beyond_memory": (lambda d: [d[part].update(num_layers=2**62) for part in ("model", "schedule")], "do not cover"),
    "depth_beyond_an_index": (lambda d: d["model"].update(num_layers=2**70), "num_layers differs"),
    "negative_depth": (lambda d: d["model"].update(num_layers=-1), "num_layers differs"),
    "states_in_no_layer": (lambda d: _keep(d, {**STATES, "layers": [DEPTH]}), NO_STATES),
    "states_in_a_layer_below_all": (lambda d: _keep(d, {**STATES, "layers": [-1, 2]}), NO_STATES),
    "states_in_a_layer_twice": (lambda d: _keep(d, {**STATES, "layers": [1, 1]}), NO_STATES),
    "states_in_a_layer_of_two_groups": (lambda d: _keep(d, STATES, {**STATES, "layers": [1, 2]}), NO_STATES),
    "state_of_no_channels": (lambda d: _keep(d, {**STATES, "states": [{"name": "a", "shape": [0, 3]}]}), NO_STATES),
    "state_of_no_shape": (lambda d: _keep(d, {**STATES, "states": [{"name": "a", "shape": []}]}), NO_STATES),
    "state_beyond_an_array": (lambda d: _keep(d, {**STATES, "states": [{"name": "a", "shape": [2**31]}]}), NO_STATES),
    "two_states_of_a_name": (lambda d: _keep(d, {**STATES, "states": 2 * [{"name": "a", "shape": [1]}]}), NO_STATES),
    "state_beside_keys_of_its_name": (
        lambda d: _keep(d, {**STATES, "keys": KEYS, "states": [{"name": "key", "shape": [1]}]}),
        NO_STATES,
    ),
    "keys_of_no_heads": (lambda d: _keep(d, {**STATES, "keys": {**KEYS, "num_heads": 0}}), NO_STATES),
    "keys_beyond_an_array": (lambda d: _keep(d, {**STATES, "keys": {**KEYS, "head_size": 2**31}}), NO_STATES),
    "number_for_keys": (lambda d: _keep(d, {**STATES, "keys": 1}), r"model.state_layers\[0\].keys is 1, not an object"),
    "keys_of_a_layer_above": (lambda d: _keep(d, {**READS, "layers": [2, 5], "keys_of": 3}), NO_SOURCE),
    "keys_of_a_layer_below_all": (lambda d: _keep(d, {**READS, "keys_of": -1}), NO_SOURCE),
    "keys_of_a_layer_that_has_none": (lambda d: _keep(d, {**STATES, "layers": [0]}, READS), NO_SOURCE),
    "keys_of_a_layer_that_reads_others": (lambda d: _keep(d, READS, {**READS, "layers": [4], "keys_of": 1}), NO_SOURCE),
    "keys_of_its_own_and_of_another": (lambda d: _keep(d, {**READS, "keys": KEYS}), NO_SOURCE),
    "keys_of_a_layer_that_is_skipped": (
        lambda d: _keep(d, {**READS, "layers": [3], "keys_of": 2}),
        "skips layer 2, whose keys and values later layers read at every position; give 3 warm-up layers or more",
    ),
    "segment_missing_a_layer": (lambda d: d["segments"][-1].pop(), "do not cover each layer once"),
    "overlapping_segments": (lambda d: d["segments"][1].insert(0, 0), "do not cover each layer once"),
    "segment_of_no_layers": (lambda d: d["segments"].append([]), "do not cover each layer once"),
    "kv_slots_of_another_schedule": (lambda d: d["kv_slots"].__setitem__(1, 3), "kv_slots do not follow"),
    "variant_missing": (lambda d: d["variants"].pop(), "variants lack one of the schedule's"),
    "variant_that_climbs_other_layers": (lambda d: d["variants"][-1]["segments"].reverse(), "does not climb its layers"),
    "variant_of_fewer_than_no_layers": (
        lambda d: d["variants"].append({"name": "v", "num_layers": -5, "segments": [], "graph": None}),
        "does not climb",
    ),
    "variant_of_no_layers": (
        lambda d: d["variants"].append({"name": "v", "num_layers": 0, "segments": [], "graph": None}),
        "does not climb",
    ),
    "variant_deeper_than_memory": (
        lambda d: d["variants"].append({"name": "v", "num_layers": 2**62, "segments": [0], "graph": None}),
        "does not climb",
    ),
    "variant_with_a_segment_that_is_not_there": (lambda d: d["variants"][0]["segments"].append(99), "does not climb"),
    "variant_that_counts_segments_from_the_last": (lambda d: d["variants"][0]["segments"].__setitem__(-1, -1), "does not climb"),
    "variant_of_all_layers_missing": (lambda d: d["variants"].pop(0), "variants lack one of the schedule's"),
    "variant_that_is_there_twice": (lambda d: d["variants"].append(d["variants"][0]), "variants are not distinct"),
    "variant_whose_graph_is_outside": (lambda d: d["variants"][0].update(graph="../x"), "outside the bundle"),
    "variant_whose_graph_has_no_name": (lambda d: d["variants"][0].update(graph=""), "not among its files"),
    "target_lacking_a_weight_size": (lambda d: d["targets"][0]["segment_weight_bytes"].pop(), "how many bytes of weights"),
    "target_with_no_weights": (lambda d: d["targets"][0].update(head_weight_bytes=0), "how many bytes of weights"),
    "target_with_weights_beyond_64_bits": (
        lambda d: d["targets"][0].update(head_weight_bytes=2**63),
        "how many bytes of weights",
    ),
    "target_lacking_an_engine": (lambda d: d["targets"][0]["segments"].pop(), "lack an engine"),
    "tied_weight_that_is_no_file": (lambda d: d["targets"][0].update(tied_weight="../tied.bin"), "outside the bundle"),
    "engine_that_is_no_file": (lambda d: d["targets"][0].update(head="other.onnx"), "not among its files"),
    "engine_without_a_name": (lambda d: d["targets"][0].update(embed=""), "not among its files"),
    "segments_engine_outside": (lambda d: d["targets"][0]["segments"].__setitem__(0, "../x"), "outside the bundle"),
    "file_that_is_there_twice": (lambda d: d["files"].append(d["files"][0]), "files: one is listed twice"),
    "absolute_path": (lambda d: d["files"][0].update(path="/etc/passwd"), "outside the bundle"),
    "path_that_climbs_out": (lambda d: d["files"][0].update(path="../x"), "outside the bundle"),
    "absolute_path_of_a_file_that_is_there": (lambda d: _add_this_file(d, ""), "outside the bundle"),
    "path_that_climbs_out_to_a_file_that_is_there": (lambda d: _add_this_file(d, "../" * 40), "outside the bundle"),
    "backslash_path": (lambda d: d["files"].append({"path": "..\\x", "size": 0, "sha256": ""}), "outside the bundle"),
    "path_with_nothing_in_it": (lambda d: d["files"].append({"path": "", "size": 0, "sha256": ""}), "is missing"),
    "path_longer_than_a_name_may_be": (
        lambda d: d["files"].append({"path": "a" * 300, "size": 0, "sha256": ""}),
        "cannot be read|is missing",
    ),
    "path_with_a_zero_byte": (lambda d: d["files"].append({"path": "a\0b", "size": 0, "sha256": ""}), "is missing"),
    "path_with_half_a_character": (lambda d: d["files"].append({"path": "\ud800", "size": 0, "sha256": ""}), "is missing"),
    "path_with_a_line_break": (lambda d: d["files"].append({"path": "a\nb", "size": 0, "sha256": ""}), "is missing"),
    "wrong_size": (lambda d: d["files"][0].update(size=1), "bytes, not 1"),
}

LEVELS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "the manifest": lambda d: d,
    "model": lambda d: d["model"],
    "limits": lambda d: d["limits"],
    "schedule": lambda d: d["schedule"],
    "variants[0]": lambda d: d["variants"][0],
    "targets[0]": lambda d: d["targets"][0],
    "files[0]": lambda d: d["files"][0],
}
