"""The C++ tests (Catch2), plain and under the sanitizers; the header from C; the installed library from CMake and pkg-config."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from skipdecode.exporter.export import ExportRequest, export
from skipdecode.schedule import Anchor
from skipdecode.schedule_builders import ScheduleRequest
from tests.cpp.conftest import BUILD, LIBRARIES, SANITIZERS, Driver
from tests.models import LAYERS, MAX_LENGTH
from tests.one_core import one_core
from tests.standin import driver as standin
from tests.zoo import Zoo

ROOT = Path(__file__).parents[2]


def environment(**more: str | Path) -> dict[str, str]:
    """This process's environment plus the sanitizers' settings, whose dlopen does not look along the library's own run path."""
    return {**os.environ, **SANITIZERS, "LD_LIBRARY_PATH": str(LIBRARIES), **{key: str(value) for key, value in more.items()}}


@pytest.fixture(scope="module")
def gpu_bundles(zoo: Zoo, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Bundles for cpu and cuda, in fp16: OPT, a Llama that skips layers in the prompt too, and short convolutions with states."""
    paths = []
    for name, anchor in (("opt", Anchor.GENERATED), ("lfm2", Anchor.GENERATED), ("llama", Anchor.ABSOLUTE)):
        paths.append(tmp_path_factory.mktemp("gpu") / name)
        schedule = ScheduleRequest(name="linear", max_layers=LAYERS, min_layers=2, span=10, max_variants=3, anchor=anchor)
        export(
            ExportRequest(
                model=str(zoo.checkpoint(name)), out=paths[-1], schedule=schedule, targets=("cpu", "cuda"), slim=True,
                max_batch=4, max_length=MAX_LENGTH,
            )
        )  # fmt: skip
    return paths


@pytest.mark.parametrize("build", ["release", "address", "thread"])
def test_the_cpp_tests_pass(build: str, conformance_bundle: Callable[[str], Path], hybrid_bundles: dict[Anchor, Path]) -> None:
    bundles = {
        "SKD_TEST_BUNDLE": conformance_bundle("llama"),
        "SKD_TEST_ABSOLUTE_BUNDLE": conformance_bundle("llama-absolute"),
        "SKD_TEST_HYBRID_BUNDLE": hybrid_bundles[Anchor.GENERATED],
        "SKD_TEST_ABSOLUTE_HYBRID_BUNDLE": hybrid_bundles[Anchor.ABSOLUTE],
    }
    done = subprocess.run(
        [BUILD / build / "tests" / "skd_tests"],
        env=environment(**bundles),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert "All tests passed" in done.stdout


@pytest.mark.parametrize("build", ["release", "address"])
def test_gpu_engines_pass_the_device_tests_on_a_cpu(build: str, gpu_bundles: list[Path]) -> None:
    done = subprocess.run(
        [BUILD / build / "tests" / "skd_device_tests"],
        env=environment(SKD_TEST_DEVICE_BUNDLES=" ".join(map(str, gpu_bundles))),
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert "All tests passed" in done.stdout


@pytest.mark.parametrize("build", ["release", "address", "thread"])
def test_the_services_own_tests_pass(build: str) -> None:
    done = subprocess.run(
        [BUILD / build / "tests" / "skd_service_tests"],
        env=environment(), capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert "All tests passed" in done.stdout


@pytest.mark.parametrize("build", ["release", "address", "thread"])
def test_the_gpu_tests_pass_on_a_stand_in_for_the_driver(build: str, libcuda: Path, gpu_bundles: list[Path]) -> None:
    bundles = " ".join(map(str, gpu_bundles))
    # the last needs a process in which nothing has used the driver yet; failures say nothing of threads, and take half a minute
    for which in (["~[each_failure]~[first_use]"] if build == "thread" else [], ["[first_use]"]):
        done = subprocess.run(
            [BUILD / build / "tests" / "skd_cuda_tests", *which],
            env=environment(LD_LIBRARY_PATH=f"{libcuda}:{LIBRARIES}", SKD_TEST_DEVICE_BUNDLES=bundles),
            capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
        assert "All tests passed" in done.stdout


def test_on_the_real_cuda_provider_engine_runs_become_graphs_whichever_kernel_multiplies_int8(zoo: Zoo, tmp_path: Path) -> None:
    """CUDA and its driver are stand-ins that compute nothing, but they get the calls that a GPU would get."""
    provider, libraries = standin.provider() / "onnxruntime" / "capi", standin.build_runtime(tmp_path)
    (tmp_path / "libonnxruntime.so.1").symlink_to(next(provider.glob("libonnxruntime.so.*")))
    for name in ("cuda", "shared"):
        (tmp_path / f"libonnxruntime_providers_{name}.so").symlink_to(provider / f"libonnxruntime_providers_{name}.so")
    schedule = ScheduleRequest(name="linear", max_layers=LAYERS, min_layers=2, span=10, max_variants=3)
    request = ExportRequest(model=str(zoo.checkpoint("lfm2")), out=tmp_path / "b", schedule=schedule, targets=("cuda",))
    made = export(dataclasses.replace(request, quantize="int8", max_length=MAX_LENGTH))
    loaded = {"LD_LIBRARY_PATH": libraries, "LD_PRELOAD": tmp_path / "libonnxruntime.so.1", "ORT_FPA_INTB_DEBUG": "1"}
    for chosen, by_cutlass in (({}, False), ({"ORT_FPA_INTB_GEMM": "1"}, True)):
        done = subprocess.run(
            [BUILD / "release" / "cpp_bench" / "skd_bench", tmp_path / "b", "5", "12", "1"],
            env=environment(**loaded, **chosen), capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        *said, figures = done.stdout.splitlines()
        launches = json.loads(figures)["full"]["graph_launches_per_step"]
        assert launches > len(made.segments), "segments, embedding and head, except in the first step"
        assert any("fpA_intB" in line for line in said) is by_cutlass


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores, so that a quota of one leaves fewer")
def test_a_process_with_a_quota_of_one_core_has_no_larger_pool(conformance_bundle: Callable[[str], Path]) -> None:
    def num_threads(started_by: list[str]) -> int:
        driver = Driver(*started_by)
        driver.ask(command="load", bundle=conformance_bundle("opt"))
        count = driver.num_threads()
        driver.close()
        return count

    with one_core() as started_by:
        within = num_threads(started_by)
    assert within == num_threads([]) - len(os.sched_getaffinity(0)) + 1


def test_the_header_compiles_as_c(conformance_bundle: Callable[[str], Path]) -> None:
    program = BUILD / "release" / "tests" / "skd_c_only"
    done = subprocess.run(
        [program, conformance_bundle("opt")], env=environment(), capture_output=True, text=True, timeout=60, check=True
    )
    assert len(done.stdout.split()) == 8
    refused = subprocess.run([program, "nowhere"], env=environment(), capture_output=True, text=True, timeout=60, check=False)
    assert refused.returncode == 2
    assert refused.stderr == "nowhere: there is no bundle.json here; name the folder that skip-export wrote\n"


@pytest.mark.parametrize(("asked", "status"), [([], 2), (["--help"], 0), (["nowhere", "--help"], 0), (["nowhere", "1"], 2)])
def test_the_benchmark_prints_its_usage(asked: list[str], status: int) -> None:
    program = BUILD / "release" / "cpp_bench" / "skd_bench"
    done = subprocess.run([program, *asked], env=environment(), capture_output=True, text=True, timeout=60, check=False)
    said, other = (done.stderr, done.stdout) if status else (done.stdout, done.stderr)
    assert (done.returncode, other) == (status, "") and said.startswith("usage: skd_bench BUNDLE [PROMPT_TOKENS ")
    assert (said.count("\n") == 1) is (status == 2)


@pytest.mark.parametrize(
    ("counts", "says"),
    [
        (["0", "2", "1"], "PROMPT_TOKENS: '0' is out of range; choose 1..999999999\n"),
        (["5x", "2", "1"], "PROMPT_TOKENS: '5x' is out of range; choose 1..999999999\n"),
        (["5", "1", "1"], "NEW_TOKENS: '1' is out of range; choose 2..999999999\n"),
        (["5", "4294967298", "1"], "NEW_TOKENS: '4294967298' is out of range; choose 2..999999999\n"),
        (["5", "2", "0"], "ROUNDS: '0' is out of range; choose 1..999999999\n"),
        (["5", "2", "-1"], "ROUNDS: '-1' is out of range; choose 1..999999999\n"),
    ],
)
def test_a_count_that_the_benchmark_cannot_measure_with_gives_one_line(counts: list[str], says: str) -> None:
    command = [BUILD / "release" / "cpp_bench" / "skd_bench", "nowhere", *counts]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", says)


def test_the_benchmark_sends_no_telemetry_of_onnx_runtime(
    conformance_bundle: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its library stores what it is going to send in the user's cache folder."""
    for name in ("CI", "GITHUB_ACTIONS", "ORT_DISABLE_TELEMETRY"):
        monkeypatch.delenv(name, raising=False)
    command = [BUILD / "release" / "cpp_bench" / "skd_bench", conformance_bundle("opt"), "5", "2", "1"]
    subprocess.run(command, env=environment(XDG_CACHE_HOME=tmp_path), capture_output=True, timeout=60, check=True)
    assert list(tmp_path.iterdir()) == []


def test_a_given_onnx_runtime_takes_the_place_of_headers_and_library_and_leaves_the_wheels_alone(tmp_path: Path) -> None:
    name, genai = "libonnxruntime.so.1.2.3", next(LIBRARIES.glob("libonnxruntime-genai.so.*")).name
    wheel, given, got = (tmp_path / folder for folder in ("wheel", "given", "got"))
    for folder in (wheel, given / "include", given / "lib", got / "include", got / "lib"):
        folder.mkdir(parents=True)
    (wheel / name).write_text("the wheel's")
    (got / "lib" / name).symlink_to(wheel / name)  # as an earlier run leaves it
    (got / "lib" / genai).touch()
    (got / "include" / "onnxruntime_c_api.h").write_text("Debian's")
    (given / "lib" / name).write_text("another")
    (given / "include" / "onnxruntime_c_api.h").write_text("another")
    script, given_by = ROOT / "runtime" / "cpp" / "get_dependencies.sh", {**os.environ, "ONNXRUNTIME_ROOT": str(given)}
    for _ in range(2):
        subprocess.run([script, got, "python"], env=given_by, capture_output=True, timeout=60, check=True)
        assert (got / "include" / "onnxruntime_c_api.h").read_text() == (got / "lib" / name).read_text() == "another"
    assert (wheel / name).read_text() == "the wheel's" and (given / "include" / "onnxruntime_c_api.h").exists()


def test_the_folder_of_an_earlier_run_may_be_given_as_onnx_runtimes_and_keeps_its_headers(tmp_path: Path) -> None:
    got, script = tmp_path / "got", ROOT / "runtime" / "cpp" / "get_dependencies.sh"
    shutil.copytree(LIBRARIES.parent, got, symlinks=True)
    given_by = {**os.environ, "ONNXRUNTIME_ROOT": str(got)}
    subprocess.run([script, got, sys.executable], env=given_by, capture_output=True, timeout=60, check=True)
    assert (got / "lib" / "libonnxruntime.so.1").exists() and list((got / "include").rglob("onnxruntime_c_api.h"))


@pytest.mark.parametrize(
    "sources",
    [
        "deb http://mirror.test/debian bookworm main",
        "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://mirror.test/debian bookworm main",
        "deb http://security.test/debian-security bookworm-security main\ndeb http://mirror.test/debian bookworm main",
        "Types: deb\nURIs: http://mirror.test/debian-security http://mirror.test/debian\nSuites: bookworm",
    ],
)
def test_headers_come_from_the_systems_mirror_whatever_its_list_of_sources_has_beside_it(tmp_path: Path, sources: str) -> None:
    programs = {
        "cat": 'echo "$SOURCES"',
        "dpkg-query": "echo install ok installed",
        "apt-get": 'for given; do case $given in Dir::Etc::sourcelist=*) cp "${given#*=}" "$ASKED";; esac; done; exit 1',
    }
    for name, does in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{does}\n")
        (tmp_path / name).chmod(0o755)
    given = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SOURCES": sources, "ASKED": str(tmp_path / "asked")}
    script = ROOT / "runtime" / "cpp" / "get_dependencies.sh"
    without = {key: value for key, value in os.environ.items() if key != "ONNXRUNTIME_ROOT"}
    subprocess.run([script, tmp_path / "got", sys.executable], env={**without, **given}, timeout=60, check=False)
    assert (tmp_path / "asked").read_text() == "deb http://mirror.test/debian trixie main\n"


def test_only_the_c_functions_are_exported() -> None:
    if shutil.which("nm") is None:
        pytest.skip("there is no nm here")
    lines = _run(["nm", "-D", "--defined-only", BUILD / "release" / "libskipdecode.so"]).splitlines()
    names = {line.split()[-1] for line in lines}
    assert "skd_generate" in names and {name for name in names if not name.startswith("skd_")} == set()


@pytest.mark.parametrize("global_pools", [False, True])
def test_an_environment_that_the_application_created_first_must_have_global_pools(
    conformance_bundle: Callable[[str], Path], global_pools: bool
) -> None:
    driver = Driver()
    made = driver.ask(command="make_environment", library=LIBRARIES / "libonnxruntime.so.1", global_pools=global_pools)
    answer = driver.ask(command="load", bundle=conformance_bundle("opt"))
    driver.close()
    assert made == {"made": True}
    if global_pools:
        assert answer["num_layers"] == LAYERS
    else:
        assert (answer["code"], answer["error"]) == (
            2,
            "this process made an ONNX Runtime environment of its own first, so engines cannot share one thread pool; "
            "load the bundle first, or create that environment with global thread pools",
        )


def test_a_refused_library_does_not_stay_the_processs_library(conformance_bundle: Callable[[str], Path], tmp_path: Path) -> None:
    other = shutil.copytree(conformance_bundle("opt"), tmp_path / "engines")
    manifest = json.loads((other / "bundle.json").read_text())
    manifest["targets"][0]["library_version"] = "1.0.0"
    (other / "bundle.json").write_text(json.dumps(manifest))
    library, driver = LIBRARIES / "libonnxruntime.so.1", Driver()
    for _ in range(2):
        says = driver.ask(command="load", bundle=other, onnxruntime_library=library)["error"]
        assert "the engines were compiled by onnxruntime 1.0.0, but " in says
    good = {"command": "load", "bundle": conformance_bundle("opt")}
    assert "ONNX Runtime cannot be loaded (/nowhere.so" in driver.ask(**good, onnxruntime_library="/nowhere.so")["error"]
    assert driver.ask(**good, onnxruntime_library=library)["num_layers"] == LAYERS
    assert driver.ask(**good, onnxruntime_library="/nowhere.so")["num_layers"] == LAYERS, "the process has its library by now"
    driver.close()


@pytest.mark.parametrize("inside", ["program", "library"])
def test_a_program_or_library_in_the_bundles_folder_keeps_its_written_pages(
    conformance_bundle: Callable[[str], Path], tmp_path: Path, inside: str
) -> None:
    bundle = shutil.copytree(conformance_bundle("opt"), tmp_path / "engines")
    library, program = LIBRARIES / "libonnxruntime.so.1", BUILD / "release" / "tests" / "skd_driver"
    if inside == "library":
        library = Path(shutil.copy(library, bundle / "targets" / "libonnxruntime.so.1"))
    else:
        program = Path(shutil.copy(program, bundle / "driver"))
        shutil.copy(BUILD / "release" / "libskipdecode.so.0", bundle)
    driver = Driver("sh", "-c", f"exec {program}", LD_LIBRARY_PATH=f"{bundle}:{LIBRARIES}")
    for _ in range(2):
        assert driver.ask(command="load", bundle=bundle, onnxruntime_library=library)["num_layers"] == LAYERS
    asked = {"command": "generate", "prompts": [[5, 6, 7]]}
    found, expected = driver.ask(**asked, bundle=bundle), driver.ask(**asked, bundle=conformance_bundle("opt"))
    assert found == expected
    driver.close()


@pytest.fixture
def no_threads(tmp_path: Path) -> str:
    """A library to preload so that the system starts no more threads."""
    (tmp_path / "threads.c").write_text("#include <errno.h>\nint pthread_create(void) { return EAGAIN; }\n")
    _run(["gcc", "-shared", "-fPIC", tmp_path / "threads.c", "-o", tmp_path / "threads.so"])
    return str(tmp_path / "threads.so")


def test_a_pool_whose_threads_the_system_does_not_start_is_refused(
    conformance_bundle: Callable[[str], Path], no_threads: str
) -> None:
    driver = Driver(LD_PRELOAD=no_threads)
    answer = driver.ask(command="load", bundle=conformance_bundle("opt"), threads=2)
    says = "threads: the system cannot start that many for ONNX Runtime; choose fewer threads, or raise ulimit -u"
    assert (answer["code"], answer["error"]) == (3, says)
    driver.close()


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="on one core engines load one after another, without threads")
def test_engines_load_where_the_system_starts_no_more_threads(conformance_bundle: Callable[[str], Path], no_threads: str) -> None:
    driver = Driver(LD_PRELOAD=no_threads)
    assert driver.ask(command="load", bundle=conformance_bundle("opt"), threads=1)["num_layers"] == LAYERS
    driver.close()


