"""Files are compared with their digests, and the first damaged file is described."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from titanlite.checkpoint import digest
from titanlite.checkpoint.digest import FileDigest, first_fault, write_file

FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (Path.unlink, "b is missing"),
    "longer": (lambda file: file.write_bytes(b"content of b and more"), "b has 21 bytes, 12 were written"),
    "changed": (lambda file: file.write_bytes(b"content of B"), "b is not what was written: its SHA-256"),
    "a pipe": (lambda file: (file.unlink(), os.mkfifo(file)), "b cannot be read: it is a named pipe"),
}


@pytest.fixture
def files(tmp_path: Path) -> dict[str, FileDigest]:
    return {name: write_file(tmp_path / name, f"content of {name}".encode()) for name in "abc"}


def test_files_as_they_were_written_have_no_fault(tmp_path: Path, files: dict[str, FileDigest]) -> None:
    assert first_fault(tmp_path, files) is None


@pytest.mark.parametrize("kind", FAULTS)
def test_a_fault_is_told(tmp_path: Path, files: dict[str, FileDigest], kind: str) -> None:
    damage, message = FAULTS[kind]
    damage(tmp_path / "b")
    assert (first_fault(tmp_path, files) or "").startswith(message)


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE])
def test_only_an_io_error_says_something_about_the_file(
    tmp_path: Path, files: dict[str, FileDigest], monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def fails(path: Path) -> FileDigest:
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(digest, "digest_file", fails)
    if number == errno.EIO:
        assert first_fault(tmp_path, files) == f"a cannot be read: {os.strerror(number)}"
    else:
        with pytest.raises(OSError, match=os.strerror(number)):
            first_fault(tmp_path, files)
