"""What a user gets: every module in the wheel, and a runtime that needs neither torch nor onnx."""

from __future__ import annotations

import ast
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def test_the_wheel_holds_every_module_and_every_part_of_the_report(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)]
    built = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
    assert "would be ignored" not in built.stdout + built.stderr, "setuptools warns of data that a later version leaves out"
    (wheel,) = tmp_path.glob("*.whl")
    packed = {
        name for name in zipfile.ZipFile(wheel).namelist() if name.endswith((".py", ".h", ".cu", ".ptx")) or "/assets/" in name
    }
    tracked = subprocess.run(
        [
            "git",
            "ls-files",
            "runtime/*.py",
            "exporter/*.py",
            "graph_passes/*.py",
            "plugins/*.py",
            "plugins/*.h",
            "plugins/*.cu",
            "plugins/*.ptx",
            "runtime/*/assets/*",
        ],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split()
    assert len(tracked) > 20
    wanted = {f"skipdecode/{path.removeprefix('runtime/')}" for path in tracked}
    licences = {name for name in packed if ".dist-info/licenses/" in name}
    assert (packed - licences, len(licences)) == (wanted, 1), "the licence is that of the report's charts, packed once more"


@pytest.mark.parametrize(
    ("folder", "above"),
    [
        ("runtime", ("exporter", "graph_passes", "plugins")),
        ("graph_passes", ("exporter", "plugins")),
        ("plugins", ("exporter", "graph_passes")),
    ],
)
def test_no_module_imports_from_a_package_above_its_own(folder: str, above: tuple[str, ...]) -> None:
    modules = sorted((ROOT / folder).rglob("*.py"))
    imported = {(module.name, name) for module in modules for name in _imports(module)}
    assert modules and any(name.startswith("skipdecode") for _, name in imported)
    assert not [(module, name) for module, name in imported if name.startswith(tuple(f"skipdecode.{one}" for one in above))]


def _imports(module: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_the_runtime_imports_neither_torch_nor_transformers_nor_onnx_nor_plugin_code() -> None:
    code = (
        "import sys, skipdecode, skipdecode.cli.run, skipdecode.cli.inspect, skipdecode.cli.validate;"
        "import skipdecode.validation.report, skipdecode.turn_around; skipdecode.turn_around.ptx();"
        "above = {'torch', 'transformers', 'onnx', 'onnx_ir', 'onnxscript', 'skipdecode.plugins.turnaround'};"
        "print(sorted(above & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]"
