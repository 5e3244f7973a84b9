"""Pins that the pages of docs/ quote the files that they name as they are, and show every example."""

from __future__ import annotations

import re

import pytest

from tests.support import module_list
from tests.support.quoted_code import PAGES, QUOTE, ROOT, refreshed


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_quoted_code_is_that_of_its_file(page) -> None:
    text = page.read_text(encoding="utf-8")
    assert text == refreshed(text), "run: python -m tests.support.quoted_code"
    assert refreshed(text.replace("def ", "def other_", 1)) == text  # control: another text is noticed


def test_every_example_is_on_the_page_on_extending() -> None:
    page = (ROOT / "docs/extending.md").read_text(encoding="utf-8")
    quoted = {match[2] for match in QUOTE.finditer(page)}
    examples = {path for path in (ROOT / "tests/examples").glob("*.py") if not path.name.startswith("test_")}
    assert quoted == {path.relative_to(ROOT).as_posix() for path in examples}
    for name in re.findall(r"\| `(titanlite\.[\w.]+)` \|", page):
        module, _, attribute = name.rpartition(".")
        assert hasattr(__import__(module, fromlist=[attribute]), attribute), name


def test_the_list_of_modules_is_that_of_the_package() -> None:
    page = module_list.PAGE.read_text(encoding="utf-8")
    assert page == module_list.refreshed(page), "run: python -m tests.support.module_list"
    assert module_list.refreshed(page.replace("The training", "A training")) == page  # control


NAME = re.compile(r'"((?:train|eval|throughput|time|memory|data|progress|compile|checkpoint)/[a-z_]+)"')


def test_the_page_on_metrics_has_every_metric_of_the_code() -> None:
    code = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "titanlite").rglob("*.py"))
    page = (ROOT / "docs/metrics.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"^\| `([\w/]+)` \|", page, flags=re.MULTILINE))
    assert listed - {"train/NAME"} == set(NAME.findall(code))
    assert 'f"train/{name}"' in code  # train/NAME
