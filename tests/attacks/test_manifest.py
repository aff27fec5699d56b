"""Damaged and edited bundles: one malformation for every rule of the manifest (docs/bundle.md)."""

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
from skipdecode.schedule import Schedule
from tests.attacks.manifest_changes import CHANGES, DEPTH, LEVELS
from tests.manifests import make_manifest
from tests.unprivileged import UNPRIVILEGED


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("attacked")
    schedule = Schedule(name="table", num_layers=DEPTH, warmup_layers=1, layers=(5, 4, 4, 2))
    manifests.write(make_manifest(schedule, folder), folder)
    return folder


@pytest.fixture
def attack(bundle: Path) -> Any:
    """Rewrite bundle.json with a change, expect an error of one clear line, and restore the file."""
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
    assert ";" in str(caught.value), "the error ends with what to do"


def test_an_unreadable_file_is_named_with_what_to_do(bundle: Path) -> None:
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


def test_a_folder_without_a_manifest_is_not_a_bundle(tmp_path: Path) -> None:
    _refused(tmp_path, "there is no bundle.json here")
    _refused(tmp_path / "nowhere", "there is no bundle.json here")
    (tmp_path / "file").touch()
    _refused(tmp_path / "file", "there is no bundle.json here")


@pytest.mark.parametrize("name", ["a\0b", "a\ud800b"])
def test_a_name_that_no_folder_can_have_is_refused_like_any_other(name: str) -> None:
    with pytest.raises(BundleError, match=r"bundle\.json: cannot be read") as caught, manifests.one_bundle(Path(name)):
        manifests.read(Path(name))
    assert "\n" not in str(caught.value)


def test_a_newer_format_is_refused_by_its_number(attack: Any) -> None:
    attack(lambda d: d.update(format_version=5), "format_version is 5, this runtime reads 4")


@pytest.mark.parametrize("name", CHANGES)
def test_a_malformed_manifest_is_refused(attack: Any, name: str) -> None:
    attack(*CHANGES[name])


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


def test_a_changed_byte_is_found_when_hashes_are_checked(bundle: Path) -> None:
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
def test_any_one_replaced_value_is_read_or_refused_and_never_crashes(bundle: Path, tmp_path: Path, data: st.DataObject) -> None:
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
