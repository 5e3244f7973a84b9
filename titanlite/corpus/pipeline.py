"""prepare: makes token shards from text files, for `titanlite prepare` and for text sources on first use.

The files are partitioned into splits (data/text_files.py), the splits are drawn at random into shards, and
the documents of each shard are shuffled. Training shuffles sequences over the whole dataset (data/order.py),
so preparation needs to mix only the documents within a sequence. stages.py does the work, in a folder beside
the output. Finished work is never repeated: a preparation continues after a kill, and several machines can
share it. The resulting bytes do not depend on interruptions, processes or machines. The folder is renamed to
the output when it is complete. If the output is in a bucket, the folder is in the user's cache folder, one
for each worker, and finished work is sent to the bucket (shared_work.py)."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import IO, Any

from titanlite.config import toml
from titanlite.config.component import ConfigError
from titanlite.corpus.report import located, merge, summary
from titanlite.corpus.shared_work import SharedWork, is_made, joined, open_made
from titanlite.corpus.stages import JobState, PrepareOptions
from titanlite.data.shards import PreparedTokens, TokenShards, write_description
from titanlite.data.text_files import size_of
from titanlite.data.worker_pool import num_cores, worker_pool
from titanlite.files import make_folder, sync, write_atomically
from titanlite.log import logger
from titanlite.progress import Progress
from titanlite.runtime.environment import user_cache
from titanlite.tokenizers.base import Tokenizer


def prepare(
    files: Sequence[PurePath],
    output: PurePath,
    tokenizer: Tokenizer,
    options: PrepareOptions,
    *,
    num_processes: int = 0,
    worker: tuple[int, int] = (0, 1),
    origin: dict[str, Any] | None = None,
) -> PreparedTokens | None:
    """Make the dataset `output` from text files in `num_processes` processes (0: one per core).

    `worker` (i, n): do only the i-th of n shares of the work. The last worker to finish completes the dataset
    and returns it; the other workers return None. `origin`: a record for dataset.json of what the files were
    made from. Raises ConfigError for bad input; finished work is then kept for the next call."""
    options.chat_format(tokenizer, files)  # before the folder is made
    folder = work_folder(output, worker)
    is_new = not folder.exists()
    with locked(folder, output, worker) as unfinished:
        if not unfinished:  # another process has completed the dataset
            return open_made(output)
        try:
            state = JobState(files, folder, tokenizer, options)
            if not state.splits:
                raise ConfigError("the corpus is empty: no text files")
            if isinstance(output, Path):
                _check_same_job(state, worker)
                if state.marker("whole", state.key) is None:
                    _work_on(state, num_processes, worker, output.name)
                return _complete(state, output, origin)
            with joined(output, worker, state.key) as state.shared:
                return _prepare_shared(state, state.shared, num_processes, worker, origin)
        except FileNotFoundError:  # another worker may have completed the dataset and deleted the work
            if not is_made(output):
                raise
            return open_made(output)
        except ConfigError:
            if is_new and worker[1] == 1 and not any(folder.glob("*.json")):  # no work is finished
                shutil.rmtree(folder, ignore_errors=True)
            raise


def _prepare_shared(
    state: JobState,
    shared: SharedWork,
    num_processes: int,
    worker: tuple[int, int],
    origin: dict[str, Any] | None,
) -> PreparedTokens | None:
    """Do a worker's share of the work, and complete the dataset in a bucket if no shard is missing."""
    if not shared.is_made:
        shared.delete_others(state.shared_names())
        _work_on(state, num_processes, worker, shared.output.name)
        shared.look()
        shards = range(len(state.shards))
        if not all(map(state.is_assembled, shards)):
            shutil.rmtree(state.folder, ignore_errors=True)  # all of this worker's work is in the bucket
            return None
        names = list(map(state.shared_shard, shards))
        records = shared.records(names)
        _describe(state, records, origin)
        shared.complete(state.folder, {name: record["tags"] for name, record in zip(names, records)})
    shutil.rmtree(state.folder, ignore_errors=True)
    return open_made(shared.output)


def discard(output: Path) -> None:
    """Delete the unfinished work for `output`, after other processes have ended theirs."""
    folder = work_folder(output)
    if folder.exists():
        with locked(folder, output, (0, 1)) as unfinished:
            if unfinished:
                shutil.rmtree(folder, ignore_errors=True)


def work_folder(output: PurePath, worker: tuple[int, int] = (0, 1)) -> Path:
    """Return the folder of unfinished work for `output`, on a local disk."""
    if isinstance(output, Path):
        return output.with_name(f".partial-{output.name}")
    name = hashlib.sha256(str(output).encode()).hexdigest()[:16]
    return user_cache().expanduser() / "titanlite" / "prepare" / f"{name}-{worker[0]}-of-{worker[1]}"


# ---- the stages, on all processes


