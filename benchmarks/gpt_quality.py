"""The family gpt beside nanochat's own code: bits per byte of held-out text against seconds and tokens, on
the same text, tokenizer and GPU.

    python benchmarks/gpt_quality.py text FOLDER [--every 1]        # text, tokenizer and datasets for both
    python benchmarks/gpt_quality.py nanochat FOLDER NAME CHECKOUT [--seed 0] [-- --depth=8 ...]
    python benchmarks/gpt_quality.py titanlite FOLDER NAME [--seed 0] [--without PART] [-- --KEY=VALUE ...]
    python benchmarks/gpt_quality.py summary FOLDER --output benchmarks/results/NAME.json
    python benchmarks/gpt_quality.py draw benchmarks/results/NAME.json --output assets/NAME.png

The text is that of text_by_kind.py, all kinds mixed: the files of the standard library and of all installed
packages, without duplicates, with one file in 33 held out. Files are cut at line ends into documents of at
most 3,000 characters, about 750 tokens: nanochat trains on no more than the first 2,048 tokens of a document,
so that of whole files it would see beginnings only, and it crops fewer tokens of short documents. Both
programs read the same documents under the same 32,768 ids.

A run is recorded in FOLDER/NAME.json: its command, the seconds of training (without start, compilation, which
ends with the tenth step, validation and saves, as nanochat counts them), the tokens, and the bits per byte of
held-out text of each saved checkpoint. titanlite reports every ten steps, and each of these steps is recorded
with their mean; nanochat waits for the GPU after each step and reports it. Both models are scored by the same
code, on each held-out document by itself: BOS and up to 2,047 tokens, of which all but BOS count, and neither
begins nor ends of documents. nanochat's checkpoints are read by titanlite's importer, whose logits are
nanochat's. With `--tokens-per-s` a run only measures speed: nothing is scored.

`--without` leaves one of PARTS out of titanlite's recipe.

A NAME is a series and a seed: n0 and n1 are two runs of the series n. `draw` prints the mean and the spread
of each series, and draws the bits per byte of all its checkpoints against the seconds of training.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import pickle
import random
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import tomli_w
import torch
import torch.nn.functional as F

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks.environment import without_paths, write_result  # noqa: E402
from benchmarks.text_by_kind import read_documents, titanlite, without_duplicates, write_lines  # noqa: E402
from titanlite.interop.formats import open_weights  # noqa: E402
from titanlite.interop.weights import check, load_weights  # noqa: E402
from titanlite.job import load_job  # noqa: E402
from titanlite.losses import WHOLE_VOCABULARY, score_targets  # noqa: E402
from titanlite.models.base import Decoder  # noqa: E402
from titanlite.models.gpt import Gpt  # noqa: E402
from titanlite.runtime.process import pick_device  # noqa: E402
from titanlite.tokenizers.tiktoken import Tiktoken  # noqa: E402

VOCAB_SIZE, NUM_SPECIAL, TOKENIZER_SHARE = 32_768, 9, 8
SEQ_LEN, SKIPPED_STEPS, MAX_CHARACTERS = 2048, 10, 3000
SPECIAL = (
    "bos", "user_start", "user_end", "assistant_start", "assistant_end", "python_start", "python_end",
    "output_start", "output_end",
)  # fmt: skip
STEP_LINE = re.compile(r"step (\d+)/\d+ .*? dt: ([\d.]+)ms \| tok/sec: ([\d,]+)")


# The parts that a run can leave out: fields of the model, and keys of the optimizer.
PARTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "value_embedding": ({"value_embedding_interval": 0}, {}),
    "residual_mix": ({"residual_scalars": False}, {}),
    "smear": ({"smear": False}, {}),
    "backout": ({"backout": False}, {}),
    "softcap": ({"logit_softcap": 0.0}, {}),
    "squared_relu": ({"has_squared_relu": False}, {}),
    "zero_init": ({"zero_init": False}, {}),
    "head_norms": ({"norms_heads": False}, {}),
    "cautious_weight_decay": ({}, {"cautious_weight_decay": False}),
    "row_norms": ({}, {"equalize_rows": False, "exact_norm": False}),
    "normuon": ({}, {"normalize": "none"}),
}


# ---- text


def make_text(folder: Path, every: int) -> None:
    """Write the documents, the tokenizer and the datasets."""
    documents = without_duplicates(sorted(read_documents(every), key=lambda d: (d.digest, d.kind)))
    texts = {
        name: [part for d in documents if d.held_out == held_out for part in parts(d.text)]
        for name, held_out in (("train", False), ("held_out", True))
    }
    random.Random(0).shuffle(texts["train"])  # nanochat reads them in their order
    sample = write_lines(folder / "sample.jsonl", texts["train"][::TOKENIZER_SHARE])
    tokenizer = folder / "tokenizer.tiktoken"
    titanlite("tokenizer", "train", sample, "--vocab-size", VOCAB_SIZE - NUM_SPECIAL, "--output", tokenizer)
    files = {name: write_lines(folder / f"{name}.jsonl", lines) for name, lines in texts.items()}
    keys = [f"--tokenizer.path={tokenizer}", f"--tokenizer.num_special_tokens={NUM_SPECIAL}"]
    titanlite("prepare", files["train"], f"--output={folder / 'tokens'}", *keys)
    _write_for_nanochat(folder, files, tokenizer)
    sizes = {name: sum(len(text.encode()) for text in lines) for name, lines in texts.items()}
    (folder / "text.json").write_text(json.dumps({name: [len(texts[name]), sizes[name]] for name in texts}))


def parts(text: str) -> list[str]:
    """A text cut at line ends into parts of at most MAX_CHARACTERS characters; a longer line is one part."""
    result = [""]
    for line in text.splitlines(keepends=True):
        if result[-1] and len(result[-1]) + len(line) > MAX_CHARACTERS:
            result.append("")
        result[-1] += line
    return result


def _tokenizer(file: Path) -> Tiktoken:
    return Tiktoken(path=str(file), num_special_tokens=NUM_SPECIAL)


def _write_for_nanochat(folder: Path, files: dict[str, Path], tokenizer: Path) -> None:
    """nanochat's base directory: its last file of text is for validation."""
    import tiktoken

    data, target = folder / "nanochat" / "base_data_climbmix", folder / "nanochat" / "tokenizer"
    for place in (data, target):
        place.mkdir(parents=True, exist_ok=True)
    for number, name in enumerate(("train", "held_out")):
        link = data / f"shard_{number:05}.parquet"
        link.unlink(missing_ok=True)
        link.symlink_to(files[name].resolve())
    encoding = _tokenizer(tokenizer).build()._encoding  # type: ignore[attr-defined]
    ranks = dict(encoding._mergeable_ranks)
    special = {f"<|{name}|>": len(ranks) + i for i, name in enumerate(SPECIAL)}
    own = tiktoken.Encoding("own", pat_str=encoding._pat_str, mergeable_ranks=ranks, special_tokens=special)
    (target / "tokenizer.pkl").write_bytes(pickle.dumps(own))
    lengths = {rank: len(token) for token, rank in ranks.items()}
    torch.save(
        torch.tensor([lengths.get(i, 0) for i in range(own.n_vocab)], dtype=torch.int32),
        target / "token_bytes.pt",
    )


