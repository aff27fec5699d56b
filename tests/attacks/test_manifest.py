"""A damaged or edited bundle: every rule of the manifest, one malformation each (docs/bundle.md)."""

from __future__ import annotations

import copy
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from skipdecode import manifest as manifests
from skipdecode.errors import BundleError, SkipDecodeError
from skipdecode.graph_passes.plan import plan_variants
from skipdecode.model import Model
from skipdecode.schedule import Schedule
from tests.unprivileged import UNPRIVILEGED

DEPTH = 6


def make_manifest(schedule: Schedule, folder: Path) -> manifests.Manifest:
    """A manifest for `schedule` whose engines are files of a few bytes."""
    plan = plan_variants(schedule)
    engines = ["embed.onnx", "head.onnx", *(f"segment_{i}.onnx" for i in range(len(plan.segments)))]
    folder.mkdir(exist_ok=True)
    for name in engines:
        (folder / name).write_bytes(name.encode())
    return manifests.Manifest(
        format_version=manifests.FORMAT_VERSION,
        model=Model(
            name="m", model_type="opt", num_layers=schedule.num_layers, hidden_size=8, num_heads=2, num_kv_heads=2, head_size=4,
            vocab_size=9, num_parameters=100, state_layers=(), eos_token_ids=(2,),
        ),
        dtype="float32",
        limits=manifests.Limits(max_length=32, max_batch=4),
        schedule=schedule,
        kv_slots=tuple(map(schedule.cap, range(schedule.num_layers))),
        segments=plan.segments,
        variants=tuple(manifests.Variant(name=f"v{n}", num_layers=n, segments=s, graph=None) for n, s in plan.variants),
        targets=(
            manifests.Target(
                name="cpu",
                weights="fp32", library="onnxruntime", library_version="1", machine="x86_64", cpu_features=("avx2",),
                embed="embed.onnx", segments=tuple(engines[2:]), head="head.onnx", tied_weight=None,
                segment_weight_bytes=(1 << 20,) * len(engines[2:]), head_weight_bytes=1 << 16,
            ),
        ),
        files=tuple(manifests.describe_file(folder, name) for name in engines),
    )  # fmt: skip


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("attacked")
    schedule = Schedule(name="table", num_layers=DEPTH, warmup_layers=1, layers=(5, 4, 4, 2))
    manifests.write(make_manifest(schedule, folder), folder)
    return folder


@pytest.fixture
def attack(bundle: Path) -> Any:
    """Rewrites bundle.json, expects one clear line, and puts it back."""
    path = bundle / "bundle.json"
    good = path.read_text()

    def refused(change: Callable[[dict[str, Any]], object], says: str) -> None:
        data = json.loads(good)
        change(data)
        path.write_text(json.dumps(data))
        _refused(bundle, says)

    yield refused
    path.write_text(good)


def _refused(bundle: Path, says: str) -> None:
    with pytest.raises(BundleError, match=says) as caught:
        manifests.read(bundle)
    assert str(caught.value).startswith(str(bundle)) and "\n" not in str(caught.value)
    assert ";" in str(caught.value), "ends in what to do"


def test_a_file_that_may_not_be_read_is_named_with_what_to_do(bundle: Path) -> None:
    file, inspect = bundle / "head.onnx", "import sys; from skipdecode.cli.inspect import main; sys.exit(main(sys.argv[1:]))"
    file.chmod(0)
    ended = subprocess.run(
        [*UNPRIVILEGED, sys.executable, "-c", inspect, str(bundle)], capture_output=True, text=True, check=False
    )
    file.chmod(0o644)
    said = f"{file}: cannot be read (Permission denied); check its name and permissions\n"
    assert (ended.returncode, ended.stderr, ended.stdout) == (2, said, "")


def test_the_untouched_bundle_is_read(bundle: Path) -> None:
    assert manifests.read(bundle).model.num_layers == DEPTH


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, "\xff", "null", "[]", '"x"', "1e999"])
def test_a_manifest_that_is_not_a_json_object_is_refused(bundle: Path, text: str) -> None:
    path = bundle / "bundle.json"
    good = path.read_bytes()
    path.write_bytes(text.encode("latin-1"))
    _refused(bundle, "cannot be read|format_version is None")
    path.write_bytes(good)


