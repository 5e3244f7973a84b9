"""Files that others may have touched: what is not a regular file is refused at once, writing follows no link,
and a kill leaves the old content or the new."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from tests.support.kinds import WRONG_KINDS
from titanlite import files
from titanlite.config import json_file
from titanlite.config.component import ConfigError
from titanlite.files import FileFault, is_inside, named, new_folder, read_regular, write_atomically


@pytest.mark.parametrize("kind", WRONG_KINDS)
def test_only_regular_files_are_read(tmp_path: Path, kind: str) -> None:
    make, message = WRONG_KINDS[kind]
    path = tmp_path / "x.json"
    make(path)
    with pytest.raises((FileFault, OSError), match=message):
        read_regular(path)
    with pytest.raises(ConfigError, match=f"{path} cannot be read: .*{message}"):
        json_file.read_object(path)


def test_a_link_to_a_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('{"a": 1}')
    (tmp_path / "link.json").symlink_to(tmp_path / "x.json")
    assert json_file.read_object(tmp_path / "link.json") == {"a": 1}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[" * 100_000, "it is nested too deep"),
        ('{"a": ' * 100_000, "it is nested too deep"),
        ("[]", "it is not a JSON object"),
        ("", "Expecting value"),
        (f'{{"a": {"9" * 5000}}}', "Exceeds the limit"),
        (b"\xff\xfe{", "utf"),
    ],
)
def test_what_is_no_json_object_is_refused(tmp_path: Path, content: str | bytes, message: str) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError, match=f"cannot be read: .*{message}"):
        json_file.read_object(path)


def test_a_file_that_is_too_large_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(bytes(11))
    assert read_regular(tmp_path / "x", max_bytes=11) == bytes(11)
    with pytest.raises(FileFault, match="it has more than 10 bytes"):
        read_regular(tmp_path / "x", max_bytes=10)


def test_expected_types_are_exact() -> None:
    json_file.expect({"a": 1, "b": "x"}, a=int, b=str)
    for tree, message in [
        ({"a": True}, "a is True, not an integer"),
        ({}, "a is missing"),
        ([], r"\[\] is not an object"),
        ({"a": "x" * 100}, f"a is '{'x' * 59}..., not an integer"),
    ]:
        with pytest.raises(ValueError, match=message):
            json_file.expect(tree, a=int)


# ---- writing


def test_a_planted_link_is_replaced_and_not_followed(tmp_path: Path) -> None:
    victim, target = tmp_path / "victim", tmp_path / "job.toml"
    victim.write_text("theirs")
    target.symlink_to(victim)
    write_atomically(target, "ours")
    assert (victim.read_text(), target.read_text(), target.is_symlink()) == ("theirs", "ours", False)


def test_the_name_aside_cannot_be_guessed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = set()
    original = files.write_new
    monkeypatch.setattr(files, "write_new", lambda path, data: (names.add(path.name), original(path, data)))
    for _ in range(2):
        write_atomically(tmp_path / "job.toml", "x")
    assert len(names) == 2
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FileExistsError):
        original(tmp_path / "link", b"x")
    assert not (tmp_path / "elsewhere").exists()


def test_what_a_killed_writer_left_is_removed_by_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "job.toml"
    write_atomically(path, "old")
    (tmp_path / ".partial-job.toml-0123abcd").write_text("ne")
    assert path.read_text() == "old"
    write_atomically(path, "new")
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("job.toml", "new")]


def test_an_error_leaves_the_old_content_and_names_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "job.toml"
    write_atomically(path, "old")

    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left on device") as error:
        write_atomically(path, "new")
    assert error.value.filename == str(path)
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("job.toml", "old")]


def test_a_new_folder_is_there_whole_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "sub/made"

    def fail() -> None:
        with new_folder(target) as folder:
            (folder / "a").write_text("a")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert list((tmp_path / "sub").iterdir()) == []
    with new_folder(target) as folder:
        (folder / "a").write_text("a")
        assert not target.exists()
    assert [path.name for path in target.iterdir()] == ["a"]


def test_a_new_folder_removes_what_a_kill_left_a_day_ago(tmp_path: Path) -> None:
    """A younger one may be another process's, and one of another target is none of ours."""
    names = {".unfinished-made-01234567", ".unfinished-made-76543210", ".unfinished-made-2-01234567"}
    for name in names:
        (tmp_path / name).mkdir()
    for name in names - {".unfinished-made-76543210"}:
        os.utime(tmp_path / name, (0, 0))
    with new_folder(tmp_path / "made"):
        pass
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"made", ".unfinished-made-76543210", ".unfinished-made-2-01234567"}


def test_numpys_short_writes_have_a_name(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="16 requested and 8 written") as error, named(tmp_path / "x"):
        raise OSError("16 requested and 8 written")
    assert (error.value.errno, error.value.filename) == (errno.EIO, str(tmp_path / "x"))


def test_files_inside_a_folder(tmp_path: Path) -> None:
    """Links count as what they lead to; those of Hugging Face's cache may lead to the repository's blobs."""
    repository = tmp_path / "datasets--org--name"
    snapshot = repository / "snapshots" / "c0ffee"
    for path in (snapshot / "data", repository / "blobs", tmp_path / "other"):
        path.mkdir(parents=True)
    (snapshot / "blob").symlink_to("../../blobs/1")
    (snapshot / "data" / "blob").symlink_to("../../../blobs/1")
    (snapshot / "secret").symlink_to(tmp_path / "other" / "1")
    (snapshot / "loop").symlink_to("loop")
    (tmp_path / "link").symlink_to(snapshot)
    for folder in (snapshot, tmp_path / "link"):
        for name in ("a", "data/a", "data/../a", "blob", "data/blob", "loop"):
            assert is_inside(folder / name, folder), name
        for name in ("secret", "../a", "../../a"):
            assert not is_inside(folder / name, folder), name
    assert is_inside(snapshot / "data" / "blob", snapshot / "data")
    (tmp_path / "other" / "blob").symlink_to(repository / "blobs" / "1")
    assert not is_inside(tmp_path / "other" / "blob", tmp_path / "other")
    assert not is_inside(Path("https://example.com/a"), tmp_path)
    # Folders with the names of the cache's, but not of a repository in it.
    mine, theirs = tmp_path / "data" / "snapshots" / "x", tmp_path / "data" / "blobs"
    for path in (mine, theirs):
        path.mkdir(parents=True)
    (mine / "secret").symlink_to(theirs / "1")
    assert is_inside(mine / "1", mine)
    assert not is_inside(mine / "secret", mine)
