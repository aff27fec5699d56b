"""An export that gets a signal ends cleanly and leaves nothing."""

from __future__ import annotations

import contextlib
import functools
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from skipdecode.exporter import cli, command
from skipdecode.exporter.output_folder import fresh_folder
from skipdecode.exporter.signals import ending_on_signals, uninterrupted
from tests.zoo import Zoo


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Restore the handlers: a process that one of these signals ends ignores them from then on."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in a shell's background
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_pressing_ctrl_c_again_does_not_interrupt_the_clean_up() -> None:
    cleared = []

    def interrupted() -> None:
        with ending_on_signals():
            try:
                signal.raise_signal(signal.SIGINT)
            finally:
                with uninterrupted():
                    signal.raise_signal(signal.SIGINT)
                    signal.raise_signal(signal.SIGTERM)
                    cleared.append(True)

    with pytest.raises(SystemExit) as caught:
        interrupted()
    signal.raise_signal(signal.SIGINT)
    assert (caught.value.code, cleared) == (130, [True])


def test_an_export_under_nohup_goes_on_when_its_terminal_is_closed() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with ending_on_signals() as check:
        signal.raise_signal(signal.SIGHUP)
        check()
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


@pytest.mark.parametrize("replaced", [False, True])
def test_ctrl_c_while_a_folder_is_removed_leaves_no_half_of_it(
    replaced: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The export's own folder, half-written, or the bundle that it has replaced."""
    out, rmtree = tmp_path / "bundle", shutil.rmtree
    if replaced:
        out.mkdir()

    def interrupted(folder: Path, **options: bool) -> None:
        signal.raise_signal(signal.SIGINT)
        rmtree(folder, **options)

    def ended() -> None:
        with ending_on_signals(), contextlib.suppress(ConnectionError), fresh_folder(out, force=True) as partial:
            (partial / "file").write_bytes(b"x")
            if not replaced:
                raise ConnectionError

    monkeypatch.setattr(shutil, "rmtree", interrupted)
    with pytest.raises(SystemExit):
        ended()
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")] == (["bundle", "bundle/file"] if replaced else [])


def test_ctrl_c_just_after_the_folder_is_made_leaves_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mkdir = Path.mkdir

    def interrupted(folder: Path, *mode: int, **options: bool) -> None:
        mkdir(folder, *mode, **options)
        if folder != tmp_path:
            signal.raise_signal(signal.SIGINT)

    def ended() -> None:
        with ending_on_signals(), fresh_folder(tmp_path / "bundle", force=False):
            pytest.fail("it went on")

    monkeypatch.setattr(Path, "mkdir", interrupted)
    with pytest.raises(SystemExit):
        ended()
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_export_that_is_terminated_leaves_nothing(zoo: Zoo, tmp_path: Path, number: signal.Signals) -> None:
    command = [Path(sys.executable).parent / "skip-export", zoo.checkpoint("llama"), "--out", tmp_path / "bundle"]
    # these tests may run under nohup, where SIGHUP would be ignored
    default = functools.partial(signal.signal, number, signal.SIG_DFL)
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, preexec_fn=default) as process:
        started = time.monotonic()
        while not any(tmp_path.iterdir()) and process.poll() is None and time.monotonic() < started + 120:
            time.sleep(0.05)
        assert any(tmp_path.iterdir()), "it never began to write"
        process.send_signal(number)
        _, printed = process.communicate(timeout=120)
    assert (process.returncode, printed) == (128 + number, "")
    assert list(tmp_path.iterdir()) == []


def test_an_export_that_is_interrupted_while_it_imports_prints_nothing() -> None:
    code = """
import signal, sys
from skipdecode.exporter import command

class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == "skipdecode.exporter.export":
            signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, Interrupting())
sys.exit(command.main())
"""
    done = subprocess.run([sys.executable, "-c", code, "opt-125m", "--out", "x"], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.parametrize(
    ("module", "at_once"), [("torch._dynamo.weak", False), ("torchlib", True), ("skipdecode.manifest", True)]
)
def test_torch_finishes_its_work_before_it_is_interrupted(module: str, at_once: bool) -> None:
    """An exception from a callback of torch's would end the process, or be dropped."""
    their: dict[str, Any] = {"__name__": module}
    exec("def work(callback):\n    callback()\n    return 'done'", their)
    reached = []

    def ended() -> None:
        with ending_on_signals() as check:
            reached.append(their["work"](lambda: signal.raise_signal(signal.SIGINT)))
            check()

    with pytest.raises(SystemExit) as caught:
        ended()
    assert (caught.value.code, reached) == (130, [] if at_once else ["done"])


def test_an_export_ends_at_its_next_report_where_a_library_swallows_the_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    reached = []

    def swallowing(_: object, report: Callable[[str, float], None]) -> None:
        with contextlib.suppress(SystemExit):
            signal.raise_signal(signal.SIGTERM)
        reached.append("layer 0")
        report("layer 1", 0.5)
        reached.append("layer 1")

    monkeypatch.setattr(cli, "export", swallowing)
    with pytest.raises(SystemExit) as caught:
        command.main(["opt-125m", "--out", "bundle"])
    assert (caught.value.code, reached) == (143, ["layer 0"])


def test_an_export_whose_signal_arrives_in_a_finalizer_ends_without_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    class Finalized:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGTERM)

    def dropping(_: object, report: Callable[[str, float], None]) -> None:
        Finalized()
        report("layer 1", 0.5)

    unraisable: list[sys.UnraisableHookArgs] = []
    monkeypatch.setattr(sys, "unraisablehook", unraisable.append)
    monkeypatch.setattr(cli, "export", dropping)
    with pytest.raises(SystemExit) as caught:
        command.main(["opt-125m", "--out", "bundle"])
    assert (caught.value.code, unraisable) == (143, [])
    assert sys.unraisablehook == unraisable.append


def test_the_exit_status_is_the_signals_where_a_library_raises_another_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        try:
            signal.raise_signal(signal.SIGTERM)
        except SystemExit as error:
            raise RuntimeError("import failed") from error

    monkeypatch.setattr(cli, "export", interrupted)
    with pytest.raises(SystemExit) as caught:
        command.main(["opt-125m", "--out", "bundle"])
    assert caught.value.code == 143
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN, "ignored while Python ends"


def test_an_export_that_ends_by_itself_leaves_signal_handlers_as_they_were() -> None:
    before = signal.getsignal(signal.SIGTERM)
    assert command.main([str(Path("nowhere").absolute()), "--out", "bundle"]) == 2
    assert signal.getsignal(signal.SIGTERM) is before
