"""The rules that keep the tree readable: who may import whom, where the world is touched, how long things may
get."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "titanlite"
LAYERS = [  # low to high: a unit imports lower layers only, never a sibling
    {"files", "errors"},
    {"config", "log", "host_copy", "torch_compat"},
    {"progress", "commands"},
    {"attention", "tokenizers", "losses", "mesh", "flops"},
    {"data", "models"},
    {"optim"},
    {"checkpoint", "parallel", "runtime", "metrics", "prepare"},
    {"interop"},
    {"evaluate", "generate", "report"},
    {"job"},
    {"startup"},
    {"run"},
    {"train", "cli", "tools"},
    {"__main__"},
]
LEVEL = {unit: level for level, layer in enumerate(LAYERS) for unit in layer}
SIBLINGS = {("tools", "train")}  # `launch` runs the trainer in its own process when there is one rank


def imports(tree: ast.AST) -> Iterator[str]:
    """Full names of what is imported; RELATIVE for a relative import."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            yield "RELATIVE"
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def layer_violations(root: Path) -> list[str]:
    """Every import that goes up or sideways."""
    actual = []
    for path in sorted(root.rglob("*.py")):
        unit = path.relative_to(root).parts[0].removesuffix(".py")
        for name in imports(ast.parse(path.read_text())):
            parts = name.split(".")
            if name == "RELATIVE":
                actual.append(f"{path}: relative import")
            elif parts[0] == "titanlite" and len(parts) > 1 and parts[1] in LEVEL and parts[1] != unit:
                allowed = LEVEL[parts[1]] < LEVEL.get(unit, 0) or (unit, parts[1]) in SIBLINGS
                if not allowed:
                    actual.append(f"{path}: {unit} (layer {LEVEL.get(unit)}) imports {name}")
    return actual


def test_units_import_only_lower_layers() -> None:
    assert not layer_violations(PACKAGE)


def test_every_unit_has_a_layer() -> None:
    units = {
        p.name.removesuffix(".py")
        for p in PACKAGE.iterdir()
        if p.suffix == ".py" or (p / "__init__.py").exists()
    }
    assert units - {"__init__"} <= LEVEL.keys()


@pytest.mark.parametrize(
    "violation",
    [
        "from titanlite.job import Job",
        "import titanlite.parallel.fsdp",
        "from titanlite import data",
        "from . import x",
    ],
)
def test_a_planted_violation_is_found(tmp_path: Path, violation: str) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "bad.py").write_text(violation + "\n")
    assert len(layer_violations(tmp_path)) == 1


def sources() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def uses(path: Path, *prefixes: str) -> bool:
    """Whether the file imports anything under the prefixes, or spells them as attributes (`os.environ`)."""
    tree = ast.parse(path.read_text())
    names = list(imports(tree)) + [ast.unparse(n) for n in ast.walk(tree) if isinstance(n, ast.Attribute)]
    return any(name == p or name.startswith(p + ".") for name in names for p in prefixes)


def users(*prefixes: str) -> set[str]:
    return {path.relative_to(PACKAGE).as_posix() for path in sources() if uses(path, *prefixes)}


def test_each_thing_is_touched_in_one_place() -> None:
    # runtime/environment.py sets what OpenMP reads while torch is imported, which runtime/runtime.py does
    assert users("os.environ", "os.getenv") == {"runtime/environment.py"}
    assert users("logging") == {"log.py", "tools/launch.py"}  # launch silences torchrun's own report
    assert not {u for u in users("torch.distributed") if u.startswith("models/")}
    assert not {u for u in users("torch") if u.startswith("config/")}
    may = {"parallel", "checkpoint", "interop", "runtime", "mesh.py", "optim", "attention", "tools"}
    may |= {"torch_compat.py"}
    assert {unit.split("/")[0] for unit in users("torch.distributed")} <= may


def test_sizes_stay_readable() -> None:
    for path in sources():
        lines = path.read_text().splitlines()
        assert len(lines) <= (350 if path.name == "train.py" else 500), f"{path}: {len(lines)} lines"
        for node in ast.walk(ast.parse("\n".join(lines))):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                length = node.end_lineno - node.lineno + 1
                assert length <= 60, f"{path}:{node.lineno}: {node.name} has {length} lines"


def imported_tests(root: Path) -> list[str]:
    """Every import of a test module, or of a conftest, by another module of tests."""
    actual = []
    for path in sorted((root / "tests").rglob("*.py")):
        for name in imports(ast.parse(path.read_text(encoding="utf-8"))):
            parts = name.split(".")
            is_test = any(part.startswith("test_") or part == "conftest" for part in parts)
            if name == "RELATIVE" or (parts[0] == "tests" and is_test):
                actual.append(f"{path}: {name}")
    return actual


def test_no_test_module_is_imported() -> None:
    """What several tests need is in tests/support/."""
    assert not imported_tests(ROOT)


@pytest.mark.parametrize(
    "line",
    [
        "from tests.unit.test_job import load",
        "from tests.unit import test_job",
        "import tests.unit.test_job",
        "from .test_job import load",
        "from tests.conftest import corpus",
    ],
)
def test_a_planted_import_of_a_test_module_is_found(tmp_path: Path, line: str) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_a.py").write_text(line + "\n")
    assert len(imported_tests(tmp_path)) == 1


def test_the_tree_in_the_readme_names_every_folder_and_module() -> None:
    tree = (ROOT / "README.md").read_text(encoding="utf-8").partition("## The tree")[2]
    inside = set(re.findall(r"\w+(?:\.py|/)", tree.partition("titanlite/\n")[2].partition("```")[0]))
    units = {p.name for p in PACKAGE.glob("*.py")} | {
        f"{p.parent.name}/" for p in PACKAGE.glob("*/__init__.py")
    }
    assert inside - {"apply.py"} == units - {"__init__.py", "__main__.py"}
    docs = {path.name for path in (ROOT / "docs").glob("*.md")}
    assert docs <= set(re.findall(r"[\w-]+\.md", tree))


def test_every_file_says_what_it_is_in_ascii() -> None:
    for path in sources():
        text = path.read_text(encoding="utf-8")
        assert text.isascii(), f"{path}: not ASCII"
        assert ast.get_docstring(ast.parse(text)), f"{path}: no opening paragraph"
