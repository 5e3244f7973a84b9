"""Fields of messages besides role and content. Some say that a message is not trained on; the others must be
read, or a part of the conversation would be lost without a word."""

from __future__ import annotations

import json
from collections.abc import Container, Mapping, Sequence
from typing import Any

# Fields of an assistant's message that say whether it is trained on: 0 or false, 1 or true.
TRAINED = ("weight", "train", "training", "trainable", "loss", "loss_mask")
# Fields of messages and conversations that nothing has to read, besides names that end in "_id": they say
# where a text comes from.
DESCRIPTIONS = (
    *("id", "uuid", "hash", "index", "name", "title", "source", "dataset", "split", "category"),
    *("topic", "tags", "language", "model", "date", "timestamp", "url", "license", "metadata"),
)
REMEDY = "name the field in ignore_fields to leave it out"


def unread(value: Mapping[str, Any], known: Container[str]) -> list[str]:
    """Return the names of the fields of a message or conversation that are neither in `known`, nor empty, nor
    descriptions."""
    return [
        name
        for name, item in value.items()
        if name not in known and item not in (None, "", [], {}) and not is_description(name)
    ]


def is_description(name: str) -> bool:
    """Return whether nothing has to read the fields of this name."""
    return name in DESCRIPTIONS or name.endswith("_id")


def untrained(messages: Sequence[Mapping[str, Any]]) -> set[int]:
    """Return the numbers of the assistant's messages that are not trained on. Raises ValueError for other
    weights than 0 and 1, and for a message of another role that is to be trained on."""
    numbers = set[int]()
    for i, message in enumerate(messages):
        given = {name: message[name] for name in TRAINED if name in message}
        for name, value in given.items():
            if not isinstance(value, (int, float)) or value not in (0, 1):
                raise ValueError(
                    f"messages[{i}] has `{name}` = {json.dumps(value):.40}; the only weights are 0 or false "
                    "for a message that is not trained on, 1 or true for one that is"
                )
        names = " and ".join(f"`{name}`" for name in given)
        if len(set(given.values())) > 1:
            raise ValueError(f"messages[{i}] has {names}, which contradict each other")
        if message.get("role") == "assistant":
            numbers |= {i} if given and not any(given.values()) else set()
        elif any(given.values()):
            raise ValueError(
                f"messages[{i}] has {names}, but only the assistant's messages can be trained on"
            )
    return numbers


def check_answers(messages: Sequence[Mapping[str, Any]], untrained: Container[int]) -> None:
    """Raise ValueError for an empty message of the assistant, which would train the end of a turn alone."""
    for i, message in enumerate(messages):
        others = unread(message, ("role", "content", *TRAINED))
        is_empty = not str(message.get("content", "")).strip() and not others
        if is_empty and message.get("role") == "assistant" and i not in untrained:
            raise ValueError(f"messages[{i}] is an empty answer, of which only the end would be trained on")
