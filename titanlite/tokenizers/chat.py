"""Chat templates: conversations as text and token ids, and which of the tokens the assistant wrote.

A template is Jinja, as in Hugging Face's chat_template.jinja. What the assistant writes, with the token that
ends its turn, stands between `{% generation %}` and `{% endgeneration %}`, as in transformers. Only these
tokens count in the loss. A template without the two marks is an error, because nothing else tells which
tokens are the assistant's.

The names of special tokens in a template are these tokens; the same names in one text of a message are plain
text. A template that joins two texts of a message without a separator can still form such a name, and added
tokens that are not special keep their ids. The text depends on the conversation alone: a template has no
clock (`strftime_now` of transformers is undefined, for which templates have a fallback)."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jinja2
import numpy as np
from jinja2.ext import Extension
from jinja2.nodes import Node, Output, Scope, TemplateData
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

# Noncharacters of Unicode, which mark places in a template's output and are then removed.
BEGIN, END, PLAIN = "\ufdd0", "\ufdd1", "\ufdd2"
MARKS = re.compile(f"([{BEGIN}{END}{PLAIN}])")
ESCAPED_MARKS = re.compile(r"\\ufdd[0-2]", re.IGNORECASE)  # by tojson, or by printing a table


@dataclass(frozen=True)
class RenderedChat:
    """A conversation as text. `assistant`: the assistant's ranges of characters. `plain`: the characters at
    which a message spells the name of a special token."""

    text: str
    assistant: tuple[tuple[int, int], ...]
    plain: tuple[int, ...]


class ChatTokens(NamedTuple):
    """A conversation as token ids, uint32 [tokens]. `loss_mask`: which of them the assistant wrote, bool
    [tokens]."""

    ids: np.ndarray
    loss_mask: np.ndarray


class ChatFormat:
    """A tokenizer's chat template. Picklable: `titanlite prepare` sends it to its processes.

    `name`: of the template's file, for messages. `variables`: names of special tokens that the template may
    use, such as `eos_token`. Raises ValueError for a template that is invalid, or that does not mark the
    assistant's text."""

    def __init__(self, template: str, name: str, tokenizer_json: bytes, variables: Mapping[str, str]):
        self.template, self.name, self.variables = template, name, dict(variables)
        self._tokenizer_json = tokenizer_json
        try:
            has_marks = _compile(template)[1]
        except jinja2.TemplateError as e:
            line = getattr(e, "lineno", None)
            raise ValueError(f"{name}{f':{line}' if line else ''}: not a valid template: {e}") from None
        if not has_marks:
            raise ValueError(
                f"{name} does not mark the assistant's text: put `{{% generation %}}` and "
                "`{% endgeneration %}` around what the assistant writes, with the token that ends its turn"
            )

    @property
    def fingerprint(self) -> str:
        """A hash of the template and its variables."""
        return hashlib.sha256(repr((self.template, sorted(self.variables.items()))).encode()).hexdigest()[:16]

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Any = None, add_generation_prompt: bool = False
    ) -> RenderedChat:
        """Return the text of a conversation. `add_generation_prompt`: end with the beginning of an answer.

        Raises ValueError, with the template's own message if it has one, for a conversation that the template
        refuses, and for one without text of the assistant, unless the answer is yet to be written."""
        messages, tools = self._marked(list(messages)), self._marked(tools)
        try:
            rendered = self._compiled.render(
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self.variables,
            )
        except (jinja2.TemplateError, TypeError, KeyError, ValueError, ArithmeticError, RecursionError) as e:
            raise ValueError(f"the chat template refuses this conversation: {e}") from None
        chat = _without_marks(rendered)
        if not add_generation_prompt and all(begin == end for begin, end in chat.assistant):
            raise ValueError("a conversation without text of the assistant has no token to train on")
        return chat

    def encode(self, chat: RenderedChat) -> ChatTokens:
        """Return the token ids of a rendered conversation.

        A token is the assistant's if one of its characters is: the first and last token of a span may have
        characters before and after it."""
        encoding = self._library.encode(chat.text, add_special_tokens=False)
        ids, offsets = np.array(encoding.ids, np.uint32), np.array(encoding.offsets, np.int64).reshape(-1, 2)
        mask = np.zeros(len(ids), dtype=np.bool_)
        for begin, end in chat.assistant:
            inside = np.flatnonzero((offsets[:, 1] > begin) & (offsets[:, 0] < end))
            if len(inside):
                mask[inside[0] : inside[-1] + 1] = True
        for place in reversed(chat.plain):
            for i in np.flatnonzero((offsets[:, 0] <= place) & (place < offsets[:, 1]))[::-1]:
                if int(ids[i]) in self._special:
                    text = chat.text[offsets[i, 0] : offsets[i, 1]]
                    plain = self._plain_library.encode(text, add_special_tokens=False).ids
                    ids = np.concatenate([ids[:i], np.array(plain, np.uint32), ids[i + 1 :]])
                    mask = np.concatenate([mask[:i], np.full(len(plain), mask[i]), mask[i + 1 :]])
        return ChatTokens(ids, mask)

    def end_of_turn(self) -> set[int]:
        """Return the ids of the special tokens with which an answer ends; empty if the template has none."""
        messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        try:
            ids, loss_mask = self.encode(self.render(messages))
        except ValueError:  # a template for other conversations
            return set()
        return set(ids[loss_mask].tolist()) & self._special.keys()

    def _marked(self, value: Any) -> Any:
        """Copy a value of JSON with PLAIN in front of each name of a special token. Raises ValueError for a
        text that has a mark."""
        if isinstance(value, str):
            if MARKS.search(value):
                raise ValueError(
                    "a message holds U+FDD0, U+FDD1 or U+FDD2, noncharacters that mark places here"
                )
            return self._special_names.sub(lambda match: PLAIN + match[0], value)
        if isinstance(value, Mapping):
            return {self._marked(key): self._marked(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self._marked(item) for item in value]
        return value

    @cached_property
    def _compiled(self) -> jinja2.Template:
        return _compile(self.template)[0]

    @cached_property
    def _library(self) -> Any:
        return self._load(special_tokens_in_text=True)

    @cached_property
    def _plain_library(self) -> Any:
        return self._load(special_tokens_in_text=False)

    @cached_property
    def _special(self) -> dict[int, str]:
        added = self._library.get_added_tokens_decoder().items()
        return {number: token.content for number, token in added if token.special}

    @cached_property
    def _special_names(self) -> re.Pattern[str]:
        names = sorted(self._special.values(), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, names)) or "(?!)")

    def _load(self, special_tokens_in_text: bool) -> Any:
        from tokenizers import Tokenizer as Library

        # Without the post-processor, which may take blanks out of the tokens' ranges of characters.
        tree = json.loads(self._tokenizer_json) | {"post_processor": None}
        library = Library.from_str(json.dumps(tree))
        library.no_truncation()
        library.no_padding()
        library.encode_special_tokens = not special_tokens_in_text
        return library

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key not in _CACHED}