def _work_on(state: JobState, num_processes: int, worker: tuple[int, int], name: str) -> None:
    """Do a worker's share of the work. `name`: of the dataset, for the progress bar."""
    processes = min(num_processes or num_cores(), len(state.splits))
    with worker_pool(processes, _begin, state) as pool:
        if state.compares:
            _scan(state, pool, processes, worker)
        _encode(state, pool, processes, worker, name)


@dataclass(frozen=True)
class Task:
    """One call of a stage, a method of `JobState`, with the number of a split or shard. `size`: bytes of
    text, for the progress bar."""

    stage: str
    index: int
    size: int = 0


def _scan(state: JobState, pool: Executor, processes: int, worker: tuple[int, int]) -> None:
    if state.is_resolved():
        return

    def missing(splits: Iterable[int]) -> deque[Task]:
        if state.shared:
            state.shared.look()
        return deque(Task("scan", i, state.splits[i].size) for i in splits if not state.is_scanned(i))

    indices = range(len(state.splits))
    total, left = sum(split.size for split in state.splits), sum(task.size for task in missing(indices))
    with _bar(total, total - left, "scanning for duplicates") as bar:
        # First this worker's splits. Then, from the last, the splits that other workers have not done, so
        # that no worker waits for one that never starts.
        for splits in (indices[worker[0] :: worker[1]], reversed(indices)):
            for _ in _run(pool, processes, bar, missing(splits), state.shared):
                pass
        with _alone(state):  # one worker resolves, other workers wait
            if state.shared:
                state.shared.look()
            if not state.is_resolved():
                state.resolve(lambda stage: bar.set_description(f"resolving {stage}"))


@contextmanager
def _alone(state: JobState) -> Iterator[None]:
    """Only one worker is in the body."""
    if state.shared:
        with state.shared.alone():
            yield
        return
    with open(state.folder / "lock-resolve", "a") as lock:
        _lock(lock, "another worker to resolve duplicates")
        yield


def _encode(state: JobState, pool: Executor, processes: int, worker: tuple[int, int], name: str) -> None:
    shards = range(len(state.shards))[worker[0] :: worker[1]]
    missing = {
        shard: [
            Task("encode", i, state.splits[i].size)
            for i in state.shards[shard]
            if state.marker(f"split-{i:06}", state.split_keys[i]) is None
        ]
        for shard in shards
        if not state.is_assembled(shard)
    }
    if state.shared:  # a shard may be assembled here and not in the bucket yet
        for shard in missing:
            if state.marker(f"shard-{shard:05}", state.shard_keys[shard]):
                missing[shard] = []
    shard_of = {i: shard for shard in missing for i in state.shards[shard]}
    num_open = {shard: len(tasks) for shard, tasks in missing.items()}
    total = sum(state.splits[i].size for shard in shards for i in state.shards[shard])
    left = sum(task.size for tasks in missing.values() for task in tasks)
    todo = deque(task for shard, tasks in missing.items() for task in (tasks or [Task("assemble", shard)]))
    documents = tokens = 0
    with _bar(total, total - left, f"tokenising into {name}") as bar:
        for task, result in _run(pool, processes, bar, todo, state.shared):
            if task.stage == "encode":
                documents, tokens = documents + result["documents"], tokens + result["tokens"]
                bar.set_postfix(documents=documents, tokens=tokens, refresh=False)
                num_open[shard := shard_of[task.index]] -= 1
                if not num_open[shard]:
                    todo.appendleft(Task("assemble", shard))


def _run(
    pool: Executor, processes: int, bar: Progress, tasks: deque[Task], shared: SharedWork | None
) -> Iterator[tuple[Task, Any]]:
    """Run tasks and yield each with its result when it is finished. The caller may add tasks meanwhile."""
    pending: dict[Future, Task] = {}
    while tasks or pending:
        if shared:
            shared.check()
        while tasks and len(pending) < 2 * processes:  # few pending tasks: shards are finished in order
            task = tasks.popleft()
            pending[pool.submit(_work, task)] = task
        finished, _ = wait(pending, timeout=1, return_when=FIRST_COMPLETED)
        for future in finished:
            task = pending.pop(future)
            try:
                result = future.result()
            except BrokenProcessPool:
                raise RuntimeError(
                    "a process of the preparation was killed, perhaps because memory ran out; run it "
                    "again to continue"
                ) from None
            bar.update(task.size)
            yield task, result
        bar.refresh()  # updates the elapsed time


def _bar(total: int, done: int, description: str) -> Progress:
    return Progress(total=total, initial=done, unit="B", unit_scale=True, desc=description, mininterval=0.5)


# ---- processes

_state: list[JobState] = []  # one entry: the state of this process


def _begin(state: JobState) -> None:
    _state[:] = [state]


def _work(task: Task) -> Any:
    return getattr(_state[0], task.stage)(task.index)


# ---- locks


