"""`titanlite generate PATH --prompt TEXT`: sample text from the model in a run's newest checkpoint, a given
checkpoint, or a Hugging Face directory, whose special tokens are then used as in transformers.

Text is printed token by token. Several prompts are continued one after another; prompt i has seed + i.
--chat writes each prompt as a user's message in the tokenizer's chat template and prints the answer. Without
a prompt it reads messages from standard input, one per line, and answers each in one conversation.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from titanlite.checkpoint.commit import CheckpointError
from titanlite.checkpoint.find import find_checkpoint
from titanlite.checkpoint.state import listed, model_tensors, non_finite
from titanlite.commands import parser
from titanlite.config.component import ConfigError
from titanlite.fetch import local_copy
from titanlite.generate import CachedLogits, Generation, before_any, next_tokens, text_after
from titanlite.interop.dcp import check_hashes
from titanlite.interop.formats import open_checkpoint
from titanlite.interop.huggingface import open_hugging_face
from titanlite.interop.weights import Weights, check_own, load_weights, skeleton
from titanlite.job import load_recorded_job, open_recorded_tokenizer
from titanlite.log import set_up_logging, tell
from titanlite.models.base import Decoder, ModelFamily
from titanlite.models.hf_config import read_family
from titanlite.runtime.process import pick_device
from titanlite.tokenizers.base import Tokenizer
from titanlite.tokenizers.huggingface import HuggingFace
from titanlite.tokenizers.template import TemplateLimitError


@dataclass(frozen=True)
class Source:
    """A model with its tokenizer. `path`: the directory of the model. `encode`: maps a prompt to token ids.
    `stop_ids`: ids that end a text. `max_position`: the longest text that the model supports, in tokens."""

    path: Path
    net: Decoder
    tokenizer: Tokenizer
    encode: Callable[[str], list[int]]
    stop_ids: set[int]
    max_position: int | None
    device: torch.device

    def continuation(self, prompt: str, config: Generation, seed: int) -> Iterator[list[int]]:
        """Yield the list of new ids after each new id, until the text ends. Raises ConfigError if the text
        may become too long for the model."""
        yield from self.continued(self.encode(prompt) or [self.tokenizer.bos], config, seed)

    def answer(
        self, messages: Sequence[dict[str, str]], config: Generation, seed: int
    ) -> Iterator[list[int]]:
        """Yield as `continuation` does, for an answer to a conversation. Raises ConfigError if the tokenizer
        has no chat template or the template refuses the conversation."""
        chat = self.tokenizer.chat_format()
        try:
            prompt = chat.encode(chat.render(messages, add_generation_prompt=True)).ids.tolist()
        except (ValueError, TemplateLimitError) as e:
            raise ConfigError(str(e)) from None
        yield from self.continued(prompt, config, seed)

    def continued(self, start: list[int], config: Generation, seed: int) -> Iterator[list[int]]:
        """Yield as `continuation` does, for a prompt of token ids."""
        length = len(start) + config.max_new_tokens
        if self.max_position is not None and length > self.max_position:
            raise ConfigError(
                f"a prompt of {len(start)} tokens and --max-new-tokens={config.max_new_tokens} exceed the "
                f"model's max_position of {self.max_position} tokens"
            )
        next_logits = CachedLogits(self.net, length, self.device)
        new_ids: list[int] = []
        for token in next_tokens(next_logits, start, config, self.tokenizer.vocab_size, seed):
            new_ids.append(token)
            yield new_ids
            if token in self.stop_ids:
                return

    def text(self, prompt: str, ids: Sequence[int]) -> str:
        """Decode the ids before the first stop id, which follow the prompt."""
        return text_after(prompt, before_any(ids, self.stop_ids), self.tokenizer)


def main(argv: Sequence[str]) -> int:
    """Print the prompts and their continuations."""
    options = parser("generate").read(argv)
    prompts = [*options.prompt, *(_lines(options.prompt_file) if options.prompt_file else [])]
    if not prompts and not options.chat:
        raise ConfigError("nothing to continue: give --prompt or --prompt-file")
    try:
        config = Generation(
            max_new_tokens=options.max_new_tokens,
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
        )
    except ConfigError as e:
        raise ConfigError(f"--{str(e.key).replace('_', '-')}: {e}") from None
    set_up_logging(rank=0, verbose=False)
    source = open_source(
        local_copy(options.path), pick_device(), options.allow_imports, options.ema, options.base
    )
    if options.chat:
        ends = source.tokenizer.chat_format().end_of_turn()
        source = replace(source, stop_ids=source.stop_ids | ends)
    tell(f"using {'the average of the weights in ' if options.ema else ''}{source.path}")
    if options.chat and not prompts:
        return _converse(source, config, options.seed)
    for i, prompt in enumerate(prompts):
        if len(prompts) > 1:
            print(f"--- {i + 1} of {len(prompts)}")
        if options.chat:
            _answer(source, [{"role": "user", "content": prompt}], config, options.seed + i)
            continue
        continuation = source.continuation(prompt, config, options.seed + i)
        _print_growing(prompt, (source.text(prompt, ids) for ids in continuation))
    return 0


def _converse(source: Source, config: Generation, seed: int) -> int:
    """Answer the lines of standard input as messages of one conversation."""
    messages = list[dict[str, str]]()
    if sys.stdin.isatty():
        tell("one message per line; Ctrl-D ends the conversation")
    for line in filter(None, map(str.rstrip, sys.stdin)):
        messages.append({"role": "user", "content": line})
        answer = _answer(source, messages, config, seed + len(messages) // 2)
        messages.append({"role": "assistant", "content": answer})
    return 0


def _answer(source: Source, messages: Sequence[dict[str, str]], config: Generation, seed: int) -> str:
    """Print the answer to a conversation, and return it."""
    answers = source.answer(messages, config, seed)
    return _print_growing("", (source.text("", ids) for ids in answers))


def _lines(file: Path) -> list[str]:
    try:
        return [line for line in file.read_text(encoding="utf-8").splitlines() if line]
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"--prompt-file: {file} cannot be read: {e}") from None


def _print_growing(prompt: str, texts: Iterator[str]) -> str:
    """Print the prompt and a text that grows, and return both. A character of which only some bytes are known
    is printed when it is complete."""
    text, printed = prompt, 0
    for continuation in texts:
        text = prompt + continuation
        complete = max(len(text.rstrip("\ufffd")), printed)
        print(text[printed:complete], end="", flush=True)
        printed = complete
    print(text[printed:])
    return text


def open_source(
    path: Path,
    device: torch.device,
    allow_imports: bool,
    average: bool = False,
    base_path: Path | None = None,
) -> Source:
    """Load the model at `path` onto `device`, in bf16 on GPUs. `average`: with the average of the weights
    from a checkpoint. `base_path`: the directory of the base model of a checkpoint's adapters; None: the
    recorded one. Raises ConfigError or CheckpointError."""
    if (path / "config.json").exists():
        if average:
            raise ConfigError(f"{path} is a Hugging Face directory, which has no average: leave out --ema")
        if base_path:
            raise ConfigError(f"{path} is a Hugging Face directory, which is whole: leave out --base")
        return _open_hugging_face(path, device)
    path = find_checkpoint(path)
    check_hashes(path)
    job = load_recorded_job(path, allow_imports)
    weights = open_checkpoint(path, job.model, average, base_path=base_path)
    tokenizer = open_recorded_tokenizer(job, path, weights.tokenizer)
    net = _load(weights, job.model, device)

    def encode(prompt: str) -> list[int]:
        return [tokenizer.bos, *tokenizer.encode(prompt)]  # as training documents begin

    return Source(path, net, tokenizer, encode, tokenizer.stop_ids, job.model.max_position, device)


def _open_hugging_face(path: Path, device: torch.device) -> Source:
    family = read_family(path)
    tokenizer = HuggingFace(path=str(path), special_tokens_in_text=True).build()
    if tokenizer.vocab_size > family.config.vocab_size:
        raise ConfigError(
            f"{path}: its tokenizer has {tokenizer.vocab_size} ids, its config.json vocab_size = "
            f"{family.config.vocab_size}: they belong to different models"
        )
    weights = open_hugging_face(path, family)
    net = _load(weights, family, device)
    return Source(
        path, net, tokenizer, tokenizer.encode_framed, tokenizer.stop_ids, family.config.max_position, device
    )


def _load(weights: Weights, family: ModelFamily, device: torch.device) -> Decoder:
    """Build the family's model with exactly these weights."""
    net = skeleton(weights, family)
    check_own(weights, net)
    _cast(net, torch.bfloat16 if device.type == "cuda" else torch.float32)
    net.to_empty(device=device)
    net.fill_buffers()
    load_weights(weights, net)
    if names := non_finite({"model": model_tensors(net)}):
        raise CheckpointError(f"{weights.path}: {listed(names)} has values that are not finite")
    return net.requires_grad_(False)


def _cast(net: Decoder, dtype: torch.dtype) -> None:
    """Cast the parameters of `net` to `dtype`. Buffers keep theirs: in bf16, a router's correction bias would
    choose other experts."""
    for parameter in net.parameters():
        parameter.data = parameter.data.to(dtype)