def test_a_folder_without_a_manifest_is_no_bundle(tmp_path: Path) -> None:
    _refused(tmp_path, "there is no bundle.json here")
    _refused(tmp_path / "nowhere", "there is no bundle.json here")
    (tmp_path / "file").touch()
    _refused(tmp_path / "file", "there is no bundle.json here")


def test_a_newer_format_is_named(attack: Any) -> None:
    attack(lambda d: d.update(format_version=5), "format_version is 5, this runtime reads 4")


STATES = {"layers": [0, 2], "keys": None, "keys_of": None, "states": [{"name": "conv_state", "shape": [5, 3]}]}
NO_STATES = "model.state_layers have layers out of range or twice, or parts without a size"


KEYS = {"num_heads": 1, "head_size": 4}
READS = {"layers": [1, 2], "keys": None, "keys_of": 0, "states": []}
NO_SOURCE = "model.state_layers read keys of layers that have none, or are above"


def _keep(data: dict[str, Any], *groups: dict[str, Any]) -> None:
    data["model"]["state_layers"] = list(groups)


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
    "unknown_anchor": (lambda d: d["schedule"].update(anchor="elsewhere"), "generated or absolute"),
    "rising_schedule": (lambda d: d["schedule"].update(layers=[2, 5]), "rises from 2 to 5"),
    "empty_schedule": (lambda d: d["schedule"].update(layers=[]), "empty"),
    "schedule_of_another_depth": (lambda d: d["schedule"].update(num_layers=7), "num_layers differs"),
    "zero_limit": (lambda d: d["limits"].update(max_length=0), "not positive"),
    "negative_limit": (lambda d: d["limits"].update(max_batch=-1), "not positive"),
    "limit_beyond_64_bits": (lambda d: d["limits"].update(max_length=2**63), "below"),
    "model_without_heads": (lambda d: d["model"].update(num_kv_heads=0), "model has sizes that are not positive"),
    "model_of_negative_width": (lambda d: d["model"].update(hidden_size=-8), "model has sizes that are not positive"),
    "more_parameters_than_a_float_can_hold": (lambda d: d["model"].update(num_parameters=10**400), "below"),
    "depth_beyond_memory": (lambda d: [d[part].update(num_layers=2**62) for part in ("model", "schedule")], "do not cover"),
    "depth_beyond_an_index": (lambda d: d["model"].update(num_layers=2**70), "num_layers differs"),
    "negative_depth": (lambda d: d["model"].update(num_layers=-1), "num_layers differs"),
    "states_in_no_layer": (lambda d: _keep(d, {**STATES, "layers": [DEPTH]}), NO_STATES),
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
    "variant_deeper_than_memory": (
        lambda d: d["variants"].append({"name": "v", "num_layers": 2**62, "segments": [0], "graph": None}),
        "does not climb",
    ),
    "variant_with_a_segment_that_is_not_there": (lambda d: d["variants"][0]["segments"].append(99), "does not climb"),
    "target_lacking_a_weight_size": (lambda d: d["targets"][0]["segment_weight_bytes"].pop(), "how many bytes of weights"),
    "target_with_no_weights": (lambda d: d["targets"][0].update(head_weight_bytes=0), "how many bytes of weights"),
    "target_lacking_an_engine": (lambda d: d["targets"][0]["segments"].pop(), "lack an engine"),
    "tied_weight_that_is_no_file": (lambda d: d["targets"][0].update(tied_weight="../tied.bin"), "outside the bundle"),
    "engine_that_is_no_file": (lambda d: d["targets"][0].update(head="other.onnx"), "not among its files"),
    "file_that_is_there_twice": (lambda d: d["files"].append(d["files"][0]), "files: one is there twice"),
    "absolute_path": (lambda d: d["files"][0].update(path="/etc/passwd"), "outside the bundle"),
    "path_that_climbs_out": (lambda d: d["files"][0].update(path="../x"), "outside the bundle"),
    "backslash_path": (lambda d: d["files"][0].update(path="..\\x"), "outside the bundle"),
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


@pytest.mark.parametrize("name", CHANGES)
def test_malformation(attack: Any, name: str) -> None:
    attack(*CHANGES[name])


