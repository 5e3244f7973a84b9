"""Pins tokenizers with pieces and byte fallback: a tokenizer.model gives the ids of the library
sentencepiece, and its export those ids in transformers; a tokenizer.json built as Llama 2's, Mistral's and
Gemma's gives the ids of transformers; text survives, also token by token; bytes are counted; what loses text
is refused."""

from __future__ import annotations

import base64
import io
import json
import os
import pickle
import random
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
import transformers
from hypothesis import given
from hypothesis import strategies as st
from sentencepiece import sentencepiece_model_pb2
from tokenizers import AddedToken, decoders, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Library

from tests.support.jobs import ROOT, make_job, metrics_of
from tests.support.multilingual import SENTENCES
from titanlite import cli
from titanlite.config.component import ConfigError
from titanlite.contrib.sentencepiece import SentencePiece
from titanlite.contrib.sentencepiece_model import as_tokenizer_json, read_model
from titanlite.generate import text_after
from titanlite.tokenizers.base import Tokenizer
from titanlite.tokenizers.huggingface import HuggingFace
from titanlite.tokenizers.pieces import SPACE_MARK
from titanlite.tokenizers.same_ids import verified_files
from titanlite.tokenizers.tiktoken import Tiktoken
from titanlite.train import train as train_job

IDENTITY = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
LLAMA2 = {"model_type": "bpe", "split_digits": True, "allow_whitespace_only_pieces": True, **IDENTITY}
SYMBOLS = ["\n\n", SPACE_MARK * 2, SPACE_MARK * 3, "<table>", "fox"]
KINDS: dict[str, dict[str, Any]] = {
    "llama2": LLAMA2,
    "gemma": {
        **LLAMA2,
        "add_dummy_prefix": False,
        "user_defined_symbols": SYMBOLS,
        **{"pad_id": 0, "eos_id": 1, "bos_id": 2, "unk_id": 3, "eos_piece": "<eos>", "bos_piece": "<bos>"},
    },
    "unigram": {"model_type": "unigram", **IDENTITY},
    "unigram with symbols": {
        "model_type": "unigram",
        "user_defined_symbols": ["\n", "<table>", "fox"],
        **IDENTITY,
    },
    "unigram nmt_nfkc": {"model_type": "unigram", "normalization_rule_name": "nmt_nfkc"},
    "bpe nmt_nfkc": {"model_type": "bpe", "normalization_rule_name": "nmt_nfkc", "bos_id": -1},
}
EXACT = [kind for kind in KINDS if "nmt" not in kind]  # text survives unchanged
# White space of all kinds, composed and decomposed letters, and names of special tokens, bytes and symbols.
PARTS = [
    *("  ", "   ", "\n", "\n\n", "\t", "\r\n", "\u00a0", "\u3000", "\u2028", "e\u0301", "\ufb01", "\uff21"),
    *(
        "<s>",
        "</s>",
        "<unk>",
        "<bos>",
        "<0x41>",
        "<0x0A>",
        "<table>",
        SPACE_MARK,
        "12345",
        "x" * 30,
        "\x00",
        "\ufeff",
    ),
    *(word for sentence in SENTENCES for word in sentence.split()),
]


def texts(num: int = 200) -> list[str]:
    rng = random.Random(0)
    made = ["".join(rng.choice(PARTS) + rng.choice(["", " "]) for _ in range(rng.randint(1, 20)))
            for _ in range(num)]  # fmt: skip
    return [*SENTENCES, "\n".join(SENTENCES), *made, "", " ", "  a ", "a  ", "\n"]


