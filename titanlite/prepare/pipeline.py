"""prepare: from text files to token shards, for `titanlite prepare` and for sources of text on first use.

The files are divided into splits (corpus.py), the splits are drawn at random into shards, and the documents
of each shard are shuffled again. Training shuffles sequences over the whole dataset (data/order.py), so this
has only to mix the documents within a sequence. stages.py does the work, in a folder beside the output.
Finished work is never repeated: a killed run continues, and several machines can share a corpus. The bytes
depend on none of that. The folder is renamed to the output when it is complete."""

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
from pathlib import Path
from typing import IO, Any

from titanlite.config import toml
from titanlite.config.component import ConfigError
from titanlite.data.shards import TokenShards, write_description
from titanlite.data.worker_pool import num_cores, worker_pool
from titanlite.files import make_folder, sync, write_atomically
from titanlite.log import logger
from titanlite.prepare.report import located, merge, table
from titanlite.prepare.stages import JobState, PrepareOptions
from titanlite.progress import Progress
from titanlite.tokenizers.base import Tokenizer


def prepare(
    files: Sequence[Path],
    output: Path,
    tokenizer: Tokenizer,
    options: PrepareOptions,
    *,
    num_processes: int = 0,
    worker: tuple[int, int] = (0, 1),
    keep: bool = True,
) -> TokenShards | None:
    """Make the dataset `output` from text files in `num_processes` processes (0: one per core).

    `worker` (i, n): do only the i-th of n shares of the work. The last worker to finish completes the
    dataset; the others return None. Raises ConfigError for bad input; finished work is then kept for the next
    call if `keep`."""
    folder = work_folder(output)
    with locked(folder, output, worker) as unfinished:
        if not unfinished:  # another process has made it
            return TokenShards(output)
        try:
            state = JobState(files, folder, tokenizer, options)
            if not state.splits:
                raise ConfigError("the corpus is empty: no text files")
            _check_same_job(state, worker)
            if state.marker("whole", state.key) is None:
                processes = min(num_processes or num_cores(), len(state.splits))
                with worker_pool(processes, _begin, state) as pool:
                    if state.compares:
                        _scan(state, pool, processes, worker)
                    _encode(state, pool, processes, worker, output.name)
            return _complete(state, output)
        except FileNotFoundError:  # the folder is gone: another worker has completed it meanwhile
            if not output.exists():
                raise
            return TokenShards(output)
        except ConfigError:
            if not keep:
                shutil.rmtree(folder, ignore_errors=True)
            raise


def work_folder(output: Path) -> Path:
    """Return the folder of unfinished work for `output`."""
    return output.with_name(f".partial-{output.name}")


# ---- the stages, on all processes


@dataclass(frozen=True)
class Task:
    """One call of a stage, a method of `JobState`, with the number of a split or shard. `size`: bytes of
    text, for the progress bar."""

    stage: str
    index: int
    size: int = 0


def _scan(state: JobState, pool: Executor, processes: int, worker: tuple[int, int]) -> None:
    if state.marker("resolve", state.resolve_key):
        return

    def missing(splits: Iterable[int]) -> deque[Task]:
        tasks = deque[Task]()
        for u in splits:
            if state.marker(f"scan-{u:06}", state.scan_keys[u]) is None:
                tasks.append(Task("scan", u, state.splits[u].size))
        return tasks

    everything = range(len(state.splits))
    total, left = sum(u.size for u in state.splits), sum(task.size for task in missing(everything))
    with _bar(total, total - left, "scanning for duplicates") as bar:
        for _ in _run(pool, processes, bar, missing(everything[worker[0] :: worker[1]])):
            pass
        # Then the splits that other workers have not done, from the last: a worker that never starts is not
        # waited for.
        for _ in _run(pool, processes, bar, missing(reversed(everything))):
            pass
        with open(state.folder / "lock-resolve", "a") as lock:  # one worker resolves, the others wait
            _lock(lock, "another worker to resolve duplicates")
            if state.marker("resolve", state.resolve_key) is None:
                state.resolve(lambda stage: bar.set_description(f"resolving {stage}"))


def _encode(state: JobState, pool: Executor, processes: int, worker: tuple[int, int], name: str) -> None:
    missing = {
        s: [
            Task("encode", u, state.splits[u].size)
            for u in state.shards[s]
            if state.marker(f"unit-{u:06}", state.split_keys[u]) is None
        ]
        for s in range(len(state.shards))[worker[0] :: worker[1]]
        if state.marker(f"shard-{s:05}", state.shard_keys[s]) is None
    }
    shard_of = {u: s for s in missing for u in state.shards[s]}
    open_splits = {s: len(tasks) for s, tasks in missing.items()}
    total = sum(
        state.splits[u].size
        for s in range(len(state.shards))[worker[0] :: worker[1]]
        for u in state.shards[s]
    )
    left = sum(task.size for tasks in missing.values() for task in tasks)
    todo = deque(task for s, tasks in missing.items() for task in (tasks or [Task("assemble", s)]))
    documents = tokens = 0
    with _bar(total, total - left, f"tokenising into {name}") as bar:
        for task, made in _run(pool, processes, bar, todo):
            if task.stage == "encode":
                documents, tokens = documents + made["documents"], tokens + made["tokens"]
                bar.set_postfix(documents=documents, tokens=tokens, refresh=False)
                open_splits[s := shard_of[task.index]] -= 1
                if not open_splits[s]:
                    todo.appendleft(Task("assemble", s))


