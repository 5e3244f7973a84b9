"""Pins what a user sees of the command line: exit codes, one line on standard error for a mistake of the
user's and a traceback for one of ours, help, and how run_train.sh finds a configuration and hands its
arguments on.
"""

from __future__ import annotations

import errno
import importlib.metadata
import json
import os
import platform
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.tiers import full
from titanlite import cli, train
from titanlite.commands import Verb, parser, verbs
from titanlite.config import reference, schema
from titanlite.config.component import ConfigError
from titanlite.interop import export
from titanlite.log import logger, protect_terminal, set_up_logging
from titanlite.optim.base import Optimizer
from titanlite.runtime.environment import NOTES
from titanlite.tools import launch
from titanlite.tools.verbs import DTYPES, launch_arguments

ROOT = Path(__file__).resolve().parents[2]
RUN_TRAIN = ROOT / "run_train.sh"
DEBUG = str(ROOT / "train_configs" / "debug.toml")


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "job.toml"
    path.write_text(Path(DEBUG).read_text())
    return path


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """`run("config", path)`: exit code, standard output and standard error, in this process."""

    def run(*argv: str) -> tuple[int, str, str]:
        code = cli.run([str(word) for word in argv])
        out, err = capsys.readouterr()
        return code, out, err

    return run


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The arguments of each training that would have begun."""
    calls: list[list[str]] = []

    def main(argv: list[str]) -> int:
        calls.append(list(argv))
        return 0

    monkeypatch.setattr(train, "main", main)
    return calls


def complaint_of(result: tuple[int, str, str], wanted_code: int = 2) -> str:
    """The one line of an error of the user's."""
    code, out, err = result
    assert code == wanted_code, err
    assert out == ""
    assert err.startswith("titanlite: ")
    assert err.count("\n") == 1, "more than one line"
    assert err.endswith("\n"), "not a whole line"
    return err.removeprefix("titanlite: ").rstrip("\n")


# ---- verbs


def test_an_unknown_verb_is_told_with_the_known_ones(run):
    assert complaint_of(run("tarin")) == (
        f"unknown verb 'tarin'; did you mean `titanlite train`? (known: {', '.join(verbs())})"
    )


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help_lists_every_verb(run, flag):
    code, out, err = run(flag)
    assert (code, err) == (0, "")
    for name, verb in verbs().items():
        assert any(line.split()[:1] == [name] and verb.about in line for line in out.splitlines())


def test_the_version(run):
    assert run("--version") == (
        0,
        f"titanlite 0.1.0 (torch {version('torch')}, Python {platform.python_version()})\n",
        "",
    )


def test_the_package_runs_as_a_module():
    done = subprocess.run([sys.executable, "-m", "titanlite", "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stdout.split()[:2]) == (0, ["titanlite", "0.1.0"]), done.stderr


@pytest.mark.parametrize("verb", verbs())
def test_a_verb_alone_is_a_mistake_that_shows_its_usage(run, verb):
    code, out, err = run(verb)
    assert (code, out) == (2, ""), "a script whose variable is empty must not succeed"
    assert f"titanlite {verb}" in err
    assert len(err.splitlines()) < 60, "not the whole reference"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ["generate", "x", "--promt", "a"],
            "unknown option '--promt'; did you mean '--prompt'? (known: --all",
        ),
        (["generate", "x", "y"], "unknown argument 'y'; see `titanlite generate --help`"),
        (["generate", "x", "--max_new_tokens=many"], "argument --max-new-tokens: invalid int value: 'many'"),
        (["export", "x", "~no-one/y"], "argument target: '~no-one/y': the home folder ~no-one is not known"),
        (["export", "x"], "the following arguments are required: target; see `titanlite export --help`"),
        (["config", DEBUG, "--rank", "8"], "unknown option '--rank'; did you mean '--ranks'? (known: --"),
        (["config", DEBUG, "--allow_import"], "unknown option '--allow_import'; did you mean '--allow-"),
        (["data", "show", "--sequnce", "3"], "unknown option '--sequnce'; did you mean '--sequence'? ("),
        (["data", "show", DEBUG, "--num_sequnces=3"], "unknown option '--num_sequnces'; did you mean '"),
        (["tokenizer", "show", "--allow-import", "x"], "unknown option '--allow-import'; did you mean"),
        (["checkpoint", "show", "x", "--tensor"], "unknown option '--tensor'; did you mean '--tensors'?"),
        (["launch", "--nproc-per-nod=2", DEBUG], "unknown option '--nproc-per-nod'; did you mean '--nproc"),
        (["launch", DEBUG, "--max-restart=2"], "unknown option '--max-restart'; did you mean '--max"),
        (["import", "a", "b", DEBUG, "--dtyp=x"], "unknown option '--dtyp'; did you mean '--dtype'?"),
        (["config", DEBUG, "--rnk=8"], "unknown option '--rnk'; did you mean '--ranks'?"),
        (["config", DEBUG, "--nowhere=8"], "command line, --nowhere: unknown key 'nowhere' (known: "),
        (["launch", "--nproc_per_node=two", DEBUG], "command line, --nproc-per-node=two (NGPU of run_train"),
        (["launch", "--nnodes=2:1", DEBUG], "NNODES=2:1: expected MIN:MAX with MIN <= MAX"),
        (["launch", "--nnodes=2", DEBUG], "several nodes need --rdzv-endpoint=host:port"),
    ],
)  # fmt: skip
def test_mistakes_in_options_are_told_in_one_line(run, argv, message):
    assert complaint_of(run(*argv)).startswith(message)