def train(**settings: Any) -> bytes:
    """A tokenizer.model, trained on the sentences and on runs of spaces."""
    rng, written = random.Random(1), io.BytesIO()
    lines = [" ".join(rng.sample(sentence.split(), k=3)) for sentence in SENTENCES for _ in range(20)
             if len(sentence.split()) > 2]  # fmt: skip
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([*lines, *(line.replace(" ", "    ") for line in lines[::3])]),
        model_writer=written,
        **{
            **{"vocab_size": 600, "hard_vocab_limit": False, "byte_fallback": True, "num_threads": 1},
            **{"character_coverage": 0.99, "minloglevel": 2, **settings},
        },
    )
    return written.getvalue()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A directory with a tokenizer.model for each kind."""
    root = tmp_path_factory.mktemp("sp")
    for kind, settings in KINDS.items():
        (root / kind).mkdir()
        (root / kind / "tokenizer.model").write_bytes(train(**settings))
    return {kind: root / kind for kind in KINDS}


def reference(folder: Path) -> Any:
    return sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))


def export(tokenizer: Tokenizer, folder: Path) -> Path:
    folder.mkdir(parents=True)
    for name, content in tokenizer.hugging_face_files().items():
        (folder / name).write_bytes(content)
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_ids_are_those_of_sentencepiece(trained: dict[str, Path], kind: str) -> None:
    ours, theirs = SentencePiece(path=str(trained[kind])).build(), reference(trained[kind])
    assert ours.vocab_size == len(theirs)
    for text in texts():
        assert ours.encode(text) == theirs.encode(text), ascii(text)
    ids = [i for text in texts() for i in ours.encode(text)]
    assert len(ids) < 0.8 * sum(len(text.encode()) for text in texts())  # pieces are found
    assert len({i for i in ids if theirs.is_byte(i)}) > 50  # byte fallback is needed


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in EXACT])
def test_a_known_difference_to_sentencepiece(trained: dict[str, Path], kind: str) -> None:
    """`tokenizers` drops an accent after a character that the model's normalisation replaces."""
    ours, theirs = SentencePiece(path=str(trained[kind])).build(), reference(trained[kind])
    for text in ("\ufb01\u0301", "\uff21\u0301"):  # a ligature and a fullwidth letter
        assert ours.encode(text) == ours.encode(text[0])
        assert theirs.encode(text) != theirs.encode(text[0])
    assert ours.encode("e\u0301") == theirs.encode("e\u0301") == theirs.encode("\u00e9")


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_an_export_has_the_same_ids_in_transformers(
    trained: dict[str, Path], kind: str, tmp_path: Path
) -> None:
    ours = SentencePiece(path=str(trained[kind])).build()
    folder = export(ours, tmp_path / "hf")
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    names = ("<s>", "</s>", "<unk>", "<bos>")  # in transformers, these are special tokens
    plain = [text for text in texts() if not any(name in text for name in names)]
    for text in plain:
        assert theirs.encode(text, add_special_tokens=False) == ours.encode(text), ascii(text)
        assert theirs.encode(text) == ours.encode_framed(text)
    assert (theirs.eos_token_id, theirs.unk_token) == (ours.eos, "<unk>")
    assert (folder / "tokenizer.model").read_bytes() == (trained[kind] / "tokenizer.model").read_bytes()
    read_back = HuggingFace(path=str(folder)).build()
    assert [read_back.encode(text) for text in texts()] == [ours.encode(text) for text in texts()]
    assert (read_back.bos, read_back.eos) == (ours.bos, ours.eos)


