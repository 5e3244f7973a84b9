"""What all tests share."""

from __future__ import annotations

import getpass
import logging
import os
import signal
import tempfile

# Compiled code stays out of the user's cache folder.
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/torchinductor_{getpass.getuser()}")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # two tests run side by side; before torch is imported

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

settings.register_profile("titanlite", deadline=None)  # no test is a measurement: the machine may be loaded
settings.load_profile("titanlite")

logging.getLogger("titanlite").setLevel(logging.INFO)  # once: pytest's log_level does it for each test
logging.disable(logging.DEBUG)  # torch's loggers fill pages of a failed test's report

# torch is imported where it is needed: tests/test_architecture.py needs none.


def pytest_configure(config: pytest.Config) -> None:
    """Hide CUDA devices, unless only tests marked gpu are asked for."""
    if "gpu" not in config.option.markexpr.split(" and "):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def pytest_addoption(parser: pytest.Parser) -> None:
    from tests.support.tiers import part

    parser.addoption("--part", type=part, metavar="K/N", help="run part K of N of the tests, such as 1/4")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests of other parts, and skip tests marked gpu if no CUDA device is to be seen."""
    if part := config.getoption("part"):
        from tests.support.tiers import in_part

        others = {item for item in items if not in_part(item.nodeid, *part)}
        config.hook.pytest_deselected(items=list(others))
        items[:] = [item for item in items if item not in others]
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    if gpu:
        import torch

        if not torch.cuda.is_available():
            for item in gpu:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device, and `pytest -m gpu`"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `-n`, a worker that is done takes tests from one that is not, unless --dist says otherwise."""
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log) if config.getvalue("dist") == "load" else None


@pytest.fixture
def hangups() -> Iterator[None]:
    """SIGHUP as it is in a terminal, for tests that send it: under nohup, it is ignored in all processes."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two text files of a few hundred documents."""
    from tests.support.jobs import write_corpus

    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture
def run_on() -> Callable[..., list[Any]]:
    """`run_on(world_size, function, *args)`: what the function returned on each rank."""
    from tests.support import ranks

    return ranks.run


@pytest.fixture
def no_hang() -> Iterator[None]:
    """A test that waits for ever fails."""

    def fail(number: int, frame: object) -> None:
        raise TimeoutError("it hangs")

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(120)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)
