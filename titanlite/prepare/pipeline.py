"""From a corpus to shards: the one way, for `titanlite prepare` and for raw text on first use.

The corpus is cut into units (corpus.py); units are drawn at random into shards, and a shard's documents are
shuffled again. Training shuffles rows over the whole dataset (order.py), so this has only to mix the
documents that meet in a row. stages.py does the work, in a folder beside the output; done work is never done
again, so a killed run continues, machines can share a corpus, and the bytes depend on none of that. The
folder gets its name when it is whole.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import (
    FIRST_COMPLETED,
    Executor,
    Future,
    wait,
)
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
from titanlite.prepare.stages import Recipe, Work
from titanlite.progress import Progress
from titanlite.tokenizers.base import Tokenizer


def prepare(
    files: Sequence[Path],
    output: Path,
    tokenizer: Tokenizer,
    recipe: Recipe,
    *,
    num_processes: int = 0,
    part: tuple[int, int] = (0, 1),
    keep: bool = True,
) -> TokenShards | None:
    """Make the dataset `output`, on `num_processes` (0: all cores), with a progress bar.

    `part` (i, n): do only the i-th of n shares of the work; the last to finish completes the dataset, the
    others return None. Raises ConfigError for bad input; what was done by then is kept for the next call if
    `keep`.
    """
    folder = work_folder(output)
    with locked(folder, output, part) as unfinished:
        if not unfinished:  # another process was faster
            return TokenShards(output)
        try:
            work = Work(files, folder, tokenizer, recipe)
            if not work.units:
                raise ConfigError("the corpus is empty: no text files")
            _check_plan(work, part)
            if work.marker("whole", work.key) is None:
                processes = min(num_processes or num_cores(), len(work.units))
                with worker_pool(processes, _begin, work) as pool:
                    if work.compares:
                        _scan(work, pool, processes, part)
                    _encode(work, pool, processes, part, output.name)
            return _complete(work, output)
        except FileNotFoundError:  # the folder is gone: another part has completed it meanwhile
            if not output.exists():
                raise
            return TokenShards(output)
        except ConfigError:
            if not keep:
                shutil.rmtree(folder, ignore_errors=True)
            raise


def work_folder(output: Path) -> Path:
    """Where unfinished work for `output` lies."""
    return output.with_name(f".partial-{output.name}")


# ---- the stages, on all processes


@dataclass(frozen=True)
class Task:
    """A stage's function of `Work`, by name, for one unit or shard; `size`: what it adds to the bar."""

    stage: str
    index: int
    size: int = 0


def _scan(work: Work, pool: Executor, processes: int, part: tuple[int, int]) -> None:
    if work.marker("resolve", work.resolve_key):
        return

    def missing(units: Iterable[int]) -> deque[Task]:
        tasks = deque[Task]()
        for u in units:
            if work.marker(f"scan-{u:06}", work.scan_keys[u]) is None:
                tasks.append(Task("scan", u, work.units[u].size))
        return tasks

    everything = range(len(work.units))
    total, left = sum(u.size for u in work.units), sum(task.size for task in missing(everything))
    with _bar(total, total - left, "scanning for duplicates") as bar:
        for _ in _run(pool, processes, bar, missing(everything[part[0] :: part[1]])):
            pass
        # What other parts have not done, from the end: nobody waits for a machine that never comes.
        for _ in _run(pool, processes, bar, missing(reversed(everything))):
            pass
        with open(work.folder / "lock-resolve", "a") as lock:  # one machine sorts, the others wait
            _lock(lock, "another part to resolve duplicates")
            if work.marker("resolve", work.resolve_key) is None:
                work.resolve(lambda what: bar.set_description(f"resolving {what}"))


def _encode(work: Work, pool: Executor, processes: int, part: tuple[int, int], name: str) -> None:
    missing = {
        s: [
            Task("encode", u, work.units[u].size)
            for u in work.shards[s]
            if work.marker(f"unit-{u:06}", work.unit_keys[u]) is None
        ]
        for s in range(len(work.shards))[part[0] :: part[1]]
        if work.marker(f"shard-{s:05}", work.shard_keys[s]) is None
    }
    shard_of = {u: s for s in missing for u in work.shards[s]}
    open_units = {s: len(tasks) for s, tasks in missing.items()}
    total = sum(
        work.units[u].size for s in range(len(work.shards))[part[0] :: part[1]] for u in work.shards[s]
    )
    left = sum(task.size for tasks in missing.values() for task in tasks)
    todo = deque(task for s, tasks in missing.items() for task in (tasks or [Task("assemble", s)]))
    documents = tokens = 0
    with _bar(total, total - left, f"tokenising into {name}") as bar:
        for task, made in _run(pool, processes, bar, todo):
            if task.stage == "encode":
                documents, tokens = documents + made["documents"], tokens + made["tokens"]
                bar.set_postfix(documents=documents, tokens=tokens, refresh=False)
                open_units[s := shard_of[task.index]] -= 1
                if not open_units[s]:
                    todo.appendleft(Task("assemble", s))


