"""Chat templates in the published structure of five families, with generation blocks; a tokenizer that has
the special tokens of all of them; and conversations."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

CHATML = """\
{%- for message in messages %}
    {%- if loop.first and message.role != 'system' %}
        {{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}{{- message.content + '<|im_end|>' }}{%- endgeneration %}
        {{- '\\n' }}
    {%- else %}
        {{- message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
LLAMA3 = """\
{{- bos_token }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {%- if message['role'] == 'assistant' %}
        {%- generation %}{{- message['content'] | trim + '<|eot_id|>' }}{%- endgeneration %}
    {%- else %}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""
MISTRAL = """\
{%- if messages[0].role == 'system' %}
    {%- set system, turns = messages[0].content + '\\n\\n', messages[1:] %}
{%- else %}
    {%- set system, turns = '', messages %}
{%- endif %}
{{- bos_token }}
{%- for message in turns %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}
    {%- if message.role == 'user' %}
        {{- '[INST] ' + (system if loop.last or loop.index0 == turns | length - 2 else '') }}
        {{- message.content + '[/INST]' }}
    {%- else %}
        {%- generation %}{{- ' ' + message.content + eos_token }}{%- endgeneration %}
    {%- endif %}
{%- endfor %}
"""
GEMMA = """\
{{ bos_token }}
{%- if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}

{% for message in messages %}
{% if message['role'] == 'assistant' %}
{{ '<start_of_turn>model\\n' }}{% generation %}{{ message['content'] | trim }}<end_of_turn>
{% endgeneration %}
{% else %}
{{ '<start_of_turn>' + message['role'] + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}
{% endif %}
{% endfor %}
{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}
"""
ZEPHYR = """\
{% for message in messages %}
{% if message['role'] == 'user' %}
{{ '<|user|>\\n' + message['content'] + eos_token }}
{% elif message['role'] == 'system' %}
{{ '<|system|>\\n' + message['content'] + eos_token }}
{% elif message['role'] == 'assistant' %}
{{ '<|assistant|>\\n' }}{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}

{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}
"""
TEMPLATES = {"chatml": CHATML, "llama3": LLAMA3, "mistral": MISTRAL, "gemma": GEMMA, "zephyr": ZEPHYR}
WITHOUT_SYSTEM = ("gemma",)
SPECIAL = [
    *("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    *("[INST]", "[/INST]", "<start_of_turn>", "<end_of_turn>", "<|user|>", "<|system|>", "<|assistant|>"),
]
TURNS = [
    "What does len() do?",
    "It returns the number of items of a container.\n\nFor a string: `len('h\u00e9')` is 2.",
    "  And in \u4e2d\u6587, or for \U0001f600\U0001f468\u200d\U0001f469?",
    "\n\u4e2d\u6587 has 2; emoji count by code point \U0001f600",
    "caf\u00e9?\r\n\tIt's 12345 + 67",
    " 12412 ",
    "{{ bos_token }} {% generation %}",
    "That is Jinja, not code of mine. \U0001f600",
]


def conversations(with_system: bool = True) -> list[list[dict[str, str]]]:
    """One to four questions with answers, with and without a system prompt."""
    roles = ["user", "assistant"] * 4
    turns = [{"role": role, "content": text} for role, text in zip(roles, TURNS)]
    chats = [turns[begin:end] for begin in (0, 2, 4) for end in range(begin + 2, len(turns) + 1, 2)]
    system = {"role": "system", "content": "Answer in one sentence. \u2014 \u00dcber alles genau."}
    return chats + ([[system, *chat] for chat in chats] if with_system else [])


def write_tokenizer(folder: Path, template: str | None, **configured: Any) -> Path:
    """A directory with a byte-level BPE tokenizer, trained on the conversations, and a template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    library = Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=SPECIAL,
    )
    library.train_from_iterator(TURNS[:6], trainer)
    return _save(library, folder, template, **configured)


def _save(library: Any, folder: Path, template: str | None, **configured: Any) -> Path:
    folder.mkdir(parents=True)
    library.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config | configured))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


def write_pieces_tokenizer(folder: Path, template: str, prefix: str) -> Path:
    """A directory with a tokenizer of characters and bytes, such as Llama 2's, and a template. `prefix`: the
    texts that get a blank in front: "always", also those behind a special token, or the "first" one."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

    special = ["<unk>", "<s>", "</s>"]
    texts = [*special, *(f"<0x{i:02X}>" for i in range(256)), "\u2581", *map(chr, range(33, 127))]
    vocab = {text: i for i, text in enumerate(texts)}
    library = Tokenizer(models.BPE(vocab, [], byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    if prefix == "always":
        blanks = [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
        library.normalizer = normalizers.Sequence(blanks)
    else:
        library.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prefix, split=False)
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    library.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    library.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in special])
    return _save(library, folder, template)


def without_plain_name(folder: Path) -> Path:
    """Change a tokenizer so that a text of only a token's name cannot be other tokens than this one."""
    tree = json.loads((folder / "tokenizer.json").read_text())
    tree["model"]["ignore_merges"] = True  # a word that is a token is not split
    tree["pre_tokenizer"]["use_regex"] = False  # a text is one word
    (folder / "tokenizer.json").write_text(json.dumps(tree))
    return folder


def write_conversations(file: Path, chats: Iterable[list[dict[str, str]]]) -> Path:
    """A file with a conversation per line."""
    file.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    return file
