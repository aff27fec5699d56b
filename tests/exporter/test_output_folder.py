"""`--out`: what is replaced, what is refused, and that nothing half-written stays."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import save

from skipdecode import manifest as manifests
from skipdecode.errors import BundleError
from skipdecode.exporter.export import ExportRequest, export
from skipdecode.exporter.output_folder import check_out, fresh_folder, real_out
from skipdecode.schedule_builders import ScheduleRequest
from tests.exporter.without_torch import SKIP_EXPORT
from tests.models import MAX_LENGTH
from tests.unprivileged import UNPRIVILEGED
from tests.zoo import Zoo

OLD, NEW = '{"format_version": 1, "name": "old"}', '{"format_version": 2, "name": "new"}'


def _write(out: Path, text: str) -> None:
    """Write a bundle as an export does."""
    check_out(out, force=True)
    with fresh_folder(out, force=True) as partial:
        (partial / manifests.MANIFEST).write_text(text)


def test_a_link_to_a_bundle_stays_and_the_bundle_is_replaced(zoo: Zoo, tmp_path: Path) -> None:
    _write(tmp_path / "bundle", OLD)
    (tmp_path / "link").symlink_to("bundle")
    model, full = str(zoo.checkpoint("llama")), ScheduleRequest(name="full")
    export(ExportRequest(model=model, out=tmp_path / "link", schedule=full, max_length=MAX_LENGTH, force=True))
    assert os.readlink(tmp_path / "link") == "bundle"
    assert manifests.read(tmp_path / "bundle").schedule.name == "full"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bundle", "link"]


def test_missing_parent_folders_are_made(tmp_path: Path) -> None:
    _write(tmp_path / "models" / "llama" / "bundle", NEW)
    assert (tmp_path / "models" / "llama" / "bundle" / manifests.MANIFEST).read_text() == NEW


def test_the_current_folder_is_replaced_if_it_is_a_bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _write(tmp_path / "bundle", OLD)
    monkeypatch.chdir(tmp_path / "bundle")
    _write(real_out(Path(".")), NEW)
    assert (tmp_path / "bundle" / manifests.MANIFEST).read_text() == NEW
    assert [path.name for path in tmp_path.iterdir()] == ["bundle"]


def test_a_bundle_that_holds_what_the_export_reads_is_not_replaced(zoo: Zoo, tmp_path: Path) -> None:
    _write(out := tmp_path / "bundle", OLD)
    inside = shutil.copytree(zoo.checkpoint("llama"), out / "models" / "llama")
    (table := out / "table.json").write_text("[6, 4, 2]")
    (adapter := tmp_path / "adapter").mkdir()
    lora = {"peft_type": "LORA", "base_model_name_or_path": str(inside)}
    (adapter / "adapter_config.json").write_text(json.dumps(lora))
    (adapter / "adapter_model.safetensors").write_bytes(save({}))
    asked = (
        (inside, "full", "checkpoint"),
        (adapter, "full", "checkpoint"),
        (zoo.checkpoint("llama"), f"table:{table}", "table"),
    )
    for model, schedule, named in asked:
        request = ExportRequest(
            model=str(model), out=out, schedule=ScheduleRequest(name=schedule), max_length=MAX_LENGTH, force=True
        )
        with pytest.raises(
            BundleError, match=rf"bundle: holds .*, which the export reads; move the {named}, or choose another --out"
        ):
            export(request)
    assert (out / manifests.MANIFEST).read_text() == OLD and (inside / "model.safetensors").is_file()


def test_a_file_is_not_replaced(zoo: Zoo, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("years of work")
    with pytest.raises(BundleError, match="is not a bundle"):
        export(ExportRequest(model=str(zoo.checkpoint("llama")), out=tmp_path / "file", max_length=MAX_LENGTH, force=True))
    assert (tmp_path / "file").read_text() == "years of work"


@pytest.mark.parametrize(
    ("moved", "number"), [(".bundle.partial-", errno.EIO), ("bundle", errno.EBUSY)], ids=["new", "old: a container's volume"]
)
def test_a_bundle_that_cannot_be_replaced_stays_as_it_was(
    moved: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "bundle"
    _write(out, OLD)
    rename = Path.rename

    def failing(path: Path, target: Path) -> Path:
        if path.name.startswith(moved):
            raise OSError(number, os.strerror(number), str(path), None, str(target))
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(BundleError, match=rf"bundle: cannot be written \({os.strerror(number)}\)"):
        _write(out, NEW)
    assert (out / manifests.MANIFEST).read_text() == OLD
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.parametrize("content", ["chunks", "[]", '["format_version"]', '{"name": "a web page\'s"}', "[" * 100_000])
def test_a_folder_with_a_bundle_json_of_another_kind_is_not_replaced(content: str, tmp_path: Path) -> None:
    (tmp_path / manifests.MANIFEST).write_text(content)
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(BundleError, match="is not a bundle"):
        check_out(tmp_path, force=True)


def test_exports_that_run_under_the_same_process_id_leave_one_another_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in two containers that share a volume."""
    monkeypatch.setattr(os, "getpid", lambda: 1)
    out = tmp_path / "bundle"

    def export_while_another_does() -> None:
        with fresh_folder(out, force=False) as first:
            (first / manifests.MANIFEST).write_text(OLD)
            with fresh_folder(out, force=False) as second:
                (second / manifests.MANIFEST).write_text(NEW)
            assert (first / manifests.MANIFEST).read_text() == OLD

    with pytest.raises(BundleError, match="exists already"):
        export_while_another_does()
    assert (out / manifests.MANIFEST).read_text() == NEW
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.parametrize("name", ["bundle", "bundle[x86]"])
def test_leftovers_of_a_killed_export_are_removed_by_the_next_one_and_folders_of_running_ones_are_not(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    out = tmp_path / name
    left, others = tmp_path / f".{name}.partial-0123abcd", tmp_path / f".{name}2.partial-0123abcd"

    def with_one_that_runs() -> None:
        for folder in (left, others):
            (folder / "graphs").mkdir(parents=True)
        with fresh_folder(out, force=False) as running:
            for folder in (left, others, running):
                os.utime(folder, (1, 1))
            _write(out, NEW)
            assert running.is_dir() and others.is_dir() and not left.exists()

    with pytest.raises(BundleError, match="exists already"):
        with_one_that_runs()
    (message,) = caplog.messages
    assert message == f"removed {left}, left behind by an export that was killed"


def test_a_bundle_that_a_killed_export_had_put_aside_is_restored_unless_another_has_taken_its_place(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    out, old = tmp_path / "bundle", tmp_path / ".bundle.replaced-0123abcd"
    _write(old, OLD)
    os.utime(old, (1, 1))
    with pytest.raises(BundleError, match="exists already"), fresh_folder(out, force=False):
        pytest.fail("an export to it begins")
    assert (out / manifests.MANIFEST).read_text() == OLD
    assert list(tmp_path.iterdir()) == [out]
    _write(old, OLD)
    os.utime(old, (1, 1))
    _write(out, NEW)
    assert list(tmp_path.iterdir()) == [out]
    assert caplog.messages == [
        f"restored {out}, which a killed export had moved aside",
        f"removed {old}, left behind by an export that was killed",
    ]
    opened = {os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")}
    assert not [path for path in opened if path.startswith(str(tmp_path))], "a leftover's folder stays open"


@pytest.mark.parametrize("kind", ["partial", "replaced"])
def test_files_and_links_with_the_names_of_leftovers_are_kept(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    out, file, link = (tmp_path / name for name in ("bundle", f".bundle.{kind}-01234567", f".bundle.{kind}-89abcdef"))
    file.write_text("a note")
    _write(tmp_path / "elsewhere", OLD)
    link.symlink_to("elsewhere")
    for path in (file, tmp_path / "elsewhere"):
        os.utime(path, (1, 1))
    _write(out, NEW)
    assert (out / manifests.MANIFEST).read_text() == NEW
    assert file.read_text() == "a note" and (link / manifests.MANIFEST).read_text() == OLD
    assert caplog.messages == []


def test_on_a_file_system_without_locks_exports_work_and_remove_no_leftovers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unlockable(file: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", unlockable)
    (left := tmp_path / ".bundle.partial-0123abcd").mkdir()
    os.utime(left, (1, 1))
    for content in (OLD, NEW):
        _write(tmp_path / "bundle", content)
        assert (tmp_path / "bundle" / manifests.MANIFEST).read_text() == content
    assert sorted(tmp_path.iterdir()) == [left, tmp_path / "bundle"]


def test_a_bundle_that_a_running_export_is_replacing_is_not_removed_by_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, found = tmp_path / "bundle", []
    _write(out, OLD)
    os.utime(out, (1, 1))
    rmtree = shutil.rmtree

    def slow(folder: Path, **options: bool) -> None:
        if not found:
            assert ".partial-" in folder.name, "a bundle that is half removed must not be taken for one that was put aside"
            found.append(folder)
            os.utime(folder, (1, 1))
            with pytest.raises(BundleError, match="exists already"), fresh_folder(out, force=False):
                pass
            assert (folder / manifests.MANIFEST).read_text() == OLD
        rmtree(folder, **options)

    monkeypatch.setattr(shutil, "rmtree", slow)
    _write(out, NEW)
    assert found and list(tmp_path.iterdir()) == [out]


def test_a_bundle_that_another_export_has_meanwhile_put_in_place_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "bundle"
    _write(out, OLD)
    rename = Path.rename

    def late(path: Path, target: Path) -> Path:
        if ".partial-" in path.name:
            out.mkdir()
            (out / manifests.MANIFEST).write_text("another's")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", late)
    with pytest.raises(BundleError, match="cannot be written"):
        _write(out, NEW)
    assert (out / manifests.MANIFEST).read_text() == "another's"
    assert list(tmp_path.iterdir()) == [out], "the bundle that both have replaced does not stay"


def test_a_bundle_has_the_permissions_of_any_new_folder(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        _write(tmp_path / "bundle", NEW)
    finally:
        os.umask(before)
    assert (tmp_path / "bundle").stat().st_mode & 0o777 == 0o750


@pytest.mark.parametrize("force", [False, True])
def test_a_mounted_volume_is_refused_before_any_work(force: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os.path, "ismount", lambda path: path == tmp_path)
    with pytest.raises(BundleError, match="is a mount point, which cannot be replaced; name a folder in it"):
        check_out(tmp_path, force)
    check_out(tmp_path / "bundle", force)


@pytest.mark.parametrize("mode", [0o555, 0o000])
def test_a_folder_that_takes_no_other_is_refused_before_any_work(mode: int, tmp_path: Path) -> None:
    (folder := tmp_path / "shared").mkdir(mode=mode)
    (model := tmp_path / "model").mkdir()
    (model / "config.json").write_text("{}")  # which an export reads later
    command = [*UNPRIVILEGED, *SKIP_EXPORT, model, "--out", folder / "new" / "bundle"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    says = f"cannot be made in {folder}, which takes no new folder; check permissions, or choose another --out"
    assert (done.returncode, done.stderr) == (2, f"{folder}/new/bundle: {says}\n")


def test_a_bundle_cannot_be_made_in_a_file(tmp_path: Path) -> None:
    (file := tmp_path / "file").touch()
    with pytest.raises(BundleError, match=f"bundle: cannot be made in {file}, which is a file; check permissions, or choose"):
        check_out(file / "new" / "bundle", force=False)


def test_an_empty_folder_is_replaced_with_force(tmp_path: Path) -> None:
    (out := tmp_path / "bundle").mkdir()
    with pytest.raises(BundleError, match="exists already; choose another --out, or replace it with --force"):
        check_out(out, force=False)
    _write(out, NEW)
    assert (out / manifests.MANIFEST).read_text() == NEW


def _fail_inside(out: Path, error: OSError) -> None:
    with fresh_folder(out, force=False):
        raise error


@pytest.mark.parametrize(
    "error",
    [
        ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"),
        OSError("the hub says no"),
        PermissionError(errno.EACCES, "Permission denied", "/models/llama/model.safetensors"),
        OSError(errno.ENOSPC, "No space left on device", "/tmp/compiler.lock"),
        OSError(errno.EBADF, "Bad file descriptor", 7),
    ],
)
def test_an_error_that_does_not_concern_out_is_raised_unchanged(error: OSError, tmp_path: Path) -> None:
    with pytest.raises(OSError) as caught:
        _fail_inside(tmp_path / "bundle", error)
    assert caught.value is error
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EFBIG])
def test_a_file_system_error_without_a_file_name_is_reported_for_out(number: int, tmp_path: Path) -> None:
    """An error of writing to an open file has none."""
    with pytest.raises(BundleError, match=rf"cannot be written \({os.strerror(number)}\)"):
        _fail_inside(tmp_path / "bundle", OSError(number, os.strerror(number)))


def test_an_array_that_finds_no_room_is_reported_for_out(tmp_path: Path) -> None:
    """numpy raises an error of its own, with neither an errno nor a file's name."""

    def write() -> None:
        with fresh_folder(tmp_path / "bundle", force=False), Path("/dev/full").open("wb") as full:
            np.zeros(1 << 20).tofile(full)

    with pytest.raises(BundleError, match=r"bundle: cannot be written \(0 of 1048576 numbers were written\); free space or"):
        write()


def test_an_error_of_a_file_in_the_bundle_is_reported_for_out(tmp_path: Path) -> None:
    def write_over_a_folder() -> None:
        with fresh_folder(tmp_path / "bundle", force=False) as partial:
            (partial / "graphs").mkdir()
            (partial / "graphs").write_bytes(b"")

    with pytest.raises(BundleError, match=r"bundle: cannot be written \(Is a directory\)"):
        write_over_a_folder()


def test_an_error_of_a_file_that_is_copied_into_the_bundle_is_reported_for_out(tmp_path: Path) -> None:
    def copy() -> None:
        with fresh_folder(tmp_path / "bundle", force=False) as partial:
            raise OSError(
                errno.ENOSPC, os.strerror(errno.ENOSPC), "/models/tokenizer.json", None, str(partial / "tokenizer.json")
            )

    with pytest.raises(BundleError, match=r"bundle: cannot be written \(No space left on device\)"):
        copy()


@pytest.mark.parametrize("force", [False, True])
def test_what_appears_at_out_while_an_export_runs_is_not_replaced(tmp_path: Path, force: bool) -> None:
    out = tmp_path / "bundle"

    def export_late() -> None:
        with fresh_folder(out, force) as partial:
            (partial / manifests.MANIFEST).write_text(NEW)
            out.write_text("another's")

    with pytest.raises(BundleError, match="exists and is not a bundle, so it is not replaced; choose"):
        export_late()
    assert out.read_text() == "another's"
    assert list(tmp_path.iterdir()) == [out]
