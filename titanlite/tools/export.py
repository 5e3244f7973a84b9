"""`titanlite export RUN_OR_STEP DIR`: a checkpoint's model as a Hugging Face directory, which
`AutoModelForCausalLM.from_pretrained` and `AutoTokenizer.from_pretrained` open. On the CPU, in the memory of
one tensor; nothing is left behind if it fails."""

from __future__ import annotations

import re
from collections.abc import Sequence

from titanlite.checkpoint.digest import gib
from titanlite.checkpoint.resume import find_checkpoint
from titanlite.commands import parser
from titanlite.config.component import ConfigError
from titanlite.config.paths import check_new
from titanlite.interop.dcp import check_hashes, open_titanlite
from titanlite.interop.export import DTYPES, write_directory
from titanlite.interop.weights import ModelAndTokenizer, check_tokenizer
from titanlite.job import load_recorded_job
from titanlite.log import set_up_logging, tell


def main(argv: Sequence[str]) -> int:
    """Write the directory and say where it is."""
    options = parser("export").read(argv)
    size_limit = parse_size(options.max_shard_size)
    set_up_logging(rank=0, verbose=False)
    check_new(options.target, "DIR")
    path = find_checkpoint(options.path)
    check_hashes(path)
    job = load_recorded_job(path, options.allow_imports)
    tokenizer = job.tokenizer.build()
    weights = open_titanlite(path, job.model)
    now = getattr(job.tokenizer, "path", job.tokenizer.name)
    again = f"titanlite import {path} DIR CONFIG.toml --tokenizer.path=..."
    why = f"it is not what is now in {now}; if it has moved: `{again}`, with your own file of the run"
    check_tokenizer(weights, tokenizer, why)
    exchange = ModelAndTokenizer(job.model, tokenizer)
    dtype = DTYPES.get(options.dtype)
    tell(f"using {path}")
    size = write_directory(weights, options.target, exchange, dtype, size_limit, options.keep_padding)
    print(f"{options.target}: {job.model.name} {job.model.flavor} from {path}, {gib(size)}")
    return 0


def parse_size(text: str) -> int:
    """`5GB`, `500MB`, `2GiB` or a number, in bytes."""
    units = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text)
    if not found or found[2].upper() not in units or float(found[1]) == 0:
        raise ConfigError(f"--max-shard-size={text} is no size, such as 5GB or 500MB")
    return int(float(found[1]) * units[found[2].upper()])
