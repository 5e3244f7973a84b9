"""Conversations in files: `messages` with `role` and `content`, as most datasets have them, or ShareGPT's
`conversations` with `from` and `value`. Files hold one conversation per line of JSON, one per row of parquet,
or a single JSON array of conversations."""

from __future__ import annotations

import codecs
import json
from collections.abc import Container, Iterator, Sequence
from pathlib import PurePath
from typing import Any

from titanlite.config.component import ConfigError, suggest
from titanlite.data import text_files
from titanlite.data.text_files import Document, FileSplit, Limits, OnBad
from titanlite.data.text_formats import check_content, format_of
from titanlite.tokenizers.chat import ROLES, ChatFormat
from titanlite.tokenizers.message_fields import REMEDY, TRAINED, is_description, unread
from titanlite.tokenizers.template import TemplateLimitError

SHAREGPT_ROLES = {"system": "system", "human": "user", "gpt": "assistant"}
LISTS = ("messages", "conversations")  # fields that hold the messages
FIELDS = (*LISTS, "system", "tools")
BYTE_ORDER_MARK = codecs.BOM_UTF8.decode()


def check_files(files: Sequence[PurePath]) -> None:
    """Raise ConfigError for a file that cannot hold conversations."""
    for file in files:
        kind, _ = format_of(file)
        if kind == "text":
            check_content(file, text_files.beginning(file))
            raise ConfigError(
                f"{file}: conversations are read from .jsonl, .ndjson, .json and .parquet files only"
            )
        if kind == "parquet":
            _columns(file)


def split_conversations(files: Sequence[PurePath]) -> list[FileSplit]:
    """Partition the files into splits, in their order. A JSON array is one split."""
    splits = list[FileSplit]()
    for file in files:
        kind, compression = format_of(file)
        if kind == "parquet":
            splits += text_files.parquet_splits(file, _columns(file))
        elif _begins_array(file):
            size = text_files.size_of(file)
            splits.append(FileSplit((file,), 0, 1, size * (text_files.RATIO if compression else 1)))
        else:
            splits += text_files.split_files([file], "")
    return splits


def read_conversations(
    split: FileSplit, chat: ChatFormat, on_bad: OnBad, limits: Limits, ignore: Container[str] = ()
) -> Iterator[Document]:
    """Yield the rendered conversations of a split in order. Bad ones are passed to `on_bad`. `ignore`: names
    of fields that are left out of conversations and messages.

    Raises ConfigError for a file that cannot be read, is truncated or damaged, or lacks the column."""
    (file,) = split.files
    if format_of(file)[0] == "parquet":
        lines = _rows(split, on_bad, ignore)
    else:
        lines = _array(file, limits) if _is_array(split) else text_files.lines(split, limits)
    for place, line in lines:
        try:
            record = _without(text_files.record_of(line, limits), ignore)
            rendered = chat.render(messages_of(record, chat), tools_of(record))
            text = text_files.checked(rendered.text, "conversation")
        except TemplateLimitError as e:
            raise ConfigError(f"{text_files.where(file, place)}: {e}") from None
        except ValueError as e:
            on_bad(file, place, str(e))
        else:
            yield Document(text, file, place, rendered)


def _without(record: dict[str, Any], ignore: Container[str]) -> dict[str, Any]:
    """Return a conversation without some fields, also of its messages."""

    def kept(value: Any) -> Any:
        return {k: v for k, v in value.items() if k not in ignore} if isinstance(value, dict) else value

    lists = {key: list(map(kept, record[key])) for key in LISTS if isinstance(record.get(key), list)}
    return kept(record | lists)


