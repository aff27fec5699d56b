"""What all commands share, seen from a shell: where their output goes, and how they end."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from skipdecode.cli import guarded
from skipdecode.cli.inspect import main as inspect_main
from skipdecode.cli.run import main as run_main
from skipdecode.cli.validate import main as validate_main
from skipdecode.exporter.command import main as export_main
from tests.zoo import Zoo

BIN = Path(sys.executable).parent


def _shell(command: str, bundle: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `command` with the bundle's folder as $0, as for a user whose output is not a terminal."""
    path = f"{BIN}{os.pathsep}{os.environ['PATH']}"
    own = ("CI", "GITHUB_ACTIONS", "ORT_DISABLE_TELEMETRY", "PYTHONUNBUFFERED")
    kept = {name: value for name, value in os.environ.items() if name not in own}
    return subprocess.run(
        ["sh", "-c", command, str(bundle)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**kept, "PATH": path, **environment},
    )


@pytest.mark.parametrize(
    ("main", "given"),
    [
        (export_main, ["opt-125m", "--random-weights", "--force", "--out", ""]),
        (run_main, ["", "--token-ids", "5"]),
        (inspect_main, [""]),
        (validate_main, [""]),
    ],
)
def test_an_empty_name_is_not_taken_for_the_working_directory(
    main: Callable[[list[str]], int], given: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(given)
    assert ended.value.code == 2 and capsys.readouterr().err.count(": is empty; name a folder; see skip-") == 1
    assert list(tmp_path.iterdir()) == []


def test_no_memory_for_an_array_is_one_line_and_exit_2(capsys: pytest.CaptureFixture[str]) -> None:
    """As for a table with a number for each of the positions that --max-length asks for."""
    assert guarded(lambda: np.zeros(1 << 60, np.uint8).size, debug=False) == 2
    refused = r"no memory is left \(Unable to allocate 1\.00 EiB .*\); free some, or ask for less\n"
    assert re.fullmatch(refused, capsys.readouterr().err)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_command_that_is_terminated_leaves_no_temporary_files(number: signal.Signals, status: int, tmp_path: Path) -> None:
    def action() -> int:
        with tempfile.TemporaryDirectory(dir=tmp_path):
            signal.raise_signal(number)
        return 0

    with pytest.raises(SystemExit) as ended:
        guarded(action, debug=False)
    assert ended.value.code == status and list(tmp_path.iterdir()) == []
    assert signal.getsignal(number) is signal.SIG_DFL


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGHUP])
def test_a_second_signal_does_not_keep_temporary_files_from_being_removed(second: signal.Signals, tmp_path: Path) -> None:
    def action() -> int:
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            signal.raise_signal(second)
            (tmp_path / "removed").touch()
        return 0

    with pytest.raises(SystemExit) as ended:
        guarded(action, debug=False)
    assert ended.value.code == 143 and (tmp_path / "removed").exists()


def test_a_command_runs_in_any_thread_of_a_program() -> None:
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(guarded, lambda: 0, debug=False).result() == 0