_CACHED = {name for name, value in vars(ChatFormat).items() if isinstance(value, cached_property)}


class _Generation(Extension):
    """The block `{% generation %} ... {% endgeneration %}`: puts BEGIN and END around its output."""

    tags = {"generation"}  # noqa: RUF012 -- jinja2 declares it so

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        self.environment.extend(has_generation=True)
        begin, end = (Output([TemplateData(mark)]).set_lineno(line) for mark in (BEGIN, END))
        return Scope([begin, *body, end]).set_lineno(line)


def _compile(template: str) -> tuple[jinja2.Template, bool]:
    """Return the compiled template, with the same settings as transformers, and whether it has a generation
    block. Raises jinja2.TemplateError."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.globals["raise_exception"] = _raise_exception
    environment.filters["tojson"] = _to_json
    compiled = environment.from_string(template)
    return compiled, hasattr(environment, "has_generation")


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """The filter `tojson` without jinja2's escapes for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _without_marks(rendered: str) -> RenderedChat:
    """Remove the marks from a template's output. Raises ValueError if they are not in pairs."""
    texts, spans, plain = list[str](), list[tuple[int, int]](), list[int]()
    length, begin = 0, -1
    if ESCAPED_MARKS.search(rendered):
        raise ValueError("a message names a special token where the chat template escapes its characters")
    for text in MARKS.split(rendered):
        if text == PLAIN:
            plain.append(length)
        elif text in (BEGIN, END):
            if (text == BEGIN) != (begin < 0):
                raise ValueError("the chat template puts a generation block into another, or cuts one")
            if text == END:
                spans.append((begin, length))
            begin = length if text == BEGIN else -1
        else:
            texts.append(text)
            length += len(text)
    return RenderedChat("".join(texts), tuple(spans), tuple(plain))