# ---- runs


def run_nanochat(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Train with nanochat's code. Returns seconds and tokens by step, and the folder of its checkpoints."""
    arguments = [f"--model-tag={options.name}", "--core-metric-every=-1", "--sample-every=-1",
                 "--eval-every=-1", *options.arguments]  # fmt: skip
    command = [sys.executable, str(ROOT / "benchmarks/nanochat_train.py"), options.checkout,
               str(options.seed), *arguments]  # fmt: skip
    lines = _logged(command, folder / f"{options.name}.log", NANOCHAT_BASE_DIR=str(folder / "nanochat"))
    steps = [match for line in lines if (match := STEP_LINE.search(line))]
    batch = next(
        int(m[1].replace(",", "")) for line in lines if (m := re.search(r"Total batch size ([\d,]+)", line))
    )
    seconds = [float(match[2]) / 1000 for match in steps]
    checkpoints = folder / "nanochat" / "base_checkpoints" / options.name
    saved = {int(path.stem.split("_")[1]): str(path) for path in sorted(checkpoints.glob("model_*.pt"))}
    return {"step_s": seconds, "tokens_per_step": batch, "saved": saved, "arguments": arguments}


def run_titanlite(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Train with titanlite. Returns what run_nanochat returns."""
    run = folder / options.name
    arguments = [
        f"--job.dump_folder={run}", f"--tokenizer.path={folder / 'tokenizer.tiktoken'}",
        f"--tokenizer.num_special_tokens={NUM_SPECIAL}",
        f'--data.sources=[{{name="tokens",path="{folder / "tokens"}"}}]',
        "--data.holdout_sequences=0", "--no-validation.enable", "--generation.prompts=[]",
        f"--training.seed={options.seed}", f"--metrics.log_freq={SKIPPED_STEPS}", "--metrics.detail_freq=0",
        "--metrics.sinks=[]", "--checkpoint.keep_latest_k=0", "--checkpoint.async_mode=disabled",
        *options.arguments,
    ]  # fmt: skip
    config = name = options.config or "gpt_d8"
    if options.without:
        config = str(without(name, options.without, folder / f"{options.name}.toml"))
    _logged(
        [sys.executable, "-m", "titanlite.cli", "train", config, *arguments], folder / f"{options.name}.log"
    )
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    seconds = list[float]()  # each report has the mean of the steps since the one before
    for line in metrics:
        if "time/step_s" in line:
            seconds += [line["time/step_s"]] * (line["step"] - len(seconds))
    training = load_job(config, arguments, 1).training
    saved = {int(path.name.split("-")[1]): str(path) for path in sorted((run / "checkpoint").glob("step-*"))}
    tokens = training.global_batch_size * training.seq_len
    return {
        "step_s": seconds,
        "tokens_per_step": tokens,
        "saved": saved,
        "config": name,
        "without": options.without,
        "arguments": arguments,
    }


def without(config: str, part: str, file: Path) -> Path:
    """Write the configuration of that name without a part of the recipe, and without the groups of parameters
    that the model then lacks. Returns `file`."""
    job = tomllib.loads((ROOT / "train_configs" / f"{config}.toml").read_text())
    fields, keys = PARTS[part]
    job["model"].setdefault("overrides", {}).update(fields)
    job["optimizer"].update(keys)
    groups = [group for group in job["optimizer"]["param_groups"] if part not in group["pattern"]]
    if part == "normuon":  # Muon has no second moment
        groups = [group for group in groups if group["pattern"] != "model.layers.*"]
    job["optimizer"]["param_groups"] = groups
    file.write_text(tomli_w.dumps(job))
    return file


def _logged(command: list[str], log: Path, **environment: str) -> list[str]:
    """Run a command. Returns the lines of its output, which `log` gets, too."""
    with log.open("w") as file:
        code = subprocess.run(
            command, stdout=file, stderr=subprocess.STDOUT, cwd=ROOT, env={**os.environ, **environment}
        ).returncode
    lines = log.read_text().splitlines()
    if code:
        raise SystemExit("\n".join([f"{command[1]} ended with {code}", *lines[-30:]]))
    return lines


def record_run(folder: Path, options: argparse.Namespace) -> None:
    """Train, score the checkpoints, and write the record."""
    began = time.perf_counter()
    record = (run_nanochat if options.program == "nanochat" else run_titanlite)(folder, options)
    record["wall_s"] = round(time.perf_counter() - began, 1)
    saved = record.pop("saved")
    timed = record["step_s"][SKIPPED_STEPS:]
    record |= {
        "program": options.program, "seed": options.seed, "num_steps": len(record["step_s"]),
        "train_s": sum(timed), "tokens_per_s": len(timed) * record["tokens_per_step"] / sum(timed),
        "peak_gib": None, "bits_per_byte": {},
    }  # fmt: skip
    if not options.tokens_per_s:
        scorer = Scorer(folder)
        for step, path in saved.items():
            net = (
                scorer.nanochat(Path(path)) if options.program == "nanochat" else scorer.titanlite(Path(path))
            )
            record["bits_per_byte"][step] = scorer.bits_per_byte(net)
            print(options.name, step, record["bits_per_byte"][step], flush=True)
    record["arguments"] = [without_paths(word.replace(str(folder), "FOLDER")) for word in record["arguments"]]
    write_result(folder / f"{options.name}.json", record, "torch")
    shown = ("train_s", "tokens_per_s", "num_steps", "bits_per_byte")
    print(options.name, {key: record[key] for key in shown}, flush=True)


# ---- scores


def default_eps(device: torch.device, dtype: torch.dtype) -> float:
    """The epsilon of F.rms_norm without one, as nanochat calls it: of the dtype or of fp32, which depends on
    the device and on PyTorch's version."""
    x = torch.full((8,), 1e-6, device=device, dtype=dtype)
    measured = (x / F.rms_norm(x, (8,))).float().square().mean().item()
    choices = (torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)
    return min(choices, key=lambda eps: abs(math.log(measured / eps)))


class Scorer:
    """Scores models on the held-out documents."""

    def __init__(self, folder: Path, limit_bytes: int = 4_000_000):
        tokenizer = _tokenizer(folder / "tokenizer.tiktoken").build()
        lines = (folder / "held_out.jsonl").read_text(encoding="utf-8").splitlines()
        self.documents, self.device = list[list[int]](), pick_device()
        self.dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        self.tokenizer, self.num_bytes = tokenizer, 0
        num_bytes = torch.load(folder / "nanochat/tokenizer/token_bytes.pt").tolist()
        for line in lines:
            if self.num_bytes > limit_bytes:
                break
            ids = tokenizer.encode(json.loads(line)["text"])[: SEQ_LEN - 1]
            self.documents.append([tokenizer.bos, *ids])
            self.num_bytes += sum(num_bytes[i] for i in ids)
        self.documents.sort(key=len)

    def nanochat(self, model_file: Path) -> Decoder:
        meta = json.loads(model_file.with_name(f"meta_{model_file.stem.split('_')[1]}.json").read_text())
        config = meta["model_config"]
        window = -(-config["sequence_len"] // 4 // 128) * 128 + 1
        letters = (config["window_pattern"] * config["n_layer"])[: config["n_layer"] - 1] + "L"
        overrides = {
            "layer_pattern": letters, "sliding_window": window if "S" in letters else 0,
            "norm_eps": default_eps(self.device, self.dtype), "vocab_size": VOCAB_SIZE,
        }  # fmt: skip
        folder = model_file.parent / f"only_{model_file.stem}"
        folder.mkdir(exist_ok=True)
        for file in (model_file, model_file.with_name(f"meta_{model_file.stem.split('_')[1]}.json")):
            (folder / file.name).unlink(missing_ok=True)
            (folder / file.name).symlink_to(file.resolve())
        return self._loaded(folder, Gpt(flavor=f"d{config['n_layer']}", overrides=overrides))

    def titanlite(self, step: Path) -> Decoder:
        return self._loaded(step, load_job(str(step / "job.toml"), [], 1).model)  # type: ignore[arg-type]

    def _loaded(self, folder: Path, family: Gpt) -> Decoder:
        weights, net = open_weights(folder, family), family.build()
        check(weights, family)
        load_weights(weights, net)
        return net.to(self.device, self.dtype)

    @torch.no_grad()
    def bits_per_byte(self, net: Decoder) -> float:
        """The sum of -log2 p over all tokens of the documents, divided by their bytes."""
        from dataclasses import replace

        vocabulary = replace(WHOLE_VOCABULARY, softcap=net.logit_softcap)
        total, size = 0.0, 64 if self.device.type == "cuda" else 8
        for start in range(0, len(self.documents), size):
            batch = self.documents[start : start + size]
            length = max(map(len, batch)) - 1
            inputs = torch.full((len(batch), length), self.tokenizer.bos)
            targets = torch.full((len(batch), length), -100)
            for row, ids in enumerate(batch):
                inputs[row, : len(ids) - 1] = torch.tensor(ids[:-1])
                targets[row, : len(ids) - 1] = torch.tensor(ids[1:])
            inputs, targets = inputs.to(self.device), targets.to(self.device)
            scores = net(
                inputs,
                head_fn=lambda h, w, y=targets: score_targets(h, w, y, self.tokenizer.vocab_size, vocabulary),
            )
            total -= scores[..., 0].double().sum().item()
        return total / math.log(2) / self.num_bytes


# ---- summary


def summarize(folder: Path, output: Path) -> None:
    """Write the records of all runs into one file."""
    records = {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
    text = records.pop("text")
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    write_result(output, {"gpu": gpu, "text": text, "runs": records}, "torch")


def seconds_at(run: dict[str, Any]) -> list[tuple[float, float]]:
    """The seconds of training, as `train_s` counts them, and the bits per byte of each checkpoint."""
    return [
        (sum(run["step_s"][SKIPPED_STEPS:step]), bits)
        for step, bits in sorted((int(step), bits) for step, bits in run["bits_per_byte"].items())
    ]


def by_series(runs: dict[str, dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """The runs of each series, by the name without its digits."""
    series: dict[str, list[dict[str, Any]]] = {}
    for name, run in sorted(runs.items()):
        series.setdefault(name.rstrip("0123456789"), []).append(run)
    return series


def draw(file: Path, output: Path | None) -> None:
    """Print one line of a table per series, and draw the bits per byte against the seconds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    result = json.loads(file.read_text())
    figure, axes = pyplot.subplots(figsize=(8, 4), dpi=120)
    print("| series | runs | steps | seconds | tokens/s | bits per byte |", "| --- " * 6 + "|", sep="\n")
    for number, (name, runs) in enumerate(by_series(result["runs"]).items()):
        ends = [curve[-1] for run in runs if (curve := seconds_at(run))]
        seconds, bits = [run["train_s"] for run in runs], [bits for _, bits in ends]
        speed = statistics.mean(run["tokens_per_s"] for run in runs)
        print(
            f"| {name} | {len(runs)} | {runs[0]['num_steps']} | {mean_and_range(seconds, 1)} | {speed:,.0f} "
            f"| {mean_and_range(bits, 4) if bits else '-'} |"
        )
        label = f"{runs[0]['program']} ({name})"
        for run in runs:
            x, y = zip(*seconds_at(run)) if run["bits_per_byte"] else ((), ())
            axes.plot(x, y, "o-", color=f"C{number}", markersize=4, linewidth=1.2, label=label)
            label = "_"
    axes.set(
        xlabel=f"seconds of training on one {result['gpu']}",
        ylabel="bits per byte of held-out text",
        yscale="log",
    )
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    if output is not None:
        figure.savefig(output)


def mean_and_range(values: list[float], digits: int) -> str:
    """The mean of values, and their least and greatest."""
    mean, least, most = (f"{f(values):.{digits}f}" for f in (statistics.mean, min, max))
    return f"{mean} ({least} to {most})" if len(values) > 1 else mean


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("program", choices=("text", "nanochat", "titanlite", "summary", "draw"))
    parser.add_argument("folder", type=Path, help="for draw, the file of a summary")
    parser.add_argument("names", nargs="*", help="NAME, and CHECKOUT of nanochat")
    parser.add_argument("--every", type=int, default=1, help="read one file in so many")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--config", help="of titanlite (gpt_d8)")
    parser.add_argument("--without", choices=PARTS, help="the part of titanlite's recipe to leave out")
    parser.add_argument("--tokens-per-s", action="store_true", help="do not score")
    parser.add_argument("--output", type=Path)
    words = sys.argv[1:]
    end = words.index("--") if "--" in words else len(words)
    options = parser.parse_args(words[:end])
    options.arguments = words[end + 1 :]
    options.folder = options.folder.resolve()
    if options.program == "text":
        make_text(options.folder, options.every)
    elif options.program == "summary":
        summarize(options.folder, options.output)
    elif options.program == "draw":
        draw(options.folder, options.output)
    else:
        options.name, *rest = options.names
        options.checkout = str(Path(rest[0]).resolve()) if rest else ""
        record_run(options.folder, options)


if __name__ == "__main__":
    main()
