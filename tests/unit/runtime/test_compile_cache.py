"""Pins where torch's compiler keeps its code: in a folder of the user's alone, by versions and device; what
is refused; and that a second start reads it."""

from __future__ import annotations

import logging
import os
import re
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import titanlite
from tests.support.jobs import metrics_in
from titanlite.config.component import ConfigError
from titanlite.runtime import compile_cache, environment
from titanlite.runtime.compile_cache import use_compile_cache

ROOT = Path(__file__).resolve().parents[3]
CPU, VARIABLE = torch.device("cpu"), "TORCHINDUCTOR_CACHE_DIR"


@pytest.fixture
def environ(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[dict[str, str]]:
    """An environment with nothing but the user's cache folder."""
    values = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    monkeypatch.setattr(environment, "os", SimpleNamespace(environ=values))
    with torch.compiler.config.patch(cache_key_tag=""):
        yield values


def test_compiled_code_is_kept_in_the_users_cache_folder(environ: dict[str, str], tmp_path: Path) -> None:
    use_compile_cache("", True, CPU, tmp_path / "run")
    folder = Path(environ[VARIABLE])
    assert folder.parent == tmp_path / "cache/titanlite/compile"
    assert folder.name.startswith(f"torch-{torch.__version__}_titanlite-")
    assert folder.name.endswith(torch.backends.cpu.get_cpu_capability().replace(" ", "_"))
    assert [stat.S_IMODE(path.stat().st_mode) for path in (folder, folder.parent)] == [0o700, 0o700]


def test_code_is_compiled_again_for_other_operators_and_passes(
    environ: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a package with an edited module. Else compiled code would call operators with other arguments."""
    package = tmp_path / "package"
    (package / "models").mkdir(parents=True)
    operators, other = package / "models/moe.py", package / "log.py"
    monkeypatch.setattr(titanlite, "__file__", str(package / "__init__.py"))

    def tag() -> str:
        torch.compiler.config.cache_key_tag = "mine"
        compile_cache._digest_of_definitions.cache_clear()  # another process
        for _ in range(2):  # it is added once
            use_compile_cache("", True, CPU, tmp_path / "run")
        return torch.compiler.config.cache_key_tag

    operators.write_text("@torch.library.custom_op('titanlite::f')")
    other.write_text("")
    first = tag()
    assert re.fullmatch(r"mine [0-9a-f]{64}", first)
    other.write_text("# edited")
    assert tag() == first
    operators.write_text(operators.read_text() + "# edited")
    second = tag()
    assert second != first
    for source in (operators, other):  # an installation of compiled modules alone
        source.rename(source.with_suffix(".pyc"))
    assert tag() == second


@pytest.mark.full
def test_torch_compiles_again_for_another_tag(tmp_path: Path) -> None:
    code = """
import sys, torch
from torch._dynamo.utils import counters
torch.compiler.config.cache_key_tag = sys.argv[1]
torch.compile(lambda x: x.sin() + 1)(torch.ones(4, requires_grad=True))
print(counters["aot_autograd"]["autograd_cache_hit"] + counters["inductor"]["fxgraph_cache_hit"])
"""
    hits = [
        subprocess.run(
            [sys.executable, "-c", code, tag],
            env=os.environ | {VARIABLE: str(tmp_path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for tag in ("a", "a", "b", "b")
    ]
    assert [hit != "0\n" for hit in hits] == [False, True, False, True]


def test_the_users_variable_stays_unless_the_key_is_set(environ: dict[str, str], tmp_path: Path) -> None:
    environ[VARIABLE] = "mine"
    use_compile_cache("", True, CPU, tmp_path / "run")
    assert environ[VARIABLE] == "mine"
    use_compile_cache(str(tmp_path / "other"), True, CPU, tmp_path / "run")
    assert Path(environ[VARIABLE]).parent == tmp_path / "other"


def test_a_folder_that_others_may_write_to_is_refused(environ: dict[str, str], tmp_path: Path) -> None:
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(ConfigError, match=r"can be written to by other users; `chmod 700 ") as e:
        use_compile_cache(str(folder), True, CPU, tmp_path / "run")
    assert e.value.key == "compile.cache_dir"
    assert VARIABLE not in environ
    folder.chmod(0o755)
    use_compile_cache(str(folder), True, CPU, tmp_path / "run")  # control


def test_a_folder_of_another_user_is_refused(
    environ: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile_cache, "os", SimpleNamespace(getuid=lambda: os.getuid() + 1))
    with pytest.raises(ConfigError, match="belongs to another user"):
        use_compile_cache(str(tmp_path / "theirs"), True, CPU, tmp_path / "run")


def test_a_folder_inside_the_run_folder_is_refused(environ: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "run")
    for folder in ("run", "run/cache", "link/cache"):
        with pytest.raises(ConfigError, match="is in the run folder"):
            use_compile_cache(str(tmp_path / folder), True, CPU, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("kind", ["a file", "shared", "another user's", "of nobody"])
def test_a_default_folder_that_cannot_be_used_is_a_warning(
    environ: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    kind: str,
) -> None:
    cache = tmp_path / "cache"
    if kind == "a file":
        cache.touch()
    elif kind == "of nobody":  # as `~` of a user id without a home folder
        environ["XDG_CACHE_HOME"] = "~no such user"
    else:
        (cache / "titanlite/compile").mkdir(parents=True)
        (cache / "titanlite/compile").chmod(0o770 if kind == "shared" else 0o700)
    owner = os.getuid() + (kind == "another user's")
    monkeypatch.setattr(compile_cache, "os", SimpleNamespace(getuid=lambda: owner))
    with caplog.at_level(logging.WARNING):
        use_compile_cache("", False, CPU, tmp_path / "run")
        assert not caplog.records, "nothing is compiled"
        use_compile_cache("", True, CPU, tmp_path / "run")
    assert VARIABLE not in environ
    (record,) = caplog.records
    assert "compiled code stays in torch's own folder" in record.getMessage()


def test_a_run_that_compiles_nothing_makes_no_folder(environ: dict[str, str], tmp_path: Path) -> None:
    use_compile_cache("", False, CPU, tmp_path / "run")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["a file/mine", "~no such user/mine"])
def test_a_named_folder_that_cannot_be_made_is_refused(
    environ: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a file").touch()
    with pytest.raises(ConfigError, match=f"cannot use the folder {name}: ") as e:
        use_compile_cache(name, True, CPU, tmp_path / "run")
    assert e.value.key == "compile.cache_dir"
    assert VARIABLE not in environ


@pytest.mark.full
def test_a_second_start_compiles_from_the_cache(tmp_path: Path) -> None:
    """In fresh processes. The control has a cache of its own."""
    seconds, losses = {}, {}
    for run, cache in (("first", "a"), ("second", "a"), ("control", "b")):
        folder = tmp_path / run
        keys = {"training.steps": 2, "compile.enable": "true", "checkpoint.enable": "false"}
        keys |= {"compile.cache_dir": tmp_path / cache, "data.cache_dir": tmp_path / "data"}
        words = [f"--{key}={value}" for key, value in (keys | {"job.dump_folder": folder}).items()]
        subprocess.run(
            [sys.executable, "-m", "titanlite.cli", "train", "debug", *words], cwd=ROOT, check=True
        )
        reports = metrics_in(folder)
        seconds[run] = sum(report.get("compile/seconds", 0.0) for report in reports)
        losses[run] = [report["train/loss"] for report in reports]
    assert seconds["second"] < seconds["first"] / 2, seconds
    assert seconds["control"] > seconds["second"] * 2, seconds
    assert losses["first"] == losses["second"] == losses["control"]
