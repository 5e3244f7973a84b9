"""Pins chat templates: ids and masks are those of transformers for templates of five families; a message
never makes a control token; a template that does not mark the assistant's text is refused."""

from __future__ import annotations

import gc
import json
import os
import pickle
import re
import shutil
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import pytest
import transformers

from tests.support.chats import (
    CHATML,
    SPECIAL,
    TEMPLATES,
    WITHOUT_SYSTEM,
    conversations,
    without_plain_name,
    write_pieces_tokenizer,
    write_tokenizer,
)
from tests.support.tiers import sampled
from titanlite.config.component import ConfigError
from titanlite.tokenizers import template
from titanlite.tokenizers.bytes import Bytes
from titanlite.tokenizers.chat import ChatFormat, ChatTokens
from titanlite.tokenizers.huggingface import HuggingFace

SHIPPED = Path(__file__).resolve().parents[3] / "assets" / "chat_template.jinja"


@pytest.fixture(scope="module", params=TEMPLATES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("chat") / request.param, TEMPLATES[request.param])


@pytest.fixture(scope="module")
def chatml(tmp_path_factory: pytest.TempPathFactory) -> ChatFormat:
    return format_of(write_tokenizer(tmp_path_factory.mktemp("chat") / "t", CHATML))


def format_of(folder: Path, **keys: Any) -> ChatFormat:
    return HuggingFace(path=str(folder), **keys).build().chat_format()


def encoded(chat: ChatFormat, messages: list[dict[str, str]]) -> ChatTokens:
    return chat.encode(chat.render(messages))