def test_a_leading_tilde_of_an_option_is_the_home_folder(monkeypatch):
    monkeypatch.setenv("HOME", "/home/ada")
    options = parser("export").read(["~/run", "./~", "--base=~"])
    assert [options.path, options.target, options.base] == [
        Path("/home/ada/run"),
        Path("~"),
        Path("/home/ada"),
    ]


def test_options_are_spelled_with_dashes_or_underscores():
    words = ["run", "--max_new_tokens", "5", "--top-k=3", "--prompt=a_b-c", "--allow_imports"]
    options = parser("generate").read(words)
    assert (options.max_new_tokens, options.top_k, options.allow_imports) == (5, 3, True)
    assert options.prompt == ["a_b-c"]


def test_the_other_verbs_take_both_spellings_too(run):
    message = complaint_of(run("config", DEBUG, '--job.imports=["nowhere_to_be_found"]', "--allow_imports"))
    assert "cannot import 'nowhere_to_be_found'" in message, "the flag was seen"


@pytest.mark.parametrize("verb", [["train"], ["config"], ["data", "show"], ["launch"]])
def test_an_option_without_a_value(run, verb):
    message = complaint_of(run(*verb, DEBUG, "--training.seed", "--validation.enable"))
    assert message == "command line, --training.seed: needs a value: an integer"


def test_the_dtypes_of_the_options_are_those_of_an_export():
    assert tuple(export.DTYPES) == DTYPES


def test_no_verb_is_a_mistake_that_shows_the_help(run):
    code, out, err = run()
    assert code == 2
    assert "train from a TOML file" in out + err


@pytest.mark.parametrize(
    "verb",
    [
        "train",
        "launch",
        "config",
        "generate",
        "export",
        "import",
        "checkpoint",
        "plan",
        "prepare",
        "data",
        "tokenizer",
        "metrics",
        "migrate",
        "tasks",
        "report",
        "compare",
        "tune",
        "verify-resume",
    ],
)
def test_every_verb_has_help(verb, capsys):
    try:
        code = cli.run([verb, "--help"])
    except SystemExit as exit:  # argparse's way
        code = exit.code
    assert code == 0
    assert f"titanlite {verb}" in capsys.readouterr().out


def test_the_verbs_of_the_help_are_all_tested():
    tested = next(m for m in test_every_verb_has_help.pytestmark if m.name == "parametrize").args[1]
    assert sorted(tested) == sorted(verbs())


def test_the_help_of_train_lists_the_keys(run):
    code, out, _ = run("train", "--help", "all")
    assert code == 0
    assert "  --training.seq_len=2048   <int>" in out.splitlines()
    text = "      Tokens that each sequence predicts; it has seq_len + 1 tokens."
    assert text in out.splitlines()
    assert run("train", "--help", "training.seq_len")[1].splitlines()[1:] == [
        "  --training.seq_len=2048   <int>",
        text,
    ]


def test_the_short_help_fits_on_two_screens_and_leads_to_the_whole(run):
    _, out, _ = run("train", "-h")
    lines = out.splitlines()
    assert len(lines) < 100
    for name in (*schema.table("job")["keys"], *(f"--{key}" for key in reference.COMMON)):
        assert any(line.startswith(f"  {name} ") for line in lines), name
    assert {"SECTION", "SECTION.KEY", "all"} <= set(re.findall(r"--help ([\w.]+)", out))


def test_help_is_a_verb_too(run):
    assert run("help") == run("--help")
    assert run("help", "export") == run("export", "--help")
    assert run("help", "train", "optimizer") == run("train", "--help", "optimizer")


def test_the_reference_is_printed(run):
    code, out, err = run("config", "--reference")
    assert (code, err) == (0, "")
    assert out.startswith("# Configuration\n")


def test_config_prints_the_resolved_job(run, config):
    code, out, err = run("config", config, "--training.steps=77")
    assert (code, err) == (0, "")
    assert "steps = 77" in out.splitlines()
    assert 'mixed_precision_param = "auto"' in out.splitlines(), "a default"


# ---- which torch


@pytest.mark.parametrize("version", ["2.11.0", "2.12.1+cu128", "2.13.0+cpu", "2.13.0a0+git1234"])
def test_supported_torch(monkeypatch, version):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    assert cli.unsupported_torch() is None


@pytest.mark.parametrize("version", ["2.10.1", "2.14.0", "1.13.1", "3.0.0", "unknown"])
def test_unsupported_torch_is_refused_before_anything_is_imported(run, monkeypatch, version):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    monkeypatch.setattr(cli.importlib, "import_module", lambda name: pytest.fail(f"imported {name}"))
    assert complaint_of(run("train", DEBUG)) == f"titanlite needs torch >= 2.11, < 2.14; found {version}"


def test_missing_torch(run, monkeypatch):
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    assert complaint_of(run("train", DEBUG)) == "titanlite needs torch >= 2.11, < 2.14; it is not installed"


def test_the_range_of_torch_is_that_of_the_package():
    low, high = (".".join(map(str, version)) for version in (cli.TORCH_MIN, cli.TORCH_BELOW))
    assert f'"torch>={low},<{high}"' in (ROOT / "pyproject.toml").read_text()


# ---- mistakes in a configuration


