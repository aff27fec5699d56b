"""Damaged and edited bundles against the C++ reader: it refuses what Python refuses, in one line, and the next bundle loads."""

from __future__ import annotations

import json
import shutil
import subprocess
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import onnx
import pytest

from skipdecode import manifest as manifests
from skipdecode.schedule import Schedule
from tests.attacks.manifest_changes import CHANGES, DEPTH, LEVELS
from tests.cpp.conftest import BUILD, LIBRARIES, Driver, replacing
from tests.cpp.test_native import environment
from tests.manifests import make_manifest
from tests.unprivileged import UNPRIVILEGED

SKD_ERROR_BUNDLE, SKD_ERROR_TARGET, SKD_ERROR_INTERNAL = 1, 2, 5
CORPUS = Path(__file__).parent / "corpus.zip"  # kept by `make fuzz`
Change = Callable[[dict[str, Any]], object]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("attacked")
    manifests.write(make_manifest(Schedule(name="table", num_layers=DEPTH, warmup_layers=1, layers=(5, 4, 4, 2)), folder), folder)
    return folder


@pytest.fixture
def refused(bundle: Path, driver: Driver) -> Iterator[Callable[[str], str]]:
    """Write a text as bundle.json, expect a refusal and return its line. The file is restored afterwards."""
    path = bundle / "bundle.json"
    good = path.read_bytes()

    def ask(text: str) -> str:
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
        answer = driver.ask(command="load", bundle=bundle)
        assert answer.get("code") == SKD_ERROR_BUNDLE, answer
        line: str = answer["error"]
        assert line.startswith(f"{bundle}/") and "\n" not in line and ";" in line, line
        return line

    yield ask
    path.write_bytes(good)


@pytest.mark.parametrize("name", CHANGES)
def test_cpp_refuses_what_python_refuses(bundle: Path, refused: Callable[[str], str], name: str) -> None:
    data = json.loads((bundle / "bundle.json").read_text())
    CHANGES[name][0](data)
    refused(json.dumps(data))


@pytest.mark.parametrize("level", LEVELS)
def test_unknown_and_missing_keys_are_named(bundle: Path, refused: Callable[[str], str], level: str) -> None:
    good = json.loads((bundle / "bundle.json").read_text())
    for key in sorted(set(LEVELS[level](good)) - {"format_version"}):
        data = json.loads(json.dumps(good))
        del LEVELS[level](data)[key]
        assert f"{level} has missing key '{key}'" in refused(json.dumps(data))
    LEVELS[level](good)["extra"] = 1
    assert f"{level} has unknown key 'extra'" in refused(json.dumps(good))


@pytest.mark.parametrize("text", ["", "{", "[" * 1_000_000, "null", "[]", '"x"', "1e999", '{"format_version": 1e999}'])
def test_a_file_that_is_not_a_manifest_is_refused(refused: Callable[[str], str], text: str) -> None:
    refused(text)


@pytest.mark.parametrize(("before", "after"), [("\ufeff", ""), ("", "\0"), ("", "\0 and more")])
def test_a_byte_order_mark_or_a_nul_is_refused(bundle: Path, refused: Callable[[str], str], before: str, after: str) -> None:
    refused(before + (bundle / "bundle.json").read_text() + after)


def test_a_newer_format_is_refused_by_its_number(bundle: Path, refused: Callable[[str], str]) -> None:
    data = json.loads((bundle / "bundle.json").read_text())
    line = refused(json.dumps({**data, "format_version": 5}))
    assert "format_version is 5, this runtime reads 4; export the model with this version" in line


def test_missing_and_truncated_files_are_named(bundle: Path, driver: Driver) -> None:
    engine = bundle / "segment_0.onnx"
    whole = engine.read_bytes()
    engine.write_bytes(whole[:-1])
    assert "segment_0.onnx: has 13 bytes, not 14" in driver.ask(command="load", bundle=bundle)["error"]
    engine.unlink()
    assert "segment_0.onnx: is missing" in driver.ask(command="load", bundle=bundle)["error"]
    engine.write_bytes(whole)