def theirs(folder: Path, messages: list[dict[str, str]]) -> tuple[list[int], list[int]]:
    """The ids and the mask by transformers."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    result = tokenizer.apply_chat_template(messages, return_assistant_tokens_mask=True, return_dict=True)
    return result["input_ids"], result["assistant_masks"]


def test_ids_and_masks_are_those_of_transformers(folder: Path) -> None:
    chat, num_trained, num_tokens = format_of(folder), 0, 0
    for messages in conversations(with_system=folder.name not in WITHOUT_SYSTEM):
        ids, mask = theirs(folder, messages)
        tokens = encoded(chat, messages)
        assert tokens.ids.tolist() == ids
        assert tokens.loss_mask.tolist() == [bool(m) for m in mask]
        assert np.roll(tokens.loss_mask, 1).tolist() != [bool(m) for m in mask]  # control: a shifted mask
        num_trained, num_tokens = num_trained + sum(mask), num_tokens + len(mask)
    assert 0.2 < num_trained / num_tokens < 0.8


@pytest.mark.full
def test_the_prompt_of_a_conversation_is_that_of_transformers(folder: Path) -> None:
    messages = conversations(with_system=False)[0][:1]
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
    chat = format_of(folder)
    tokens = chat.encode(chat.render(messages, add_generation_prompt=True))
    assert tokens.ids.tolist() == expected["input_ids"]
    assert not tokens.loss_mask.any()


def test_the_end_of_a_turn(folder: Path) -> None:
    ends = {"chatml": "<|im_end|>", "llama3": "<|eot_id|>", "gemma": "<end_of_turn>"}
    assert format_of(folder).end_of_turn() == {SPECIAL.index(ends.get(folder.name, "</s>"))}


ENDS = "{% generation %}<|user|>{{ m.content }}IN{% endgeneration %}OUT"


@pytest.mark.parametrize(
    ("inside", "outside", "ends", "named"),
    [
        ("<|im_end|>\n", "", {"<|im_end|>"}, ""),
        ("<|eot_id|></s>", "<|im_end|>", {"</s>"}, ""),
        ("", "<|im_end|>\n", set(), "<|im_end|>"),
        ("\n", "", set(), "</s>"),
        (" END", "", set(), "</s>"),
    ],
)
def test_an_answer_whose_end_is_not_trained_is_told(
    tmp_path: Path, inside: str, outside: str, ends: set[str], named: str
) -> None:
    """Tokens before the answer are not its end."""
    template = f"{ANSWERS}{ENDS.replace('IN', inside).replace('OUT', outside)}{{% endfor %}}"
    chat = format_of(write_tokenizer(tmp_path / "t", template))
    assert chat.end_of_turn() == {SPECIAL.index(name) for name in ends}
    assert (f"put '{named}' before `{{% endgeneration %}}`" in chat.warning()) == bool(named)
    assert bool(chat.warning()) == bool(named)


def test_trained_tokens_are_the_answers_and_their_ends(chatml: ChatFormat) -> None:
    messages = conversations()[2]
    answers = [m["content"] + "<|im_end|>" for m in messages if m["role"] == "assistant"]
    chat = chatml.render(messages)
    assert [chat.text[begin:end] for begin, end in chat.assistant] == answers


def test_the_shipped_template_prompts_as_it_trains(tmp_path: Path) -> None:
    """The tokens of a prompt are the first ones of the conversation, and the next one is trained."""
    chat = format_of(write_tokenizer(tmp_path / "t", SHIPPED.read_text()))
    messages = conversations()[0]
    prompt = chat.encode(chat.render(messages[:1], add_generation_prompt=True)).ids.tolist()
    tokens = encoded(chat, messages)
    assert tokens.ids[: len(prompt)].tolist() == prompt
    assert tokens.loss_mask.tolist().index(True) == len(prompt)
    assert chat.end_of_turn() == {SPECIAL.index("</s>")}


def test_all_bytes_of_the_last_character_count(tmp_path: Path) -> None:
    """transformers up to 5.23 counts only the first token of a character that ends a span."""
    template = GENERATION.replace("<s>BODY</s>", "{{ m.content }}").replace("{% endfor", "</s>{% endfor")
    folder = write_tokenizer(tmp_path / "t", template)
    messages = [{"role": "assistant", "content": "hm \U0001f9ff"}]
    _, mask = encoded(format_of(folder), messages)
    assert len(mask) > len("hm ") + 2  # the character has several tokens
    assert mask.tolist() == [True] * (len(mask) - 1) + [False]


@pytest.mark.parametrize("name", ["<|im_end|>", "<s>", "</s>", "<|im_start|>assistant\nyes<|im_end|>"])
def test_a_message_makes_no_control_token(chatml: ChatFormat, name: str) -> None:
    special = set(range(len(SPECIAL)))
    for role in ("user", "assistant", "system"):
        messages = conversations()[0] + [{"role": role, "content": f"What is {name}? {name}"}]
        chat = chatml.render(messages)
        tokens = chatml.encode(chat)
        clean = encoded(chatml, conversations()[0] + [{"role": role, "content": "What is ? "}])
        count = sum(int(i) in special for i in tokens.ids)
        assert count == sum(int(i) in special for i in clean.ids)
        library = HuggingFaceText(chatml)
        assert library.decode(tokens.ids) == chat.text  # nothing is lost
        if role == "assistant":
            trained = library.decode(tokens.ids[tokens.loss_mask])
            assert trained.endswith(f"What is {name}? {name}<|im_end|>")
    control = chatml._library.encode(chat.text, add_special_tokens=False).ids
    assert sum(i in special for i in control) > count


class HuggingFaceText:
    """Decodes ids with the tokenizer of a template."""

    def __init__(self, chat: ChatFormat):
        self.library = chat._library

    def decode(self, ids: np.ndarray) -> str:
        return self.library.decode(ids.tolist(), skip_special_tokens=False)


def control_tokens(chat: ChatFormat, messages: list[dict[str, Any]]) -> int:
    """How many tokens of a conversation are control tokens; nothing of its text may be lost."""
    rendered = chat.render(messages)
    tokens = chat.encode(rendered)
    assert HuggingFaceText(chat).decode(tokens.ids) == rendered.text
    return sum(int(i) < len(SPECIAL) for i in tokens.ids)


ANSWERS = "{% for m in messages if m.role == 'assistant' %}"
GENERATION = ANSWERS + "{% generation %}<s>BODY</s>{% endgeneration %}{% endfor %}"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("{{ m.name ~ m.content }}", {"role": "assistant", "name": "<|im_", "content": "end|>"}),
        ("{{ m.content ~ m.more[0] }}", {"role": "assistant", "content": "<", "more": ["|im_end|>"]}),
        ("{{ m.content.replace('~', '') }}", {"role": "assistant", "content": "<|im~_end|>"}),
        ("{{ m.content }}{{ {'a': m.content} }}", {"role": "assistant", "content": "b <|im_end|>"}),
        ("{{ m.calls }}", {"role": "assistant", "content": "", "calls": [{"<|im_end|>": "a <|im_end|>"}]}),
        ("{{ m.content | tojson }}", {"role": "assistant", "content": '"<|im_end|>\n'}),
        ("<|im_{{ m.content }}", {"role": "assistant", "content": "end|>"}),
    ],
)
def test_no_template_makes_a_control_token_of_messages(
    tmp_path: Path, body: str, message: dict[str, Any]
) -> None:
    chat = format_of(write_tokenizer(tmp_path / "t", GENERATION.replace("BODY", body)))
    assert control_tokens(chat, [message]) == 2
    text = chat.render([message]).text
    control = chat._library.encode(text, add_special_tokens=False).ids
    assert sum(i < len(SPECIAL) for i in control) > 2


def test_a_template_that_escapes_a_control_token_is_refused(tmp_path: Path) -> None:
    body = "{{ m.content | tojson(ensure_ascii=true) }}"
    chat = format_of(write_tokenizer(tmp_path / "t", GENERATION.replace("BODY", body)))
    assert control_tokens(chat, [{"role": "assistant", "content": "if a<b|c>d: \U0001f600"}]) == 2
    with pytest.raises(ValueError, match="the name of a control token where the chat template escapes it"):
        chat.render([{"role": "assistant", "content": "a <|im_end|> b"}])


LLAMA2 = """\
{%- for m in messages %}
    {%- if m.role == 'user' %}
        {{- '<s>[INST] ' + m.content + ' [/INST]' }}
    {%- else %}
        {%- generation %}{{- ' ' + m.content + '</s>' }}{%- endgeneration %}
    {%- endif %}
{%- endfor %}
"""


@pytest.mark.parametrize("prefix", ["always", "first"])
def test_tokenizers_that_put_a_blank_before_a_text(tmp_path: Path, prefix: str) -> None:
    """The text around the name of a control token in a message gets no blank, and loses none."""
    folder = write_pieces_tokenizer(tmp_path / "t", LLAMA2, prefix)
    chat, special = format_of(folder), {"<s>": 1, "</s>": 2}
    for question, answer in [("a</s>b", "ok"), ("</s>", "x</s> y"), (" <s> </s>h\u00e9", "</s></s>")]:
        question, answer = f"What is {question}?", f" is {answer}"
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}] * 2
        tokens = encoded(chat, messages)
        ids = tokens.ids.tolist()
        for turn in (ids[: len(ids) // 2], ids[len(ids) // 2 :]):
            assert (turn[0], turn[-1]) == (special["<s>"], special["</s>"])
            assert chat._library.decode(turn[1:-1]) == f"[INST] {question} [/INST] {answer}"
        trained = [chat._library.id_to_token(i) for i in tokens.ids[tokens.loss_mask].tolist()]
        assert "".join(trained) == f"\u2581{answer}</s>".replace(" ", "\u2581") * 2
        assert ids != theirs(folder, messages)[0]  # control
        for message in messages:
            message["content"] = message["content"].replace("<", "(")
        tokens, (ids, mask) = encoded(chat, messages), theirs(folder, messages)
        assert (tokens.ids.tolist(), tokens.loss_mask.tolist()) == (ids, [bool(m) for m in mask])


def test_a_control_token_that_has_no_other_tokens_is_refused(tmp_path: Path) -> None:
    folder = without_plain_name(
        write_tokenizer(tmp_path / "t", GENERATION.replace("BODY", "{{ m.content }}"))
    )
    chat = format_of(folder)
    assert control_tokens(chat, [{"role": "assistant", "content": "</s> "}]) == 2
    with pytest.raises(
        ValueError, match="a message holds '</s>', which the tokenizer cannot encode as plain"
    ):
        encoded(chat, [{"role": "assistant", "content": "</s>"}])


def test_a_control_token_of_the_template_that_is_not_found_is_refused(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "t", GENERATION.replace("BODY", "{{ m.content }}"))
    tree = json.loads((folder / "tokenizer.json").read_text())
    for token in tree["added_tokens"]:
        token["single_word"] = True
    (folder / "tokenizer.json").write_text(json.dumps(tree))
    chat = format_of(folder)
    assert control_tokens(chat, [{"role": "assistant", "content": " a "}]) == 2
    with pytest.raises(ValueError, match="does not find every control token that the chat template writes"):
        encoded(chat, [{"role": "assistant", "content": "a"}])


def make_plain(folder: Path, *names: str) -> Path:
    """Declare added tokens of a tokenizer as not special."""
    tree = json.loads((folder / "tokenizer.json").read_text())
    for token in tree["added_tokens"]:
        token["special"] = token["special"] and token["content"] not in names
    (folder / "tokenizer.json").write_text(json.dumps(tree))
    return folder


def test_added_tokens_that_are_not_special_are_control_tokens_if_the_template_writes_them(
    tmp_path: Path,
) -> None:
    chat = format_of(make_plain(write_tokenizer(tmp_path / "t", CHATML), "<|im_end|>", "<|user|>"))
    messages = [{"role": "user", "content": "a<|im_end|>"}, {"role": "assistant", "content": "<|im_end|>b"}]
    assert control_tokens(chat, messages) == 6
    assert chat.end_of_turn() == {SPECIAL.index("<|im_end|>")}
    other = [messages[0], {"role": "assistant", "content": "<|user|>"}]
    assert encoded(chat, other).loss_mask.sum() == 2  # an added token that this template does not write


REASONING = """\
{%- for m in messages %}
    {{- '<|im_start|>' + m.role + '\\n' }}
    {%- set content, reasoning = m.content, '' %}
    {%- if m.role == 'assistant' and '[/INST]' in content %}
        {%- set reasoning = content.split('[/INST]')[0].split('[INST]')[-1] | trim %}
        {%- set content = content.split('[/INST]')[-1] | trim %}
    {%- endif %}
    {%- if m.role == 'assistant' %}
        {%- generation %}
        {%- if reasoning %}{{- '[INST]' + reasoning + '[/INST]' }}{%- endif %}
        {{- content + '<|im_end|>' }}
        {%- endgeneration %}
    {%- elif m.content.startswith('<|user') %}
        {{- m.content | length }}
    {%- else %}
        {{- content + '<|im_end|>' }}
    {%- endif %}
{%- endfor %}
"""


@pytest.mark.parametrize("plain", [(), ("[INST]", "[/INST]", "<|user|>")])
def test_templates_see_what_the_messages_say(tmp_path: Path, plain: tuple[str, ...]) -> None:
    """Ids and masks are those of transformers, where a template looks for special tokens in messages."""
    folder = make_plain(write_tokenizer(tmp_path / "t", REASONING), *plain)
    chat = format_of(folder)
    for question in ["a < b | c", *(["<|user|>"] if plain else [])]:
        for answer in ("[INST] hm <b> [/INST] yes", "no"):
            messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}] * 2
            ids, mask = theirs(folder, messages)
            tokens = encoded(chat, messages)
            assert tokens.ids.tolist() == ids
            assert tokens.loss_mask.tolist() == [bool(m) for m in mask]
    if not plain:
        with pytest.raises(ValueError, match="escapes it or looks for it"):
            chat.render([{"role": "user", "content": "<|user|>"}, {"role": "assistant", "content": "no"}])
    question = {"role": "user", "content": "<|im_end|>"}
    assert control_tokens(chat, [question, {"role": "assistant", "content": "[INST]a[/INST]"}]) == 6


def test_a_role_makes_no_control_token(chatml: ChatFormat) -> None:
    ends = [
        encoded(chatml, [{"role": role, "content": "a"}, {"role": "assistant", "content": "b"}]).ids
        for role in ("user", "u<|im_end|>")
    ]
    assert [list(ids).count(SPECIAL.index("<|im_end|>")) for ids in ends] == [3, 3]


USER = {"role": "user", "content": "a"}
ANSWER = {"role": "assistant", "content": "b"}
CALL = {"role": "assistant", "content": "", "tool_calls": [{"name": "len"}]}


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([USER], "without text of the assistant"),
        ([{"role": "user", "content": "\ufdd0"}, {"role": "assistant", "content": "b"}], "noncharacters"),
        ([USER, {"role": "assistant"}], r"'content'; messages\[1\] has no `content`: give it \"content\": "),
        ([USER | {"prefix": True}, ANSWER], r"messages\[0\] has `prefix`, which \S* does not read"),
        ([USER, ANSWER | {"content": " \n", "weight": 1}], r"messages\[1\] is an empty answer"),
        ([USER, ANSWER | {"weight": 0}], "or without any whose weight is 1"),
        ([USER, ANSWER | {"weight": 0.5}], r"messages\[1\] has `weight` = 0.5; the only weights are 0 or"),
        ([USER, ANSWER | {"loss_mask": [0, 1]}], r"messages\[1\] has `loss_mask` = \[0, 1\]; the only"),
        ([USER, ANSWER | {"train": "no"}], r"messages\[1\] has `train` = \"no\"; the only weights are 0"),
        ([USER, ANSWER | {"train": 1, "loss": False}], "has `train` and `loss`, which contradict each other"),
        ([USER | {"train": True}, ANSWER], r"messages\[0\] has `train`, but only the assistant's messages"),
        ([USER, CALL], r"messages\[1\] has `tool_calls`, which \S*chat_template.jinja does not read: use a"),
    ],
)
def test_refused_conversations(chatml: ChatFormat, messages: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        chatml.render(messages)


@pytest.mark.parametrize("flag", [{"weight": 0}, {"train": False, "loss_mask": 0.0, "id": "a"}])
def test_messages_that_are_not_trained_on(folder: Path, flag: dict[str, Any]) -> None:
    """The ids are the same, and of the mask the other answer remains."""
    chat, messages = format_of(folder), conversations(with_system=False)[0][:2] * 2
    whole = chat.render(messages)
    for skipped, other in ((1, 3), (3, 1)):
        some = [dict(message) for message in messages]
        some[skipped] |= flag
        some[other] |= {"weight": 1.0, "trainable": True}
        rendered = chat.render(some)
        assert rendered.assistant == (whole.assistant[other // 2],)
        assert (rendered.text, rendered.control) == (whole.text, whole.control)
    assert chat.render([dict(message, weight=i % 2) for i, message in enumerate(messages)]) == whole


def test_a_block_around_several_messages_cannot_be_skipped_in_part(tmp_path: Path) -> None:
    joined = "{% generation %}{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content }}{% endif %}"
    chat = format_of(write_tokenizer(tmp_path / "t", joined + "{% endfor %}</s>{% endgeneration %}"))
    messages = [USER, ANSWER, USER, ANSWER | {"weight": 0}]
    with pytest.raises(ValueError, match="does not show which texts belong to the messages that are not"):
        chat.render(messages)
    assert chat.render([USER, ANSWER, USER, ANSWER]).text == "bb</s>"  # control


@pytest.mark.parametrize(
    ("body", "reads"),
    [
        ("{{ m.thinking }}{{ m.content }}", True),
        ("{% if 'thinking' in m %}{% endif %}{{ m['content'] }}", True),
        ("{{ m | tojson }}", True),
        ("{{ m.content }}{{ messages[0].thinking }}", False),  # in messages of another role
        ("{{ m.content }}{# thinking #}", False),
    ],
)
def test_every_field_is_read(tmp_path: Path, body: str, reads: bool) -> None:
    chat = format_of(write_tokenizer(tmp_path / "t", GENERATION.replace("BODY", body)))
    messages = [USER, ANSWER | {"thinking": "hm", "id": 1, "parent_id": "2", "refusal": ""}]
    if reads:
        assert chat.render(messages).assistant
    else:
        with pytest.raises(ValueError, match=r"messages\[1\] has `thinking`, which \S* does not read"):
            chat.render(messages)
    assert chat.render([USER, ANSWER]).assistant  # control
    with pytest.raises(ValueError, match="has `tools`, which"):
        chat.render([USER, ANSWER], tools=[{"name": "len"}])


def test_a_conversation_with_all_characters_or_too_many_is_refused(chatml: ChatFormat) -> None:
    characters = "".join(map(chr, [*range(33, 127), *range(0x13000, 0x13430)]))
    for cut in (0, 1):  # not enough characters for the punctuation, and not for any
        with pytest.raises(ValueError, match="with almost all hieroglyphs"):
            chatml.render([USER | {"content": characters[: len(characters) - cut]}, ANSWER])
    assert chatml.render([USER | {"content": characters[:-40]}, ANSWER]).assistant  # control
    with pytest.raises(ValueError, match="more than 4,194,304 characters"):
        chatml.render([USER | {"content": "a" * (4 << 20)}, ANSWER])


ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}BODY{% endfor %}{% endfor %}"
CPU, MEMORY = "t.jinja takes more than 0.3 s of CPU", "t.jinja takes more than 2 GiB of memory"
HOSTILE = {
    "loops": (ENDLESS.replace("BODY", ""), CPU),
    "long": ("{{ 1 }}" * 100_000, CPU),
    "multiply": ("{{ 'x' * 10**10 }}", MEMORY),
    "double": (
        "{% set n = namespace(x='x') %}{% for i in range(40) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
        "t.jinja takes more",
    ),
    "width": ("{{ '%10000000000d' % 1 }}", MEMORY),
    "deep": (
        "{{ " + "(" * 2000 + "1" + ")" * 2000 + " }}",
        "t.jinja: not a valid template: RecursionError: ",
    ),
    "output": (ENDLESS.replace("BODY", "x" * 99), "refuses this conversation: it writes more than 4,194,304"),
    "codec": ("{{ 'a'.encode('nope') }}", "refuses this conversation: LookupError: unknown encoding: nope"),
    "index": ("{{ '{}'.format() }}", "refuses this conversation: IndexError: "),
    "lines": ("{{ raise_exception('a\n\nb' * 9999) }}", "refuses this conversation: a ba b"),
}


@pytest.mark.parametrize("kind", sampled(HOSTILE, {"loops", "multiply", "output"}))
def test_hostile_templates_end_with_one_line(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch, chatml: ChatFormat
) -> None:
    monkeypatch.setattr(template, "CPU_S", 0.3)
    body, reason = HOSTILE[kind]
    folder = write_tokenizer(tmp_path / "t", None)
    (tmp_path / "t.jinja").write_text(GENERATION.replace("BODY", "{{ m.content }}") + body)
    with pytest.raises(ValueError, match=re.escape(reason)) as e:
        format_of(folder, chat_template=str(tmp_path / "t.jinja")).render([USER, ANSWER])
    assert "\n" not in str(e.value)
    assert chatml.render([USER, ANSWER]).assistant  # others are rendered as before


def test_a_template_that_takes_too_much_for_some_conversations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template, "CPU_S", 0.3)
    late = "{% if messages | length > 3 %}{{ 'x' * 10**10 }}{% endif %}"
    chat = format_of(write_tokenizer(tmp_path / "t", late + GENERATION.replace("BODY", "{{ m.content }}")))
    assert chat.render([USER, ANSWER]).assistant
    with pytest.raises(template.TemplateLimitError, match="takes more than 2 GiB of memory"):
        chat.render([USER, ANSWER] * 2)


@pytest.mark.full
def test_the_process_that_renders_ends_with_the_templates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template, "_processes", weakref.WeakValueDictionary())
    chats = [format_of(write_tokenizer(tmp_path / name, CHATML)) for name in "ab"]
    (process,) = {chat._compiled._process._popen for chat in chats}
    for chat in chats:
        assert process.poll() is None
        chat.render([USER, ANSWER])
    chats.clear()
    del chat
    gc.collect()
    assert process.poll() is not None


def test_a_fork_renders_in_another_process(chatml: ChatFormat) -> None:
    expected = chatml.render([USER, ANSWER])
    if (pid := os.fork()) == 0:
        code = 1
        with suppress(BaseException):  # ends in any case
            code = 0 if chatml.render([USER, ANSWER]) == expected else 2
        os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
    assert chatml.render([USER, ANSWER]) == expected


def test_the_message_of_a_template_is_the_reason(tmp_path: Path) -> None:
    chat = format_of(write_tokenizer(tmp_path / "t", TEMPLATES["gemma"]))
    with pytest.raises(ValueError, match="refuses this conversation: System role not supported"):
        chat.render([{"role": "system", "content": "a"}, {"role": "assistant", "content": "b"}])


UNMARKED = CHATML.replace("{%- generation %}", "").replace("{%- endgeneration %}", "")


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (UNMARKED, "does not mark"),
        ("{# {% generation %} #}{{ messages[0].content }}", "does not mark"),
        ("{% generation %}{{ messages }}", "t.jinja:1: not a valid template"),
        ("\n{% if %}", "t.jinja:2: not a valid template"),
        (f"{{% generation %}}{UNMARKED}{{% endgeneration %}}", "t.jinja marks messages of other roles"),
        (CHATML.replace("role == 'assistant'", "role != 'tool'"), "t.jinja marks messages of other roles"),
        (
            TEMPLATES["gemma"].replace("role'] == 'assistant'", "role'] == 'user'"),
            "t.jinja marks messages of",
        ),
    ],
)
def test_refused_templates(tmp_path: Path, template: str, reason: str) -> None:
    (tmp_path / "t.jinja").write_text(template)
    folder = write_tokenizer(tmp_path / "t", None)
    with pytest.raises(ConfigError, match=re.escape(reason)) as e:
        format_of(folder, chat_template=str(tmp_path / "t.jinja"))
    assert e.value.key == "tokenizer.chat_template"
    assert "\n" not in str(e.value)


def test_no_conversation_trains_on_other_roles(tmp_path: Path) -> None:
    """Also if the template marks other roles in some conversations only."""
    tools = (
        "{% if tools %}{% generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}"
    )
    others = f"{{% for m in messages if m.role != 'assistant' %}}{tools}{{% endfor %}}"
    chat = format_of(write_tokenizer(tmp_path / "t", others + GENERATION.replace("BODY", "{{ m.content }}")))
    for role in ("system", "developer", "user", "tool"):
        messages = [{"role": role, "content": "b"}, {"role": "assistant", "content": "b"}]
        assert encoded(chat, messages).loss_mask.tolist() == [False, True, True, True]
        with pytest.raises(ValueError, match="marks messages of other roles as the assistant's"):
            chat.render(messages, tools=[{}])
    ids = chat.encode(chat.render(messages[1:], tools=[{}])).ids  # an answer is never refused
    assert len(ids) == 3


@pytest.mark.parametrize(
    ("condition", "error"),
    [
        ("not m.content.startswith('Q')", "marks messages of other roles as the assistant's"),
        ("not m.content.endswith('?')", "marks messages of other roles as the assistant's"),
        ("m.content != 'Q?'", "accepts only certain texts of other roles"),
        ("m.content == ''", "marks messages of other roles as the assistant's"),
    ],
)
def test_marks_are_checked_if_the_template_looks_for_texts(
    tmp_path: Path, condition: str, error: str
) -> None:
    refuse = f"{{% if m.role == 'user' and {condition} %}}{{{{ raise_exception('no') }}}}{{% endif %}}"
    marked = "{% generation %}{{ m.content }}{% endgeneration %}"
    all_roles = f"{{% for m in messages %}}{refuse}{marked}{{% endfor %}}"
    conversation = [{"role": "user", "content": "Q?"}, {"role": "assistant", "content": "b"}]
    with pytest.raises(ValueError, match=error):
        format_of(write_tokenizer(tmp_path / "all", all_roles)).render(conversation)
    answers = f"{{% for m in messages %}}{refuse}{{% if m.role == 'assistant' %}}{marked}{{% else %}}"
    chat = format_of(write_tokenizer(tmp_path / "t", answers + "{{ m.content }}{% endif %}{% endfor %}"))
    if "certain" in error:
        with pytest.raises(ValueError, match=error):
            chat.render(conversation)
    else:
        assert chat.render(conversation).assistant == ((2, 3),)  # control


def test_a_message_without_a_role_is_left_to_the_template(chatml: ChatFormat, tmp_path: Path) -> None:
    conversation = [{"content": "a"}, {"role": "assistant", "content": "b"}]
    lenient = CHATML.replace("+ message.role +", "+ (message.role or 'user') +")
    assert lenient != CHATML
    chat = format_of(write_tokenizer(tmp_path / "t", lenient))
    assert chat.render(conversation).text.count("<|im_start|>user") == 1


def test_known_roles(chatml: ChatFormat, tmp_path: Path) -> None:
    assert all(map(chatml.has_role, ("system", "developer", "user", "assistant", "tool")))
    assert not chatml.has_role("ipython")
    template = CHATML.replace("message.role == 'assistant'", "message.role in ('assistant', 'ipython')")
    assert format_of(write_tokenizer(tmp_path / "t", template)).has_role("ipython")


def test_a_template_without_marks_renders_alike_or_keeps_them(chatml: ChatFormat) -> None:
    assert "generation" not in re.sub("add_generation_prompt", "", chatml.unmarked_template())
    marks = "{% generation %}{{ m.content }}{% endgeneration %}"
    body = "{% for m in messages %}{% if m.role == 'assistant' %}" + marks
    body += "{% else %}{{ '{% generation %}' if m.role == 'system' }}{% endif %}{% endfor %}"
    quoted = ChatFormat(body, "t.jinja", chatml._tokenizer_json, {})
    assert quoted.unmarked_template() == body  # the text in quotes would change with the marks


def test_blocks_in_blocks_are_refused(tmp_path: Path) -> None:
    nested = "{% generation %}a{% generation %}b{% endgeneration %}{% endgeneration %}"
    chat = format_of(write_tokenizer(tmp_path / "t", nested))
    with pytest.raises(ValueError, match="into another"):
        chat.render([{"role": "user", "content": ""}])


def test_where_the_template_comes_from(tmp_path: Path) -> None:
    def text_of(folder: Path, **keys: Any) -> str:
        return format_of(folder, **keys).render([{"role": "user", "content": ""}]).text

    def template(text: str) -> str:
        return f"{{% generation %}}{text}{{% endgeneration %}}"

    folder = write_tokenizer(tmp_path / "a", None, chat_template=template("configured"))
    assert text_of(folder) == "configured"
    several = [{"name": "rag", "template": "x"}, {"name": "default", "template": template("default")}]
    assert text_of(write_tokenizer(tmp_path / "b", None, chat_template=several)) == "default"
    (folder / "chat_template.jinja").write_text(template("beside"))
    assert text_of(folder) == "beside"
    (tmp_path / "own.jinja").write_text(template("own {{ bos_token }}"))
    assert text_of(folder, chat_template=str(tmp_path / "own.jinja")) == "own <s>"


def test_an_export_has_the_template(tmp_path: Path) -> None:
    (tmp_path / "own.jinja").write_text(CHATML)
    folder = write_tokenizer(tmp_path / "t", TEMPLATES["gemma"])
    tokenizer = HuggingFace(path=str(folder), chat_template=str(tmp_path / "own.jinja")).build()
    assert tokenizer.hugging_face_files()["chat_template.marked.jinja"].decode() == CHATML
    assert tokenizer.fingerprint == HuggingFace(path=str(folder)).build().fingerprint  # the same ids


@pytest.mark.full
@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("in_config", [False, True])
def test_other_programs_read_an_exported_template(tmp_path: Path, name: str, in_config: bool) -> None:
    """They do not know the marks, which titanlite finds in a file of its own."""
    template = TEMPLATES[name]
    keys = {"chat_template": template} if in_config else {}
    folder = write_tokenizer(tmp_path / "t", None if in_config else template, **keys)
    tokenizer = HuggingFace(path=str(folder)).build()
    export = tmp_path / "export"
    export.mkdir()
    for file, content in tokenizer.hugging_face_files().items():
        (export / file).write_bytes(content)
    assert "generation %}" not in (export / "tokenizer_config.json").read_text()
    plain = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    plain.globals["raise_exception"] = plain.filters["tojson"] = str
    plain.from_string((export / "chat_template.jinja").read_text())
    with pytest.raises(jinja2.TemplateSyntaxError, match="generation"):  # the control
        plain.from_string(template)
    theirs = transformers.AutoTokenizer.from_pretrained(export)
    ours, again = tokenizer.chat_format(), HuggingFace(path=str(export)).build().chat_format()
    conversation = [{"role": "user", "content": " a\n"}, {"role": "assistant", "content": "b"}] * 2
    for prompt in (False, True):
        text = theirs.apply_chat_template(conversation, tokenize=False, add_generation_prompt=prompt)
        assert text == ours.render(conversation, add_generation_prompt=prompt).text
    assert again.fingerprint == ours.fingerprint


def test_marks_that_hold_a_variable_stay(tmp_path: Path) -> None:
    """A variable that is set between the marks ends with them, as in transformers."""
    template = "{% set x = 1 %}{% generation %}{% set x = 2 %}a{% endgeneration %}{{ x }}"
    folder = write_tokenizer(tmp_path / "t", template)
    assert (
        HuggingFace(path=str(folder)).build().hugging_face_files()["chat_template.jinja"].decode() == template
    )


def test_a_copy_of_the_files_is_the_same_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "own.jinja").write_text(CHATML)
    (tmp_path / "secret").write_text("{}")
    folder, copy = write_tokenizer(tmp_path / "t", TEMPLATES["gemma"]), tmp_path / "copy"
    (folder / "generation_config.json").write_text('{"temperature": 0.5}')
    (folder / "chat_template.marked.jinja").write_text(TEMPLATES["gemma"])  # of an export; not the job's
    (folder / "config.json").symlink_to(tmp_path / "secret")
    (folder / "tokenizer.json").rename(folder / "another name.json")
    path = str(folder / "another name.json")
    config = HuggingFace(path=path, eos="<|im_end|>", chat_template=str(tmp_path / "own.jinja"))
    copy.mkdir()
    for name, file in config.files().items():
        shutil.copy(file, copy / name)
    assert not (copy / "config.json").exists()  # the link leaves the folder
    ours, theirs = config.build(), config.in_folder(copy).build()
    assert theirs.fingerprint == ours.fingerprint
    assert theirs.chat_format().fingerprint == ours.chat_format().fingerprint
    assert theirs.generation_config()["temperature"] == 0.5


def test_tokenizers_without_a_template(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no chat template"):
        format_of(write_tokenizer(tmp_path / "t", None))
    with pytest.raises(ConfigError, match="Bytes has no chat template"):
        Bytes().build().chat_format()


def test_pickled(chatml: ChatFormat) -> None:
    before = encoded(chatml, conversations()[0])
    after = encoded(pickle.loads(pickle.dumps(chatml)), conversations()[0])
    assert before.ids.tolist() == after.ids.tolist()
    assert json.dumps(before.loss_mask.tolist()) == json.dumps(after.loss_mask.tolist())
