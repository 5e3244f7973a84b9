"""The list of planted faults fits the tree. What finds them is `python -m tests.support.planted_faults`."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from tests.support.planted_faults import ROOT, load_faults, misfits

FAULTS = load_faults()


def test_each_fault_stands_once_in_its_file_and_its_tests_exist() -> None:
    assert not misfits(FAULTS)


def test_names_are_told_apart() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 30


def test_there_are_faults_in_every_folder_of_the_package() -> None:
    folders = {path.parent.relative_to(ROOT).as_posix() for path in (ROOT / "titanlite").rglob("*.py")}
    assert folders == {Path(fault.file).parent.as_posix() for fault in FAULTS}


def test_a_fault_that_does_not_fit_is_told() -> None:
    fault = FAULTS[0]
    wrong = [
        {"old": "not in there"},
        {"old": "import"},
        {"file": "titanlite/none.py"},
        {"tests": ["tests/none.py"]},
    ]
    for change in wrong:
        assert len(misfits([dataclasses.replace(fault, **change)])) == 1