def test_an_unreadable_file_is_named_with_what_to_do(bundle: Path) -> None:
    file, driver = bundle / "segment_0.onnx", Driver(*UNPRIVILEGED)
    file.chmod(0)
    line = driver.ask(command="load", bundle=bundle)["error"]
    file.chmod(0o644)
    driver.close()
    assert line == f"{file}: cannot be read (Permission denied); check its name and permissions"


def test_a_file_that_is_not_an_engine_is_refused(
    conformance_bundle: Callable[[str], Path], driver: Driver, tmp_path: Path
) -> None:
    bundle = shutil.copytree(conformance_bundle("opt"), tmp_path / "engines")
    engine = next((bundle / "targets" / "cpu").glob("segment_*.onnx"))
    engine.write_bytes(b"\0" * engine.stat().st_size)
    answer = driver.ask(command="load", bundle=bundle)
    assert answer["code"] == SKD_ERROR_BUNDLE and f"{engine.name}: cannot be loaded" in answer["error"]
    assert driver.ask(command="load", bundle=conformance_bundle("opt"))["num_layers"] == 6


def test_an_engine_that_fails_while_it_runs_is_named_and_nothing_else_is_printed(
    conformance_bundle: Callable[[str], Path], tmp_path: Path
) -> None:
    bundle = shutil.copytree(conformance_bundle("opt"), tmp_path / "engines")
    head = bundle / "targets" / "cpu" / "head.onnx"
    model = onnx.load(head, load_external_data=False)
    (axis,) = [a for node in model.graph.node if node.op_type == "GatherElements" for a in node.attribute if a.name == "axis"]
    axis.i ^= 2  # one bit of the file
    size = head.stat().st_size
    head.write_bytes(model.SerializeToString())
    assert head.stat().st_size == size
    asked = {"command": "generate", "bundle": str(bundle), "prompts": [[5, 6, 7]], "max_new_tokens": 4}
    done = subprocess.run(
        [BUILD / "release" / "tests" / "skd_driver"], input=json.dumps(asked), env=environment(),
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    answer = json.loads(done.stdout)
    assert answer["code"] == SKD_ERROR_INTERNAL and answer["error"].startswith(f"{head}: ONNX Runtime stopped (Non-zero status")
    assert answer["error"].endswith("axis 3 is not in valid range [-3,2]); check the bundle with skip-inspect --check-hashes")
    assert done.stderr == ""


@pytest.mark.parametrize("other", ["opt", "llama", "nothing"])
def test_a_bundle_that_is_replaced_while_it_is_loaded_is_refused_and_the_other_one_loads(
    conformance_bundle: Callable[[str], Path], tmp_path: Path, other: str
) -> None:
    """With the same model everything would fit; with another, files are missing or differ; with none, all are missing."""
    bundle, by, driver = shutil.copytree(conformance_bundle("opt"), tmp_path / "engines"), tmp_path / "other", Driver()
    if other != "nothing":
        shutil.copytree(conformance_bundle(other), by)
    library = replacing(bundle, by, "libonnxruntime.so.1", tmp_path)
    answer = driver.ask(command="load", bundle=bundle, onnxruntime_library=library)
    assert answer == {"code": SKD_ERROR_BUNDLE, "error": f"{bundle}: was replaced while it was loaded; load it again"}
    again = driver.ask(command="load", bundle=bundle if other != "nothing" else bundle.with_name("before"))
    assert again["num_layers"] == 6
    driver.close()


def _reversed(data: dict[str, Any]) -> None:
    data["targets"][0]["segments"].reverse()


def _head_first(data: dict[str, Any]) -> None:
    target = data["targets"][0]
    target.update(embed=target["head"], head=target["embed"])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (_reversed, "segment_005.onnx: its input 'past_key.5' is not one that bundle.json calls for"),
        (_head_first, "head.onnx: its input 'hidden' is not one that bundle.json calls for"),
        (lambda d: d["model"].update(hidden_size=32), "'hidden' is float32 [?,?,64], bundle.json calls for float32 [?,?,32]"),
        (lambda d: d["model"].update(vocab_size=100), "head.onnx: its output 'logits' is float32 [?,99], bundle.json calls for"),
        (lambda d: d["model"].update(num_kv_heads=1), "segment_000.onnx: its input 'past_key.0' is float32 [?,4,?,16], bundle"),
        (lambda d: d["model"].update(head_size=8), "bundle.json calls for float32 [?,4,?,8]"),
    ],
)
def test_engines_that_do_not_match_the_manifest_are_refused_when_they_are_loaded(
    conformance_bundle: Callable[[str], Path], driver: Driver, tmp_path: Path, change: Change, says: str
) -> None:
    bundle = shutil.copytree(conformance_bundle("opt"), tmp_path / "engines")
    data = json.loads((bundle / "bundle.json").read_text())
    change(data)
    (bundle / "bundle.json").write_text(json.dumps(data))
    answer = driver.ask(command="load", bundle=bundle)
    assert answer["code"] == SKD_ERROR_BUNDLE and says in answer["error"], answer
    assert answer["error"].endswith("; export the model again")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: t.update(library_version="1.0.0"), "/engines: the engines were compiled by onnxruntime 1.0.0, but "),
        (lambda t: t.update(cpu_features=["sve"]), "laid out for x86_64 with sve; this CPU differs"),
        (lambda t: t.update(name="cuda"), "is built without CUDA; name one with CUDA in skd_load_options.onnxruntime_library"),
    ],
)
def test_engines_of_another_version_cpu_or_target_are_refused(
    conformance_bundle: Callable[[str], Path], driver: Driver, tmp_path: Path, change: Change, says: str
) -> None:
    bundle = shutil.copytree(conformance_bundle("opt"), tmp_path / "engines")
    data = json.loads((bundle / "bundle.json").read_text())
    change(data["targets"][0])
    (bundle / "bundle.json").write_text(json.dumps(data))
    answer = driver.ask(command="load", bundle=bundle)
    assert answer["code"] == SKD_ERROR_TARGET and says in answer["error"], answer