def test_an_unknown_key_is_told_with_file_line_and_the_nearest_name(run, config):
    config.write_text(config.read_text().replace("seq_len = 128", "seqlen = 128"))
    line = config.read_text().splitlines().index("seqlen = 128") + 1
    message = complaint_of(run("train", config))
    assert message.startswith(
        f"{config}:{line}: training.seqlen: unknown key 'seqlen'; did you mean 'seq_len'? (known: "
    )


def test_an_unknown_key_on_the_command_line(run, config):
    message = complaint_of(run("train", config, "--optimizer.beta3=0.9"))
    assert message.startswith("command line, --optimizer.beta3: unknown key 'beta3'; did you mean 'beta2'?")
    message = complaint_of(run("train", config, "--optimizer.momentum=0.9"))
    assert "unknown key 'momentum'; optimizer 'muon' has it (known: beta1, " in message


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("steps = 160", 'steps = "160"', "training.steps: '160' has no unit; write an integer, or an"),
        (
            'name = "adamw"',
            'name = "adamv"',
            "optimizer.name: unknown optimizer 'adamv'; did you mean 'adamw'?",
        ),
        ('verify = "full"', 'verify = "ful"', "data.verify: 'ful' is not allowed; did you mean 'full'?"),
        (
            "global_batch_size = 16",
            "global_batch_size = 15",
            "training.global_batch_size: 15 sequences are not a multiple of",
        ),
    ],
    ids=["wrong type", "unknown choice", "bad literal", "cross-section rule"],
)
def test_a_bad_value_is_told_with_file_and_line(run, config, before, after, message):
    config.write_text(config.read_text().replace(before, after))
    line = config.read_text().splitlines().index(after) + 1
    assert complaint_of(run("train", config)).startswith(f"{config}:{line}: {message}")


@pytest.mark.parametrize("verb", ["train", "launch", "config"])
def test_a_missing_configuration_file(run, tmp_path, verb):
    message = complaint_of(run(verb, tmp_path / "none.toml"))
    assert message.startswith(f"{tmp_path / 'none.toml'}: cannot read the configuration: ")
    assert "No such file" in message


