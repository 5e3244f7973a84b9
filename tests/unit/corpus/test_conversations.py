"""Pins conversations on their way into sequences: what transformers masks is what does not count, with any
packing; a damaged line is named with its file; and nothing is left behind."""

from __future__ import annotations

import gzip
import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.support.chats import (
    CHATML,
    conversations,
    without_plain_name,
    write_conversations,
    write_tokenizer,
)
from tests.support.datasets import write_dataset
from tests.support.jobs import make_job, metrics_of, write_toml
from tests.support.models import family, hugging_face, keys_of
from tests.support.tiers import full, sampled
from titanlite import cli
from titanlite.config.component import ConfigError
from titanlite.corpus.chat_source import Chat
from titanlite.corpus.conversations import read_conversations, split_conversations
from titanlite.corpus.filters import ExactDuplicates, Filter
from titanlite.corpus.pipeline import prepare
from titanlite.corpus.stages import PrepareOptions
from titanlite.data import text_files
from titanlite.data.batch import IGNORE, make_batch
from titanlite.data.packing import PACKINGS
from titanlite.data.shards import TokenShards
from titanlite.job import Job
from titanlite.tokenizers.base import Tokenizer
from titanlite.tokenizers.bytes import Bytes
from titanlite.tokenizers.chat import ChatFormat
from titanlite.tokenizers.huggingface import HuggingFace
from titanlite.train import train

transformers = pytest.importorskip("transformers")
SEQ_LEN = 256


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer with a template, and conversations.jsonl."""
    folder = write_tokenizer(tmp_path_factory.mktemp("chat") / "t", CHATML)
    write_conversations(folder / "conversations.jsonl", conversations())
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return HuggingFace(path=str(folder)).build()


@pytest.fixture(scope="module")
def shards(folder: Path, tokenizer: Tokenizer) -> TokenShards:
    return Chat(path=[str(folder / "conversations.jsonl")]).build(tokenizer, folder / "cache")


def masked(folder: Path) -> list[tuple[list[int], list[int]]]:
    """The ids and masks of the conversations by transformers."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    options = {"return_assistant_tokens_mask": True, "return_dict": True}
    results = [tokenizer.apply_chat_template(chat, **options) for chat in conversations()]
    return [(result["input_ids"], result["assistant_masks"]) for result in results]


def test_documents_are_conversations_without_other_tokens(folder: Path, shards: TokenShards) -> None:
    stored = []
    for number in range(shards.num_documents):
        ids = shards.document(number)
        start = int(shards.token_offsets(0, number, number + 1)[0])
        mask = shards.loss_mask(start, len(ids))
        assert mask is not None
        stored.append((ids.tolist(), mask.astype(int).tolist()))
    assert sorted(stored) == sorted(masked(folder))
    assert json.loads((shards.path / "dataset.json").read_text())["format"] == 2


@pytest.mark.parametrize("num_splits", [1, 4])
@pytest.mark.parametrize("packing", PACKINGS)
def test_targets_are_the_trained_tokens(
    folder: Path, shards: TokenShards, packing: str, num_splits: int
) -> None:
    """Every target that counts is a token of the assistant, each at most once; best_fit, whose sequences hold
    whole conversations, counts each exactly once."""
    packed = PACKINGS[packing](shards, SEQ_LEN, folder / "cache", True)
    sequences = [packed[i] for i in range(len(packed))]
    batch = make_batch(range(len(packed)), sequences, seq_len=SEQ_LEN, with_positions=True).split(num_splits)
    targets = batch.targets[batch.targets != IGNORE]
    trained = [i for ids, mask in masked(folder) for i, counts in zip(ids, mask) if counts]
    assert batch.num_targets == len(targets)
    if packing == "best_fit":
        assert sorted(targets.tolist()) == sorted(trained)
    else:
        assert 0.8 * len(trained) < len(targets) <= len(trained)
    for sequence, row in zip(sequences, batch.targets.reshape(-1, SEQ_LEN)):
        assert sequence.loss_mask is not None
        counts = row.numpy() != IGNORE
        assert not (counts & ~sequence.loss_mask[1:]).any()
        assert (row.numpy()[counts] == sequence.tokens[1:][counts]).all()


def test_the_hash_of_a_batch_depends_on_the_mask(folder: Path, shards: TokenShards) -> None:
    sequence = PACKINGS["best_fit"](shards, SEQ_LEN, folder / "cache", True)[0]
    assert sequence.loss_mask is not None
    other = type(sequence)(sequence.tokens, sequence.document_starts, 0, np.roll(sequence.loss_mask, 1))
    hashes = {make_batch([0], [s], seq_len=SEQ_LEN).hash for s in (sequence, other)}
    assert len(hashes) == 2


