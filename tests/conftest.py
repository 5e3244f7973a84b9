"""What all tests share."""

from __future__ import annotations

import gc
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


def fsync(file: Any) -> None:
    """Check that the file is open. A disk takes milliseconds, thousands of times, and no test cuts its power:
    tests/support/power_loss.py replays the calls. Ranks and other processes have the real function."""
    os.fstat(file if isinstance(file, int) else file.fileno())


os.fsync = fsync

# torch is imported where it is needed: tests/test_architecture.py needs none.


def wants_gpu(config: pytest.Config) -> bool:
    """Return whether tests marked gpu are asked for by `-m gpu`, alone or with other markers."""
    return "gpu" in config.option.markexpr.split(" and ")


def pytest_configure(config: pytest.Config) -> None:
    """Hide CUDA devices, unless only tests marked gpu are asked for, which need one."""
    if not wants_gpu(config):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        return
    import torch

    if not torch.cuda.is_available():
        raise pytest.UsageError("-m gpu: torch finds no CUDA device on this machine")


@pytest.fixture(scope="session")
def s3_endpoint() -> Iterator[str]:
    """The URL of an S3 server of this process."""
    from tests.support.buckets import s3_server

    with s3_server() as endpoint:
        yield endpoint


@pytest.fixture
def bucket(s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of a new bucket, which s3://NAME/... reaches."""
    from tests.support.buckets import KEYS, new_bucket
    from titanlite import object_store

    for name, value in {**KEYS, "AWS_ENDPOINT_URL": s3_endpoint}.items():
        monkeypatch.setenv(name, value)
    yield new_bucket(s3_endpoint)
    object_store.forget_clients()


def pytest_addoption(parser: pytest.Parser) -> None:
    from tests.support.tiers import part

    parser.addoption("--part", type=part, metavar="K/N", help="run part K of N of the tests, such as 1/4")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests marked gpu, unless they are asked for, and the tests of other parts."""
    from tests.support.tiers import in_part

    part = config.getoption("part")

    def is_selected(item: pytest.Item) -> bool:
        if item.get_closest_marker("gpu") and not wants_gpu(config):
            return False
        return part is None or in_part(item.nodeid, *part)

    config.hook.pytest_deselected(items=[item for item in items if not is_selected(item)])
    items[:] = [item for item in items if is_selected(item)]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collect tests without garbage collection, and make full collections rare in the tests: each of them
    visits all imported modules, which takes 0.3 s and finds little."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.set_threshold(5_000, 20, 50)
        gc.freeze()
        gc.enable()


def pytest_sessionfinish() -> None:
    """Exempt all objects from pytest's and the interpreter's last garbage collections."""
    gc.freeze()


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
