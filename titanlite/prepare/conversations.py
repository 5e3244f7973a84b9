"""Conversations in lines of JSON: `messages` with `role` and `content`, as most datasets have them, or
ShareGPT's `conversations` with `from` and `value`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from titanlite.config.component import ConfigError
from titanlite.prepare.corpus import format_of
from titanlite.tokenizers.chat import ChatFormat, RenderedChat

SHAREGPT_ROLES = {"system": "system", "human": "user", "gpt": "assistant"}


def render_record(record: dict[str, Any], chat: ChatFormat) -> RenderedChat:
    """Render the conversation in a JSON object, with the object's `tools` if it has any. Raises
    ValueError."""
    return chat.render(messages_of(record), record.get("tools"))


def messages_of(record: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the messages in a JSON object, each with a role and a content. Other fields of a message, such
    as `tool_calls`, are kept; fields that are null are left out, as in transformers. Raises ValueError."""
    given = [key for key in ("messages", "conversations") if key in record]
    if len(given) != 1:
        count = "both" if given else "neither"
        raise ValueError(f"{count} of the fields `messages` and `conversations` in this line")
    (key,) = given
    messages = record[key]
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"`{key}` is not a list of messages")
    return [_message(message, f"{key}[{i}]") for i, message in enumerate(messages)]


def _message(message: Any, name: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise ValueError(f"{name} is not an object with a role and a content")
    message = {key: value for key, value in message.items() if value is not None}
    if "from" in message and "role" not in message:
        role = message.pop("from")
        if not isinstance(role, str) or role not in SHAREGPT_ROLES:
            raise ValueError(f"{name}: `from` is {role!r}, expected one of {', '.join(SHAREGPT_ROLES)}")
        message = {"role": SHAREGPT_ROLES[role], "content": message.pop("value", None), **message}
    for field in ("role", "content"):
        if not isinstance(message.get(field), str):
            raise ValueError(f"{name} has no text as `{field}`")
    return message


def check_formats(files: Sequence[Path]) -> None:
    """Raise ConfigError for a file that cannot hold conversations."""
    for file in files:
        if format_of(file)[0] != "lines":
            raise ConfigError(f"{file}: conversations are read from .jsonl, .ndjson and .json files only")