def _run(pool: Executor, processes: int, bar: Progress, tasks: deque[Task]) -> Iterator[tuple[Task, Any]]:
    """Yield each task with its result when it is finished. Tasks may be added meanwhile."""
    pending: dict[Future, Task] = {}
    while tasks or pending:
        while tasks and len(pending) < 2 * processes:  # few, so that shards are finished in order
            task = tasks.popleft()
            pending[pool.submit(_work, task)] = task
        finished, _ = wait(pending, timeout=1, return_when=FIRST_COMPLETED)
        for future in finished:
            task = pending.pop(future)
            try:
                made = future.result()
            except BrokenProcessPool:
                raise RuntimeError(
                    "a process of the preparation was killed, perhaps because memory ran out; run it "
                    "again to continue"
                ) from None
            bar.update(task.size)
            yield task, made
        bar.refresh()  # so that the clock advances while nothing finishes


def _bar(total: int, done: int, description: str) -> Progress:
    return Progress(total=total, initial=done, unit="B", unit_scale=True, desc=description, mininterval=0.5)


# ---- processes

_state: list[JobState] = []  # of this process, one entry


def _begin(state: JobState) -> None:
    _state[:] = [state]


def _work(task: Task) -> Any:
    return getattr(_state[0], task.stage)(task.index)


# ---- locks


@contextmanager
def locked(folder: Path, output: Path, worker: tuple[int, int]) -> Iterator[bool]:
    """Hold the lock of a worker, so that it runs once at a time, and refuse another number of workers
    meanwhile. Yields False if `output` exists."""
    while True:
        if output.exists():
            shutil.rmtree(folder, ignore_errors=True)
            yield False
            return
        try:
            make_folder(folder)
        except OSError as e:
            raise ConfigError(f"cannot make {folder}: {e.strerror}", "output") from None
        with open(folder / f"lock-{worker[0]}-of-{worker[1]}", "a") as lock:
            _lock(lock, f"another process that prepares {output.name}")
            if not os.fstat(lock.fileno()).st_nlink:  # its holder has finished, and deleted the folder
                continue
            if others := [other for other in _held(folder, worker) if not other.endswith(f"-of-{worker[1]}")]:
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
    """Raise ConfigError if a running worker prepares another dataset here: they would mix their files."""
    file = state.folder / "plan"
    with open(state.folder / "lock", "a") as lock:
        _lock(lock, "another worker to start")
        if file.exists() and file.read_text() != state.key and any(_held(state.folder, worker)):
            raise ConfigError(
                f"{state.folder.name}: another worker is preparing it from other files, or with other "
                "filters or another tokenizer; wait for it, or give all workers the same input"
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


def _complete(state: JobState, output: Path) -> TokenShards | None:
    """Rename the work folder to the dataset if no shard is missing."""
    folder = state.folder
    with open(folder / "lock", "a") as lock:
        _lock(lock, "another worker to finish")
        if output.exists():
            return TokenShards(output)
        if state.marker("whole", state.key) is None:
            made = [state.marker(f"shard-{s:05}", key) for s, key in enumerate(state.shard_keys)]
            shards = [m for m in made if m is not None]
            if len(shards) < len(made):
                return None
            report = merge([m["report"] for m in shards])
            if not report["kept"]["documents"]:
                lost = f"; the filters removed all of it:\n{table(report)}" if state.filters else ""
                raise ConfigError(f"the corpus is empty: no text in its files{lost}")
            text = json.dumps(located(report), indent=1, ensure_ascii=False) + "\n"
            write_atomically(folder / "report.json", text)
            prepared = origin(state.options, state.tokenizer, state.files)
            write_description(folder, state.tokenizer, [m["entry"] for m in shards], prepared)
            state.mark("whole", state.key, {})  # from here on only files are deleted
            sync(folder)
        keep = {f"{s:05}.{suffix}" for s in range(len(state.shards)) for suffix in ("bin", "idx")}
        for file in folder.iterdir():
            if file.name not in keep | {"dataset.json", "report.json", "whole.json"}:
                file.unlink(missing_ok=True)  # workers clean up their shards' files at the same time
        sync(folder)
        os.rename(folder, output)
        (output / "whole.json").unlink()
        sync(output)
        sync(output.parent)
        return TokenShards(output)


def origin(options: PrepareOptions, tokenizer: Tokenizer, files: Sequence[Path]) -> dict[str, Any]:
    """Return the record of options, tokenizer and input that dataset.json keeps."""
    sizes = [(file.name, file.stat().st_size) for file in files]
    corpus = {
        "files": len(files),
        "bytes": sum(size for _, size in sizes),
        "names_and_sizes_sha256": hashlib.sha256(repr(sizes).encode()).hexdigest(),
    }
    tree = {**toml.as_tree(options), "filters": toml.as_tree(list(options.filters)), "input": corpus}
    return tree | ({"tokenizer": toml.as_tree(tokenizer.config)} if tokenizer.config else {})