def messages_of(record: dict[str, Any], chat: ChatFormat) -> list[dict[str, Any]]:
    """Return the messages in a JSON object; `system` beside them is the first one. Other fields of a message,
    such as `tool_calls`, are kept; those that are null are left out, as in transformers. Raises ValueError,
    also for a role that `chat` does not know, and for a field beside the messages that nothing reads."""
    given = [key for key in LISTS if record.get(key) is not None]
    if len(given) != 1:
        count = "both" if given else "neither"
        raise ValueError(f"{count} of the fields `messages` and `conversations` in this conversation")
    (key,) = given
    if not isinstance(record[key], list) or not record[key]:
        raise ValueError(f"`{key}` is not a list of messages")
    if others := unread(record, FIELDS):
        in_messages = others[0] in TRAINED
        remedy = (
            "write it into the assistant's messages, or leave the conversation out" if in_messages else REMEDY
        )
        raise ValueError(f"the conversation has `{others[0]}`, which nothing reads: {remedy}")
    messages = [_message(message, f"{key}[{i}]", chat) for i, message in enumerate(record[key])]
    if (system := record.get("system")) in (None, ""):
        return messages
    if not isinstance(system, str):
        raise ValueError("`system` is not a text")
    if messages[0]["role"] == "system":
        raise ValueError("both `system` and a first message of the system")
    return [{"role": "system", "content": system}, *messages]


def tools_of(record: dict[str, Any]) -> list[Any] | None:
    """Return the `tools` in a JSON object: a list, or its JSON as a text. Raises ValueError."""
    tools = record.get("tools")
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) if tools else None
        except (ValueError, RecursionError) as e:
            raise ValueError(f"`tools` is a text that is not valid JSON: {e}") from None
    if tools is not None and not isinstance(tools, list):
        raise ValueError("`tools` is not a list")
    return tools


def _message(message: Any, name: str, chat: ChatFormat) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise ValueError(f"{name} is not an object with a role and a content")
    if message.get("from") is not None and message.get("role") is None:
        others = dict(message)
        role, content = others.pop("from"), others.pop("value", None)
        if not isinstance(role, str) or role not in SHAREGPT_ROLES:
            raise ValueError(f"{name}: `from` is {role!r}, expected one of {', '.join(SHAREGPT_ROLES)}")
        message = {**others, "role": SHAREGPT_ROLES[role], "content": content}
    message = {key: value for key, value in message.items() if value is not None}
    if not isinstance(role := message.get("role"), str):
        raise ValueError(f"{name} has no text as `role`")
    if not chat.has_role(role):
        raise ValueError(
            f"{name}: unknown role {role!r}{suggest(role, ROLES)}; the chat template looks for no such role"
        )
    if isinstance(message.get("content"), list) and message["content"]:
        texts = [_text(part, f"{name}.content[{i}]") for i, part in enumerate(message["content"])]
        message["content"] = "".join(texts)
    calls_without_content = message.get("tool_calls") and message.get("content") is None
    if not calls_without_content and not isinstance(message.get("content"), str):
        raise ValueError(f"{name} has no text as `content`")
    return message


def _text(part: Any, name: str) -> str:
    """Return the text of a part of a content. Raises ValueError for a part of another type."""
    if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        raise ValueError(
            f'{name} is not a text, {{"type": "text", "text": "..."}}; models here read only text'
        )
    text: str = part["text"]
    return text


# ---- files


def _columns(file: PurePath, ignore: Container[str] = ()) -> list[str]:
    """Return the columns of a parquet file that conversations are made of, and those that nothing would read.
    Raises ConfigError."""
    names = text_files.open_parquet(file).schema_arrow.names
    columns = [name for name in names if name not in ignore and not is_description(name)]
    if len(set(columns)) < len(columns):
        raise ConfigError(f"{file}: several columns have the same name (columns: {', '.join(names)})")
    if not set(columns) & set(LISTS):
        raise ConfigError(f"{file}: no column `messages` or `conversations` (columns: {', '.join(names)})")
    return columns


def _rows(split: FileSplit, on_bad: OnBad, ignore: Container[str]) -> Iterator[tuple[int, bytes]]:
    """Yield the rows of a split of parquet as lines of JSON, each with its number. Rows that are not JSON are
    passed to `on_bad`."""
    (file,) = split.files
    for first, batch in text_files.parquet_batches(split, _columns(file, ignore)):
        try:
            records = batch.to_pylist()
        except ValueError as e:  # not UTF-8
            raise ConfigError(f"{text_files.where(file, first)} or later: damaged parquet: {e}") from None
        for row, record in enumerate(records, first):
            try:
                line = json.dumps(_as_json(_without(record, ignore), "")).encode()
            except ValueError as e:
                on_bad(file, row, str(e))
            else:
                yield row, line


