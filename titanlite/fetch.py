"""Copies of folders in a bucket: for commands that read them, in titanlite/fetched in the user's cache
folder; for commands that write them, in $TMPDIR until they are uploaded."""

from __future__ import annotations

import fcntl
import hashlib
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePath

from titanlite.checkpoint import commit
from titanlite.checkpoint.commit import CheckpointError, Damaged, Manifest
from titanlite.checkpoint.digest import FileDigest, digest_file, fault_of, first_fault, gib
from titanlite.config.component import ConfigError
from titanlite.config.paths import check_new
from titanlite.files import hash_stream, make_folder, new_folder
from titanlite.log import tell
from titanlite.progress import Progress
from titanlite.runtime.environment import user_cache
from titanlite.storage import FileVersion, storage_of, upload

BLOCK_BYTES = 8 << 20
LAST = (
    "model.safetensors.index.json", "config.json", "adapter_config.json", "meta_000000.json", commit.MANIFEST,
)  # fmt: skip
"""The files of exports (meta_000000.json: of nanochat's format), adapters and checkpoints that are written
last, in this order."""


def local_copy(path: PurePath) -> Path:
    """A local path as it is; otherwise a copy of the checkpoint at `path`, of the newest checkpoint of a run
    folder, or of a folder with other files. A copy of a checkpoint is made once, and its hashes are checked;
    of other files once for each version of theirs. Several processes may call this at once. Raises
    ConfigError, or CheckpointError for a damaged checkpoint."""
    if isinstance(path, Path):
        return path
    storage = storage_of(path)
    steps = commit.list_committed(path) or commit.list_committed(path / "checkpoint")
    is_one = commit.step_of(path) is not None or storage.exists(path / commit.MANIFEST)
    checkpoint = path if is_one else steps[-1][1] if steps else None
    if checkpoint is None:
        return _copy_of_files(path)
    if not storage.is_folder(checkpoint):
        raise ConfigError(f"{checkpoint}: there is no such checkpoint")
    try:
        manifest = commit.check(checkpoint)
        folder = _cache() / manifest["sha256"][:32] / f"step-{manifest['step']}"
        with _alone(folder.parent):
            if not folder.exists():
                tell(f"copying {checkpoint} ({gib(commit.total_size(manifest))}) to {folder.parent}")
                with new_folder(folder) as partial:
                    _copy_checkpoint(checkpoint, manifest, partial)
    except Damaged as e:
        if not storage.is_folder(checkpoint):  # a run that goes on deletes old ones
            raise CheckpointError(f"{checkpoint} was deleted while it was read") from None
        raise commit.damaged(checkpoint, e) from None
    return folder


@contextmanager
def verified_copy(path: PurePath, manifest: Manifest) -> Iterator[Path]:
    """Verify the contents of a checkpoint. Yields its path on a local disk, otherwise that of a copy in
    $TMPDIR, which is deleted when the body ends. Raises Damaged."""
    if isinstance(path, Path):
        if reason := first_fault(path, commit.digests(manifest)):
            raise Damaged(reason)
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="titanlite-verify-") as folder:
        _copy_checkpoint(path, manifest, Path(folder))
        yield Path(folder)


def _copy_checkpoint(path: PurePath, manifest: Manifest, folder: Path) -> None:
    """Copy the files of a checkpoint into an empty folder. Raises Damaged for one that is not as it was
    written."""
    for name, expected in commit.digests(manifest).items():
        if reason := fault_of(path / name, expected, lambda source: _fetch(source, folder / source.name)):
            raise Damaged(reason)
    (folder / commit.MANIFEST).write_text(commit.manifest_text(manifest))


def _copy_of_files(path: PurePath) -> Path:
    """A copy of all files directly in a folder, whose tags tell it from one of other contents."""
    files = _files_in(path)
    if not files:
        raise ConfigError(f"{path}: there is no such folder")
    about = repr(sorted((str(file), *version) for file, version in files.items()))
    folder = _cache() / hashlib.sha256(about.encode()).hexdigest()[:32] / path.name
    with _alone(folder.parent):
        if not folder.exists():
            tell(f"copying {path} to {folder.parent}")
            with new_folder(folder) as partial:
                try:
                    for file in files:
                        _fetch(file, partial / file.name)
                    is_same = _files_in(path) == files
                except FileNotFoundError:  # deleted since
                    is_same = False
                if not is_same:
                    raise ConfigError(f"{path} changed while it was copied; repeat the command")
    return folder


def _files_in(folder: PurePath) -> dict[PurePath, FileVersion]:
    files = storage_of(folder).files_below(folder)
    return {file: version for file, version in files.items() if file.parent == folder}


def check_target(target: PurePath, key: str) -> None:
    """Raise ConfigError if a command cannot write the new folder `target`. `key`: names it. A folder in a
    bucket may have the files of an interrupted upload, which has no file of LAST but the index."""
    if isinstance(target, Path):
        check_new(target, key)
        return
    storage_of(target).check_writable(target, key)
    if any(storage_of(target).exists(target / name) for name in LAST[1:]):
        raise ConfigError(f"{target} exists; choose another, or delete it", key)


@contextmanager
def new_target(target: PurePath) -> Iterator[Path]:
    """Yield the path of the local folder that the body makes: `target` itself, or a folder in $TMPDIR that is
    uploaded to the bucket when the body ends, without the files that are there already with the same
    content. Raises ConfigError for a folder with other files, CheckpointError if it cannot be written."""
    if isinstance(target, Path):
        yield target
        return
    with tempfile.TemporaryDirectory(prefix="titanlite-upload-") as folder:
        local = Path(folder, target.name)
        yield local
        try:
            _upload_folder(local, target)
        except OSError as e:
            raise CheckpointError(
                f"{target} could not be written whole: {type(e).__name__}: {e}; the same command completes it"
            ) from None


def _upload_folder(folder: Path, target: PurePath) -> None:
    storage = storage_of(target)
    there = {path.name for path in storage.list(target)}
    names = [file.name for file in folder.iterdir()]
    if others := there - set(names):
        raise ConfigError(f"{target} has other files, such as {min(others)}; choose another folder")
    for name in sorted(names, key=lambda name: (LAST.index(name) if name in LAST else -1, name)):
        if name in there and _is_uploaded(folder / name, target / name):
            tell(f"{target / name} is there already")
            continue
        upload(folder / name, target / name)


def _is_uploaded(file: Path, target: PurePath) -> bool:
    """Whether an object has the content of a file. It is read if it has the same size."""
    return storage_of(target).size(target) == file.stat().st_size and digest_file(target) == digest_file(file)


def _cache() -> Path:
    return user_cache().expanduser() / "titanlite" / "fetched"


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Only one process of this machine is in the body."""
    make_folder(folder)
    with open(folder / ".lock", "w") as file:
        fcntl.lockf(file, fcntl.LOCK_EX)
        yield


def _fetch(source: PurePath, target: Path) -> FileDigest:
    """Copy a file. Returns the size and the SHA-256 of the copy."""
    size = storage_of(source).size(source)
    bar = Progress(total=size, desc=source.name, unit="B", unit_scale=True, delay=2, leave=False)
    with storage_of(source).open(source) as reader, open(target, "wb") as writer, bar:
        while block := reader.read(BLOCK_BYTES):
            writer.write(block)
            bar.update(len(block))
    with open(target, "rb") as copied:
        return FileDigest(*hash_stream(copied, target))
