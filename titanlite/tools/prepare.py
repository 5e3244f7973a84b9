"""titanlite prepare [CONFIG.toml] [INPUT ...] --output=DIR [--key=value ...] [--worker=I/N]

Make a dataset of token shards from text. INPUT: files, directories and globs of .jsonl (one document per
line), .parquet (one document per row) and other files (one document per file), also compressed (.gz, .zst).
The documents are filtered, shuffled and tokenised on all cores. After an interruption the same command
continues the work. The result does not depend on the number of processes or workers. --reference prints every
key as Markdown, as in docs/prepare.md."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from titanlite.config import toml
from titanlite.config.component import ConfigError
from titanlite.config.imports import import_components
from titanlite.config.overrides import split_words
from titanlite.config.paths import check_writable
from titanlite.data.shards import TokenShards
from titanlite.prepare.corpus import Limits, find_files
from titanlite.prepare.filters import Filter
from titanlite.prepare.pipeline import origin, prepare, work_folder
from titanlite.prepare.report import table
from titanlite.prepare.stages import PrepareOptions
from titanlite.tokenizers.base import TokenizerConfig
from titanlite.tokenizers.tiktoken import Tiktoken


@dataclass(frozen=True, kw_only=True)
class Prepare(Limits):
    """A preparation of a dataset. Every key may be in the TOML file or on the command line."""

    input: list[str] = dataclasses.field(default_factory=list)
    """Files, directories (their .txt, .jsonl, .ndjson, .json and .parquet files, compressed ones too) and
    globs."""
    output: str = ""
    """The dataset directory to make. It appears when it is complete."""
    field: str = "text"
    """The field of a JSON line, or the column of a .parquet file, that holds the text."""
    seed: int = 0
    """Seed of the shuffle of the documents."""
    bad_lines: Literal["stop", "skip"] = "stop"
    """Action for lines that are not JSON, lack the field, are not UTF-8 or exceed max_document_mib: `stop` at
    the first one, or `skip` and count them."""
    num_processes: int = 0
    """Processes to tokenise with; 0: one per core. Does not change the result."""
    worker: str = "0/1"
    """I/N: do the share of worker I (from 0) of N, each on a machine of its own, with `output` on a shared
    file system. The last worker to finish completes the dataset. Does not change the result."""
    imports: list[str] = dataclasses.field(default_factory=list)
    """Python modules to import first, which register filters or tokenizers. Modules in the current directory
    are found."""
    tokenizer: TokenizerConfig = dataclasses.field(default_factory=Tiktoken)
    filters: list[Filter] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_processes < 0:
            raise ConfigError(f"{self.num_processes} is below 0", "num_processes")
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
    words, overrides = split_words(argv)
    path = words.pop(0) if words and words[0].endswith(".toml") else None
    tree, locator = toml.read(path, overrides)
    if words:
        tree["input"] = words
    import_components(tree.get("imports", []), "imports", locator, allowed=True)
    job = toml.build(Prepare, tree, locator)
    output = Path(job.output)
    try:
        options = PrepareOptions(
            field=job.field,
            seed=job.seed,
            bad_lines=job.bad_lines,
            filters=job.filters,
            max_document_mib=job.max_document_mib,
            max_compression_ratio=job.max_compression_ratio,
        )
        _check(job, output)
        files = find_files(job.input, "input")
        tokenizer = job.tokenizer.build()
        prepared = origin(options, tokenizer, files)
        complete = job.share[1] > 1 and output.exists() and TokenShards(output).prepared == prepared
        # If there are more workers than shards, other workers may have completed the dataset.
        if os.path.lexists(output) and not complete:
            raise ConfigError(f"{output} exists; choose another, or delete it", "output")
        shards = prepare(files, output, tokenizer, options, num_processes=job.num_processes, worker=job.share)
    except ConfigError as e:
        raise locator.located(e) from None
    if shards is None:
        print(f"worker {job.worker} is done; the last worker to finish completes {output}")
        return 0
    report = json.loads((output / "report.json").read_text())
    print(table(report))
    print(
        f"{output}: {shards.num_documents:,} documents, {shards.num_tokens:,} tokens "
        f"({report['kept']['characters'] / shards.num_tokens:.2f} characters per token)"
    )
    return 0


def _check(job: Prepare, output: Path) -> None:
    if not job.input:
        raise ConfigError("name at least one file, directory or glob to read", "input")
    if not job.output:
        raise ConfigError("name the directory to make: --output=DIR", "output")
    check_writable(output.parent, "output")
    if work_folder(output).exists():
        print(f"continuing {work_folder(output)}", file=sys.stderr)
