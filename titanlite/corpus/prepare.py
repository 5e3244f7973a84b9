"""titanlite prepare [CONFIG.toml] [INPUT ...] --output=DIR [--key=value ...] [--worker=I/N]

Make a dataset of token shards from text. INPUT: files, directories and globs of .jsonl (one document per
line), .parquet (one document per row) and other files (one document per file), also compressed (.gz, .zst),
on a disk or in a bucket (s3://BUCKET/FOLDER); hf:NAME, a dataset of the Hugging Face hub.
--from-stream.name=NAME reads a stream instead.
The documents are filtered, shuffled and tokenised on all cores. After an interruption the same command
continues the work. The result does not depend on the number of processes or workers. `--help SECTION` lists
the keys of one section, `--help all` lists all keys, and --reference prints them as Markdown, as in
docs/prepare.md."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

import titanlite.corpus.hub_stream
import titanlite.tokenizers.bytes
import titanlite.tokenizers.huggingface  # noqa: F401 -- registers the tokenizer, like the lines before
from titanlite.config import toml
from titanlite.config.component import ConfigError, check_at_least
from titanlite.config.imports import ALLOW_IMPORTS, import_components
from titanlite.config.overrides import split_words
from titanlite.config.paths import UrlText, check_writable
from titanlite.corpus.bucket_files import find_inputs
from titanlite.corpus.hub import PREFIX, HubSplit, hub_files
from titanlite.corpus.pipeline import prepare, prepared_record, work_folder
from titanlite.corpus.report import summary
from titanlite.corpus.shared_work import check_output, exists, is_made, open_made
from titanlite.corpus.stages import PrepareOptions
from titanlite.corpus.stream_files import fetch
from titanlite.data.stream_source import DocumentStream
from titanlite.log import tell
from titanlite.options import take_flag
from titanlite.storage import parse_path, storage_of
from titanlite.tokenizers.base import TokenizerConfig
from titanlite.tokenizers.tiktoken import Tiktoken


@dataclass(frozen=True, kw_only=True)
class Prepare(HubSplit, PrepareOptions):
    """Settings of a preparation, in its TOML file or on the command line."""

    input: list[UrlText] = dataclasses.field(default_factory=list)
    """Files, globs, directories (their .txt, .jsonl, .ndjson, .json and .parquet files, also compressed), and
    `hf:NAME`: a dataset of the Hugging Face hub, or a directory laid out like one. URLs of a bucket may be
    files, directories and globs, too."""
    from_stream: DocumentStream | None = None
    output: UrlText = ""
    """The dataset directory, which appears when it is complete; also in a bucket: s3://BUCKET/FOLDER."""
    num_processes: int = 0
    """Number of processes; 0: one per core. Does not change the result."""
    worker: str = "0/1"
    """I/N: the share of worker I (from 0) of N, each on one machine, with `output` on a shared file system or
    in a bucket. The last worker to finish completes the dataset. Does not change the result."""
    imports: list[str] = dataclasses.field(default_factory=list)
    """Python modules to import first, which register filters, tokenizers or streams."""
    tokenizer: TokenizerConfig = dataclasses.field(default_factory=Tiktoken)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(self, 0, "num_processes")
        self.share  # noqa: B018 -- checks it

    @property
    def share(self) -> tuple[int, int]:
        """The key `worker` as (I, N)."""
        i, _, n = self.worker.partition("/")
        if not (i.isdecimal() and n.isdecimal() and int(i) < int(n)):
            raise ConfigError(f"{self.worker!r} is not I/N with I from 0 to N - 1, as in 0/4", "worker")
        return int(i), int(n)


def main(argv: Sequence[str]) -> int:
    """Prepare the dataset and print the report."""
    words, overrides = split_words(take_flag(argv, ALLOW_IMPORTS)[1])  # they are allowed in any case
    path = words.pop(0) if words and words[0].endswith(".toml") else None
    tree, locator = toml.read(path, overrides)
    if words:
        tree["input"] = words
    import_components(tree, locator, allowed=True)
    job = toml.build(Prepare, tree, locator)
    for line in locator.left_out:
        tell(line)
    try:
        output = parse_path(job.output, "output")
        options = PrepareOptions(**{f.name: getattr(job, f.name) for f in dataclasses.fields(PrepareOptions)})
        _check(job, output)
        local = [item for item in job.input if not item.startswith(PREFIX)]
        files = find_inputs(local, "input") if local else []
        tokenizer = job.tokenizer.build()
        fetched, origin = _fetch(job, output)  # last, because it may take hours
        files += fetched
        # If there are more workers than shards, other workers may have completed the dataset.
        if is_made(output) and open_made(output).prepared != prepared_record(
            options, tokenizer, files, origin
        ):
            raise exists(output)
        shards = prepare(
            files,
            output,
            tokenizer,
            options,
            num_processes=job.num_processes,
            worker=job.share,
            origin=origin,
        )
    except ConfigError as e:
        raise locator.located(e) from None
    if shards is None:
        print(f"worker {job.worker} is done; the last worker to finish completes {output}")
        return 0
    if shards.warning:
        tell(f"{output}: {shards.warning}")
    report = json.loads(storage_of(output).read(output / "report.json"))
    print(summary(report))
    print(
        f"{output}: {shards.counts()} "
        f"({report['kept']['characters'] / shards.num_tokens:.2f} characters per token), "
        f"tokenizer {job.tokenizer.label}"
    )
    return 0


def _fetch(job: Prepare, output: PurePath) -> tuple[list[Path], dict[str, Any]]:
    """Return the files of the hub, after downloading them, or of the stream, after writing them; and what
    dataset.json records about the hub or the stream."""
    if job.from_stream:
        if job.documents == "chat":
            raise ConfigError("conversations are read from files; a stream has texts", "documents")
        fetched = fetch(job.from_stream, output, job.field, job.bad_lines)
        return fetched.files, {"stream": toml.as_tree(fetched.stream)}
    names = [item.removeprefix(PREFIX) for item in job.input if item.startswith(PREFIX)]
    splits = [hub_files(name, job) for name in names]
    return [file for files, _ in splits for file in files], {"hub": [r for _, r in splits]} if splits else {}


def _check(job: Prepare, output: PurePath) -> None:
    from_hub = any(item.startswith(PREFIX) for item in job.input)
    if not job.input and not job.from_stream:
        raise ConfigError("name at least one file, directory or glob to read", "input")
    if job.input and job.from_stream:
        raise ConfigError("a stream is read alone: leave out the input, or prepare it separately", "input")
    if job.from_stream and job.share[1] > 1:
        raise ConfigError("a stream is read by one worker: leave out --worker", "worker")
    for key in ("config", "split", "revision"):
        if getattr(job, key) != getattr(HubSplit(), key) and not from_hub:
            advice = f"write from_stream.{key}" if job.from_stream else "no input is one"
            raise ConfigError(f"applies to {PREFIX}NAME: {advice}", key)
    if not job.output:
        raise ConfigError("name the directory to make: --output=DIR", "output")
    is_begun = not isinstance(output, Path) and check_output(output)
    if job.share[1] == 1 and is_made(output):
        raise exists(output)
    folder = work_folder(output, job.share)
    try:
        check_writable(folder.parent, "output")
    except ConfigError as e:
        if isinstance(output, Path):
            raise
        raise ConfigError(
            f"{e}; the unfinished work for {output} is kept there: choose another cache folder by "
            "XDG_CACHE_HOME"
        ) from None
    if is_begun or folder.exists():
        print(f"continuing {folder if isinstance(output, Path) else output}", file=sys.stderr)
