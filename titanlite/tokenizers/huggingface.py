"""Hugging Face's tokenizer.json, run by the library `tokenizers`: byte-level BPE (Llama 3, Qwen, GPT-2, ...),
and BPE or Unigram with byte fallback, as converted from SentencePiece (Llama 2, Mistral, Gemma, ...).

Other algorithms (WordPiece, vocabularies of characters) lose text and are errors. The file's post-processor
is not used for training: `encode_documents` frames documents as for every tokenizer."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from titanlite.config.component import ConfigError
from titanlite.config.json_file import as_json, read_object
from titanlite.config.paths import PathText
from titanlite.config.shipped import find_file
from titanlite.files import is_inside
from titanlite.tokenizers import pieces
from titanlite.tokenizers.base import Tokenizer, TokenizerConfig, read_bytes
from titanlite.tokenizers.chat import ChatFormat
from titanlite.tokenizers.template import TemplateLimitError
from titanlite.tokenizers.tokenizer_json import TOKENIZER_CONFIG

# Settings in tokenizer_config.json that an export keeps, beside names of tokens. With others, such as
# add_prefix_space, added_tokens_decoder or auto_map, transformers changes or replaces the tokenizer of
# tokenizer.json.
KEPT = ("chat_template", "model_input_names", "model_max_length", "padding_side", "truncation_side")
SPECIAL_LISTS = ("additional_special_tokens", "extra_special_tokens")
ADDED_LISTS = ("added_tokens_decoder", "added_tokens")
# Tokens that no text of the training data stands for: a name without an id is left out of an export.
NOT_IN_TEXT = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
MARKED = "chat_template.marked.jinja"  # an export's template with the marks of the assistant's text
TEMPLATES = (MARKED, "chat_template.jinja", "chat_template.json")
BESIDE = (
    *TEMPLATES,
    *("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("config.json", "generation_config.json", "tokenizer.model"),
)
SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


@dataclass(frozen=True, kw_only=True)
class HuggingFace(TokenizerConfig, name="huggingface"):
    """A tokenizer.json: byte-level BPE (Llama 3, Qwen), or BPE or Unigram with byte fallback (Llama 2,
    Mistral, Gemma)."""

    FILE: ClassVar = "tokenizer.json"
    path: PathText
    """tokenizer.json, or its directory."""
    bos: str = ""
    """Token before a document; empty: bos_token of tokenizer_config.json beside the file, else EOS."""
    eos: str = ""
    """Token after a document; empty: eos_token of tokenizer_config.json beside the file."""
    special_tokens_in_text: bool = False
    """Encode names of special tokens in documents as these tokens, not as plain text."""
    chat_template: PathText = ""
    """Jinja template of conversations, with the assistant's text between `{% generation %}` and `{%
    endgeneration %}`; empty: chat_template.jinja or tokenizer_config.json beside the file."""

    def files(self) -> dict[str, Path]:
        path = Path(self.path)
        path = path / self.FILE if path.is_dir() else path
        beside = [path.with_name(name) for name in BESIDE]
        files = {file.name: file for file in beside if file.is_file() and is_inside(file, path.parent)}
        if self.chat_template:  # the only template of the copy
            files = {name: file for name, file in files.items() if name not in TEMPLATES}
            files["chat_template.jinja"] = find_file(self.chat_template)
        return files | {self.FILE: path}

    def in_folder(self, folder: Path) -> HuggingFace:
        return replace(self, path=str(folder), chat_template="")

    def build(self) -> HuggingFaceTokenizer:
        path = Path(self.path)
        if path.is_dir() and not (path / "tokenizer.json").exists() and (path / "tokenizer.model").exists():
            raise ConfigError(
                f"{path} has a tokenizer.model but no tokenizer.json: select the tokenizer 'sentencepiece', "
                "or 'tiktoken' for Llama 3's file",
                "tokenizer.name",
            )
        path = path / self.FILE if path.is_dir() else path
        return HuggingFaceTokenizer(self, path, read_bytes(str(path), "tokenizer.path"))


class HuggingFaceTokenizer(Tokenizer):
    """The tokenizer that HuggingFace.build returns. `path`: the file, for messages and for the files beside
    it. `content`: of tokenizer.json."""

    def __init__(self, config: HuggingFace, path: Path, content: bytes):
        try:
            from tokenizers import Tokenizer as Library
        except ImportError:
            raise ConfigError(
                f"{config.name!r} needs the library tokenizers: pip install 'titanlite[tokenizer]'",
                "tokenizer.name",
            ) from None
        self.config, self._folder, self._content = config, path.parent, content
        try:
            self._has_pieces = has_pieces(json.loads(content))
            self._library = Library.from_str(content.decode())
            self._pad_token = (self._library.padding or {}).get("pad_token", "")
            self._library.no_truncation()
            self._library.no_padding()
            self._set_mode()
            self._library.encode(pieces.PROBE)  # finds what ends the library
            if self._has_pieces:  # it may change words of a text, for example to lower case
                pieces.check_probe(self.decode(self.encode(pieces.PROBE)))
        except json.JSONDecodeError as e:
            message = f"{path} is not valid JSON, for example because it is cut off: {e}"
            raise ConfigError(message, "tokenizer.path") from None
        # The library has no exception class, and its panics are no Exceptions.
        except BaseException as e:
            if not isinstance(e, Exception) and type(e).__name__ != "PanicException":
                raise
            raise ConfigError(f"{path}: {e}", "tokenizer.path") from None
        self.vocab_size = max(self._library.get_vocab(with_added_tokens=True).values()) + 1
        self.eos = self._special("eos", config.eos, path)
        self.bos = self._special("bos", config.bos, path)
        self._has_bos = bool(config.bos or self._named("bos"))
        self._check_token_names(path)
        framing = ["EOS"] if self.bos == self.eos else []  # datasets with other fingerprints lack the EOS
        inputs = (content, config.special_tokens_in_text, self.bos, self.eos, *framing)
        self.fingerprint = hashlib.sha256(repr(inputs).encode()).hexdigest()[:16]
        own = {"bos_token_id": None, "eos_token_id": self.eos}
        self._model_ids = self._ids_of("config.json", own)
        settings = self._object("generation_config.json").items()
        ids = self._ids_of("generation_config.json", self._model_ids).items()
        self._generation = {key: value for key, value in settings if key not in SPECIAL_IDS}
        self._generation |= {key: value for key, value in ids if value is not None}

    def model_ids(self) -> dict[str, Any]:
        return self._model_ids

    def generation_config(self) -> dict[str, Any]:
        return self._generation

    def _ids_of(self, name: str, otherwise: dict[str, Any]) -> dict[str, Any]:
        """Return the special ids in a JSON file beside tokenizer.json; missing keys are taken from
        `otherwise`. The EOS ids always include `eos`. A BOS that the tokenizer itself names takes precedence.
        Ids outside the vocabulary are left out."""
        special = dict(otherwise)
        for key in SPECIAL_IDS:
            value = self._object(name).get(key)
            ids = value if isinstance(value, list) else [] if value is None else [value]
            if not all(type(i) is int for i in ids):
                raise ConfigError(
                    f"{self._folder / name}: {key} is {value!r}, neither an id nor a list of ids",
                    "tokenizer.path",
                )
            if ids := [i for i in ids if 0 <= i < self.vocab_size]:
                special[key] = ids if isinstance(value, list) else ids[0]
        eos = special["eos_token_id"]
        listed = eos if isinstance(eos, list) else [eos]
        special["eos_token_id"] = eos if self.eos in listed else [self.eos, *listed]
        return special | ({"bos_token_id": self.bos} if self._has_bos else {})

    def _object(self, name: str) -> dict[str, Any]:
        """Read a JSON file beside tokenizer.json; a missing file is empty."""
        file = self._folder / name
        try:
            return read_object(file) if file.exists() else {}
        except ConfigError as e:
            raise ConfigError(str(e), "tokenizer.path") from None

    def _special(self, key: str, name: str, path: Path) -> int:
        name = name or self._named(key)
        if not name and key == "bos":
            return self.eos
        if not name:
            raise ConfigError(
                f"give the token at the end of a document: no tokenizer_config.json beside {path} names it",
                "tokenizer.eos",
            )
        token = self._library.token_to_id(name)
        if token is None:
            raise ConfigError(f"{path} has no token {name!r}", f"tokenizer.{key}")
        return token

    def _named(self, key: str) -> str:
        """Return the name of `bos` or `eos` in tokenizer_config.json, or ""."""
        return next(_contents(self._object("tokenizer_config.json").get(f"{key}_token")), "")

    def encode(self, text: str) -> list[int]:
        # The fast method leaves out offsets, a third of the time. A batch of one text uses one core, because
        # other processes use the other cores.
        return self._library.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def encode_framed(self, text: str) -> list[int]:
        """Return the ids that transformers returns, with the special tokens of the file's post-processor."""
        return self._library.encode(text, add_special_tokens=True).ids

    def decode(self, ids: Sequence[int]) -> str:
        return self._library.decode(list(ids), skip_special_tokens=False)

    def decode_continuation(self, ids: Sequence[int]) -> str:
        if not self._has_pieces:
            return self.decode(ids)
        # Only at the start of a text does the library remove a space.
        return self.decode([self.eos, *ids])[len(self.decode([self.eos])) :]

    def bytes_per_token(self) -> np.ndarray | None:
        """In byte-level BPE each character of a token in the file is one byte (GPT-2's printable characters);
        added tokens are written as their text. Bytes are counted in the text after the file's normalizer.

        A tokenizer that adds a space in front of each text has -1 bytes for EOS, so that the bytes of a
        document add up to the bytes of its text. If its BOS is the same token, a document may have both as
        targets, and the result is None."""
        if self._adds_space() and self.bos == self.eos:
            return None
        vocab = self._library.get_vocab(with_added_tokens=False)
        num_bytes = {
            number: pieces.num_bytes(token) if self._has_pieces else len(token)
            for token, number in vocab.items()
        }
        for number, token in self._library.get_added_tokens_decoder().items():
            num_bytes[number] = 0 if token.special else len(token.content.encode("utf-8"))
        table = self._bytes_per_token(num_bytes)
        table[self.eos] -= self._adds_space()
        return table

    def _adds_space(self) -> bool:
        """Whether the first token of a text has a space that the text does not have."""
        first = self._library.encode("a", add_special_tokens=False).tokens[0]
        return self._has_pieces and first.startswith(pieces.SPACE_MARK)

    def chat_format(self) -> ChatFormat:
        template, name = self._chat_template()
        config = self._object("tokenizer_config.json")
        tokens = {key: next(_contents(value), "") for key, value in config.items() if key.endswith("_token")}
        names = {key: name for key, name in tokens.items() if name} | self._framing()
        try:
            return ChatFormat(template, name, self._content, names)
        except (ValueError, TemplateLimitError) as e:
            raise ConfigError(str(e), "tokenizer.chat_template") from None

    def _chat_template(self) -> tuple[str, str]:
        """Return the text and the name of the chat template. Raises ConfigError if there is none."""
        assert isinstance(self.config, HuggingFace)
        file = self._folder / MARKED
        file = file if file.exists() else self._folder / "chat_template.jinja"
        if self.config.chat_template:
            file = Path(self.config.chat_template)
        elif not file.exists():
            file = self._folder / "tokenizer_config.json"
            template = self._object(file.name).get("chat_template")
            if isinstance(template, list):  # several, by name
                defaults = [item for item in template if item.get("name") == "default"]
                template = defaults[0].get("template") if defaults else None
            if not isinstance(template, str):
                raise ConfigError(
                    f"the tokenizer {self.config.label} has no chat template: give the file of one, such "
                    "as assets/chat_template.jinja, which needs no special tokens for roles",
                    "tokenizer.chat_template",
                )
            return template, str(file)
        try:
            return read_bytes(str(file), "tokenizer.chat_template").decode("utf-8"), str(file)
        except UnicodeDecodeError:
            raise ConfigError(f"{file} is not UTF-8", "tokenizer.chat_template") from None

    def hugging_face_files(self) -> dict[str, bytes]:
        """Return tokenizer.json unchanged, the chat template, and a tokenizer_config.json with titanlite's
        BOS and EOS."""
        files, config = {"tokenizer.json": self._content}, self._exported_config()
        own = ["tokenizer.model"] if self._has_pieces else []
        for name in (*TEMPLATES, *own):
            if file := self._beside(name):
                files[name] = read_bytes(str(file), "tokenizer.path")
        if isinstance(self.config, HuggingFace) and self.config.chat_template:
            files = {name: content for name, content in files.items() if name not in TEMPLATES}
            files["chat_template.jinja"] = self._chat_template()[0].encode()
        with suppress(ConfigError):  # no template, or one without marks
            chat = self.chat_format()
            if (plain := chat.unmarked_template()) != chat.template:
                config.pop("chat_template", None)
                files |= {"chat_template.jinja": plain.encode(), MARKED: chat.template.encode()}
        return {**files, "tokenizer_config.json": as_json(config)}

    def _exported_config(self) -> dict[str, Any]:
        """Return a tokenizer_config.json with which transformers runs tokenizer.json as it is.

        Other classes than PreTrainedTokenizerFast, such as GPT2Tokenizer and LlamaTokenizer of transformers
        5, build a tokenizer of their own from the vocabulary, which splits text differently. Naming a token
        makes it special, so names are kept of the tokens that are added tokens in tokenizer.json. A pad token
        that is left out is replaced by EOS."""
        self._beside("tokenizer_config.json")  # raises an error for a link out of the folder
        config = self._object("tokenizer_config.json")
        added = {token.content for token in self._library.get_added_tokens_decoder().values()}
        named, extra = dict[str, Any](), dict[str, None]()
        for key, names in self._token_names().items():
            known = [name for name in names if name in added]
            if key in SPECIAL_LISTS:
                extra |= dict.fromkeys(known)
            elif key not in ADDED_LISTS and (known or key == "pad_token"):
                named[key] = known[0] if known else self._library.id_to_token(self.eos)
        if extra:  # transformers 4 expects another type under the newer key, extra_special_tokens
            named["additional_special_tokens"] = list(extra)
        kept = {key: config[key] for key in KEPT if key in config}
        return {**TOKENIZER_CONFIG, **kept, **named, **self._framing()}

    def _token_names(self) -> dict[str, list[str]]:
        """Return the names of tokens in the files beside tokenizer.json, by key, as transformers reads them:
        with added_tokens_decoder, it does not read the older files."""
        tree = {"pad_token": self._pad_token} | self._object("tokenizer_config.json")
        if "added_tokens_decoder" not in tree:
            tree = tree | self._object("special_tokens_map.json")
            tree["added_tokens"] = [*self._object("added_tokens.json")]
        keys = [key for key in tree if key in (*SPECIAL_LISTS, *ADDED_LISTS) or key.endswith("_token")]
        return {key: names for key in keys if (names := list(_contents(tree[key])))}

    def _check_token_names(self, path: Path) -> None:
        """Raise ConfigError if a file beside tokenizer.json names a token that only gets an id when
        transformers opens the files: the model would have no row for it."""
        for key, names in self._token_names().items():
            unknown = [name for name in names if self._library.token_to_id(name) is None]
            if unknown and key not in (*NOT_IN_TEXT, "bos_token", "eos_token"):
                raise ConfigError(
                    f"{path} has no token {unknown[0]!r}, which a file beside it names ({key}): delete the "
                    "name there, or add the token with transformers, "
                    "`PreTrainedTokenizerFast.from_pretrained(DIR).save_pretrained(DIR)`",
                    "tokenizer.path",
                )

    def _framing(self) -> dict[str, str]:
        """Return the names of BOS, if the tokenizer has one, and EOS, as in tokenizer_config.json."""
        ids = {"bos_token": self.bos} if self._has_bos else {}
        return {key: self._library.id_to_token(i) or "" for key, i in (ids | {"eos_token": self.eos}).items()}

    def _beside(self, name: str) -> Path | None:
        """Return a file beside tokenizer.json that an export copies, or None if it is missing. Raises
        ConfigError for a link out of the folder, which might copy a secret, except to the blobs of Hugging
        Face's cache."""
        file = self._folder / name
        if not os.path.lexists(file):
            return None
        if not is_inside(file, self._folder):
            raise ConfigError(
                f"{file} is a link to {os.path.realpath(file)}, outside its folder, which an export would "
                "copy: replace the link by a file, or delete it",
                "tokenizer.path",
            )
        return file

    def _set_mode(self) -> None:
        assert isinstance(self.config, HuggingFace)
        self._library.encode_special_tokens = not self.config.special_tokens_in_text

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        self._set_mode()  # the library's pickle loses it


def has_pieces(tree: Any) -> bool:
    """Return True for BPE or Unigram with byte fallback, whose tokens are pieces of text; False for
    byte-level BPE, whose tokens are bytes. Raises ValueError for a tokenizer that loses text."""
    if not isinstance(tree, dict) or not isinstance(tree.get("model"), dict):
        raise ValueError("not a tokenizer.json")
    model = tree["model"]
    if (kind := model.get("type")) not in ("BPE", "Unigram"):
        raise ValueError(f"its model is {kind}, expected BPE or Unigram")
    steps = pieces.steps(tree.get("pre_tokenizer"), "pretokenizers")
    is_byte_level = any(step.get("type") == "ByteLevel" for step in steps)
    if kind == "Unigram" or (model.get("byte_fallback") and not is_byte_level):
        pieces.check(tree)
        return True
    _check_byte_level(tree)
    return False


def _contents(value: Any) -> Iterator[str]:
    """Yield the names of tokens in a value of tokenizer_config.json: a name, an object with `content`, or a
    list or an object of these."""
    if value and isinstance(value, str):
        yield value
    elif isinstance(value, dict) and "content" in value:
        yield from _contents(value["content"])
    elif isinstance(value, (dict, list)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _contents(item)


def _check_byte_level(tree: dict[str, Any]) -> None:
    """Raise ValueError unless every text has ids that decode to it, or (Qwen) to its NFC form."""
    from tokenizers import pre_tokenizers

    splits = pieces.steps(tree.get("pre_tokenizer"), "pretokenizers")
    if (
        "ByteLevel" not in {split.get("type") for split in splits}
        or not set(pre_tokenizers.ByteLevel.alphabet()) <= tree["model"]["vocab"].keys()
    ):
        raise ValueError(
            "its BPE works on characters, not on bytes, and would lose unknown characters: it has no byte "
            "fallback"
        )
    if any(split.get("add_prefix_space") for split in splits):
        raise ValueError("it adds a space before every text (add_prefix_space)")
    for step in pieces.steps(tree.get("normalizer"), "normalizers"):
        if step.get("type") != "NFC":
            raise ValueError(f"it changes text before it encodes it (normalizer {step.get('type')})")
