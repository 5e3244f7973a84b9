"""What `AutoTokenizer.from_pretrained` opens gives the ids that were trained on, for every kind of tokenizer,
on whatever text."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Library

from tests.support.tiers import full
from titanlite.config.component import ConfigError
from titanlite.tokenizers import tokenizer_json
from titanlite.tokenizers.base import BOS, EOS, Tokenizer, TokenizerConfig
from titanlite.tokenizers.bytes import Bytes
from titanlite.tokenizers.huggingface import HuggingFace
from titanlite.tokenizers.same_ids import verified_files
from titanlite.tokenizers.tiktoken import Tiktoken
from titanlite.tokenizers.tokenizer_json import LONGEST_RUN

transformers = pytest.importorskip("transformers")

ROOT = Path(__file__).resolve().parents[3]
STDLIB = str(ROOT / "assets" / "tokenizer" / "stdlib.tiktoken")

TEXTS = [
    "",
    " ",
    "def main(argv):\n    return 0\n",
    "Hello, world! It's 12345678 o'clock; they'LL see.",
    "  two  spaces   three\n\n\n\tand\ttabs \r\n windows\r\n\r\n  ",
    " " * 300 + "x" + "\n" * 40,
    "na\u00efve caf\u00e9 \u00c5ngstr\u00f6m e\u0301 \u212b",  # composed and not: nothing is normalised
    "\u65e5\u672c\u8a9e\u306e\u30c6\u30ad\u30b9\u30c8 \u0627\u0644\u0639\u0631\u0628\u064a\u0629",
    "\u0939\u093f\u0928\u094d\u0926\u0940 \u0e44\u0e17\u0e22",
    "\U0001f600\U0001f468\u200d\U0001f469\u200d\U0001f467 \u2028 \u00a0 \ufeff \x00 \x7f \x1b[0m",
    "a" * 97 + "ab" * 51 + "=" * 33 + "-" * 200,
    "x = {'a': [1, 2.5e-10, 0xFF], \"b\": None}  # comment",
]


def random_texts(n: int) -> list[str]:
    """Strings of a few kinds of characters, so that every rule of the split meets every other."""
    rng = random.Random(0)
    alphabets = [
        "ab \n",
        "aA1 '",
        " \t\r\n",
        "e\u0301\u00e9 ",
        "\u65e5\u672c a",
        "()[]{}=+-*/ _",
        "0123456789.",
    ]
    return [
        "".join(rng.choice(rng.choice(alphabets)) for _ in range(rng.randint(1, 60))) for _ in range(n)
    ] + ["".join(chr(c) for c in (rng.randrange(0x20, 0xD7FF) for _ in range(30))) for _ in range(n)]


def opened(tokenizer: Tokenizer, folder: Path) -> Any:
    """As a user opens an export."""
    folder.mkdir(exist_ok=True)
    for name, content in tokenizer.hugging_face_files().items():
        (folder / name).write_bytes(content)
    return transformers.AutoTokenizer.from_pretrained(folder)


# As in tiktoken_ext/openai_public.py of tiktoken.
CL100K = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+"
    r"|\s++$|\s*[\r\n]|\s+(?!\S)|\s"
)
KINDS: dict[str, TokenizerConfig] = {
    "tiktoken": Tiktoken(path=STDLIB),
    "reserved tokens": Tiktoken(path=STDLIB, num_special_tokens=256),
    "another split": Tiktoken(path=STDLIB, pattern=r"\p{L}+|\p{N}|[^\p{L}\p{N}]+"),
    "possessive": Tiktoken(path=STDLIB, pattern=CL100K),
    "bytes": Bytes(),
}


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_ids_are_equal_on_varied_text(tmp_path: Path, kind: str) -> None:
    tokenizer = KINDS[kind].build()
    theirs = opened(tokenizer, tmp_path / "it")
    assert len(theirs) == tokenizer.vocab_size
    for text in [*TEXTS, *random_texts(200), (ROOT / "docs/data.md").read_text()]:
        ids = tokenizer.encode(text)
        assert theirs.encode(text, add_special_tokens=False) == ids, text
        assert theirs.decode(ids) == tokenizer.decode(ids), text
        assert theirs(text).input_ids == [tokenizer.bos, *ids]  # as a document begins
    assert (theirs.bos_token_id, theirs.eos_token_id) == (tokenizer.bos, tokenizer.eos)


@pytest.mark.parametrize(
    "pattern",
    [
        CL100K,
        r"(?:[a\]\)]|[0-9[a-c]]){2,3}+|.|\n",
        full(r"\d{2}+|[^\d]{3,}+|[\s\S]"),
        r"\S+|\s+$|\s",
        full(r"^\s+|\S+|\s"),
        full(r"\pL+|\PL+"),
    ],
)
def test_regular_expressions_are_translated(monkeypatch: pytest.MonkeyPatch, pattern: str) -> None:
    """tiktoken's and Hugging Face's languages differ in possessive repetitions, anchors and short forms."""
    tokenizer = Tiktoken(path=STDLIB, pattern=pattern).build()
    assert "tokenizer.json" in verified_files(tokenizer)
    monkeypatch.setattr(tokenizer_json, "_oniguruma", lambda pattern: pattern)  # the control
    with pytest.raises(ConfigError, match=r"^an export would split .*, but training splits it into ") as e:
        verified_files(tokenizer)
    assert e.value.key == "tokenizer.pattern"
    assert "\n" not in str(e.value)


def test_a_regular_expression_of_tiktoken_alone_is_refused() -> None:
    tokenizer = Tiktoken(path=STDLIB, pattern=r"\p{Script=Latin}+|.|\n").build()
    with pytest.raises(ConfigError, match="tokenizers cannot run this tokenizer: Oniguruma error"):
        verified_files(tokenizer)


@pytest.mark.full
def test_special_tokens_in_text_are_compared_as_in_training() -> None:
    for in_text in (True, False):
        verified_files(Tiktoken(path=STDLIB, special_tokens_in_text=in_text).build())


@pytest.mark.full
@pytest.mark.parametrize("kind", ["tiktoken", "another split"])
def test_ids_are_equal_on_runs_that_are_cut(tmp_path: Path, kind: str) -> None:
    """Of more than 25,000 spaces or others; on both sides of the limit, in a row, and within other text."""
    tokenizer = KINDS[kind].build()
    theirs = opened(tokenizer, tmp_path / "it")
    ours = HuggingFace(path=str(tmp_path / "it")).build()
    n = LONGEST_RUN
    texts = [character * (n + more) for character in "0 \u00e9\u3000\x1c\x85\u200b" for more in (0, 1)]
    texts += [
        "ab" * 30_000,
        "x " + "z" * (3 * n + 1) + "\n" + " " * (2 * n + 1) + "end",
        "b" * n + " " * n + "c" * 2 * n,
    ]
    texts += ["a\n" * 20_000, "1" * (n - 1) + " " + "2" * (n + 2), "q" * (n - 1) + "\x1f" + "q" * (n + 1)]
    for text in texts:
        ids = tokenizer.encode(text)
        assert theirs.encode(text, add_special_tokens=False) == ids == ours.encode(text), (
            text[:9],
            len(text),
        )


def test_special_tokens_in_text_are_read_as_such() -> None:
    """transformers reads them always, ours when `special_tokens_in_text` says so."""
    import tempfile

    text = f"a{EOS}{BOS} b <|reserved_special_token_3|><|nothing|>{EOS}\n"
    with tempfile.TemporaryDirectory() as folder:
        options: dict[str, Any] = {"path": STDLIB, "num_special_tokens": 16}
        tokenizer = Tiktoken(**options, special_tokens_in_text=True).build()
        theirs = opened(tokenizer, Path(folder) / "it")
        ids = theirs.encode(text, add_special_tokens=False)
    assert ids == tokenizer.encode(text)
    assert ids != Tiktoken(**options).build().encode(text)
    assert {tokenizer.bos, tokenizer.eos} <= set(ids)


@pytest.mark.full
def test_a_tokenizer_json_goes_out_as_it_came_in(tmp_path: Path) -> None:
    source = tmp_path / "source"
    opened(Tiktoken(path=STDLIB).build(), source)
    config = json.loads((source / "tokenizer_config.json").read_text())
    (source / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": "{{ messages }}"}))
    tokenizer = HuggingFace(path=str(source)).build()
    theirs = opened(tokenizer, tmp_path / "it")
    assert (tmp_path / "it/tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    assert theirs.chat_template == "{{ messages }}"
    for text in [*TEXTS, *random_texts(50)]:
        assert theirs.encode(text, add_special_tokens=False) == tokenizer.encode(text)


def test_a_lone_tokenizer_json_gets_a_configuration(tmp_path: Path) -> None:
    source = tmp_path / "source"
    opened(Tiktoken(path=STDLIB, num_special_tokens=4).build(), source)
    (source / "tokenizer_config.json").unlink()
    tokenizer = HuggingFace(path=str(source), bos=BOS, eos="<|reserved_special_token_0|>").build()
    theirs = opened(tokenizer, tmp_path / "it")
    assert (theirs.bos_token_id, theirs.eos_token_id) == (tokenizer.bos, tokenizer.eos)


def with_numbers_of_three(folder: Path, **config: Any) -> Path:
    """A byte-level tokenizer.json that splits numbers as Llama 3 does, with `config` beside it."""
    library = Library.from_str(Tiktoken(path=STDLIB).build().hugging_face_files()["tokenizer.json"].decode())
    library.add_special_tokens(["<|tool|>"])
    folder.mkdir()
    library.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({**NAMED, **config}))
    return folder


NAMED = {"bos_token": BOS, "eos_token": EOS, "pad_token": EOS, "unk_token": EOS}
NUMBERS = [*map(str, range(1, 10**8, 1234567)), "a 12 345 6789", " the", "<|tool|> the"]
CLASSES = [
    *("GPT2Tokenizer", "Qwen2Tokenizer", "GPTNeoXTokenizer", "CohereTokenizer", "CodeGenTokenizer"),
    *("LlamaTokenizer", "LlamaTokenizerFast", "PreTrainedTokenizerFast", "TokenizersBackend"),
]


@pytest.mark.full
def test_no_class_of_the_source_changes_the_ids(tmp_path: Path) -> None:
    source = with_numbers_of_three(tmp_path / "source")
    tokenizer = HuggingFace(path=str(source), special_tokens_in_text=True).build()
    right, files = [tokenizer.encode(text) for text in NUMBERS], tokenizer.hugging_face_files()
    for name in CLASSES:
        (source / "tokenizer_config.json").write_text(json.dumps({**NAMED, "tokenizer_class": name}))
        assert HuggingFace(path=str(source)).build().hugging_face_files() == files
    for model_type in ("llama", "olmoe", "qwen3"):  # of which transformers has another class for the last two
        folder = tmp_path / model_type
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
        theirs = opened(tokenizer, folder)
        assert [theirs.encode(text, add_special_tokens=False) for text in NUMBERS] == right
        assert len(theirs) == tokenizer.vocab_size
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))  # control
    rebuilt = transformers.AutoTokenizer.from_pretrained(folder)
    assert [rebuilt.encode(text, add_special_tokens=False) for text in NUMBERS] != right


@pytest.mark.full
@pytest.mark.parametrize(
    "config",
    [
        {"add_prefix_space": True},
        {"split_special_tokens": True},
        {"auto_map": {"AutoTokenizer": ["own.Own", None]}},
        {"additional_special_tokens": ["<|tool|>", "the"]},
        {
            "added_tokens_decoder": {
                "300": {"content": "the"},
                "8192": {"content": "<|tool|>", "rstrip": True},
            }
        },
        {"mask_token": " the", "image_token": "the"},
        {"clean_up_tokenization_spaces": True, "legacy": False, "add_bos_token": True},
    ],
    ids=lambda config: next(iter(config)),
)
def test_no_setting_of_the_source_changes_the_ids(tmp_path: Path, config: dict[str, Any]) -> None:
    source = with_numbers_of_three(tmp_path / "source", tokenizer_class="GPT2Tokenizer", **config)
    tokenizer = HuggingFace(path=str(source), special_tokens_in_text=True).build()
    theirs = opened(tokenizer, tmp_path / "it")
    for text in NUMBERS:
        assert theirs.encode(text, add_special_tokens=False) == tokenizer.encode(text)
    assert theirs.decode(tokenizer.encode("a , b 's")) == "a , b 's"
    assert ("<|tool|>" in theirs.all_special_tokens) == ("additional_special_tokens" in config)


@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json"])
def test_a_role_without_an_id_is_left_out_of_an_export(tmp_path: Path, name: str) -> None:
    """Every id has a row in the model, and batches are padded with EOS."""
    source = with_numbers_of_three(tmp_path / "source")
    tokens = {"bos_token": BOS, "eos_token": EOS, "pad_token": {"content": "[PAD]"}, "unk_token": "[UNK]"}
    (source / name).write_text(json.dumps(tokens))
    tokenizer = HuggingFace(path=str(source), eos="<|tool|>").build()
    theirs = opened(tokenizer, tmp_path / "it")
    assert (len(theirs), theirs.unk_token) == (tokenizer.vocab_size, None)
    assert (theirs.bos_token_id, theirs.eos_token_id) == (tokenizer.bos, tokenizer.eos)
    assert theirs(["a", "a b c"], padding=True).input_ids[0][-1] == tokenizer.eos


@pytest.mark.parametrize(
    ("name", "tree"),
    [
        ("tokenizer_config.json", {"additional_special_tokens": ["<|tool|>", "<d>"]}),
        full("tokenizer_config.json", {"extra_special_tokens": [{"__type": "AddedToken", "content": "<d>"}]}),
        full("tokenizer_config.json", {"extra_special_tokens": {"image_token": "<d>"}}),
        full("tokenizer_config.json", {"added_tokens_decoder": {"9000": {"content": "<d>"}}}),
        full("tokenizer_config.json", {"image_token": "<d>"}),
        ("special_tokens_map.json", {"additional_special_tokens": ["<d>"]}),
        ("added_tokens.json", {"<d>": 9000}),
    ],
)
def test_a_token_of_texts_without_an_id_is_told(tmp_path: Path, name: str, tree: dict[str, Any]) -> None:
    """transformers adds such a token when it opens the files, with an id that the model has no row for."""
    source = with_numbers_of_three(tmp_path / "source")
    (source / name).write_text(json.dumps(tree))
    with pytest.raises(ConfigError, match=r"has no token '<d>', which a file beside it names"):
        HuggingFace(path=str(source), eos=EOS).build()
    if name == "tokenizer_config.json":  # the advice
        transformers.PreTrainedTokenizerFast.from_pretrained(source).save_pretrained(source)
        assert HuggingFace(path=str(source), eos=EOS).build().vocab_size == 8194


def test_a_configuration_that_is_no_object_is_told(tmp_path: Path) -> None:
    source = tmp_path / "source"
    opened(Tiktoken(path=STDLIB, num_special_tokens=4).build(), source)
    (source / "tokenizer_config.json").write_text("[1]")
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json .* is not a JSON object"):
        HuggingFace(path=str(source), bos=BOS, eos=EOS).build()


def test_a_tokenizer_without_such_a_form_says_so() -> None:
    class Own(Tokenizer):
        pass

    with pytest.raises(ConfigError, match="cannot be written in a form that transformers reads"):
        Own().hugging_face_files()
