"""prepare: makes token shards from text files, for `titanlite prepare` and for the source `chat`.

The files are partitioned into splits, which are drawn at random into shards, and the documents of each shard
are shuffled, as in data/tokenize_files.py, which neither filters nor resumes. stages.py does the work, in a
folder beside the output. Finished work is never repeated: a preparation continues after a kill. The resulting
bytes do not depend on interruptions or on the number of processes. The folder is renamed to the output when
it is complete."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from titanlite.config import toml
from titanlite.config.component import ConfigError
from titanlite.corpus.report import located, merge, table
from titanlite.corpus.stages import JobState, PrepareOptions
from titanlite.data.shards import TokenShards, write_description
from titanlite.data.worker_pool import num_cores, worker_pool
from titanlite.files import make_folder, sync, write_atomically
from titanlite.log import logger
from titanlite.progress import Progress
from titanlite.tokenizers.base import Tokenizer


def prepare(
    files: Sequence[Path],
    output: Path,
    tokenizer: Tokenizer,
    options: PrepareOptions,
    *,
    num_processes: int = 0,
    origin: dict[str, Any] | None = None,
) -> TokenShards:
    """Make the dataset `output` from text files in `num_processes` processes (0: one per core).

    `origin`: a record for dataset.json of what the files were made from. Raises ConfigError for bad input;
    finished work is then kept for the next call."""
    options.chat_format(tokenizer, files)  # before the folder is made
    folder = work_folder(output)
    is_new = not folder.exists()
    with locked(folder, output) as unfinished:
        if not unfinished:  # another process has completed the dataset
            return TokenShards(output)
        try:
            state = JobState(files, folder, tokenizer, options)
            if not state.splits:
                raise ConfigError("the corpus is empty: no text files")
            if state.marker("whole", state.key) is None:
                processes = min(num_processes or num_cores(), len(state.splits))
                with worker_pool(processes, _begin, state) as pool:
                    if state.compares:
                        _scan(state, pool, processes)
                    _encode(state, pool, processes, output.name)
            return _complete(state, output, origin)
        except ConfigError:
            if is_new and not any(folder.glob("*.json")):  # no work is finished
                shutil.rmtree(folder, ignore_errors=True)
            raise


def discard(output: Path) -> None:
    """Delete the unfinished work for `output`, after other processes have ended theirs."""
    folder = work_folder(output)
    if folder.exists():
        with locked(folder, output) as unfinished:
            if unfinished:
                shutil.rmtree(folder, ignore_errors=True)


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


def _scan(state: JobState, pool: Executor, processes: int) -> None:
    if state.marker("resolve", state.resolve_key):
        return
    indices = range(len(state.splits))
    left = [i for i in indices if state.marker(f"scan-{i:06}", state.scan_keys[i]) is None]
    tasks = deque(Task("scan", i, state.splits[i].size) for i in left)
    total = sum(split.size for split in state.splits)
    with _bar(total, total - sum(task.size for task in tasks), "scanning for duplicates") as bar:
        for _ in _run(pool, processes, bar, tasks):
            pass
        state.resolve(lambda stage: bar.set_description(f"resolving {stage}"))


def _encode(state: JobState, pool: Executor, processes: int, name: str) -> None:
    shards = range(len(state.shards))
    missing = {
        shard: [
            Task("encode", i, state.splits[i].size)
            for i in state.shards[shard]
            if state.marker(f"split-{i:06}", state.split_keys[i]) is None
        ]
        for shard in shards
        if state.marker(f"shard-{shard:05}", state.shard_keys[shard]) is None
    }
    shard_of = {i: shard for shard in missing for i in state.shards[shard]}
    num_open = {shard: len(tasks) for shard, tasks in missing.items()}
    total = sum(state.splits[i].size for shard in shards for i in state.shards[shard])
    left = sum(task.size for tasks in missing.values() for task in tasks)
    todo = deque(task for shard, tasks in missing.items() for task in (tasks or [Task("assemble", shard)]))
    documents = tokens = 0
    with _bar(total, total - left, f"tokenising into {name}") as bar:
        for task, result in _run(pool, processes, bar, todo):
            if task.stage == "encode":
                documents, tokens = documents + result["documents"], tokens + result["tokens"]
                bar.set_postfix(documents=documents, tokens=tokens, refresh=False)
                num_open[shard := shard_of[task.index]] -= 1
                if not num_open[shard]:
                    todo.appendleft(Task("assemble", shard))


def _run(pool: Executor, processes: int, bar: Progress, tasks: deque[Task]) -> Iterator[tuple[Task, Any]]:
    """Run tasks and yield each with its result when it is finished. The caller may add tasks meanwhile."""
    pending: dict[Future, Task] = {}
    while tasks or pending:
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


# ---- the lock


@contextmanager
def locked(folder: Path, output: Path) -> Iterator[bool]:
    """Hold the lock of a work folder, so that only one process prepares `output`. Yields False if `output`
    exists."""
    while True:
        if output.exists():
            shutil.rmtree(folder, ignore_errors=True)
            yield False
            return
        try:
            make_folder(folder)
        except OSError as e:
            raise ConfigError(f"cannot make {folder}: {e.strerror}", "output") from None
        with open(folder / "lock", "a") as lock:
            _lock(lock, f"another process that prepares {output.name}")
            if os.fstat(lock.fileno()).st_nlink:  # otherwise the previous holder has deleted the folder
                yield True
                return


def _lock(file: IO[str], holder: str) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        logger.info(f"waiting for {holder}")
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError as e:
        raise ConfigError(f"{file.name}: this file system has no locks ({e.strerror})") from None


# ---- the end


def _complete(state: JobState, output: Path, origin: dict[str, Any] | None) -> TokenShards:
    """Rename the work folder to the dataset."""
    folder = state.folder
    if state.marker("whole", state.key) is None:
        markers = [state.marker(f"shard-{i:05}", key) for i, key in enumerate(state.shard_keys)]
        shards = [marker for marker in markers if marker is not None]
        assert len(shards) == len(markers)
        report = merge([shard["report"] for shard in shards])
        if not report["kept"]["documents"]:
            reason = f"; the filters removed all text:\n{table(report)}" if report["filters"] else ""
            raise ConfigError(f"the corpus is empty: no text in its files{reason}")
        text = json.dumps(located(report), indent=1, ensure_ascii=False) + "\n"
        write_atomically(folder / "report.json", text)
        prepared = prepared_record(state.options, state.tokenizer, state.files, origin)
        write_description(folder, state.tokenizer, [shard["entry"] for shard in shards], prepared)
        state.mark("whole", state.key, {})  # after this only files are deleted
        sync(folder)
    keep = {f"{i:05}.{suffix}" for i in range(len(state.shards)) for suffix in ("bin", "idx", "mask")}
    for file in folder.iterdir():
        if file.name not in keep | {"dataset.json", "report.json", "whole.json"}:
            file.unlink()
    sync(folder)
    os.rename(folder, output)
    (output / "whole.json").unlink()
    sync(output)
    sync(output.parent)
    return TokenShards(output)


def prepared_record(
    options: PrepareOptions, tokenizer: Tokenizer, files: Sequence[Path], origin: dict[str, Any] | None
) -> dict[str, Any]:
    """Return the record of options, tokenizer and input that dataset.json keeps. `origin`: as in
    `prepare`."""
    sizes = [(file.name, file.stat().st_size) for file in files]
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