@pytest.mark.parametrize("name", ["debug.toml", "train_configs/llama3_8b.toml", "configs/debug"])
def test_a_missing_file_of_a_shipped_name_points_to_that(run, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    assert complaint_of(run("train", name)) == (
        f"{name}: no such file; for the configuration that comes with titanlite write {Path(name).stem}, "
        "without folder and .toml"
    )
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("[training]\nsteps = 'none'\n")
    assert "expected an integer" in run("train", name)[2], "a file that is there is read"


def test_a_file_that_is_not_toml(run, config):
    config.write_text("[training\n")
    assert complaint_of(run("train", config)).startswith(f"{config}:1: not valid TOML: ")


def test_a_key_of_torchtitans_is_told_where_it_stands(run, config):
    assert complaint_of(run("train", config, "--training.dataset=c4")).startswith(
        "command line, --training.dataset: unknown key 'dataset'"
    )
    config.write_text(config.read_text().replace("[training]\n", '[training]\ndataset = "c4"\n'))
    for more in ([], ["--training.batch_size=8"]):
        assert complaint_of(run("train", config, *more)).startswith(
            f"{config} is a torchtitan file (it has training.dataset); translate it first: "
        )


def test_an_override_into_a_number_is_no_crash(run, config):
    assert "--training.steps.x.y" in complaint_of(run("train", config, "--training.steps.x.y=3"))


# ---- paths that lead nowhere

HUB = "meta-llama/Llama-3.1-8B"
DOWNLOAD = f"hf download {HUB} --local-dir DIR"


@pytest.mark.parametrize(
    ("argv", "command"),
    [
        (["generate", HUB, "--prompt=a"], DOWNLOAD),
        full(["export", HUB, "new"], DOWNLOAD),
        full(["import", HUB, "new", "debug"], DOWNLOAD),
        full(["config", "debug", "--ranks=1", f"--checkpoint.initial_load_path={HUB}"], DOWNLOAD),
        (["config", "debug", "--ranks=1", "--tokenizer.name=huggingface", f"--tokenizer.path={HUB}"],
         DOWNLOAD),
        (["config", "debug", "--ranks=1", f"--tokenizer.path={HUB}"], DOWNLOAD),
        (["config", "debug", "--ranks=1", f"--data.sources=[{{name='text', path=['{HUB}']}}]"],
         f"titanlite prepare hf:{HUB}"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)  # fmt: skip
def test_a_name_on_the_hub_is_told_how_to_fetch_it(run, tmp_path, monkeypatch, argv, command):
    monkeypatch.chdir(tmp_path)
    assert f"`{command}`" in complaint_of(run(*argv)).rpartition(";")[2]
    for local in ("nowhere", "./nowhere/at/all", "meta-llama/model.safetensors", str(tmp_path / "a" / "b")):
        assert "Hugging Face" not in complaint_of(run(*(word.replace(HUB, local) for word in argv)))
    (tmp_path / "meta-llama").mkdir()  # then it is a path, with a mistake in it
    assert "Hugging Face" not in complaint_of(run(*argv))


def sources(*paths: str) -> str:
    return json.dumps([{"name": "text", "path": [path]} for path in paths]).replace(":", " =")


def test_a_source_that_is_missing_is_told_by_its_number(run, tmp_path, monkeypatch, config):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there.txt").write_text("text\n")
    argv = ["config", config, "--ranks=1"]
    said = "no such file: 'gone.txt' (relative paths start at"
    for more, key in (
        ([f"--data.sources={sources('there.txt', 'gone.txt')}"], "data.sources.1.path"),
        ([f"--data.sources={sources('gone.txt')}"], "data.sources.0.path"),
        (["--data.sources.0.name=text", '--data.sources.0.path=["gone.txt"]'], "data.sources.0.path"),
        ([f"--data.sources={sources('there.txt')}", f"--data.validation_sources={sources('gone.txt')}",
          "--data.holdout_sequences=0"], "data.validation_sources.0.path"),
    ):  # fmt: skip
        assert complaint_of(run(*argv, *more)).startswith(f"command line, --{key}: {said}")
    text = 'name = "text"\npath = ["gone.txt"]'
    assert config.read_text().count('name = "python_stdlib"') == 1
    config.write_text(config.read_text().replace('name = "python_stdlib"', text))
    line = config.read_text().splitlines().index('path = ["gone.txt"]') + 1
    assert complaint_of(run(*argv)).startswith(f"{config}:{line}: data.sources.0.path: {said}")


# ---- other endings


def fake_verb(monkeypatch: pytest.MonkeyPatch, main: Callable[[list[str]], int]) -> None:
    monkeypatch.setitem(verbs(), "fake", Verb("fake_verb_module", "for a test"))
    monkeypatch.setitem(sys.modules, "fake_verb_module", SimpleNamespace(main=main))


def raising(error: BaseException) -> Callable[[list[str]], int]:
    def main(argv: list[str]) -> int:
        raise error

    return main


def test_the_code_of_a_verb_is_passed_on(run, monkeypatch):
    fake_verb(monkeypatch, lambda argv: 75 if argv == ["a", "--b"] else 0)
    assert run("fake", "a", "--b") == (75, "", "")


def test_a_crash_shows_its_traceback_and_is_1(run, monkeypatch):
    fake_verb(monkeypatch, raising(ValueError("ours")))
    code, _, err = run("fake", "x")
    assert code == 1
    assert err.startswith("Traceback (most recent call last):")
    assert err.endswith("ValueError: ours\n")


@pytest.mark.parametrize("code", [0, None, 3])
def test_a_component_that_leaves_is_a_crash(run, monkeypatch, code):
    fake_verb(monkeypatch, raising(SystemExit(code)))
    ended, _, err = run("fake", "word")
    assert ended == 1
    assert err.endswith(f"RuntimeError: a component or an imported module called sys.exit({code!r})\n")


def test_an_error_may_say_its_code(run, monkeypatch):
    error = RuntimeError("no usable checkpoint")
    error.exit_code = 3
    fake_verb(monkeypatch, raising(error))
    assert run("fake", "x") == (3, "", "titanlite: no usable checkpoint\n")


@pytest.mark.parametrize(("text", "left"), [("Connection closed by peer", True), ("wrong", False)])
def test_a_rank_that_lost_another_leaves_its_traceback_to_the_launcher(
    run, monkeypatch, tmp_path, text, left
):
    monkeypatch.setenv(NOTES, str(tmp_path))
    fake_verb(monkeypatch, raising(RuntimeError(text)))
    code, _, said = run("fake", "x")
    traces = [file.read_text() for file in tmp_path.glob("traceback-0")]
    assert (code, bool(traces), not said) == (1, left, left)
    assert "".join([said, *traces]).endswith(f"RuntimeError: {text}\n")


def test_an_interrupt_is_130(run, monkeypatch):
    fake_verb(monkeypatch, raising(KeyboardInterrupt()))
    assert run("fake", "x") == (130, "", "titanlite: interrupted\n")


@pytest.mark.parametrize(("local_rank", "waits", "who"), [("0", [], ""), ("1", [2], "local rank 1: ")])
def test_other_ranks_tell_a_mistake_only_if_the_first_of_the_node_does_not(
    run, monkeypatch, local_rank, waits, who
):
    """It ends them while they wait, through the launcher, if it has the same to say."""
    waited = []
    monkeypatch.setattr(cli.time, "sleep", waited.append)
    for name, value in (("WORLD_SIZE", "2"), ("RANK", local_rank), ("LOCAL_RANK", local_rank)):
        monkeypatch.setenv(name, value)
    fake_verb(monkeypatch, raising(ConfigError("wrong")))
    assert run("fake", "x") == (2, "", f"titanlite: {who}wrong\n")
    assert waited == waits


# ---- launch


def test_launch_of_one_process_trains_in_this_one(run, trained, config):
    arguments = ["--training.steps", "70", "--lr_scheduler.decay_ratio", "-1", "--no-validation.enable"]
    assert run("launch", "--nproc-per-node=1", config, *arguments)[0] == 0
    assert trained == [[str(config), *arguments]]


def test_launch_checks_the_job_for_all_ranks_before_it_starts_any(run, trained, config):
    message = complaint_of(run("launch", "--nproc-per-node=3", config))
    assert "training.global_batch_size: 16 sequences " in message
    assert "NGPU" not in message
    assert trained == []


@pytest.mark.parametrize(
    ("nodes", "override", "message"),
    [
        ("2", "--training.global_batch_size=6", "= 8; .* checked for 2 nodes .* with NGPU=2 on each node"),
        ("1:2", "--training.global_batch_size=-1", "-1 depends on the number of ranks: set .*NNODES=1:2"),
        ("2:3", "--training.global_batch_size=6", "x 6 ranks = 12; .*; checked for 3 nodes"),
        ("1:2", "--parallelism.data_parallel_shard_degree=3", "makes 3 ranks, there are 4; .* for 2 nodes "),
    ],
)
def test_launch_checks_the_job_for_each_number_of_nodes(run, trained, config, nodes, override, message):
    words = [f"--nnodes={nodes}", "--nproc-per-node=2", "--rdzv-endpoint=localhost:1", config, override]
    assert re.search(message, complaint_of(run("launch", *words)))
    assert trained == []


@pytest.mark.parametrize(
    ("nodes", "override", "numbers", "said"),
    [
        ("1:4", "--training.global_batch_size=16", [1, 2, 4], "on 1, 2, 4 nodes only: .* for 3 nodes "),
        ("2:3", "--training.global_batch_size=12", [3], "on 3 nodes only: .* = 8; .* for 2 nodes "),
        ("1:2", "--parallelism.data_parallel_shard_degree=4", [2], "on 2 nodes only: .* for 1 node "),
        ("1:2", "--training.global_batch_size=16", [1, 2], None),
    ],
)
def test_launch_finds_the_numbers_of_nodes_on_which_the_job_can_train(
    config, capfd, nodes, override, numbers, said
):
    words = [f"--nnodes={nodes}", "--nproc-per-node=2", "--rdzv-endpoint=localhost:1", str(config), override]
    assert launch._check_job(*launch_arguments(words))[1] == numbers
    error = capfd.readouterr().err
    assert re.search(f"^titanlite: the job trains {said}", error) if said else error == ""


@pytest.mark.parametrize("more", [[], ["--training.steps=5"]])
def test_launch_with_a_configuration_and_help_names_the_keys(config, capsys, more):
    try:
        code = cli.run(["launch", "--nproc-per-node=1", str(config), "--help", *more])
    except SystemExit as exit:
        code = exit.code
    assert code == 0
    assert "  --training.seq_len " in capsys.readouterr().out


# ---- run_train.sh


@pytest.fixture
def run_train(tmp_path: Path) -> Callable[..., tuple[int, str, str]]:
    """`run_train("debug", NGPU="2")`: the script with a Python that only says how it was called."""
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\nexit 42\n')
    python.chmod(0o755)

    def run_train(*argv: str, **environ: str) -> tuple[int, str, str]:
        ours = {"PATH": os.environ["PATH"], "PYTHON": str(python)}
        done = subprocess.run(
            [str(RUN_TRAIN), *argv], capture_output=True, text=True, env=ours | environ, cwd=tmp_path
        )
        return done.returncode, done.stdout, done.stderr

    return run_train


def test_the_script_passes_everything_on(run_train):
    code, out, err = run_train("debug", "--training.steps=3", "--job.description=a b")
    assert (code, err) == (42, ""), "the code of the trainer is passed on"
    words = out.splitlines()
    assert words[:3] == ["-m", "titanlite.cli", "launch"]
    assert words[-3:] == ["debug", "--training.steps=3", "--job.description=a b"]
    assert "--nproc-per-node=1" in words


def test_a_path_is_taken_as_it_is(run_train, config):
    assert run_train(str(config))[1].splitlines()[-1] == str(config)


def test_the_config_file_form(run_train, config):
    code, out, _ = run_train("--training.steps=3", CONFIG_FILE=str(config))
    assert code == 42
    assert out.splitlines()[-2:] == [str(config), "--training.steps=3"]
    assert run_train(CONFIG_FILE=str(config))[1].splitlines()[-1] == str(config)


def test_several_processes_and_nodes(run_train):
    _, out, _ = run_train(
        "debug", NGPU="8", NNODES="2", NODE_RANK="1", RDZV_ENDPOINT="h:29500", RDZV_ID="a1", MAX_RESTARTS="3",
        GRACE="30", NOTICE="aws", EXCLUDE_SLOW="1",
    )  # fmt: skip
    assert out.splitlines()[3:-1] == [
        "--nproc-per-node=8",
        "--nnodes=2",
        "--node-rank=1",
        "--rdzv-endpoint=h:29500",
        "--rdzv-id=a1",
        "--max-restarts=3",
        "--grace=30",
        "--notice=aws",
        "--exclude-slow",
    ]
    assert "--exclude-slow" not in run_train("debug", EXCLUDE_SLOW="0")[1]


@pytest.mark.parametrize("verb", ["train", "launch", "config"])
def test_a_shipped_configuration_is_found_by_its_name_from_anywhere(run, tmp_path, monkeypatch, verb):
    monkeypatch.chdir(tmp_path)
    assert complaint_of(run(verb, "debug", "--training.steps=0")) == (
        "command line, --training.steps: 0 is below 1"
    )
    message = complaint_of(run(verb, "debgu"))
    assert message.startswith("no configuration 'debgu': there is no such file, and no shipped")
    assert "did you mean 'debug'? (known: debug, deepseek_v3_16b, " in message
    (tmp_path / "debug").mkdir()  # a folder is no configuration
    assert "0 is below 1" in complaint_of(run(verb, "debug", "--training.steps=0"))


@pytest.mark.parametrize("argv", [[], ["--training.steps=3"]])
def test_no_name_shows_the_usage(run_train, argv):
    code, out, err = run_train(*argv)
    assert (code, out) == (2, "")
    assert err.startswith("usage: ")


# ---- code that a TOML file names


@pytest.mark.parametrize(
    ("argv", "needs_flag"),
    [
        (["config", "job.toml"], True),
        full(["data", "show", "job.toml", "--sequence=0"], True),
        (["tokenizer", "show", "job.toml", "text"], True),
        (["import", "nothing", "new", "job.toml"], True),
        (["train", "job.toml", "--training.steps=0"], False),
        (["launch", "job.toml", "--training.steps=0"], False),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_which_verbs_run_the_imports_of_a_file(run, tmp_path, monkeypatch, config, argv, needs_flag):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "foreign_code.py").write_text("open('ran', 'w')\n")
    config.write_text(Path(DEBUG).read_text().replace("[job]", "[job]\nimports = ['foreign_code']"))
    monkeypatch.delitem(sys.modules, "foreign_code", raising=False)
    if needs_flag:
        message = complaint_of(run(*argv))
        assert message.endswith("would run the code of foreign_code; if you trust it, add --allow-imports")
        assert not (tmp_path / "ran").exists()
        argv = [*argv, "--allow-imports"]
    run(*argv)
    assert (tmp_path / "ran").exists()
    del sys.modules["foreign_code"]


PLUGIN = '''
from dataclasses import dataclass

from titanlite.optim.base import Optimizer


@dataclass(frozen=True, kw_only=True)
class Explained(Optimizer, name="explained"):
    """Optimizer of a test."""

    beta: tuple[float, float] = (0.9, 0.99)
    """Key of a test."""

    def build(self, model, mesh):
        raise NotImplementedError
'''


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (
            ["train", "job.toml", "--help", "optimizer"],
            "<tuple[float, float]>\n      Key of a test.",
        ),
        full(
            ["train", "job.toml", "--help", "all"], '[optimizer]  (name = "explained")  Optimizer of a test.'
        ),
        full(["launch", "--nproc-per-node=2", "job.toml", "--help", "optimizer"], "Key of a test."),
        (["config", "job.toml", "--allow-imports", "--help", "optimizer"], "Key of a test."),
        full(["config", "job.toml", "--reference", "--allow-imports"], "| Key of a test. |"),
    ],
    ids=["section", "help", "launch", "config", "reference"],
)
def test_help_explains_the_components_that_a_file_imports(run, tmp_path, monkeypatch, config, argv, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "explains.py").write_text(PLUGIN)
    config.write_text(Path(DEBUG).read_text().replace("[job]", "[job]\nimports = ['explains']"))
    monkeypatch.delitem(sys.modules, "explains", raising=False)
    monkeypatch.setattr(Optimizer, "choices", dict(Optimizer.choices))
    code, out, err = run(*argv)
    assert (code, err) == (0, "")
    assert said in out
    assert said not in run("config", "--reference")[1], "titanlite's own keys only"
    if "--allow-imports" in argv:
        refused = complaint_of(run(*(word for word in argv if word != "--allow-imports")))
        assert refused.endswith("if you trust it, add --allow-imports")


# ---- the real thing, once


def test_a_mistake_ends_the_whole_chain_with_2_and_one_line(tmp_path):
    done = subprocess.run(
        [str(RUN_TRAIN), "debug", "--training.stesp=3", f"--job.dump_folder={tmp_path / 'run'}"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHON": sys.executable},
        cwd=tmp_path,
    )
    message = complaint_of((done.returncode, done.stdout, done.stderr))
    assert message.startswith("command line, --training.stesp: unknown key 'stesp'; did you mean 'steps'?")
    assert not (tmp_path / "run").exists(), "nothing is written before the job is checked"


# ---- without torch

WITHOUT_TORCH = """
import contextlib, io, json, sys
before = set(sys.modules)  # what this environment imports of itself, for coverage, say
from titanlite import cli
for argv in json.loads(sys.argv[1]):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = cli.run(argv)
    packages = {name.partition(".")[0] for name in sys.modules.keys() - before}
    foreign = sorted(packages - sys.stdlib_module_names)
    print(json.dumps([code, out.getvalue(), err.getvalue(), foreign]), flush=True)
"""
SMALL = {"titanlite", "tomli", "tomli_w"}  # torch alone takes 2 s of CPU time to import, these and a verb 0.1


def test_help_and_mistakes_take_no_torch(tmp_path):
    def file(name: str, text: str) -> str:
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    debug = Path(DEBUG).read_text()
    typo = file("typo.toml", debug.replace("seq_len = 128", "seqlen = 128"))
    line = debug.splitlines().index("seq_len = 128") + 1
    syntax = file("syntax.toml", "[training]\nsteps = None\n")
    theirs = file("theirs.toml", "[model]\nname = 'llama3'\nflavor = '8B'\n[training]\ndataset = 'c4'\n")
    unknown = f"{typo}:{line}: training.seqlen: unknown key 'seqlen'; did you mean 'seq_len'?"
    later = ['--job.imports=["nowhere"]', "--optimizer.name=mine"]
    cases = [  # arguments, exit code, what is said
        (["--version"], 0, "titanlite 0.1.0"),
        *(([verb, "--help"], 0, f"usage: titanlite {verb}") for verb in verbs()),
        *(([verb], 2, f"titanlite {verb}") for verb in verbs()),
        (["train", "--help", "training"], 0, "--training.seq_len=2048"),
        (["train", "--help", "trianing"], 2, "no section 'trianing'; did you mean 'training'?"),
        (["launch", DEBUG, "--help"], 0, "  --training.seq_len "),
        (["config", "--reference"], 0, "# Configuration"),
        (["prepare", "--reference"], 0, "# Preparation"),
        *(
            ([*words, typo], 2, unknown)
            for words in (["train"], ["launch", "--nproc-per-node=2"], ["config"], ["import", "a", "b"],
                          ["data", "show"], ["tokenizer", "show"])
        ),
        (["train", syntax], 2, f"{syntax}:2: not valid TOML: Invalid value (column"),
        (["train", "debug", "--trianing.steps=3"], 2, "unknown key 'trianing'; did you mean 'training'?"),
        (["train", "debug", "--optimizer.name=adamv"], 2, "unknown optimizer 'adamv'; did you mean 'adamw'?"),
        (["train", "debug", "--training.seed=x"], 2, "expected an integer, got 'x'"),
        (["train", "debug", "--training.steps=4B tokns"], 2, "unknown unit 'tokns' of '4B tokns'; did you"),
        (["train", "debgu"], 2, "no configuration 'debgu'"),
        (["train", theirs], 2, f"titanlite migrate {theirs} -o NEW.toml"),
        (["train", "debug", *later, "--training.stesp=3"], 2, "line, --training.stesp: unknown key"),
        (["prepare", "--ouput=x"], 2, "did you mean 'output'?"),
        (["prepare", "--filters.0.name=lenght"], 2, "unknown filter 'lenght'; did you mean 'length'?"),
        (["generate", "x", "--promt=a"], 2, "did you mean '--prompt'?"),
        (["trian"], 2, "did you mean `titanlite train`?"),
        (["export", "nowhere", "x"], 2, "titanlite: nowhere: no such directory"),
        (["generate", "nowhere", "--prompt=x"], 2, "titanlite: nowhere: no such directory"),
        (["generate", typo, "--prompt=x"], 2, f"{typo} is a file; give the run folder, its job.dump_folder"),
        (["evaluate", "x"], 2, "`titanlite compare RUN` prints the validation losses"),
        (["train", "--lr=1e-3"], 2, "unknown key 'lr'; did you mean 'optimizer.lr'?"),
        (["train", "debug", "--step=9"], 2, "; did you mean 'training.steps' or 'validation.steps'?"),
        (["train", "--config", typo], 2, f"first, without an option: titanlite train {typo}"),
        (["config", f"--job.config_file={typo}"], 2, f"first, without an option: titanlite config {typo}"),
        (["train", typo.removesuffix(".toml")], 2, f"no such file; did you mean {typo}?"),
        (["train", "debug", typo], 2, "one TOML file, which comes before all options"),
        (["train", "debug", "--data.sources[0].path=x"], 2, "are numbered: write --data.sources.0.path"),
        (["train", "--help", "training.stepz"], 2, "did you mean 'training.steps'? (known: activation"),
    ]  # fmt: skip
    command = [sys.executable, "-c", WITHOUT_TORCH, json.dumps([argv for argv, _, _ in cases])]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for (argv, code, said), answer in zip(cases, done.stdout.splitlines(), strict=True):
        exit_code, out, err, packages = json.loads(answer)
        assert exit_code == code, (argv, err)
        assert set(packages) <= SMALL, argv
        assert said in (err if code else out), argv
        assert all(told.startswith("titanlite: ") for told in err.splitlines()) or len(argv) == 1, argv


def test_several_mistakes_are_told_together(run, config):
    config.write_text(config.read_text().replace("seq_len = 128", "seqlen = 128"))
    code, out, err = run("train", config, "--optimizer.beta3=1", "--training.seed=x")
    first, second, third = err.splitlines()
    line = config.read_text().splitlines().index("seqlen = 128") + 1
    assert (code, out) == (2, "")
    assert first.startswith(f"titanlite: {config}:{line}: training.seqlen: unknown key 'seqlen'")
    assert second.startswith("titanlite: command line, --training.seed: expected an integer, got 'x'")
    assert third.startswith("titanlite: command line, --optimizer.beta3: unknown key 'beta3'")


def test_an_import_that_fails_is_told_before_a_key_that_it_may_have_added(run):
    message = complaint_of(run("train", "debug", '--job.imports=["no_such_module"]', "--optimizer.beta=1"))
    assert message.startswith("command line, --job.imports: cannot import 'no_such_module': No module named")


def test_a_choice_that_an_import_adds_is_judged_after_it(run, config, tmp_path, monkeypatch):
    (tmp_path / "adds_nothing.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    imports = '--job.imports=["adds_nothing"]'
    message = complaint_of(run("config", "--allow-imports", config, imports, "--optimizer.name=mine"))
    known = ", ".join(sorted(Optimizer.choices))  # other tests of this process may have added some
    assert message == (
        f"command line, --optimizer.name: unknown optimizer 'mine' (known: {known}); "
        "one of your own needs its module in job.imports"
    )
    assert "adds_nothing" in sys.modules, "what it adds would have been known"


# ---- stops and pipes


IMPORT = """
import os, signal, sys
from titanlite import cli
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":  # in the middle of the import that takes seconds
            os.kill(os.getpid(), int(sys.argv[1]))
sys.meta_path.insert(0, Finder())
sys.exit(cli.run(sys.argv[2:]))
"""


@pytest.mark.parametrize(("verb", "number"), [("train", signal.SIGHUP), ("launch", signal.SIGTERM)])
def test_a_stop_while_torch_is_imported_is_75(hangups: None, verb: str, number: int) -> None:
    command = [sys.executable, "-c", IMPORT, str(int(number)), verb, DEBUG]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    name = signal.Signals(number).name
    assert (run.returncode, run.stderr) == (
        75, f"titanlite: stopped by {name} before the first step; nothing is lost\n"
    )  # fmt: skip


@pytest.mark.full
def test_a_save_while_torch_is_imported_ends_nothing() -> None:
    words = ["train", DEBUG, "--training.steps=-5"]  # a value is judged once torch is there
    command = [sys.executable, "-c", IMPORT, str(int(signal.SIGUSR2)), *words]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert (run.returncode, run.stderr) == (2, "titanlite: command line, --training.steps: -5 is below 1\n")


@pytest.mark.parametrize("closed", [">&-", ">&- 2>&-"])
def test_a_closed_output_is_no_error(closed: str) -> None:
    command = f"{sys.executable} -m titanlite.cli --version {closed}"
    assert subprocess.run(["bash", "-c", command], cwd=ROOT, check=False).returncode == 0


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    for verb, reader in (("train --help", "head -n 1"), ("--version", "true")):
        command = f"{sys.executable} -m titanlite.cli {verb} | {reader}; echo ${{PIPESTATUS[0]}}"
        run = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, check=False)
        *read, code = run.stdout.splitlines()
        assert (code in ("0", "141"), run.stderr) == (True, ""), verb
        assert not read or read[0].startswith("usage: titanlite train")


def test_output_that_cannot_be_written_is_an_error() -> None:
    command = f"{sys.executable} -m titanlite.cli --version > /dev/full; echo $?"
    run = subprocess.run(command, shell=True, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.stdout == "2\n"
    assert run.stderr.startswith("titanlite: No space left on device; make room there")


def test_a_message_that_nobody_can_read_changes_no_code() -> None:
    command = f"({sys.executable} -m titanlite.cli train nowhere.toml 2> /dev/full; echo $?)"
    for unbuffered in ("", "1"):
        env = os.environ | {"PYTHONUNBUFFERED": unbuffered}
        run = subprocess.run(
            command, shell=True, cwd=ROOT, env=env, capture_output=True, text=True, check=False
        )
        assert run.stdout == "2\n"


# ---- refusals of the operating system, and what reaches the terminal


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (
            OSError(errno.ENOSPC, "No space left on device", "cache/00000.bin"),
            "cache/00000.bin: No space left on device; make room there (df -h, df -i), or name a folder on "
            "another disk",
        ),
        (
            OSError(errno.EMFILE, "Too many open files"),
            "Too many open files; raise the limit of open files (ulimit -n)",
        ),
        (OSError(errno.EROFS, "Read-only file system", "x"), "x: Read-only file system"),
    ],
)
def test_a_refusal_of_the_system_is_one_line(run, monkeypatch, error, line):
    monkeypatch.setattr(train, "main", raising(error))
    assert complaint_of(run("train", DEBUG)) == line


def test_a_name_that_is_too_long_is_one_line(run, config):
    said = complaint_of(run("train", str(config), f"--job.dump_folder={'x' * 256}"))
    assert said.endswith("cannot be made: File name too long")


def test_an_error_of_a_file_is_one_line_and_1(run, monkeypatch):
    """A restart may get past an I/O error or a stale mount."""
    monkeypatch.setattr(train, "main", raising(OSError(errno.EIO, "Input/output error", "x")))
    assert complaint_of(run("train", DEBUG), 1) == (
        "x: Input/output error; check the disk or the mount (dmesg, df), and start the same command again"
    )


@pytest.mark.parametrize(
    "error", [OSError(errno.EIO, "Input/output error"), FileNotFoundError(errno.ENOENT, "No such file", "x")]
)
def test_other_errors_of_the_system_are_crashes(run, monkeypatch, error):
    """They name no file, or one whose absence the program does not expect."""
    monkeypatch.setattr(train, "main", raising(error))
    code, _, err = run("train", DEBUG)
    assert code == 1
    assert "Traceback" in err


@pytest.mark.parametrize("error", [ConfigError, RuntimeError])
def test_control_characters_do_not_reach_the_terminal(run, monkeypatch, error):
    monkeypatch.setattr(train, "main", raising(error("a\x1b]0;title\x07b\r\u202e\udcff")))
    _, _, err = run("train", DEBUG)
    assert "a\\x1b]0;title\\x07b\\r\\u202e\\udcff" in err
    assert not {"\x1b", "\x07", "\r", "\u202e"} & set(err)


def test_the_log_escapes_control_characters_and_keeps_lines(capsys):
    set_up_logging(0, verbose=True)
    logger.info("sample:\none\ttwo \u00e9\u3000\x1b[31m")
    assert capsys.readouterr().err.endswith("sample:\none\ttwo \u00e9\u3000\\x1b[31m\n")


def test_what_a_model_says_does_not_steer_a_terminal(monkeypatch):
    """A pipe gets the bytes as they are."""
    for open_it, expected in ((os.openpty, b"a\\x1b[2Jb\r\n"), (os.pipe, b"a\x1b[2Jb\n")):
        reader, writer = open_it()
        monkeypatch.setattr(sys, "stdout", open(writer, "w", encoding="utf-8"))  # noqa: SIM115
        protect_terminal()
        print("a\x1b[2Jb", flush=True)
        assert os.read(reader, 100) == expected
        sys.stdout.close()
        os.close(reader)
