"""The rules that keep the tree readable: who may import whom, and where the world is touched."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "titanlite"
LAYERS = [  # low to high: a unit imports lower layers only, never a sibling
    {"files", "errors"},
    {"config", "log", "host_copy", "step_clock", "torch_compat"},
    {"options", "progress", "table", "parallelism", "cross_entropy_kernel", "storage", "bucket_objects"},
    {"commands", "object_store"},
    {"attention", "tokenizers", "losses", "mesh", "ranks", "flops"},
    {"data", "models"},
    {"optim", "tasks"},
    {"checkpoint", "parallel", "runtime", "prepare"},
    {"metrics", "fetch"},
    {"interop"},
    {"evaluate", "generate", "stages"},
    {"job"},
    {"start_log"},
    {"start"},
    {"run"},
    {"train", "cli", "tools"},
    {"lab", "report", "corpus", "contrib"},  # satellites, which the core never imports
    {"__main__"},
]
LEVEL = {unit: level for level, layer in enumerate(LAYERS) for unit in layer}
# `launch` runs the trainer in its own process when there is one rank, and its ranks' commands in copies.
# Plans and scaling laws are printed and drawn as reports are.
SIBLINGS = {("tools", "train"), ("tools", "cli"), ("lab", "report")}


@cache
def syntax_tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def statements(tree: ast.AST) -> Iterator[ast.stmt]:
    """All statements, also inside others. Expressions hold none and are not visited."""
    for field in ("body", "orelse", "handlers", "finalbody", "cases"):
        for node in getattr(tree, field, ()):
            if isinstance(node, ast.stmt):
                yield node
            yield from statements(node)


def imports(tree: ast.AST) -> Iterator[str]:
    """Full names of what is imported; RELATIVE for a relative import."""
    for node in statements(tree):
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
        for name in imports(syntax_tree(path)):
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


def cycles(root: Path) -> list[list[str]]:
    """Every circle of modules that import each other, also for type checking only."""
    modules = {
        ".".join(("titanlite", *p.relative_to(root).with_suffix("").parts)): p for p in root.rglob("*.py")
    }
    graph = {
        module: {m for name in imports(syntax_tree(path)) for m in (name, name.rpartition(".")[0])}
        & modules.keys() - {module}
        for module, path in modules.items()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as e:
        return [e.args[1]]
    return []


def test_modules_do_not_import_each_other_in_a_circle() -> None:
    assert not cycles(PACKAGE)


def test_a_planted_circle_is_found(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "a.py").write_text("from titanlite.models.b import x\n")
    (tmp_path / "models" / "b.py").write_text("def x():\n    from titanlite.models import a\n")
    assert cycles(tmp_path)


def dotted(node: ast.expr) -> str:
    """A name with its attributes, such as os.environ; "" for attributes of other expressions."""
    if isinstance(node, ast.Attribute):
        value = dotted(node.value)
        return value and f"{value}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


# Documented members of the standard library whose names begin with an underscore.
PUBLIC = {"_asdict", "_replace", "_exit"}
PRIVATE_NAMES_OF_TORCH = {
    "torch_compat.py",
    "runtime/agent.py",
}


def own_names(trees: Iterable[ast.AST]) -> set[str]:
    """Names that the modules define: functions, classes, variables, and attributes of `self`."""
    names = set()
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and dotted(node.value) in ("self", "cls"):
            names |= {node.attr} if isinstance(node.ctx, ast.Store) else set()
    return names


def private_names(tree: ast.AST, own: set[str]) -> set[str]:
    """Private names in a module that are not `own`: attributes, imports and arguments of getattr."""
    names = {name for name in imports(tree) if not name.startswith("titanlite.")}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            names.add(node.attr)
        elif isinstance(node, ast.Call) and dotted(node.func) in ("getattr", "setattr", "hasattr"):
            names |= {a.value for a in node.args[1:2] if isinstance(a, ast.Constant)}
    return {name for name in names if is_private(name)} - own - PUBLIC


def test_private_names_of_torch_are_used_in_few_places() -> None:
    """torch_compat.py has tests of all its names. The agent and both kinds of rendezvous subclass torch's."""
    trees = {path.relative_to(PACKAGE).as_posix(): syntax_tree(path) for path in sources()}
    own = own_names(trees.values())
    users = {path: names for path, tree in trees.items() if (names := private_names(tree, own))}
    assert users.keys() == PRIVATE_NAMES_OF_TORCH, users


