"""The sdist is enough to build the wheel, and the wheel works without the checkout: it has train_configs/
and assets/tokenizer/, found from any folder. (.ci/run trains from an installed wheel.)
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from titanlite.config import shipped
from titanlite.job import load_job
from titanlite.tokenizers.tiktoken import Tiktoken

pytestmark = pytest.mark.full  # .ci/run builds the wheel, too

ROOT = Path(__file__).resolve().parents[1]
SHIPPED = [
    p.relative_to(ROOT).as_posix()
    for folder in ("train_configs", "assets/tokenizer")
    for p in (ROOT / folder).iterdir()
    if p.suffix in (".toml", ".tiktoken")
] + ["assets/chat_template.jinja"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked wheel, built from the unpacked sdist, as pip and uv build it for a user."""
    pytest.importorskip("setuptools", minversion="77")
    tree = tmp_path_factory.mktemp("tree")
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in filter(lambda name: (ROOT / name).is_file(), listed.stdout.splitlines()):
        if not name.startswith(("benchmarks/", "docs/")):
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tree / name)
    _build("sdist", tree)
    (sdist,) = (tree / "dist").glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(tree / "unpacked", filter="data")
    (source,) = (tree / "unpacked").iterdir()
    assert (source / "run_train.sh").exists()
    assert not (source / "tests").exists()
    _build("wheel", source)
    (file,) = (source / "dist").glob("*.whl")
    with zipfile.ZipFile(file) as archive:
        archive.extractall(tree / "wheel")
    return tree / "wheel"


def _build(kind: str, folder: Path) -> None:
    build = f"from setuptools import build_meta; build_meta.build_{kind}('dist')"
    done = subprocess.run([sys.executable, "-c", build], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


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