def test_a_signal_that_is_ignored_stays_ignored() -> None:
    """As under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert guarded(lambda: signal.raise_signal(signal.SIGHUP) or 0, debug=False) == 0
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("command", ["skip-run $0 --token-ids 5,6,7 --max-new-tokens 2", "skip-inspect $0 --json"])
def test_a_full_output_device_is_one_line_and_exit_2(zoo: Zoo, command: str) -> None:
    ended = _shell(f"{command} >/dev/full", zoo.bundle("opt"))
    (line,) = [line for line in ended.stderr.splitlines() if not line.startswith("[")]
    assert (ended.returncode, line.split(";")[0]) == (2, "cannot continue (No space left on device)")


def test_an_error_that_cannot_be_printed_does_not_change_the_exit_status(zoo: Zoo) -> None:
    for arguments in ("/nowhere", "--bogus"):
        for closed in ("2>/dev/full", "2>&-"):
            ended = _shell(f"skip-inspect {arguments} {closed}", zoo.bundle("opt"))
            assert (ended.returncode, ended.stdout) == (2, "")


def test_a_full_error_device_does_not_change_the_exit_status_of_what_was_done(zoo: Zoo) -> None:
    ended = _shell("skip-run $0 --token-ids 5,6,7 --max-new-tokens 2 2>/dev/full", zoo.bundle("opt"))
    assert (ended.returncode, ended.stdout.count(",")) == (0, 1)


def test_a_closed_output_gets_nothing_and_everything_else_is_done(zoo: Zoo, tmp_path: Path) -> None:
    ended = _shell(
        "skip-run $0 --token-ids 5,6,7 --max-new-tokens 2 --profile $TRACE >&-", zoo.bundle("opt"), TRACE=str(tmp_path / "t")
    )
    assert ended.returncode == 0
    assert (tmp_path / "t").is_file()
    ended = _shell("skip-inspect /nowhere 2>&-", zoo.bundle("opt"))
    assert (ended.returncode, ended.stdout) == (2, "")


def test_characters_that_the_terminal_lacks_are_escaped(capfd: pytest.CaptureFixture[str]) -> None:
    code = "from skipdecode.cli import guarded; raise SystemExit(guarded(lambda: print('Caf\\xe9 \\u2603') or 0, debug=False))"
    ended = subprocess.run([sys.executable, "-c", code], check=False, env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert (ended.returncode, capfd.readouterr().out) == (0, "Caf\\xe9 \\u2603\n")


def test_a_file_that_the_system_denies_is_named_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    def fails() -> int:
        raise PermissionError(13, "Permission denied", "/var/cache/x")

    assert guarded(fails, debug=False) == 2
    assert capsys.readouterr().err.startswith("/var/cache/x: cannot continue (Permission denied); free space, check permissions")
    assert guarded(fails, debug=True) == 2
    assert "Traceback" in (told := capsys.readouterr().err) and "PermissionError: [Errno 13]" in told


def test_where_no_folder_takes_temporary_files_tmpdir_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in a container of which everything but volumes is read-only."""
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/nowhere"])
    assert guarded(lambda: len(tempfile.mkdtemp()), debug=False) == 2
    says = "cannot continue (No usable temporary directory found in ['/nowhere']); set TMPDIR to a writable folder\n"
    assert capsys.readouterr().err == says


def test_a_traceback_does_not_change_the_exit_status(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_main(["nowhere", "--prompt", "x", "--debug"]) == 2
    assert "Traceback" in (told := capsys.readouterr().err) and "there is no bundle.json here" in told


def test_a_broken_connection_is_not_taken_for_a_reader_that_went_away(capsys: pytest.CaptureFixture[str]) -> None:
    def fails() -> int:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    assert guarded(fails, debug=False) == 2
    assert capsys.readouterr().err.startswith("cannot continue (Broken pipe)")
    code = "from skipdecode.cli import guarded; raise SystemExit(guarded(lambda: print('x' * 10**6) or 0, debug=False))"
    ended = _shell(f'{{ python -c "{code}"; echo $? >&2; }} | true', Path())
    assert (ended.stdout, ended.stderr) == ("", "0\n")


def test_onnx_runtime_sends_no_telemetry(zoo: Zoo, tmp_path: Path) -> None:
    """Its packages store what they are going to send in the user's cache folder."""
    ended = _shell("skip-run $0 --token-ids 5,6,7 --max-new-tokens 2", zoo.bundle("opt"), XDG_CACHE_HOME=str(tmp_path))
    assert ended.returncode == 0, ended.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_reader_that_goes_away_is_not_an_error(zoo: Zoo) -> None:
    ended = _shell("skip-inspect $0 --json | true; skip-inspect $0 | head -1", zoo.bundle("opt"))
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.parametrize("form", ["", "--json", "--quiet"])
@pytest.mark.parametrize("holds", [True, False])
def test_a_validations_exit_status_is_the_same_whoever_reads_its_output(holds: bool, form: str) -> None:
    schedule = {"name": "full", "layers": [2], "speedup": 1.0}
    result = {
        "bundle": {"model": {"name": "a", "layers": 2}, "schedule": schedule, "variants": []},
        "machine": {"cpu": "one", "cores": 2, "memory_gib": 4, "gpu": None}, "integrity": {"holds": True, "files": 5},
        "targets": [], "baseline": None, "resumed": 0, "holds": holds,
        "slo": [{"slo": "p99_token_ms<=1", "target": "cpu", "measured": "0.5", "holds": holds}],
    }  # fmt: skip
    measured = f"command.validate = lambda request, progress: ({result}, lambda: None)"
    code = f"from skipdecode.cli import validate as command; {measured}; raise SystemExit(command.main(['a', *'{form}'.split()]))"
    for outputs in ("| true", "2>&1 >/dev/null | true", "2>/dev/full"):
        ended = _shell(f'{{ {{ python -c "$CODE"; echo $? >&3; }} {outputs}; }} 3>&1 >/dev/null', Path(), CODE=code)
        assert ended.stdout == f"{int(not holds)}\n", outputs
        told = "" if holds or "2>" in outputs else "does not hold: p99_token_ms<=1 on cpu: measured 0.5\n"
        assert ended.stderr == told, outputs