def _run(pool: Executor, processes: int, bar: Progress, tasks: deque[Task]) -> Iterator[tuple[Task, Any]]:
    """Each task with its result, as they finish. Tasks may be added meanwhile."""
    pending: dict[Future, Task] = {}
    while tasks or pending:
        while tasks and len(pending) < 2 * processes:  # few, so that shards are finished one after the other
            task = tasks.popleft()
            pending[pool.submit(_work, task)] = task
        finished, _ = wait(pending, timeout=1, return_when=FIRST_COMPLETED)
        for future in finished:
            task = pending.pop(future)
            try:
                made = future.result()
            except BrokenProcessPool:
                raise RuntimeError(
                    "a process of the preparation was killed (out of memory?); run it again to continue"
                ) from None
            bar.update(task.size)
            yield task, made
        bar.refresh()  # the clock goes on while nothing finishes


def _bar(total: int, done: int, what: str) -> Progress:
    return Progress(total=total, initial=done, unit="B", unit_scale=True, desc=what, mininterval=0.5)


# ---- processes

_plan: list[Work] = []  # of a worker


def _begin(work: Work) -> None:
    _plan[:] = [work]


def _work(task: Task) -> Any:
    return getattr(_plan[0], task.stage)(task.index)


# ---- locks


@contextmanager
def locked(folder: Path, output: Path, part: tuple[int, int]) -> Iterator[bool]:
    """One process a part, and one way to cut the work into parts at a time. False: `output` is there."""
    while True:
        if output.exists():
            shutil.rmtree(folder, ignore_errors=True)
            yield False
            return
        try:
            make_folder(folder)
        except OSError as e:
            raise ConfigError(f"{folder} cannot be made: {e.strerror}", "output") from None
        with open(folder / f"lock-{part[0]}-of-{part[1]}", "a") as lock:
            _lock(lock, f"another process that prepares {output.name}")
            if not os.fstat(lock.fileno()).st_nlink:  # who held it has finished, and the folder is gone
                continue
            if others := [other for other in _held(folder, part) if not other.endswith(f"-of-{part[1]}")]:
                raise ConfigError(
                    f"{folder.name}: others work on it in {others[0].rpartition('-')[2]} parts just now; "
                    "wait for them, or join them"
                )
            yield True
            return


def _held(folder: Path, part: tuple[int, int]) -> Iterator[str]:
    """The names of the other parts' locks that someone holds."""
    for file in folder.glob("lock-*-of-*"):
        if file.name != f"lock-{part[0]}-of-{part[1]}":
            with open(file, "a") as lock:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    yield file.name


def _check_plan(work: Work, part: tuple[int, int]) -> None:
    """Parts that run at the same time must have planned the same work, or they would mix their files."""
    file = work.folder / "plan"
    with open(work.folder / "lock", "a") as lock:
        _lock(lock, "another part to start")
        if file.exists() and file.read_text() != work.key and any(_held(work.folder, part)):
            raise ConfigError(
                f"{work.folder.name}: others prepare it just now from other files, or with other filters or "
                "another tokenizer; wait for them, or give all the same"
            )
        write_atomically(file, work.key)


def _lock(file: IO[str], holder: str) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        logger.info(f"waiting for {holder}")
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError as e:
        raise ConfigError(f"{file.name}: this file system has no locks ({e.strerror})") from None


# ---- the end


def _complete(work: Work, output: Path) -> TokenShards | None:
    """Turn the work folder into the dataset if no shard is missing."""
    folder = work.folder
    with open(folder / "lock", "a") as lock:
        _lock(lock, "another part to finish")
        if output.exists():
            return TokenShards(output)
        if work.marker("whole", work.key) is None:
            made = [work.marker(f"shard-{s:05}", key) for s, key in enumerate(work.shard_keys)]
            shards = [m for m in made if m is not None]
            if len(shards) < len(made):
                return None
            report = merge([m["report"] for m in shards])
            if not report["kept"]["documents"]:
                lost = f"; the filters removed all of it:\n{table(report)}" if work.filters else ""
                raise ConfigError(f"the corpus is empty: no text in its files{lost}")
            text = json.dumps(located(report), indent=1, ensure_ascii=False) + "\n"
            write_atomically(folder / "report.json", text)
            made_of = origin(work.recipe, work.tokenizer, work.files)
            write_description(folder, work.tokenizer, [m["entry"] for m in shards], made_of)
            work.mark("whole", work.key, {})  # from here on only files are deleted
            sync(folder)
        keep = {f"{s:05}.{suffix}" for s in range(len(work.shards)) for suffix in ("bin", "idx")}
        for file in folder.iterdir():
            if file.name not in keep | {"dataset.json", "report.json", "whole.json"}:
                file.unlink(missing_ok=True)  # parts clean up their shards' files at the same time
        sync(folder)
        os.rename(folder, output)
        (output / "whole.json").unlink()
        sync(output)
        sync(output.parent)
        return TokenShards(output)


def origin(recipe: Recipe, tokenizer: Tokenizer, files: Sequence[Path]) -> dict[str, Any]:
    """What a dataset says that it was made of."""
    sizes = [(file.name, file.stat().st_size) for file in files]
    corpus = {
        "files": len(files),
        "bytes": sum(size for _, size in sizes),
        "names_and_sizes_sha256": hashlib.sha256(repr(sizes).encode()).hexdigest(),
    }
    tree = {**toml.as_tree(recipe), "filters": toml.as_tree(list(recipe.filters)), "input": corpus}
    return tree | ({"tokenizer": toml.as_tree(tokenizer.config)} if tokenizer.config else {})