@contextmanager
def locked(folder: Path, output: PurePath, worker: tuple[int, int]) -> Iterator[bool]:
    """Hold the lock of a worker, so that only one process runs it. Yields False if `output` exists. Raises
    ConfigError if workers of another total number are running."""
    while True:
        if is_made(output):
            shutil.rmtree(folder, ignore_errors=True)
            yield False
            return
        try:
            make_folder(folder)
        except OSError as e:
            key = "output" if isinstance(output, Path) else None  # of a bucket's, it is in the cache folder
            raise ConfigError(f"cannot make {folder}: {e.strerror}", key) from None
        with open(folder / f"lock-{worker[0]}-of-{worker[1]}", "a") as lock:
            _lock(lock, f"another process that prepares {output.name}")
            if not os.fstat(lock.fileno()).st_nlink:  # the previous holder has deleted the folder
                continue
            if others := [name for name in _held(folder, worker) if not name.endswith(f"-of-{worker[1]}")]:
                raise ConfigError(
                    f"{folder.name}: a preparation by {others[0].rpartition('-')[2]} workers is running; "
                    "wait for it, or join it with the same number of workers"
                )
            yield True
            return


def _held(folder: Path, worker: tuple[int, int]) -> Iterator[str]:
    """Yield the names of the locks that other workers hold."""
    for file in folder.glob("lock-*-of-*"):
        if file.name != f"lock-{worker[0]}-of-{worker[1]}":
            with open(file, "a") as lock:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    yield file.name


def _check_same_job(state: JobState, worker: tuple[int, int]) -> None:
    """Raise ConfigError if a running worker prepares another dataset in this folder: their files would
    mix."""
    file = state.folder / "plan"
    with open(state.folder / "lock", "a") as lock:
        _lock(lock, "another worker to start")
        if file.exists() and file.read_text() != state.key and any(_held(state.folder, worker)):
            raise ConfigError(
                f"{state.folder.name}: another worker is preparing it from other files, filters or another "
                "tokenizer; wait for it, or give all workers the same input"
            )
        write_atomically(file, state.key)


def _lock(file: IO[str], holder: str) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        logger.info(f"waiting for {holder}")
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError as e:
        raise ConfigError(f"{file.name}: this file system has no locks ({e.strerror})") from None


# ---- the end


def _complete(state: JobState, output: Path, origin: dict[str, Any] | None) -> TokenShards | None:
    """Rename the work folder to the dataset if no shard is missing."""
    folder = state.folder
    with open(folder / "lock", "a") as lock:
        _lock(lock, "another worker to finish")
        if output.exists():
            return TokenShards(output)
        if state.marker("whole", state.key) is None:
            markers = [state.marker(f"shard-{i:05}", key) for i, key in enumerate(state.shard_keys)]
            shards = [marker for marker in markers if marker is not None]
            if len(shards) < len(markers):
                return None
            _describe(state, shards, origin)
            state.mark("whole", state.key, {})  # after this only files are deleted
            sync(folder)
        keep = {f"{i:05}.{suffix}" for i in range(len(state.shards)) for suffix in ("bin", "idx", "mask")}
        for file in folder.iterdir():
            if file.name not in keep | {"dataset.json", "report.json", "whole.json"}:
                file.unlink(missing_ok=True)  # other workers delete their splits' files at the same time
        sync(folder)
        os.rename(folder, output)
        (output / "whole.json").unlink()
        sync(output)
        sync(output.parent)
        return TokenShards(output)


def _describe(state: JobState, shards: Sequence[dict[str, Any]], origin: dict[str, Any] | None) -> None:
    """Write report.json and dataset.json. `shards`: the markers of all shards. Raises ConfigError if they are
    empty."""
    report = merge([shard["report"] for shard in shards])
    if not report["kept"]["documents"]:
        reason = f"; the filters removed all text:\n{summary(report)}" if report["filters"] else ""
        raise ConfigError(f"the corpus is empty: no text in its files{reason}")
    text = json.dumps(located(report), indent=1, ensure_ascii=False) + "\n"
    write_atomically(state.folder / "report.json", text)
    prepared = prepared_record(state.options, state.tokenizer, state.files, origin)
    write_description(state.folder, state.tokenizer, [shard["entry"] for shard in shards], prepared)


def prepared_record(
    options: PrepareOptions, tokenizer: Tokenizer, files: Sequence[PurePath], origin: dict[str, Any] | None
) -> dict[str, Any]:
    """Return the record of options, tokenizer and input that dataset.json keeps. `origin`: as in
    `prepare`."""
    sizes = [(file.name, size_of(file)) for file in files]
    corpus = {
        "files": len(files),
        "bytes": sum(size for _, size in sizes),
        "names_and_sizes_sha256": hashlib.sha256(repr(sizes).encode()).hexdigest(),
    }
    tree = {**toml.as_tree(options), "input": corpus | (origin or {})}
    if chat := options.chat_format(tokenizer, files):
        tree["chat_template"] = chat.fingerprint
        tree |= {"warning": warning} if (warning := chat.warning()) else {}
    return tree | ({"tokenizer": toml.as_tree(tokenizer.config)} if tokenizer.config else {})
