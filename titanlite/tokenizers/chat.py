"""Chat templates: conversations as text and token ids, and which of the tokens the assistant wrote.

A template is Jinja, as in Hugging Face's chat_template.jinja. What the assistant writes, with the token that
ends its turn, stands between `{% generation %}` and `{% endgeneration %}`, as in transformers. Only these
tokens count in the loss. A template without the two marks is an error, because nothing else tells which
tokens are the assistant's, and so is one that puts them around a message of another role.

The name of a control token is this token where the template writes it, and plain text where it comes from a
message, also if the template joins it from several texts. Control tokens are the special tokens, and those
other added tokens that the template writes around messages. The text depends on the conversation alone: a
template has no clock (`strftime_now` of transformers is undefined, for which templates have a fallback)."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from itertools import islice, pairwise, product
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from titanlite.tokenizers.message_fields import REMEDY, TRAINED, check_answers, unread, untrained
from titanlite.tokenizers.template import (
    ALL,
    BEGIN,
    END,
    MAX_CHARACTERS,
    Template,
    TemplateError,
    TemplateLimitError,
)

MARKS = re.compile(f"([{BEGIN}{END}])")
# Characters that stand for punctuation, to see which text comes from a message: hieroglyphs, which are
# letters without case that Python and JSON print as they are.
STAND_INS = range(0x13000, 0x13430)
VERSION = 4  # increase it when a change of the code changes the text or the tokens of a conversation
OTHER_ROLES = ("system", "developer", "user", "tool")
ROLES = (*OTHER_ROLES, "assistant")
PUNCTUATION = r"[^\w\s]"
PROBE = [{"role": role, "content": role[0]} for role in ("system", "user", "assistant")]
_Spans: TypeAlias = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class RenderedChat:
    """A conversation as text. `assistant`: the assistant's ranges of characters. `control`: the characters at
    which the names of control tokens begin that the template itself writes."""

    text: str
    assistant: _Spans
    control: tuple[int, ...]


class ChatTokens(NamedTuple):
    """A conversation as token ids, uint32 [tokens]. `loss_mask`: which of them the assistant wrote, bool
    [tokens]."""

    ids: np.ndarray
    loss_mask: np.ndarray


class ChatFormat:
    """A tokenizer's chat template. Picklable: `titanlite prepare` sends it to its processes.

    `name`: of the template's file, for messages. `variables`: names of special tokens that the template may
    use, such as `eos_token`. Raises ValueError for a template that is invalid, that does not mark the
    assistant's text, or that marks a text of another role.
    All methods raise TemplateLimitError for a template that takes too much time or memory."""

    def __init__(self, template: str, name: str, tokenizer_json: bytes, variables: Mapping[str, str]):
        self.template, self.name, self.variables = template, name, dict(variables)
        self._tokenizer_json = tokenizer_json
        try:
            has_generation = self._compiled.has_generation
        except TemplateError as e:
            raise ValueError(f"{name}{f':{e.line}' if e.line else ''}: not a valid template: {e}") from None
        except TemplateLimitError as e:
            raise TemplateLimitError(f"{name} {e}") from None
        if not has_generation:
            raise ValueError(
                f"{name} does not mark the assistant's text: put `{{% generation %}}` and "
                "`{% endgeneration %}` around what the assistant writes, with the token that ends its turn"
            )
        if (
            self._probed(PROBE[1:], add_generation_prompt=False) is not None
        ):  # otherwise render() checks marks
            self._trained(PROBE[1:], None, (), ())

    @property
    def fingerprint(self) -> str:
        """A hash of the template, its variables and the version of this code."""
        inputs = (VERSION, self.template, sorted(self.variables.items()))
        return hashlib.sha256(repr(inputs).encode()).hexdigest()[:16]

    def has_role(self, role: str) -> bool:
        """Return whether a message may have this role: one of ROLES, or one that the template looks for."""
        return role in ROLES or role in self._compiled.sought

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Any = None, add_generation_prompt: bool = False
    ) -> RenderedChat:
        """Return the text of a conversation. `add_generation_prompt`: end with the beginning of an answer.

        Messages of the assistant whose weight is 0 (`message_fields.untrained`) are not in its ranges. Raises
        ValueError, with the template's own message if it has one, for a conversation that the template
        refuses, for one with fields that nothing reads, for one without text of the assistant to train on,
        unless the answer is yet to be written, for one of which the template marks a text of another role as
        the assistant's or of which that cannot be seen, and for one that makes a control token in a way that
        cannot be followed."""
        conversation, skipped = [list(messages), tools], untrained(messages)
        text, spans, read = self._rendered(conversation, add_generation_prompt)
        self._check_fields(messages, tools, read)
        if not add_generation_prompt:
            check_answers(messages, skipped)
            spans = self._trained(messages, tools, skipped, spans)
            if all(begin == end for begin, end in spans):
                raise ValueError(
                    "a conversation without text of the assistant, or without any whose weight is 1, has no "
                    "token to train on"
                )
        return RenderedChat(text, spans, self._written(text, conversation, add_generation_prompt))

    def _rendered(self, conversation: Any, add_generation_prompt: bool) -> _Rendered:
        """Return the text of the messages and tools in `conversation`. Raises ValueError if the template
        refuses them."""
        messages, tools = conversation
        strings = list(_strings(conversation))
        if sum(map(len, strings)) > MAX_CHARACTERS:
            raise ValueError(f"a conversation of more than {MAX_CHARACTERS:,} characters")
        if any(map(MARKS.search, strings)):
            raise ValueError("a message holds U+FDD0 or U+FDD1, noncharacters that mark places here")
        try:
            rendered, read = self._compiled.render(
                messages,
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self.variables,
            )
        except TemplateLimitError as e:
            raise TemplateLimitError(f"{self.name} {e} for a conversation") from None
        except TemplateError as e:
            bare = [i for i, message in enumerate(messages) if "content" not in message]
            hint = f'; messages[{bare[0]}] has no `content`: give it "content": ""' if bare else ""
            raise ValueError(f"{self.name} refuses this conversation: {e}{hint}") from None
        return _Rendered(*_without_marks(rendered), read)

    def _check_fields(
        self, messages: Sequence[Mapping[str, Any]], tools: Any, read: Container[tuple[str, str]]
    ) -> None:
        """Raise ValueError for tools, and for a field of a message that is neither empty nor one of TRAINED
        or DESCRIPTIONS, if the template does not read them."""
        missing = (
            ["the conversation has `tools`"] if tools and "tools" not in self._compiled.variables else []
        )
        for i, message in enumerate(messages):
            role = str(message.get("role", ""))
            if (role, ALL) not in read:
                names = unread(message, ("role", "content", *TRAINED))
                missing += [f"messages[{i}] has `{name}`" for name in names if (role, name) not in read]
        if missing:
            raise ValueError(
                f"{missing[0]}, which {self.name} does not read: use a template that does, or {REMEDY}"
            )

    def _trained(
        self, messages: Sequence[Mapping[str, Any]], tools: Any, skipped: Collection[int], spans: _Spans
    ) -> _Spans:
        """Return the ranges of characters in `spans` that are trained on: all but the ranges of the messages
        `skipped`.

        The conversation is rendered again with a character at both ends of the contents, or at one end if the
        template refuses that because it looks for a text at the other. The character tells the assistant's
        messages from others, and trained ones from skipped ones. Raises ValueError if the template marks the
        content of another role, or if a range has both trained and skipped messages, or neither, or if that
        cannot be seen."""
        other, yes, no = _stand_ins(3, [list(messages), tools])
        tags = [other if message.get("role") in OTHER_ROLES else "" for message in messages]
        if skipped:
            own = [message.get("role") == "assistant" for message in messages]
            tags = [(no if i in skipped else yes) if own[i] else tag for i, tag in enumerate(tags)]
        for before, after in ((True, True), (False, True), (True, False)):
            tagged = [
                {**message, "content": tag * before + content + tag * after}
                if tag and isinstance(content := message.get("content", None if tag == other else ""), str)
                else message
                for message, tag in zip(messages, tags)
            ]
            try:
                text, ranges, _ = self._rendered([tagged, tools], add_generation_prompt=False)
            except ValueError:  # the template looks for other texts
                continue
            kinds = [{other, yes, no} & set(text[begin:end]) for begin, end in ranges]
            if any(other in kind for kind in kinds):
                raise ValueError(
                    f"{self.name} marks messages of other roles as the assistant's: put `{{% generation %}}` "
                    "and `{% endgeneration %}` around no more than what the assistant writes"
                )
            if not skipped:
                return spans
            is_clear = all(len(kind) == 1 or begin == end for kind, (begin, end) in zip(kinds, ranges))
            if is_clear and len(ranges) == len(spans):
                return tuple(span for span, kind in zip(spans, kinds) if no not in kind)
        if skipped:
            raise ValueError(
                f"{self.name} does not show which texts belong to the messages that are not trained on: put "
                "each message into its own generation block"
            )
        raise ValueError(
            f"{self.name} accepts only certain texts of other roles than the assistant, so that it cannot be "
            "seen whether it marks them as the assistant's: let it accept any text"
        )

    def _written(self, text: str, conversation: Any, add_generation_prompt: bool) -> tuple[int, ...]:
        """Return the places in `text`, the rendered conversation, of the names of control tokens that the
        template itself writes.

        The conversation is rendered again with other characters for the punctuation of these names. Names
        that are still there do not come from a message, whatever the template does with its texts."""
        names = self._control_names
        punctuation = sorted(self._punctuation.intersection("".join(_strings(conversation))))
        if not punctuation:
            return _places(names, text)
        stand_ins = dict(zip(punctuation, _stand_ins(len(punctuation), conversation)))
        pattern = re.compile("|".join([*map(re.escape, self._kept), f"[{re.escape(''.join(stand_ins))}]"]))

        def disguise(string: str) -> str:
            return pattern.sub(lambda match: stand_ins.get(match[0], match[0]), string)

        try:
            other = self._rendered(_mapped(conversation, disguise), add_generation_prompt).text
        except ValueError:  # the template looks for such characters
            other = ""
        if other.translate({ord(c): original for original, c in stand_ins.items()}) == text:
            return _places(names, other)
        if names.findall(other) != names.findall(text):
            raise ValueError(
                "a message writes the name of a control token where the chat template escapes it or looks "
                "for it"
            )
        return _places(names, text)

    def encode(self, chat: RenderedChat) -> ChatTokens:
        """Return the token ids of a rendered conversation.

        A token is the assistant's if one of its characters is: the first and last token of a span may have
        characters before and after it. Raises ValueError if the tokenizer has no other tokens for the name of
        a control token in a message, or does not find one of the template's."""
        bounds = [0, *chat.control, len(chat.text)]
        text = BEGIN.join(chat.text[begin:end] for begin, end in pairwise(bounds))
        encoding = self._marked_library.encode(text, add_special_tokens=False)
        ids = np.array([self._added.get(i, i) for i in encoding.ids], np.uint32)
        is_control, is_added = np.isin(ids, list(self._control)), np.isin(encoding.ids, list(self._added))
        if len(intruders := ids[is_control & ~is_added]):
            name = self._control[int(intruders[0])]
            raise ValueError(f"a message holds {name!r}, which the tokenizer cannot encode as plain text")
        if (is_control & is_added).sum() < len(chat.control):
            raise ValueError(
                "the tokenizer does not find every control token that the chat template writes: look for "
                "`single_word` and `normalized` in tokenizer.json"
            )
        offsets, mask = np.array(encoding.offsets, np.int64).reshape(-1, 2), np.zeros(len(ids), np.bool_)
        for span in chat.assistant:
            begin, end = np.add(span, np.searchsorted(chat.control, span))  # with the marks before them
            inside = np.flatnonzero((offsets[:, 1] > begin) & (offsets[:, 0] < end))
            if len(inside):
                mask[inside[0] : inside[-1] + 1] = True
        return ChatTokens(ids, mask)

    def end_of_turn(self) -> set[int]:
        """Return the id of the control token that a model learns to write behind an answer; empty if there is
        none."""
        trained = self._ends[0] if self._ends else []
        return {number for number, name in self._control.items() if name in trained[-1:]}

    def warning(self) -> str:
        """Return a warning if answers are trained without a token that ends them, otherwise ""."""
        if self._ends is None or self._ends[0]:
            return ""
        end = (self._ends[1] or [self.variables.get("eos_token", "")])[0]
        return (
            f"{self.name} trains no token behind an answer, so that the model will not learn to stop: put "
            f"{end!r} before `{{% endgeneration %}}`"
        )

    @cached_property
    def _ends(self) -> tuple[list[str], list[str]] | None:
        """The names of the control tokens behind the answer of a conversation: those that are trained, and
        the others. None if the template refuses the conversation."""
        answer = chr(STAND_INS[0])
        try:
            chat = self.render([PROBE[1], {"role": "assistant", "content": answer}])
        except (ValueError, TemplateLimitError):  # a template for other conversations
            return None
        begin, end = chat.assistant[-1]
        begin = max(begin, chat.text.rfind(answer))
        names = [(at, self._control_names.match(chat.text, at)) for at in chat.control if at >= begin]
        return [m[0] for at, m in names if m and at < end], [m[0] for at, m in names if m and at >= end]

    def unmarked_template(self) -> str:
        """Return the template for programs that do not know its marks, if it renders a probe alike without
        them; otherwise the template itself. The marks become conditions that are true, which keep the rules
        for white space around a block."""
        ended = re.sub(r"({%[-+]?\s*)endgeneration\b", r"\1endif", self.template)
        plain = copy(self)
        plain.template = re.sub(r"({%[-+]?\s*)generation\b", r"\1if true", ended)
        try:
            plain._compiled = Template(plain.template)
        except (TemplateError, TemplateLimitError):
            return self.template
        probes = product((PROBE, PROBE[1:] * 2), (False, True))
        is_equal = all(plain._probed(*probe) == self._probed(*probe) for probe in probes)
        return plain.template if is_equal else self.template

    def _probed(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool) -> str | None:
        """Return the text of a probe; None if the template refuses it, because it is for others."""
        try:
            return self._rendered([messages, None], add_generation_prompt).text
        except ValueError:
            return None

    @cached_property
    def _compiled(self) -> Template:
        return Template(self.template)

    @cached_property
    def _library(self) -> Any:
        return self._load(control=())

    @cached_property
    def _marked_library(self) -> Any:
        """The library in which a control token's name is this token only behind BEGIN, which no message has.
        All other text is encoded where it stands, because some tokenizers put a blank before a text, and
        before what follows a token."""
        return self._load(control=self._control.values())

    @cached_property
    def _added(self) -> dict[int, int]:
        """The ids of the added tokens by those that `_marked_library` gives them."""
        ids = {token.content: i for i, token in self._library.get_added_tokens_decoder().items()}
        tokens = self._marked_library.get_added_tokens_decoder().items()
        return {i: ids[token.content.removeprefix(BEGIN)] for i, token in tokens}

    @cached_property
    def _control(self) -> dict[int, str]:
        """The names of the control tokens by id: special tokens, and other added tokens that the template
        writes around messages. A message may write a token that the template looks for in messages, such as
        `</think>`, unless the token is special and stands around messages."""
        written = "".join(self._probed(p, add_generation_prompt=True) or "" for p in (PROBE, PROBE[1:]))
        sought, control = "\n".join(self._compiled.sought), dict[int, str]()
        for number, token in self._library.get_added_tokens_decoder().items():
            is_written = token.content in written and re.search(PUNCTUATION, token.content)
            if (token.special and is_written) if token.content in sought else (token.special or is_written):
                control[number] = token.content
        return control

    @cached_property
    def _control_names(self) -> re.Pattern[str]:
        names = sorted(self._control.values(), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, names)) or "(?!)")

    @cached_property
    def _punctuation(self) -> set[str]:
        """Characters, of which every name of a control token has one: the punctuation of the names."""
        return {c for name in self._control.values() for c in re.findall(PUNCTUATION, name) or name}

    @cached_property
    def _kept(self) -> list[str]:
        """Texts that the template looks for in messages, if they are no part of a control token's name."""
        names = self._control.values()
        kept = [t for t in self._compiled.sought if t and not any(t in name or name in t for name in names)]
        return sorted(kept, key=len, reverse=True)

    def _load(self, control: Collection[str]) -> Any:
        """Load the tokenizer, with BEGIN before the names of these tokens."""
        from tokenizers import Tokenizer as Library

        # Without the post-processor, which may take blanks out of the tokens' ranges of characters.
        tree = json.loads(self._tokenizer_json) | {"post_processor": None}
        for token in tree["added_tokens"]:
            if token["content"] in control:
                token["content"] = BEGIN + token["content"]
        library = Library.from_str(json.dumps(tree))
        library.no_truncation()
        library.no_padding()
        return library

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key not in _CACHED}


