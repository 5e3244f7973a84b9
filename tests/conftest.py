"""Shared by all tests: tiny jobs on the raw-bytes tokenizer, and pools of gloo ranks that live as long as the
run."""

from __future__ import annotations

import os
import signal

os.environ.setdefault("OMP_NUM_THREADS", "1")  # two tests run side by side; before torch is imported

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

settings.register_profile("titanlite", deadline=None)  # no test is a measurement: the machine may be loaded
settings.load_profile("titanlite")

if TYPE_CHECKING:
    from tests.pool import Pool

# torch is imported where it is needed: tests/test_architecture.py needs none.


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """GPU tests need a GPU."""
    gpu = [item for item in items if "gpu" in item.keywords]
    if gpu:
        import torch

        if not torch.cuda.is_available():
            for item in gpu:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture
def hangups() -> Iterator[None]:
    """SIGHUP as it is in a terminal, for tests that send it: under nohup, it is ignored in all processes."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two text files of a few hundred documents."""
    from tests.jobs import write_corpus

    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="session")
def pools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int], Pool]]:
    """`pools(world_size)`: started once each, because starting one costs seconds and a test in it
    hundredths."""
    from tests.pool import Pool

    started: dict[int, Pool] = {}

    def get(world_size: int) -> Pool:
        if world_size not in started:
            started[world_size] = Pool(world_size, tmp_path_factory.mktemp(f"pool{world_size}"))
        return started[world_size]

    yield get
    for pool in started.values():
        pool.close()


@pytest.fixture
def run_on(pools: Callable[[int], Pool]) -> Callable[..., list[Any]]:
    """`run_on(world_size, function, *args)`: what the function returned on each rank."""
    return lambda world_size, function, *args: pools(world_size)(function, *args)


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
