"""The wheel works without the checkout: what train_configs/ and assets/tokenizer/ hold is inside it and is
found from any folder. (.ci/run trains from an installed wheel.)
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from titanlite.config import shipped
from titanlite.job import load_job
from titanlite.tokenizers.tiktoken import Tiktoken

ROOT = Path(__file__).resolve().parents[1]
SHIPPED = [
    p.relative_to(ROOT).as_posix()
    for folder in ("train_configs", "assets/tokenizer")
    for p in (ROOT / folder).iterdir()
    if p.suffix in (".toml", ".tiktoken")
] + ["assets/chat_template.jinja"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked wheel, built from the files that the Dockerfile copies."""
    pytest.importorskip("setuptools", minversion="77")
    tree = tmp_path_factory.mktemp("tree")
    for line in re.findall(r"^COPY (.*)$", (ROOT / "Dockerfile").read_text(encoding="utf-8"), re.MULTILINE):
        *sources, target = line.split()
        for source in sources:
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, tree / target, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(ROOT / source, tree / target)
    assert (tree / "run_train.sh").exists()
    build = "from setuptools import build_meta; build_meta.build_wheel('dist')"
    done = subprocess.run([sys.executable, "-c", build], cwd=tree, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (file,) = (tree / "dist").glob("*.whl")
    with zipfile.ZipFile(file) as archive:
        archive.extractall(tree / "unpacked")
    return tree / "unpacked"


def test_the_wheel_holds_the_package_and_what_ships_with_it(wheel):
    files = {p.relative_to(wheel).as_posix() for p in wheel.rglob("*") if p.is_file()}
    package = {p.relative_to(ROOT).as_posix() for p in (ROOT / "titanlite").rglob("*.py")}
    assert package | {f"titanlite/{name}" for name in [*SHIPPED, "config/schema.json"]} <= files
    assert len(SHIPPED) > 10
    assert {name.split("/")[0] for name in files if ".dist-info/" not in name} == {"titanlite"}


def test_shipped_files_are_found_from_anywhere_without_the_checkout(wheel, tmp_path, monkeypatch):
    monkeypatch.setattr(shipped, "PACKAGE", wheel / "titanlite")
    monkeypatch.chdir(tmp_path)
    job = load_job("debug")
    assert job.tokenizer.build().vocab_size == 8192
    assert load_job("llama3_8b", world_size=8).model.flavor == "8B"
    for name in SHIPPED:
        assert shipped.shipped(name) == wheel / "titanlite" / name


def test_a_file_in_the_current_directory_goes_before_a_shipped_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    default = Tiktoken()
    assert shipped.find_file(default.path) == ROOT / default.path
    (tmp_path / default.path).parent.mkdir(parents=True)
    shutil.copy(ROOT / default.path, tmp_path / default.path)
    assert shipped.find_file(default.path) == Path(default.path)
    (tmp_path / "debug").write_text(
        "[model]\nname = 'llama3'\nflavor = '8B'\n[[data.sources]]\nname = 'python_stdlib'\n"
    )
    assert load_job("debug").model.flavor == "8B"