def test_an_export_is_compared_with_training(
    trained: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = SentencePiece(path=str(trained["llama2"])).build()
    files = verified_files(ours)
    tree = json.loads(files["tokenizer.json"])
    tree["normalizer"]["normalizers"].pop(0)  # no space in front
    files["tokenizer.json"] = json.dumps(tree).encode()
    monkeypatch.setattr(ours, "hugging_face_files", lambda: files)
    with pytest.raises(ConfigError, match=r"^an export would split '1' into \['1'\], but training"):
        verified_files(ours)


def test_ids_of_the_class_for_llama_2(trained: dict[str, Path], tmp_path: Path) -> None:
    """transformers' own tokenizer. Texts that begin with a space are an exception: there the class differs
    from sentencepiece, and so an export must not name it."""
    ours = SentencePiece(path=str(trained["llama2"])).build()
    theirs = transformers.LlamaTokenizer.from_pretrained(export(ours, tmp_path / "hf"))
    for text in texts():
        if not any(name in text for name in ("<s>", "</s>", "<unk>")) and text[:1] not in (" ", SPACE_MARK):
            assert theirs.encode(text, add_special_tokens=False) == ours.encode(text)
    assert theirs.encode(" a", add_special_tokens=False) != ours.encode(" a")
    assert ours.encode(" a") == reference(trained["llama2"]).encode(" a")


def test_controls(trained: dict[str, Path]) -> None:
    """What the conversion must get right changes ids on these texts."""
    model = read_model((trained["llama2"] / "tokenizer.model").read_bytes())

    def ids(tree: dict[str, Any]) -> list[list[int]]:
        library = Library.from_str(json.dumps(tree))
        return [library.encode(text, add_special_tokens=False).ids for text in texts()]

    right, trees = ids(as_tokenizer_json(model)), [as_tokenizer_json(model) for _ in range(3)]
    trees[0]["normalizer"]["normalizers"].pop(0)  # no space in front
    trees[1]["model"]["merges"].reverse()
    trees[2]["model"]["byte_fallback"] = False
    for tree in trees:
        assert ids(tree) != right


# ---- tokenizer.json


def built(folder: Path, kind: str, model: bytes) -> Path:
    """A tokenizer.json with the parts of the published ones of this kind, and tokenizer_config.json."""
    tree = as_tokenizer_json(read_model(model))
    library = Library.from_str(json.dumps(tree))
    steps = [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    library.pre_tokenizer = None  # type: ignore[assignment]
    if kind == "llama2":
        library.normalizer = normalizers.Sequence(
            [normalizers.Prepend(SPACE_MARK), normalizers.Replace(" ", SPACE_MARK)]
        )
    elif kind == "gemma":
        library.normalizer = normalizers.Replace(" ", SPACE_MARK)
        library.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
        library.add_tokens([AddedToken(symbol, normalized=False, special=False) for symbol in SYMBOLS])
    else:
        library.normalizer = None  # type: ignore[assignment]
        split, scheme = kind == "unigram", "always" if kind == "unigram" else "first"
        library.pre_tokenizer = pre_tokenizers.Metaspace(SPACE_MARK, prepend_scheme=scheme, split=split)
    library.decoder = decoders.Sequence(steps if kind == "gemma" else [*steps, decoders.Strip(" ", 1, 0)])
    bos, eos = ("<bos>", "<eos>") if kind == "gemma" else ("<s>", "</s>")
    library.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, library.token_to_id(bos))]
    )
    folder.mkdir()
    library.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer.model").write_bytes(model)
    config = {"tokenizer_class": "LlamaTokenizer", "bos_token": bos, "eos_token": eos, "legacy": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(params=["llama2", "mistral", "gemma", "unigram"])
def published(request: pytest.FixtureRequest, trained: dict[str, Path], tmp_path: Path) -> Path:
    kind = "llama2" if request.param == "mistral" else request.param
    return built(tmp_path / request.param, request.param, (trained[kind] / "tokenizer.model").read_bytes())


@pytest.mark.full
def test_ids_of_a_tokenizer_json_are_those_of_transformers(published: Path, tmp_path: Path) -> None:
    ours = HuggingFace(path=str(published), special_tokens_in_text=True).build()
    file = str(published / "tokenizer.json")
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=file)
    exported = transformers.AutoTokenizer.from_pretrained(export(ours, tmp_path / "out"))
    for text in texts():
        assert ours.encode(text) == theirs.encode(text, add_special_tokens=False)
        assert ours.encode_framed(text) == theirs.encode(text) == exported.encode(text)
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == Path(file).read_bytes()
    assert (tmp_path / "out" / "tokenizer.model").exists()
    config = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert config["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert "legacy" not in config


def test_llama_2s_tokenizer_json_has_the_ids_of_sentencepiece(
    trained: dict[str, Path], tmp_path: Path
) -> None:
    folder = built(tmp_path / "l", "llama2", (trained["llama2"] / "tokenizer.model").read_bytes())
    ours, theirs = HuggingFace(path=str(folder)).build(), reference(folder)
    for text in texts():
        assert ours.encode(text) == theirs.encode(text)


# ---- text and bytes


@pytest.mark.parametrize("kind", EXACT)
def test_text_survives(trained: dict[str, Path], kind: str) -> None:
    tokenizer = SentencePiece(path=str(trained[kind])).build()
    for text in texts():
        assert tokenizer.decode(tokenizer.encode(text)) == text.replace(SPACE_MARK, " ")


@pytest.mark.parametrize("kind", ["llama2", "gemma", "unigram"])
def test_a_continuation_keeps_its_first_space(trained: dict[str, Path], kind: str) -> None:
    tokenizer = SentencePiece(path=str(trained[kind])).build()
    text = SENTENCES[0] + SENTENCES[4] + SENTENCES[9]
    ids = tokenizer.encode(text)
    for place in range(1, len(ids)):
        prompt = tokenizer.decode(ids[:place])
        if "\ufffd" not in prompt and "\ufffd" not in tokenizer.decode(ids[place:]):
            assert prompt + text_after(prompt, ids[place:], tokenizer) == text
    ids = tokenizer.encode("The fox")
    (place,) = [i for i in range(1, len(ids)) if tokenizer.decode_continuation(ids[i:]) == " fox"]
    # A text on its own has no space in front, unless the model adds none that decoding would remove.
    assert text_after("", ids[place:], tokenizer) == (" fox" if kind == "gemma" else "fox")


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_per_token_add_up_to_those_of_the_text(trained: dict[str, Path], kind: str) -> None:
    tokenizer, theirs = SentencePiece(path=str(trained[kind])).build(), reference(trained[kind])
    table = tokenizer.bytes_per_token()
    if tokenizer.bos == tokenizer.eos:  # the space of a document would be taken back twice
        assert table is None
        return
    assert table is not None
    for text in texts():
        if SPACE_MARK not in text and text:
            (ids,) = tokenizer.encode_documents([text])
            if kind not in EXACT:
                text = theirs.decode(theirs.encode(text))
            if text:
                assert table[ids].sum() == len(text.encode())
    assert table[theirs.piece_to_id("<0x41>")] == 1
    assert table[tokenizer.eos] == (0 if kind == "gemma" else -1)
    unk = {theirs.unk_id(), tokenizer.bos, tokenizer.eos, theirs.pad_id()}
    assert all(table[i] > 0 for i in range(tokenizer.vocab_size) if i not in unk)


@pytest.mark.parametrize("kind", KINDS)
def test_frames_fingerprints_and_pickles(trained: dict[str, Path], kind: str) -> None:
    tokenizer, theirs = SentencePiece(path=str(trained[kind])).build(), reference(trained[kind])
    (ids,) = tokenizer.encode_documents(["The fox"])
    bos, inner = theirs.bos_id(), theirs.encode("The fox")
    assert ids.tolist() == [theirs.eos_id() if bos < 0 else bos, *inner, theirs.eos_id()]
    assert ids.dtype == np.uint32
    clone = pickle.loads(pickle.dumps(tokenizer))
    assert clone.fingerprint == tokenizer.fingerprint
    assert [clone.encode(text) for text in texts(20)] == [tokenizer.encode(text) for text in texts(20)]
    others = [SentencePiece(path=str(folder)).build().fingerprint for folder in trained.values()]
    assert others.count(tokenizer.fingerprint) == 1


def test_special_tokens_in_text(trained: dict[str, Path]) -> None:
    path = str(trained["llama2"])
    tokenizer = SentencePiece(path=path).build()
    asked = SentencePiece(path=path, special_tokens_in_text=True).build()
    assert tokenizer.eos not in tokenizer.encode("a</s>b")
    assert asked.eos in asked.encode("a</s>b")
    assert asked.fingerprint != tokenizer.fingerprint


@pytest.mark.parametrize("model_type", ["bpe", "unigram"])
def test_bos_and_eos_that_are_symbols_are_text(tmp_path: Path, model_type: str) -> None:
    """As in SentencePiece, which then has no BOS and no EOS."""
    file = tmp_path / "tokenizer.model"
    settings = {"user_defined_symbols": ["<s>", "</s>"], "bos_id": -1, "eos_id": -1}
    file.write_bytes(train(**IDENTITY | {"model_type": model_type} | settings))
    theirs = reference(tmp_path)
    assert (theirs.bos_id(), theirs.eos_id()) == (-1, -1)
    with pytest.raises(ConfigError, match=r"tokenizer\.model has no EOS: give the token") as e:
        SentencePiece(path=str(file)).build()
    assert e.value.key == "tokenizer.eos"
    ours = SentencePiece(path=str(file), eos="</s>").build()
    for text in [*texts(40), "a<s>b</s>c"]:
        assert ours.encode(text) == theirs.encode(text)
    assert (ours.bos, ours.eos) == (theirs.piece_to_id("</s>"),) * 2
    assert ours.bos in ours.encode("a<s>b</s>c")
    exported = transformers.AutoTokenizer.from_pretrained(export(ours, tmp_path / "hf"))
    assert exported.encode("a b") == ours.encode("a b")


def test_a_model_without_the_trainers_settings(trained: dict[str, Path]) -> None:
    """Its BOS and EOS are SentencePiece's defaults, by name, wherever they are in the vocabulary."""
    data = (trained["llama2"] / "tokenizer.model").read_bytes()
    model, pieces = read_model(data), sentencepiece_model_pb2.ModelProto()
    pieces.ParseFromString(data)
    pieces.ClearField("trainer_spec")
    pieces.trainer_spec.model_type = 2
    pieces.pieces[1].piece, pieces.pieces[2].piece = "</s>", "<s>"
    again = read_model(pieces.SerializeToString())
    assert (again.bos, again.eos) == (model.bos, model.eos) == ("<s>", "</s>")


def test_white_space_may_be_collapsed(trained: dict[str, Path], tmp_path: Path) -> None:
    """By models with SentencePiece's `remove_extra_whitespaces`, and by a tokenizer.json made from one."""
    text = "\n  a\u00e4b\n\n  c  \n"
    folder = built(tmp_path / "l", "llama2", (trained["llama2"] / "tokenizer.model").read_bytes())
    tree = json.loads((folder / "tokenizer.json").read_text())
    normalized_by(tree, "Replace", pattern={"Regex": r"\s+"}, content=" ")
    normalized_by(tree, "Strip", strip_left=True, strip_right=True)
    (folder / "tokenizer.json").write_text(json.dumps(tree))
    for tokenizer in (HuggingFace(path=str(folder)), SentencePiece(path=str(trained["bpe nmt_nfkc"]))):
        built_tokenizer = tokenizer.build()
        assert built_tokenizer.decode(built_tokenizer.encode(text)) == "a\u00e4b c"


# ---- errors


def normalized_by(tree: dict[str, Any], kind: str, **keys: Any) -> None:
    """Put a normalizer in front of those of a tokenizer.json."""
    tree["normalizer"]["normalizers"].insert(0, {"type": kind, **keys})


def without_a_byte(tree: dict[str, Any]) -> None:
    vocab = tree["model"]["vocab"]
    vocab["<other>"] = vocab.pop("<0x41>")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (without_a_byte, "no tokens for all bytes"),
        (lambda t: t["model"].update(byte_fallback=False), "would lose unknown characters"),
        (lambda t: t["model"].update(type="WordPiece"), "its model is WordPiece, expected BPE or Unigram"),
        (lambda t: t["model"].update(type="WordLevel"), "its model is WordLevel"),
        (lambda t: t.update(normalizer={"type": "StripAccents"}), "normalizer StripAccents"),
        (
            lambda t: normalized_by(t, "Replace", pattern={"String": "q"}, content="k"),
            "it changes text: 'quick' becomes 'kuick'",
        ),
        (
            lambda t: normalized_by(t, "Replace", pattern={"Regex": "[\u00e4\u0434]"}, content="a"),
            "it changes text: '\u00e4' becomes 'a'",
        ),
        *(
            (
                partial(normalized_by, kind="Replace", pattern={"Regex": f"[{letter}]"}, content="a"),
                f"it changes text: '{letter}' becomes 'a'",
            )
            for letter in "\u1ea1\u1f00\ua65f"  # Vietnamese, ancient Greek, Old Cyrillic
        ),
        (
            lambda t: normalized_by(t, "Replace", pattern={"Regex": r"\n"}, content=""),
            "it changes text: 'fox,' becomes 'fox,123'",
        ),
        (lambda t: normalized_by(t, "Lowercase"), "normalizer Lowercase"),
        (lambda t: t.update(pre_tokenizer={"type": "WhitespaceSplit"}), "pre-tokenizer WhitespaceSplit"),
    ],
)
def test_a_tokenizer_json_that_would_lose_text(
    trained: dict[str, Path], tmp_path: Path, spoil: Callable[[dict[str, Any]], object], message: str
) -> None:
    folder = built(tmp_path / "l", "llama2", (trained["llama2"] / "tokenizer.model").read_bytes())
    tree = json.loads((folder / "tokenizer.json").read_text())
    spoil(tree)
    (folder / "tokenizer.json").write_text(json.dumps(tree))
    with pytest.raises(ConfigError, match=message) as e:
        HuggingFace(path=str(folder)).build()
    assert e.value.key == "tokenizer.path"
    assert "\n" not in str(e.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"byte_fallback": False}, "no pieces for bytes"),
        ({"model_type": "char", "vocab_size": 400}, "of type 4, neither Unigram"),
        ({"treat_whitespace_as_suffix": True}, "treat_whitespace_as_suffix"),
        ({"normalization_rule_name": "nfkc_cf"}, "it changes text"),
    ],
)
def test_a_model_that_would_lose_text(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    (tmp_path / "tokenizer.model").write_bytes(train(**settings))
    with pytest.raises(ConfigError, match=rf"tokenizer\.model: .*{message}") as e:
        SentencePiece(path=str(tmp_path)).build()
    assert e.value.key == "tokenizer.path"


def changed(model: bytes, rules: bytes = b"", piece: str = "") -> bytes:
    """The model with other compiled rules and one more piece."""
    proto = sentencepiece_model_pb2.ModelProto()
    proto.ParseFromString(model)
    if rules:
        proto.normalizer_spec.precompiled_charsmap = rules
    if piece:
        proto.pieces.add(piece=piece, score=-1e3, type=1)
    return bytes(proto.SerializeToString())


def charsmap(trie: bytes, texts: bytes = b"", size: int | None = None) -> bytes:
    return (len(trie) if size is None else size).to_bytes(4, "little") + trie + texts


# A root whose child 'a' (0x61) has a leaf with a position in the replacements.
TRIE = np.zeros(256, "<u4")
TRIE[0], TRIE[0x61], TRIE[0x60] = 0 << 10, (1 << 10) | 0x100 | 0x61, 1 << 31
BAD_TRIES = {"position": TRIE.copy(), "text": TRIE.copy(), "root": TRIE.copy(), "child": TRIE.copy()}
BAD_TRIES["position"][0x60] = 1 << 31 | 99
BAD_TRIES["text"][0x60] = 1 << 31 | 1  # inside a character
BAD_TRIES["root"][0] = 1 << 31 | 1 << 20
BAD_TRIES["child"][0x61] |= 1 << 20
BAD_CHARSMAPS = [
    *(b"x", bytes(4), b"x" * 50, charsmap(b"", size=2**32 - 1), charsmap(b"1234", size=8)),
    *(charsmap(b"12345", b"\0"), charsmap(b"\xff" * 1024, b"\0"), charsmap(TRIE.tobytes(), b"\xff\0")),
    *(charsmap(trie.tobytes(), "\u00e4\0".encode()) for trie in BAD_TRIES.values()),
]


def test_damaged_rules_of_a_normalizer(trained: dict[str, Path], tmp_path: Path) -> None:
    """The library would end the process, or panic on a text."""
    model = (trained["unigram nmt_nfkc"] / "tokenizer.model").read_bytes()
    file = tmp_path / "tokenizer.model"
    for rules in BAD_CHARSMAPS:
        file.write_bytes(changed(model, rules))
        with pytest.raises(ConfigError, match=r"tokenizer\.model: the compiled rules .* are damaged"):
            SentencePiece(path=str(file)).build()
    good = charsmap(TRIE.tobytes(), "\u00e4\0".encode())
    file.write_bytes(changed(model, good))
    with pytest.raises(
        ConfigError, match=r"it changes text: .* becomes '\u00e4'"
    ):  # it is run: a is replaced
        SentencePiece(path=str(file)).build()


def test_a_panic_of_the_library_is_told(
    trained: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = built(tmp_path / "l", "llama2", (trained["llama2"] / "tokenizer.model").read_bytes())
    tree = json.loads((folder / "tokenizer.json").read_text())
    rules = base64.b64encode(charsmap(BAD_TRIES["root"].tobytes(), b"\0")).decode()
    normalized_by(tree, "Precompiled", precompiled_charsmap=rules)
    (folder / "tokenizer.json").write_text(json.dumps(tree))
    monkeypatch.setattr("titanlite.tokenizers.pieces._is_charsmap", lambda data: True)
    with pytest.raises(ConfigError, match=r"tokenizer\.json: index out of bounds"):
        HuggingFace(path=str(folder)).build()


def test_pieces_that_are_too_long(trained: dict[str, Path], tmp_path: Path) -> None:
    """Merges of all their parts would fill the memory."""
    model = (trained["llama2"] / "tokenizer.model").read_bytes()
    file = tmp_path / "tokenizer.model"
    file.write_bytes(changed(model, piece="a" * 512))
    SentencePiece(path=str(file)).build()
    file.write_bytes(changed(model, piece="a" * 513))
    with pytest.raises(ConfigError, match="it has a piece of 513 characters: 'aaaa"):
        SentencePiece(path=str(file)).build()


def test_a_file_of_another_tokenizer(trained: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match=r"not a SentencePiece model, or .* 'tiktoken', .* 'huggingface'"):
        SentencePiece(path="assets/tokenizer/stdlib.tiktoken").build()
    model = str(trained["llama2"] / "tokenizer.model")
    with pytest.raises(ConfigError, match=r"not a tiktoken file.* 'sentencepiece'"):
        Tiktoken(path=model).build()
    with pytest.raises(ConfigError, match=r"has a tokenizer\.model but no tokenizer\.json.* 'sentencepiece'"):
        HuggingFace(path=str(trained["llama2"])).build()
    arguments = ["tokenizer", "show", "--tokenizer.name=sentencepiece", "--tokenizer.path=README.md"]
    assert cli.run(arguments) == 2
    assert capsys.readouterr().err.count("\n") == 1


@given(st.binary(max_size=60) | st.tuples(st.binary(max_size=20), st.binary(max_size=20)).map(
    lambda parts: b"\n" + bytes([len(parts[0])]) + parts[0] + parts[1]))  # fmt: skip
def test_bytes_that_are_no_model(data: bytes) -> None:
    with pytest.raises(ValueError):
        read_model(data)


# ---- a run


@pytest.mark.full
def test_train_generate_and_export(
    trained: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run on the sentences has bits per byte; its export has the run's ids and continues prompts alike."""
    (tmp_path / "text.txt").write_text("\n".join(SENTENCES * 40))
    model = trained["llama2"] / "tokenizer.model"
    vocab_size = SentencePiece(path=str(model)).build().vocab_size
    source = f'[{{name = "text", path = ["{tmp_path / "text.txt"}"]}}]'
    job = make_job(
        tmp_path,
        tmp_path,
        "--tokenizer.name=sentencepiece",
        f"--tokenizer.path={model}",
        f"--model.overrides.vocab_size={vocab_size}",
        f"--data.sources={source}",
        "--training.steps=60",
        "--lr_scheduler.total_steps=60",
        "--validation.enable",
        "--validation.freq=60",
    )
    train_job(job)
    metrics = metrics_of(job)[-1]
    assert 0 < metrics["eval/bits_per_byte"] < 8
    assert cli.run(["export", str(job.folder), str(tmp_path / "hf")]) == 0
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert theirs.encode(SENTENCES[0]) == [theirs.bos_token_id, *job.tokenizer.build().encode(SENTENCES[0])]
    printed = []
    for path in (job.folder, tmp_path / "hf"):
        capsys.readouterr()
        options = ["--prompt=The quick", "--temperature=0", "--max-new-tokens=12"]
        assert cli.run(["generate", str(path), *options]) == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1]
    assert printed[0].startswith("The quick")
    network = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    ids = theirs("The quick", return_tensors="pt").input_ids
    continued = network.generate(ids, max_new_tokens=12, do_sample=False)[0]
    assert printed[0] == theirs.decode(continued, skip_special_tokens=True) + "\n"


@pytest.mark.full
def test_prepare_and_show_in_new_processes(trained: dict[str, Path], tmp_path: Path) -> None:
    """Each verb registers the tokenizer itself."""
    (tmp_path / "text.txt").write_text("\n".join(SENTENCES))
    tokenizer = ["--tokenizer.name=sentencepiece", f"--tokenizer.path={trained['gemma']}"]

    def titanlite(*arguments: str) -> str:
        command = [sys.executable, "-m", "titanlite.cli", *arguments]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8"}
        return subprocess.run(
            command, env=environment, check=True, capture_output=True, encoding="utf-8"
        ).stdout

    titanlite("prepare", str(tmp_path / "text.txt"), f"--output={tmp_path / 'out'}", *tokenizer)
    shown = titanlite("data", "show", str(tmp_path / "out"), "--seq_len=200")
    assert "\n".join(SENTENCES[:3]) in shown