def _as_json(value: Any, name: str) -> Any:
    """Return a value of parquet as one of JSON. Binary columns hold text, as older writers make them. Fields
    that are null are left out at any depth: all rows have the fields of all others. `name`: of the value, for
    messages. Raises ValueError."""
    if isinstance(value, dict):
        items = ((key, item, f"{name}.{key}" if name else key) for key, item in value.items())
        return {key: _as_json(item, path) for key, item, path in items if item is not None}
    if isinstance(value, list):
        return [_as_json(item, f"{name}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            raise ValueError(f"{name} is binary and not UTF-8") from None
    if value is None or isinstance(value, (str, int, float)):
        return value
    raise ValueError(
        f"{name} is a {type(value).__name__}, which JSON does not have: write it as text, or remove it"
    )


def _is_array(split: FileSplit) -> bool:
    """Return whether a split is a JSON array. Files of lines with several splits are not opened for it."""
    return (split.begin, split.end) == (0, 1) and _begins_array(split.files[0])


def _begins_array(file: PurePath) -> bool:
    """Return whether a file is a JSON array, by its first character. No line of JSON lines begins so."""
    for block in text_files.blocks(file):
        if start := block.removeprefix(codecs.BOM_UTF8).lstrip():
            return start.startswith(b"[")
    return False


def _array(file: PurePath, limits: Limits) -> Iterator[tuple[int, bytes]]:
    """Yield the items of a JSON array, each with its place: the byte at which it begins, or the line in a
    compressed file. Raises ConfigError for an array that is damaged or cut off."""
    text = _ArrayText(file, limits)
    if text.next() == BYTE_ORDER_MARK:
        text.skip(BYTE_ORDER_MARK)
    text.skip("[")
    while text.next() != "]":
        yield text.place, text.item()
        if text.next() != "]":
            text.skip(",")
    text.skip("]")
    if text.next():
        raise text.fault("text follows the array; a line of JSON lines is an object with `messages`")


class _ArrayText:
    """The text of a JSON array, read in blocks. `place`: of the next character."""

    def __init__(self, file: PurePath, limits: Limits):
        self._file, self._limits, self._is_compressed = file, limits, format_of(file)[1] != ""
        self._text, self._at = "", 0
        self._blocks = codecs.iterdecode(text_files.blocks(file), "utf-8")
        self.place = 1 if self._is_compressed else 0

    def fault(self, reason: str) -> ConfigError:
        """Return the error at this place."""
        return ConfigError(f"{text_files.where(self._file, self.place)}: {reason}")

    def next(self) -> str:
        """Skip white space. Returns the next character; "" at the end of the file."""
        while True:
            rest = self._text[self._at : self._at + 1]
            if rest and not rest.isspace():
                return rest
            if rest:
                self._advance(self._at + 1)
            elif not self._read():
                return ""

    def skip(self, wanted: str) -> None:
        """Skip a character and the white space before it. Raises ConfigError for another one."""
        if (character := self.next()) != wanted:
            raise self.fault(
                f"the JSON array is damaged: expected {wanted!r}, found {character or 'the end'!r}"
            )
        self._advance(self._at + 1)

    def item(self) -> bytes:
        """Return the next item. Raises ConfigError."""
        while True:
            try:
                end = json.JSONDecoder().raw_decode(self._text, self._at)[1]
            except (json.JSONDecodeError, RecursionError) as e:
                if len(self._text) - self._at > self._limits.document_bytes or not self._read():
                    raise self.fault(f"the JSON array is damaged, or an item is too long: {e}") from None
            else:
                item = self._text[self._at : end].encode()
                self._advance(end)
                return item

    def _advance(self, at: int) -> None:
        passed = self._text[self._at : at]
        self.place += passed.count("\n") if self._is_compressed else len(passed.encode())
        self._at = at

    def _read(self) -> bool:
        """Read a block. Returns False at the end of the file."""
        try:
            block = next(self._blocks, "")
        except UnicodeDecodeError as e:
            raise self.fault(f"not UTF-8 from here on: {e.reason}") from None
        self._text, self._at = self._text[self._at :] + block, 0
        return block != ""
