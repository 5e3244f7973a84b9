"""The id of a run: kept by resumes and moves of its folder; a copy of the folder has another one."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from titanlite.metrics.sinks.run_id import NAME, identify


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "a"
    folder.mkdir()
    identify(folder, 0)
    return folder


def change(run: Path, **values: object) -> None:
    """Change what a run folder records."""
    tree = json.loads((run / NAME).read_text())
    (run / NAME).write_text(json.dumps(tree | values))


def id_of(folder: Path) -> str:
    return json.loads((folder / NAME).read_text())["run_id"]


def test_a_resume_and_a_link_keep_the_id_and_a_restart_does_not(folder: Path) -> None:
    before = (folder / NAME).read_text()
    first = identify(folder, 3).run_id
    (folder.parent / "link").symlink_to(folder)
    assert identify(folder.parent / "link", 3).run_id == first
    assert (folder / NAME).read_text() == before
    assert identify(folder, 0).run_id != first


@pytest.mark.parametrize("to_other_file_system", [False, True])
def test_a_move_keeps_the_id(folder: Path, to_other_file_system: bool) -> None:
    first, moved = id_of(folder), folder.with_name("b")
    if to_other_file_system:
        shutil.copytree(folder, moved)
        shutil.rmtree(folder)
        change(moved, device=-1)
    else:
        folder.rename(moved)
    for _ in range(2):
        assert identify(moved, 3).run_id == first
    assert json.loads((moved / NAME).read_text())["folder"] == str(moved.resolve())


@pytest.mark.parametrize("case", ["beside", "on another file system", "original moved", "hard links"])
def test_a_copy_has_an_id_of_its_own(folder: Path, caplog: pytest.LogCaptureFixture, case: str) -> None:
    first, copy = id_of(folder), folder.with_name("b")
    shutil.copytree(folder, copy, copy_function=os.link if case == "hard links" else shutil.copy)
    if case == "on another file system":
        change(copy, device=-1)
    elif case == "original moved":
        folder = folder.rename(folder.with_name("c"))
    made = identify(copy, 7)
    assert (made.copied_from, made.copied_at_step) == (first, 7)
    assert made.run_id != first
    assert identify(copy, 9) == made
    assert identify(folder, 7).run_id == id_of(folder) == first


def test_a_copy_of_which_the_original_began_again_is_the_run(folder: Path) -> None:
    """The other folder holds a run with another id, so nobody else sends to this one."""
    first, copy = id_of(folder), folder.with_name("b")
    shutil.copytree(folder, copy)
    change(copy, device=-1)
    identify(folder, 0)
    assert identify(copy, 3).run_id == first