class _Rendered(NamedTuple):
    """A template's output without the marks, the assistant's ranges of characters in it, and the roles with
    the fields that the template reads in their messages."""

    text: str
    assistant: _Spans
    read: Container[tuple[str, str]]


def _stand_ins(count: int, conversation: Any) -> list[str]:
    """Return different characters of STAND_INS that a conversation does not have. Raises ValueError if it
    has too many."""
    used = set("".join(_strings(conversation)))
    unused = list(islice((chr(i) for i in STAND_INS if chr(i) not in used), count))
    if len(unused) < count:
        raise ValueError("a conversation with almost all hieroglyphs, U+13000 to U+1342F, cannot be checked")
    return unused


_CACHED = {name for name, value in vars(ChatFormat).items() if isinstance(value, cached_property)}


def _strings(value: Any) -> Iterator[str]:
    """Yield all strings in a value of JSON."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (Mapping, list)):
        for item in (*value, *value.values()) if isinstance(value, Mapping) else value:
            yield from _strings(item)


def _mapped(value: Any, function: Callable[[str], str]) -> Any:
    """Copy a value of JSON with `function` applied to all strings."""
    if isinstance(value, str):
        return function(value)
    if isinstance(value, Mapping):
        return {_mapped(key, function): _mapped(item, function) for key, item in value.items()}
    return [_mapped(item, function) for item in value] if isinstance(value, list) else value


def _places(names: re.Pattern[str], text: str) -> tuple[int, ...]:
    return tuple(match.start() for match in names.finditer(text))


def _without_marks(rendered: str) -> tuple[str, _Spans]:
    """Return a template's output without the marks, and the ranges of characters between them. Raises
    ValueError if they are not in pairs."""
    texts, spans, length, begin = list[str](), list[tuple[int, int]](), 0, -1
    for text in MARKS.split(rendered):
        if text in (BEGIN, END):
            if (text == BEGIN) != (begin < 0):
                raise ValueError("the chat template puts a generation block into another, or cuts one")
            if text == END:
                spans.append((begin, length))
            begin = length if text == BEGIN else -1
        else:
            texts.append(text)
            length += len(text)
    return "".join(texts), tuple(spans)