@pytest.mark.parametrize(
    "line",
    [
        "x = net._state",
        "import torch._x",
        "from torch._x import y",
        "from torch import _x",
        "getattr(x, '_y')",
    ],
)
def test_a_planted_private_name_is_found(line: str) -> None:
    tree = ast.parse(line)
    assert len(private_names(tree, own_names([tree]))) == 1
    assert not private_names(ast.parse("self._x = named._asdict()"), {"_x"})


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


@cache
def names_in(path: Path) -> frozenset[str]:
    """The names that the file imports, and the attributes that it spells, such as `os.environ`."""
    tree = syntax_tree(path)
    attributes = (dotted(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute))
    return frozenset([*imports(tree), *attributes])


def users(*prefixes: str) -> set[str]:
    """The files with a name that is one of the prefixes or under one of them."""

    def uses(path: Path) -> bool:
        return any(name == p or name.startswith(p + ".") for name in names_in(path) for p in prefixes)

    return {path.relative_to(PACKAGE).as_posix() for path in sources() if uses(path)}


def test_each_thing_is_touched_in_one_place() -> None:
    # runtime/environment.py sets what OpenMP reads while torch is imported, which runtime/runtime.py does
    assert users("os.environ", "os.getenv") == {"runtime/environment.py"}
    assert users("logging") == {"log.py", "runtime/launcher.py"}  # which silences torchrun's own report
    assert not {u for u in users("torch.distributed") if u.startswith("models/")}
    assert not {u for u in users("torch") if u.startswith("config/")}
    may = {"parallel", "checkpoint", "interop", "runtime", "optim", "attention"}
    may |= {"mesh.py", "ranks.py", "torch_compat.py"}
    others = {user for user in users("torch.distributed") if user.split("/")[0] not in may}
    assert not others


def test_functions_have_few_parameters() -> None:
    for path in sources():
        for node in ast.walk(syntax_tree(path)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                names = [arg.arg for arg in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
                count = len(set(names) - {"self", "cls"})
                is_operator = path.name == "head_tail.py"  # its parameters are torch's
                # A kernel in Triton takes pointers, strides and constants one by one.
                is_kernel = any(ast.unparse(decorator) == "triton.jit" for decorator in node.decorator_list)
                where = f"{path}:{node.lineno}: {node.name}"
                assert count <= 7 or is_operator or is_kernel, f"{where} has {count} parameters"


# What an import of a test module spells. Few files do, and only these are parsed.
MAY_IMPORT_TESTS = re.compile(r"(?<!def )\btest_|\bconftest\b|\bfrom\s*\.")


def imported_tests(root: Path) -> list[str]:
    """Every import of a test module, or of a conftest, by another module of tests."""
    actual = []
    for path in sorted((root / "tests").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        for name in imports(ast.parse(text)) if MAY_IMPORT_TESTS.search(text) else ():
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


def test_the_page_on_architecture_names_every_folder_and_module() -> None:
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(\w+(?:\.py|/))`", page.partition("## Folders")[2]))
    units = {p.name for p in PACKAGE.glob("*.py")} | {
        f"{p.parent.name}/" for p in PACKAGE.glob("*/__init__.py")
    }
    assert units - {"__init__.py", "__main__.py"} <= named


def test_every_page_is_in_the_navigation_of_the_site() -> None:
    pages = {path.name for path in (ROOT / "docs").glob("*.md")}
    assert pages == set(re.findall(r": ([\w-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))


def test_every_file_says_what_it_is_in_ascii() -> None:
    for path in sources():
        text = path.read_text(encoding="utf-8")
        assert text.isascii(), f"{path}: not ASCII"
        assert ast.get_docstring(syntax_tree(path)), f"{path}: no opening paragraph"