def test_a_build_without_a_type_is_optimised(tmp_path: Path) -> None:
    _run(["cmake", "-S", ROOT / "runtime" / "cpp", "-B", tmp_path, f"-DONNXRUNTIME_ROOT={LIBRARIES.parent}"])
    assert "CMAKE_BUILD_TYPE:STRING=Release\n" in (tmp_path / "CMakeCache.txt").read_text()


def test_the_header_program_builds_against_the_installed_library_and_runs(
    conformance_bundle: Callable[[str], Path], tmp_path: Path
) -> None:
    """The program at the top of the header, built by find_package and by pkg-config."""
    header = (ROOT / "runtime" / "cpp" / "include" / "skipdecode" / "skipdecode.hpp").read_text(encoding="utf-8")
    lines = header.split("#ifndef")[0].splitlines()
    program = "\n".join(line[5:] for line in lines if line.startswith("//   "))
    assert program.count("\n") >= 8
    (tmp_path / "main.cc").write_text(program)
    prefix = tmp_path / "prefix"
    _run(["cmake", "--install", BUILD / "release", "--prefix", prefix])
    (pc,) = prefix.glob("lib/**/skipdecode.pc")
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.20)\nproject(user CXX)\nset(CMAKE_CXX_STANDARD 17)\n"
        "find_package(skipdecode 0.1 REQUIRED)\n"
        "add_executable(main main.cc)\ntarget_link_libraries(main skipdecode::skipdecode)\n"
    )
    _run(["cmake", "-S", tmp_path, "-B", tmp_path / "build", f"-DCMAKE_PREFIX_PATH={prefix}"])
    _run(["cmake", "--build", tmp_path / "build"])
    for example in ("cpp_service", "cpp_bench"):
        _run(["cmake", "-S", ROOT / "examples" / example, "-B", tmp_path / example, f"-DCMAKE_PREFIX_PATH={prefix}"])
    _run(["cmake", "--build", tmp_path / "cpp_bench"])
    flags = _run(["pkg-config", "--cflags", "--libs", "skipdecode"], PKG_CONFIG_PATH=pc.parent).split()
    _run(["g++", "-std=c++17", tmp_path / "main.cc", "-o", tmp_path / "by_pkg_config", *flags])
    installed = pc.parent.parent
    for name in ("libonnxruntime.so.1", "libonnxruntime-genai.so"):  # next to libskipdecode.so
        (installed / name).symlink_to(LIBRARIES / name)
    for built, libraries in ((tmp_path / "build" / "main", ""), (tmp_path / "by_pkg_config", installed)):
        done = subprocess.run(
            [built, conformance_bundle("opt"), "text"], env=environment(LD_LIBRARY_PATH=libraries),
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        # this bundle has no tokenizer, which the program notices after everything else has been found
        assert "the bundle has no tokenizer; give token ids" in done.stderr


def _run(command: list[str | Path], **more: str | Path) -> str:
    done = subprocess.run(command, env=environment(**more), capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