def test_a_dataset_without_masks_has_none(tmp_path: Path, tokenizer: Tokenizer) -> None:
    shards = write_dataset(tmp_path / "d", [[0, 1, 2], [3, 4]])
    assert shards.loss_mask(0, 5) is None
    assert json.loads((shards.path / "dataset.json").read_text())["format"] == 1


@pytest.mark.parametrize("damage", ["missing", "short", "changed"])
def test_a_damaged_mask_is_found(shards: TokenShards, tmp_path: Path, damage: str) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(shards.path, copy)
    TokenShards(copy).verify()
    mask = copy / "00000.mask"
    if damage == "missing":
        mask.unlink()
    else:
        content = bytearray(mask.read_bytes())
        content[0] ^= 1
        mask.write_bytes(content[: -1 if damage == "short" else None])
    with pytest.raises(ConfigError, match=r"00000\.mask"):
        TokenShards(copy).verify()


def test_masks_belong_to_the_fingerprint(shards: TokenShards, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(shards.path, copy)
    description = json.loads((copy / "dataset.json").read_text())
    description["shards"][0]["mask_sha256"] = "0" * 64
    (copy / "dataset.json").write_text(json.dumps(description))
    assert TokenShards(copy).fingerprint != shards.fingerprint


SHAREGPT = {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}
PLAIN = {"messages": [{"role": "user", "content": "a", "name": None}, {"role": "assistant", "content": "b"}]}


def test_sharegpt_is_the_same_conversation(folder: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokens = []
    for i, record in enumerate((SHAREGPT, PLAIN)):
        (tmp_path / f"{i}.jsonl").write_text(json.dumps(record) + "\n")
        tokens.append(Chat(path=[str(tmp_path / f"{i}.jsonl")]).build(tokenizer, tmp_path).document(0))
    assert tokens[0].tolist() == tokens[1].tolist()


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_fields_are_obeyed_refused_or_ignored(tokenizer: Tokenizer, tmp_path: Path, name: str) -> None:
    turns = SHAREGPT["conversations"]
    bad = [turns[0], turns[1] | {"value": "BAD", "weight": 0, "score": 1}]
    record = {"conversations": [*bad, *turns], "prompt": "a", "source": "x", "prompt_id": "y", "empty": ""}
    if name == "a.jsonl":
        (tmp_path / name).write_text(json.dumps(record))
    else:
        pytest.importorskip("pyarrow.parquet").write_table(pyarrow_table([record]), tmp_path / name)
    path, ignored = [str(tmp_path / name)], list[str]()
    for field, where in (("prompt", "the conversation"), ("score", r"messages\[1\]")):
        with pytest.raises(ConfigError, match=f"{where} has `{field}`, which"):
            Chat(path=path, ignore_fields=ignored).build(tokenizer, tmp_path)
        ignored.append(field)
    shards = Chat(path=path, ignore_fields=ignored).build(tokenizer, tmp_path)
    ids, mask = shards.document(0), shards.loss_mask(0, shards.num_tokens)
    assert "BAD" in tokenizer.decode(ids.tolist())
    assert tokenizer.decode(ids[mask].tolist()) == "b<|im_end|>"
    every = Chat(path=path, ignore_fields=[*ignored, "weight"]).build(tokenizer, tmp_path)
    ids, mask = every.document(0), every.loss_mask(0, every.num_tokens)
    assert tokenizer.decode(ids[mask].tolist()) == "BAD<|im_end|>b<|im_end|>"  # control


TOOLS = [{"type": "function", "function": {"name": "len", "parameters": {}}}]
CALL = {"role": "assistant", "content": None, "tool_calls": [{"name": "len", "arguments": {"text": "<s>"}}]}
CALLS = """\
{%- if tools %}{{- 'Tools: ' + tools | tojson + '<|im_end|>\\n' }}{% endif %}
{%- for m in messages %}
    {{- '<|im_start|>' + m.role + '\\n' }}
    {%- if m.role == 'assistant' %}
        {%- generation %}
        {%- if m.content is defined %}{{- m.content }}{% else %}{{- m.tool_calls | tojson }}{% endif %}
        {{- '<|im_end|>' }}
        {%- endgeneration %}
    {%- else %}
        {{- m.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
"""


@pytest.mark.parametrize("tools", [TOOLS, json.dumps(TOOLS)])
def test_tool_calls_without_a_content(tmp_path: Path, tools: object) -> None:
    folder = write_tokenizer(tmp_path / "t", CALLS)
    messages = [{"role": "user", "content": "a"}, CALL, {"role": "tool", "content": "1"}, *PLAIN["messages"]]
    library = HuggingFace(path=str(folder)).build()
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": messages, "tools": tools}) + "\n")
    shards = Chat(path=[str(tmp_path / "a.jsonl")]).build(library, tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    ids, mask = shards.document(0), shards.loss_mask(0, shards.num_tokens)
    assert library.decode(ids.tolist()) == theirs.apply_chat_template(messages, tools=TOOLS, tokenize=False)
    trained = json.dumps(CALL["tool_calls"]) + "<|im_end|>b<|im_end|>"
    assert library.decode(ids[mask].tolist()) == trained


def test_texts_in_parts_are_one_text(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """As in the templates that read parts: with nothing between them. Parquet has all types' fields."""
    parts = [{"type": "text", "text": text, "image": None} for text in ("a ", "b")]
    tokens = []
    for i, content in enumerate((parts, "a b", "ab")):
        records = [{"messages": [{"role": "user", "content": content}, PLAIN["messages"][1]]}]
        tokens.append(tokens_of(tmp_path / f"{i}.jsonl", records, tokenizer))
    assert tokens[0] == tokens[1] != tokens[2]
    pytest.importorskip("pyarrow.parquet").write_table(
        pyarrow_table(
            [
                {
                    "messages": [
                        {"role": "user", "content": parts},
                        {"role": "assistant", "content": [{"type": "text", "text": "b"}]},
                    ]
                }
            ]
        ),
        tmp_path / "a.parquet",
    )
    assert tokens_of(tmp_path / "a.parquet", [], tokenizer) == tokens[1]


def tokens_of(file: Path, records: list[dict[str, Any]], tokenizer: Tokenizer) -> list[list[int]]:
    """The documents of a file of conversations, in any order. Writes the file if it does not exist."""
    if not file.exists():
        file.write_text("".join(json.dumps(record) + "\n" for record in records))
    shards = Chat(path=[str(file)]).build(tokenizer, file.parent)
    return sorted(shards.document(i).tolist() for i in range(shards.num_documents))


def test_the_system_beside_the_messages_is_the_first_message(tokenizer: Tokenizer, tmp_path: Path) -> None:
    first = {"role": "system", "content": "Be brief."}
    records = [SHAREGPT | {"system": "Be brief."}, {"messages": [first, *PLAIN["messages"]]}]
    tokens = [tokens_of(tmp_path / f"{i}.jsonl", [r], tokenizer) for i, r in enumerate(records)]
    assert tokens[0] == tokens[1]
    assert tokens_of(tmp_path / "2.jsonl", [SHAREGPT | {"system": ""}], tokenizer) != tokens[0]


RECORDS = [
    *({"messages": chat, "system": None} for chat in conversations()),
    {"messages": PLAIN["messages"], "system": "\u00e9 ]}, {"},
]


@pytest.mark.parametrize(
    "name", ["a.json", full("b.json"), "bom.json", full("c.json.gz"), full("d.jsonl"), "e.parquet"]
)
def test_arrays_and_parquet_have_the_conversations_of_lines(
    tmp_path: Path, tokenizer: Tokenizer, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = tokens_of(tmp_path / "lines.jsonl", RECORDS, tokenizer)
    file, array = tmp_path / name, json.dumps(RECORDS, indent=1, ensure_ascii=False).encode()
    if name == "e.parquet":
        parquet = pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pyarrow_table(RECORDS), file, row_group_size=4)
        monkeypatch.setattr(text_files, "SPLIT_BYTES", 1)
    else:
        short = json.dumps(RECORDS).encode()
        bodies = {"a.json": array, "b.json": b"\xef\xbb\xbf \n" + short, "c.json.gz": gzip.compress(array)}
        bodies["bom.json"] = b"\xef\xbb\xbf" + array
        file.write_bytes(bodies.get(name, short))
    for size in (64, 1 << 20):
        monkeypatch.setattr(text_files, "blocks", partial(read_blocks, size=size))
        splits = split_conversations([file])
        assert len(splits) == (-(-len(RECORDS) // 4) if name == "e.parquet" else 1)
        chat = tokenizer.chat_format()
        read = [
            d for s in splits for d in read_conversations(s, chat, text_files.stop, text_files.DEFAULT_LIMITS)
        ]
        assert sorted(chat.encode(d.chat).ids.tolist() for d in read) == lines
    if name in ("a.json", "bom.json"):
        assert all(file.read_bytes()[d.place :].startswith(b"{") for d in read)
    begins = [i for i, line in enumerate(array.decode().split("\n"), 1) if line == " {"]
    expected = {
        "a.json": begins,
        "bom.json": begins,
        "c.json.gz": begins,
        "e.parquet": [*range(1, len(RECORDS) + 1)],
    }
    if name in expected:
        places = [text_files.where(file, d.place) for d in read]
        assert [int(re.split("[: ]", place)[-1]) for place in places] == expected[name]
    monkeypatch.undo()  # one split needs no other process
    assert tokens_of(file, [], tokenizer) == lines


def pyarrow_table(records: list[dict[str, Any]]) -> Any:
    import pyarrow

    return pyarrow.Table.from_pylist(records)


BLOCKS = text_files.blocks


def read_blocks(file: Path, size: int) -> Iterator[bytes]:
    for block in BLOCKS(file):
        yield from (block[i : i + size] for i in range(0, len(block), size))


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b'[{"messages": []}', ":1: the JSON array is damaged: expected ',', found 'the end'"),
        (b'[\n{"messages": []} {}]', ":2: the JSON array is damaged: expected ',', found '{'"),
        (b'[\n{"messages": [}]', ":2: the JSON array is damaged, or an item is too long: "),
        (b"[{}]\n[{}]", ":2: text follows the array; a line of JSON lines is an object with `messages`"),
        (b'[\n"\xff"]', "not UTF-8"),
    ],
)
def test_damaged_arrays(tmp_path: Path, tokenizer: Tokenizer, body: bytes, reason: str) -> None:
    (tmp_path / "a.json").write_bytes(body)
    (split,) = split_conversations([tmp_path / "a.json"])
    with pytest.raises(ConfigError, match=re.escape(reason)) as e:
        for _ in read_conversations(
            split, tokenizer.chat_format(), lambda *bad: None, text_files.DEFAULT_LIMITS
        ):
            pass
    assert str(tmp_path / "a.json") in str(e.value)


def test_parquet_without_conversations(tmp_path: Path, tokenizer: Tokenizer) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow_table([{"text": "a"}]), tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match=r"no column `messages` or `conversations` \(columns: text\)"):
        Chat(path=[str(tmp_path / "a.parquet")]).check(tokenizer)


def read_parquet(file: Path, table: Any, chat: ChatFormat) -> tuple[list[str], list[str]]:
    """Write a table, and read its conversations: the texts, and the places and reasons of bad rows."""
    pytest.importorskip("pyarrow.parquet").write_table(table, file)
    bad = list[str]()

    def on_bad(file: Path, place: int, reason: str) -> None:
        bad.append(f"{text_files.where(file, place)}: {reason}")

    splits = split_conversations([file])
    texts = [d.text for s in splits for d in read_conversations(s, chat, on_bad, text_files.DEFAULT_LIMITS)]
    return texts, bad


def test_binary_columns_of_parquet_are_text(tmp_path: Path, tokenizer: Tokenizer) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    chats = [["h\u00e9", "b"], [b"\xff", "b"], ["c", "d"]]
    rows = [
        [{"role": b"user", "content": question}, {"role": b"assistant", "content": answer}]
        for question, answer in chats
    ]
    message = pyarrow.struct([("role", pyarrow.binary()), ("content", pyarrow.binary())])
    table = pyarrow.table({"messages": pyarrow.array(rows, pyarrow.list_(message))})
    file, chat = tmp_path / "a.parquet", tokenizer.chat_format()
    texts, bad = read_parquet(file, table, chat)
    expected = [[{"role": "user", "content": q}, {"role": "assistant", "content": a}] for q, a in chats[::2]]
    assert texts == [chat.render(messages).text for messages in expected]
    assert bad == [f"{file}: row 2: messages[0].content is binary and not UTF-8"]


def test_parquet_with_values_that_json_does_not_have(tmp_path: Path, tokenizer: Tokenizer) -> None:
    dated = [{"messages": [message | {"at": datetime(2026, 1, 2)} for message in PLAIN["messages"]]}]
    undated = [{"messages": [message | {"at": None} for message in PLAIN["messages"]]}]
    chat = tokenizer.chat_format()
    texts, bad = read_parquet(tmp_path / "a.parquet", pyarrow_table(dated + undated), chat)
    assert texts == [chat.render(PLAIN["messages"]).text]
    (reason,) = bad
    assert reason.endswith(
        "row 1: messages[0].at is a datetime, which JSON does not have: write it as text, or remove it"
    )
    (split,) = split_conversations([tmp_path / "a.parquet"])
    assert len(list(read_conversations(split, chat, text_files.stop, text_files.DEFAULT_LIMITS, ["at"]))) == 2


def test_parquet_gives_no_row_the_fields_of_another(tmp_path: Path) -> None:
    """Parquet stores every field of any row in all rows, null where a row does not have it."""
    folder = write_tokenizer(tmp_path / "t", CALLS)
    chat = HuggingFace(path=str(folder)).build().chat_format()
    records = [
        {
            "messages": [
                {"role": "user", "content": "a"},
                {"role": "assistant", "tool_calls": [{"function": {"name": name, "arguments": arguments}}]},
            ],
            "tools": [{"name": name, "parameters": {argument: {"type": "any"} for argument in arguments}}],
        }
        for name, arguments in (("weather", {"city": "P", "in": {"days": 1}}), ("exp", {"x": 1.5}))
    ]
    table = pyarrow_table(records)
    texts, bad = read_parquet(tmp_path / "a.parquet", table, chat)
    calls = table.to_pylist()[1]["messages"][1]["tool_calls"]
    assert calls[0]["function"]["arguments"] == {"city": None, "in": None, "x": 1.5}  # control
    assert "null" not in "".join(texts)
    for text, record in zip(texts, records, strict=True):
        call = json.loads(text.split("assistant\n")[1].removesuffix("<|im_end|>"))
        assert call == record["messages"][1]["tool_calls"]
    assert not bad


def test_long_conversations_are_left_out_and_counted(
    folder: Path, tokenizer: Tokenizer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lengths = sorted(len(ids) for ids, _ in masked(folder))
    limit = lengths[len(lengths) // 2]
    path = [str(folder / "conversations.jsonl")]
    with caplog.at_level("INFO", "titanlite"):
        shards = Chat(path=path, max_tokens=limit).build(tokenizer, tmp_path)
    kept = [len(shards.document(i)) for i in range(shards.num_documents)]
    assert sorted(kept) == [length for length in lengths if length <= limit] != lengths
    said = f"{len(lengths) - len(kept)} of {len(lengths)} conversations have more than max_tokens = {limit}"
    assert said in caplog.text
    caplog.clear()
    with caplog.at_level("INFO", "titanlite"):
        Chat(path=path, max_tokens=limit).build(tokenizer, tmp_path)
    assert said in caplog.text  # also when the tokens are in the cache
    assert Chat(path=path).build(tokenizer, tmp_path).num_documents == len(lengths)  # another dataset
    assert shards.num_longer_than(limit) == 0
    assert shards.num_longer_than(limit - 1) == kept.count(limit)
    with pytest.raises(ConfigError, match="the filters removed all text"):
        Chat(path=path, max_tokens=1).build(tokenizer, tmp_path)
    with pytest.raises(ConfigError, match="only conversations have this key") as e:
        PrepareOptions(max_tokens=1)
    assert e.value.key == "max_tokens"


def test_conversations_that_are_cut_are_logged(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(job_of(tmp_path, folder, "--training.seq_len=64", "--training.steps=1"))
    said = 'packing = "chunk" cuts a conversation at the end of every sequence; packing = "best_fit" with'
    log = capsys.readouterr().err
    assert log.count(said) == 1
    masks = [mask for _, mask in masked(folder)]
    num_trained, num_tokens = sum(map(sum, masks)), sum(map(len, masks))
    share = f"{num_trained:,} ({num_trained / num_tokens:.1%}) of them trained"
    assert log.count(f": 18 documents, {num_tokens:,} tokens, {share}\n") == 1
    assert len(said_of(tmp_path, folder, "chunk", max_length(folder))) == 2


def test_conversations_that_best_fit_cuts_are_counted(folder: Path, tmp_path: Path) -> None:
    num, longest = sum(len(ids) > 65 for ids, _ in masked(folder)), max_length(folder)
    _, line = said_of(tmp_path, folder, "best_fit", 64)
    assert f": {num} of 18 conversations have more than seq_len + 1 = 65 tokens and are cut; " in line
    assert "give max_tokens = 65 to the source `chat`, or to `titanlite prepare`" in line
    _, line = said_of(tmp_path, folder, "best_fit", longest - 2)
    assert f": 1 of 18 conversations have more than seq_len + 1 = {longest - 1} tokens" in line
    assert len(said_of(tmp_path, folder, "best_fit", longest - 1)) == 1
    _, line = said_of(tmp_path, folder, "best_fit", 512, of_stages=256)
    assert line.endswith(": a stage with seq_len = 256 cuts a conversation at the end of every sequence")


def test_a_run_tells_that_ends_are_not_trained(tmp_path: Path) -> None:
    folder = write_tokenizer(
        tmp_path / "t", CHATML.replace("message.content + '<|im_end|>' }}{%", "message.content }}{%")
    )
    write_conversations(folder / "conversations.jsonl", conversations())
    said = said_of(tmp_path, folder, "best_fit", 512)
    assert sum("trains no token behind an answer" in line for line in said) == 1


def said_of(tmp_path: Path, folder: Path, packing: str, seq_len: int, of_stages: int = 0) -> list[str]:
    """What is said about the conversations. `of_stages`: the shortest sequences, if they differ."""
    data = job_of(tmp_path, folder, f"--data.packing={packing}").data
    sequences = data.build(HuggingFace(path=str(folder)).build(), seq_len=seq_len, seed=0)
    return sequences.describe_conversations(of_stages or seq_len)


def max_length(folder: Path) -> int:
    return max(len(ids) for ids, _ in masked(folder))


USER, ANSWER = PLAIN["messages"]
TEXT = {"type": "text", "text": "a "}
BAD_LINES = {
    "not JSON": ('{"messages": [', "not valid JSON: Expecting value at character 16 of the line"),
    "no messages": ('{"text": "a"}', "neither of the fields `messages` and `conversations`"),
    "both": ('{"messages": [], "conversations": []}', "both of the fields"),
    "empty": ('{"messages": []}', "not a list of messages"),
    "no content": (json.dumps({"messages": [USER, {"role": "assistant"}]}), "[1] has no text as `content`"),
    "no role": (json.dumps({"messages": [{"content": "a"}]}), "messages[0] has no text as `role`"),
    "content is a list": (json.dumps({"messages": [{**USER, "content": []}]}), "messages[0] has no text as"),
    "a message is a text": ('{"messages": ["a"]}', "messages[0] is not an object"),
    "from": ('{"conversations": [{"from": "tool", "value": "a"}]}', "`from` is 'tool', expected one of"),
    "no answer": (json.dumps({"messages": [USER]}), "without text of the assistant"),
    "role": (
        json.dumps({"messages": [USER, {**ANSWER, "role": "asistant"}, ANSWER]}),
        "messages[1]: unknown role 'asistant'; did you mean 'assistant'? (known: assistant, developer, ",
    ),
    "an image": (
        json.dumps({"messages": [{**USER, "content": [TEXT, {"type": "image_url", "text": ""}]}, ANSWER]}),
        "messages[0].content[1] is not a text, ",
    ),
    "refused role": (json.dumps({"messages": [{**USER, "role": "tool"}, ANSWER]}), "unknown role tool"),
    "null": (json.dumps({"messages": [USER, {**ANSWER, "content": None}]}), "[1] has no text as `content`"),
    "two systems": (
        json.dumps({"messages": [{**USER, "role": "system"}, USER, ANSWER], "system": "a"}),
        "both `system` and a first message",
    ),
    "tools": (json.dumps({**PLAIN, "tools": {}}), "`tools` is not a list"),
    "tools not JSON": (json.dumps({**PLAIN, "tools": "{"}), "`tools` is a text that is not valid JSON"),
    "tools that nothing reads": (json.dumps({**PLAIN, "tools": [{}]}), "conversation has `tools`, which"),
    "loss_mask": (
        json.dumps({**PLAIN, "loss_mask": [0, 1]}),
        "the conversation has `loss_mask`, which nothing reads: write it into the assistant's messages",
    ),
    "weight": (
        json.dumps({"messages": [USER, ANSWER | {"weight": 0.5}]}),
        "messages[1] has `weight` = 0.5",
    ),
    "reasoning": (
        json.dumps({"messages": [USER, ANSWER | {"thinking": "hm"}]}),
        "messages[1] has `thinking`, which",
    ),
    "surrogate": (json.dumps({"messages": [{**USER, "content": "\ud800"}, ANSWER]}), "lone surrogate"),
}  # fmt: skip
STRICT = """\
{% for m in messages if m.role not in ('user', 'assistant') %}
{{ raise_exception('unknown role ' + m.role) }}
{% endfor %}
"""


@pytest.mark.parametrize("kind", sampled(BAD_LINES, ["no content", "role"]))
def test_a_bad_line_is_named(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line, reason = BAD_LINES[kind]
    folder = write_tokenizer(tmp_path / "t", STRICT + CHATML)
    file = tmp_path / "in.jsonl"
    file.write_text(json.dumps(PLAIN) + "\n" + line + "\n" + json.dumps(PLAIN) + "\n")
    words = ["prepare", file, f"--output={tmp_path / 'out'}", "--documents=chat", "--num_processes=1"]
    words += ["--tokenizer.name=huggingface", f"--tokenizer.path={folder}"]
    assert cli.run(list(map(str, words))) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert f"{file}:2: " in error
    assert reason in error
    assert not (tmp_path / "out").exists()
    assert cli.run([*map(str, words), "--bad_lines=skip"]) == 0
    assert TokenShards(tmp_path / "out").num_documents == 2


@pytest.mark.parametrize("compares", [False, True])
def test_a_conversation_that_cannot_be_encoded_is_a_bad_line(tmp_path: Path, compares: bool) -> None:
    """Also where a filter compares documents, which reads all of them before any is encoded."""
    answer = "{% generation %}{{ messages[1].content }}</s>{% endgeneration %}"
    template = "<s>{{ messages[0].content }}<|im_end|>" + answer
    tokenizer = HuggingFace(path=str(without_plain_name(write_tokenizer(tmp_path / "t", template)))).build()
    questions = ["a b c d", "</s>", "a b c d", "e f g h"]
    chats = [[{"role": "user", "content": q}, {"role": "assistant", "content": "i j k l"}] for q in questions]
    file = write_conversations(tmp_path / "a.jsonl", chats)
    filters: list[Filter] = [ExactDuplicates()] if compares else []
    options = PrepareOptions(documents="chat", filters=filters)
    with pytest.raises(ConfigError, match=r"a\.jsonl:2: a message holds '</s>'"):
        prepare([file], tmp_path / "stopped", tokenizer, options, num_processes=1)
    shards = prepare([file], tmp_path / "d", tokenizer, replace(options, bad_lines="skip"), num_processes=1)
    assert shards is not None
    texts = [tokenizer.decode(shards.document(i).tolist()) for i in range(shards.num_documents)]
    kept = ["a b c d", "e f g h"] if compares else ["a b c d", "a b c d", "e f g h"]
    assert sorted(texts) == [f"<s>{question}<|im_end|>i j k l</s>" for question in kept]
    report = json.loads((shards.path / "report.json").read_text())
    characters = sum(map(len, texts)) * 3 // len(texts)
    assert report["read"] == {"documents": 3, "characters": characters}
    assert report["bad_lines"]["documents"] == 1
    (sample,) = report["bad_lines"]["samples"]
    assert sample["where"] == f"{file}:2"


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--tokenizer.name=bytes"], "Bytes has no chat template"),
        (["--tokenizer.name=huggingface", "--tokenizer.path={folder}"], "has no chat template"),
        (
            [
                "--tokenizer.name=huggingface",
                "--tokenizer.path={folder}",
                "--tokenizer.chat_template={folder}/b",
            ],
            "does not mark the assistant's text",
        ),
        (["--tokenizer.name=bytes", "--field=body"], "conversations are in `messages`"),
    ],
)
def test_a_tokenizer_without_a_usable_template(
    tmp_path: Path, words: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_tokenizer(tmp_path / "t", None)
    (folder / "b").write_text("{{ messages[0].content }}")
    file = write_conversations(tmp_path / "in.jsonl", conversations())
    words = [word.format(folder=folder) for word in words]
    assert cli.run(["prepare", str(file), f"--output={tmp_path / 'out'}", "--documents=chat", *words]) == 2
    (error,) = capsys.readouterr().err.strip().splitlines()
    assert reason in error
    assert {path.name for path in tmp_path.iterdir()} == {"t", "in.jsonl"}


def test_the_key_of_the_template_is_the_tokenizers(
    tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_tokenizer(tmp_path / "t", None)
    file = write_conversations(tmp_path / "in.jsonl", conversations())
    words = [f"--tokenizer.path={folder}", "--tokenizer.name=huggingface"]
    words += ["--model.overrides.vocab_size=448"]
    sources = f"--data.sources=[{{ name = 'chat', path = ['{file}'] }}]"
    assert cli.run(["train", str(write_toml(tmp_path, corpus)), sources, *words]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert f"tokenizer.chat_template: the tokenizer huggingface {folder} has no chat template" in last
    assert "such as assets/chat_template.jinja" in last
    assert "data.sources" not in last


def test_a_text_file_is_no_conversation(tmp_path: Path, tokenizer: Tokenizer) -> None:
    (tmp_path / "a.txt").write_text("Hello")
    with pytest.raises(ConfigError, match=r"a\.txt: conversations are read from \.jsonl"):
        Chat(path=[str(tmp_path / "a.txt")]).check(tokenizer)
    with pytest.raises(ConfigError, match="Bytes has no chat template"):
        Chat(path=[str(write_conversations(tmp_path / "a.jsonl", []))]).check(Bytes().build())


def test_another_template_is_another_dataset(folder: Path, tmp_path: Path, shards: TokenShards) -> None:
    (tmp_path / "other.jinja").write_text(CHATML.replace("a helpful", "an"))
    other = HuggingFace(path=str(folder), chat_template=str(tmp_path / "other.jinja")).build()
    built = Chat(path=[str(folder / "conversations.jsonl")]).build(other, shards.path.parent)
    assert built.fingerprint != shards.fingerprint
    assert built.path != shards.path


# ---- training


def job_of(tmp_path: Path, folder: Path, *overrides: str, name: str = "run") -> Job:
    """A job that trains on the conversations; `name`: of the run folder."""
    sources = json.dumps([{"name": "chat", "path": [str(folder / "conversations.jsonl")]}])
    sources = sources.replace(": ", " = ")
    return make_job(
        tmp_path,
        tmp_path,
        f"--data.sources={sources}",
        "--data.holdout_sequences=0",
        f"--data.cache_dir={folder / 'cache'}",
        "--tokenizer.name=huggingface",
        f"--tokenizer.path={folder}",
        *keys_of(family(vocab_size=400, max_position=512)),
        *overrides,
        name=name,
    )


def test_loss_is_the_mean_over_the_trained_tokens_of_all_conversations(tmp_path: Path, folder: Path) -> None:
    model = hugging_face(family(vocab_size=400, max_position=512))
    model.save_pretrained(tmp_path / "theirs")
    whole = ["--data.packing=best_fit", "--data.mask_documents=true", "--training.seq_len=256"]
    tokenizer = HuggingFace(path=str(folder)).build()
    job = job_of(tmp_path, folder, *whole)
    (num_sequences,) = job.data.build(tokenizer, seq_len=256, seed=0).sizes
    train(
        job_of(
            tmp_path,
            folder,
            *whole,
            f"--checkpoint.initial_load_path={tmp_path / 'theirs'}",
            f"--training.global_batch_size={num_sequences}",
            f"--training.local_batch_size={num_sequences}",
            "--training.steps=1",
        )
    )
    ours = metrics_of(job)[0]["train/loss"]

    def mean_loss(shift: int) -> float:
        total, count = 0.0, 0
        for ids, mask in masked(folder):
            labels = torch.where(torch.tensor(mask).roll(shift) > 0, torch.tensor(ids), IGNORE)
            with torch.no_grad():
                logits = model(torch.tensor([ids])).logits[0]
            total += F.cross_entropy(logits[:-1], labels[1:], ignore_index=IGNORE, reduction="sum").item()
            count += int((labels[1:] != IGNORE).sum())
        return total / count

    assert ours == pytest.approx(mean_loss(0), abs=2e-5)
    assert ours != pytest.approx(mean_loss(1), abs=2e-3)  # control: a shifted mask


@pytest.mark.full
def test_a_resumed_run_takes_the_same_steps(tmp_path: Path, folder: Path) -> None:
    """Also through steps without a target, which change nothing: sequences of 16 tokens may lie within a
    question."""
    short = ["--training.seq_len=16", "--training.global_batch_size=1", "--training.local_batch_size=1"]
    saved = ["--checkpoint.interval=1", "--checkpoint.keep_latest_k=20", "--ema.enable=true"]
    short += ["--metrics.detail_freq=1", "--guard.skip_sigma=20"]
    whole = job_of(tmp_path, folder, *short, *saved, "--training.steps=12")
    train(whole)
    train(job_of(tmp_path, folder, *short, "--training.steps=5", name="resumed"))
    resumed = job_of(tmp_path, folder, *short, "--training.steps=12", name="resumed")
    train(resumed)
    runs = [
        [(line["train/loss"], line["train/grad_norm"], line["data/batch_sha"]) for line in metrics_of(job)]
        for job in (whole, resumed)
    ]
    assert runs[0] == runs[1]
    lines, num_trained = metrics_of(whole), 0
    for before, line in pairwise(lines):
        states = [
            {p.name: p.read_bytes() for p in (whole.folder / f"checkpoint/step-{step}").glob("*.distcp")}
            for step in (before["step"], line["step"])
        ]
        assert (line["train/loss"] == "nan") == (line["train/targets"] == 0)
        assert (states[0] == states[1]) == (line["train/targets"] == 0)
        num_trained += line["train/targets"]
    assert lines[-1]["progress/total_tokens"] == num_trained + lines[0]["train/targets"]
    assert 2 < sum(line["train/targets"] == 0 for line in lines) < 10
    assert lines[-1]["train/skipped_steps"] == 0
