"""The source `chat`: conversations, tokenised on first use."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from titanlite.config.component import ConfigError, check_at_least
from titanlite.config.json_file import read_object
from titanlite.config.paths import PathText
from titanlite.corpus.pipeline import discard, prepare
from titanlite.corpus.stages import PrepareOptions
from titanlite.data.shards import TokenShards
from titanlite.data.text_files import Limits
from titanlite.data.text_formats import find_files
from titanlite.data.text_sources import CachedSource, fingerprint_of_files
from titanlite.log import logger
from titanlite.tokenizers.base import Tokenizer


@dataclass(frozen=True, kw_only=True)
class Chat(Limits, CachedSource, name="chat"):
    """Conversations, tokenised on first use: `messages` (`role`, `content`) or ShareGPT's `conversations`
    (`from`, `value`) in JSON or .parquet. The tokenizer's chat template renders them; only the assistant's
    tokens count in the loss."""

    path: list[PathText]
    """Files, directories and globs of .jsonl, .ndjson, .json (also compressed) and .parquet."""
    max_tokens: int = 0
    """Leave out longer conversations, and log how many; 0: none. Conversations longer than a sequence are
    cut."""
    ignore_fields: list[str] = dataclasses.field(default_factory=list)
    """Fields to leave out. Otherwise a field that neither template nor titanlite reads is an error, unless
    empty or a description such as `id`."""

    def __post_init__(self) -> None:
        CachedSource.__post_init__(self)
        Limits.__post_init__(self)
        check_at_least(self, 0, "max_tokens")

    @property
    def _options(self) -> PrepareOptions:
        return PrepareOptions(
            documents="chat",
            max_tokens=self.max_tokens,
            ignore_fields=self.ignore_fields,
            max_document_mib=self.max_document_mib,
        )

    def check(self, tokenizer: Tokenizer) -> bool:
        self._options.chat_format(tokenizer, find_files(self.path, "path"))
        return False

    def fingerprint(self) -> str:
        limit = f"max_tokens={self.max_tokens}" if self.max_tokens else ""
        ignored = f" ignore_fields={self.ignore_fields}" if self.ignore_fields else ""
        return fingerprint_of_files(find_files(self.path, "path"), self.name, limit + ignored)

    def write(self, path: Path, tokenizer: Tokenizer) -> TokenShards:
        try:
            shards = prepare(find_files(self.path, "path", is_told=True), path, tokenizer, self._options)
        except ConfigError as e:
            discard(path)  # it is useless: correcting the input changes the directory's name
            if e.key == "output":
                raise ConfigError(str(e), "data.cache_dir") from None
            raise
        assert isinstance(shards, TokenShards)  # there is one worker
        return shards

    def build(self, tokenizer: Tokenizer, cache_dir: Path) -> TokenShards:
        shards = super().build(tokenizer, cache_dir)
        if self.max_tokens:
            report = read_object(shards.path / "report.json")
            left_out = report["filters"][-1]["documents"]
            logger.info(
                f"{left_out:,} of {report['read']['documents']:,} conversations have more than max_tokens = "
                f"{self.max_tokens:,} tokens and are left out"
            )
        return shards

    def _tokenization(self, tokenizer: Tokenizer) -> str:
        return f"{tokenizer.fingerprint} {tokenizer.chat_format().fingerprint}"