LEVELS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "the manifest": lambda d: d,
    "model": lambda d: d["model"],
    "limits": lambda d: d["limits"],
    "schedule": lambda d: d["schedule"],
    "variants[0]": lambda d: d["variants"][0],
    "targets[0]": lambda d: d["targets"][0],
    "files[0]": lambda d: d["files"][0],
}


@pytest.mark.parametrize("level", LEVELS)
def test_an_unknown_key_is_refused_at_every_level(attack: Any, level: str) -> None:
    attack(lambda d: LEVELS[level](d).update(extra=1), re.escape(f"{level} has unknown key 'extra'"))


@pytest.mark.parametrize("level", LEVELS)
def test_every_key_of_every_level_is_required(attack: Any, bundle: Path, level: str) -> None:
    keys = set(LEVELS[level](json.loads((bundle / "bundle.json").read_text()))) - {"format_version"}
    for key in sorted(keys):
        attack(lambda d, key=key: LEVELS[level](d).pop(key), re.escape(f"{level} has missing key '{key}'"))


def test_nesting_just_below_the_interpreters_limit_is_refused_too(bundle: Path, tmp_path: Path) -> None:
    good = json.loads((bundle / "bundle.json").read_text())
    good["model"]["name"] = good["dtype"] = "here"
    text = json.dumps(good)
    for depth in range(sys.getrecursionlimit() - 150, sys.getrecursionlimit()):
        for field in ('"name": "here"', '"dtype": "here"'):
            nested = field.split(":")[0] + ": " + "[" * depth + "]" * depth
            (tmp_path / "bundle.json").write_text(text.replace(field, nested))
            _refused(tmp_path, "not a string|cannot be read")
        (tmp_path / "bundle.json").write_text('{"format_version": ' + "[" * depth + "]" * depth + "}")
        _refused(tmp_path, "format_version is|cannot be read")


def test_a_missing_file_and_a_truncated_one_are_named(bundle: Path) -> None:
    engine = bundle / "segment_0.onnx"
    whole = engine.read_bytes()
    engine.write_bytes(whole[:-1])
    _refused(bundle, "segment_0.onnx: has 13 bytes, not 14")
    engine.unlink()
    _refused(bundle, "segment_0.onnx: is missing")
    engine.write_bytes(whole)


def test_a_changed_byte_shows_when_hashes_are_checked(bundle: Path) -> None:
    engine = bundle / "segment_0.onnx"
    whole = engine.read_bytes()
    engine.write_bytes(b"X" + whole[1:])
    manifest = manifests.read(bundle)
    with pytest.raises(BundleError, match="not what the manifest says") as caught:
        manifests.check_hashes(manifest, bundle)
    assert "\n" not in str(caught.value)
    engine.unlink()
    with pytest.raises(BundleError, match=r"segment_0\.onnx: cannot be read"):
        manifests.check_hashes(manifest, bundle)
    engine.write_bytes(whole)
    manifests.check_hashes(manifest, bundle)


@given(st.integers(2, 12), st.integers(0, 3), st.lists(st.integers(0, 100), min_size=1, max_size=20))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=50)
def test_what_is_written_is_read_back(tmp_path: Path, depth: int, warmup: int, raw: list[int]) -> None:
    warmup = min(warmup, depth - 1)
    counts = sorted((warmup + 1 + count % (depth - warmup) for count in raw), reverse=True)
    schedule = Schedule(name="table", num_layers=depth, warmup_layers=warmup, layers=tuple(counts))
    manifest = make_manifest(schedule, tmp_path)
    manifests.write(manifest, tmp_path)
    assert manifests.read(tmp_path) == manifest


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


def _places(data: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    return [place for key, value in items for place in [(*path, key), *_places(value, (*path, key))]]


@given(st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=300)
def test_any_one_value_replaced_is_read_or_refused_and_never_crashes(bundle: Path, tmp_path: Path, data: st.DataObject) -> None:
    good = json.loads((bundle / "bundle.json").read_text())
    edited = copy.deepcopy(good)
    *parents, last = data.draw(st.sampled_from(_places(good)))
    holder = edited
    for key in parents:
        holder = holder[key]
    holder[last] = data.draw(JSON)
    for file in bundle.iterdir():
        if file.name != "bundle.json" and not (tmp_path / file.name).exists():
            (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "bundle.json").write_text(json.dumps(edited))
    try:
        manifests.read(tmp_path)
    except SkipDecodeError as error:
        assert "\n" not in str(error)