def test_the_cpu_engines_of_a_bundle_for_several_targets_are_the_default(
    conformance_bundle: Callable[[str], Path], driver: Driver, tmp_path: Path
) -> None:
    bundle = shutil.copytree(conformance_bundle("opt"), tmp_path / "engines")
    data = json.loads((bundle / "bundle.json").read_text())
    data["targets"].insert(0, {**data["targets"][0], "name": "tensorrt-rtx", "library": "tensorrt_rtx", "machine": "sm89"})
    (bundle / "bundle.json").write_text(json.dumps(data))
    assert driver.ask(command="load", bundle=bundle)["num_layers"] == 6
    asked = driver.ask(command="load", bundle=bundle, target="tensorrt-rtx")
    assert asked["code"] == SKD_ERROR_TARGET and "runs cpu and cuda engines, not tensorrt-rtx" in asked["error"]


def test_a_missing_target_and_a_missing_library_are_reported(conformance_bundle: Callable[[str], Path]) -> None:
    bundle = conformance_bundle("opt")
    driver = Driver()
    missing = driver.ask(command="load", bundle=bundle, onnxruntime_library="/nowhere/libonnxruntime.so")
    assert missing["code"] == SKD_ERROR_TARGET and missing["error"].startswith("ONNX Runtime cannot be loaded (/nowhere/")
    other = LIBRARIES / "libonnxruntime-genai.so"
    odd = driver.ask(command="load", bundle=bundle, onnxruntime_library=str(other))
    assert odd["error"].startswith(f"{other}: is not ONNX Runtime; install it, set LD_LIBRARY_PATH, or name it in")
    absent = driver.ask(command="load", bundle=bundle, target="cuda")
    assert "target 'cuda' is not in this bundle; choose from cpu" in absent["error"]
    empty = driver.ask(command="load", bundle=bundle, target="")
    assert (empty["code"], empty["error"]) == (
        SKD_ERROR_TARGET, f"{bundle}: target '' is not in this bundle; choose from cpu",
    )  # fmt: skip
    assert driver.ask(command="load", bundle=bundle)["num_layers"] == 6
    driver.close()


def test_what_the_fuzzer_found_is_harmless(tmp_path: Path) -> None:
    with zipfile.ZipFile(CORPUS) as corpus:
        corpus.extractall(tmp_path)
    files = sorted(tmp_path.iterdir())
    assert len(files) > 1000
    command = [BUILD / "address" / "tests" / "skd_replay_manifests", *files]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout == f"{len(files)} files\n"
