"""The files in kubernetes/: their keys, what they do with each exit code, and the command that the pods run.
No test applies them to a cluster."""

from __future__ import annotations

import copy
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.jobs import ROOT
from tests.support.kubernetes import faults, read

FILES = ("job.yaml", "jobset.yaml")
TRAINER = """#!/usr/bin/env bash
echo "$NNODES $NODE_RANK $RDZV_ENDPOINT $RDZV_ID $NGPU $MAX_RESTARTS $GRACE"
printf '%s\\n' "$@"
"""
GETENT = """#!/usr/bin/env bash
[ "$*" = "hosts localhost" ] || exit 1
echo asked >> asked
[ "$(wc -l < asked)" -ge 2 ]
"""


def objects(name: str) -> list[Any]:
    return read(ROOT / "kubernetes" / name)


def job_spec(name: str) -> Any:
    """The specification of the Job in a file."""
    spec = objects(name)[-1]["spec"]
    return spec if name == "job.yaml" else spec["replicatedJobs"][0]["template"]["spec"]


def container(name: str) -> Any:
    (one,) = job_spec(name)["template"]["spec"]["containers"]
    return one


def variables(name: str) -> dict[str, str]:
    return {entry["name"]: entry["value"] for entry in container(name)["env"] if "value" in entry}


@pytest.mark.parametrize("name", FILES)
def test_the_files_fit_the_api(name: str) -> None:
    assert [fault for thing in objects(name) for fault in faults(thing)] == []


def misspell(spec: Any) -> None:
    spec["completionmode"] = spec.pop("completionMode")


def as_text(spec: Any) -> None:
    spec["completions"] = "2"


def restart_in_place(spec: Any) -> None:
    spec["template"]["spec"]["restartPolicy"] = "OnFailure"


def list_zero(spec: Any) -> None:
    spec["podFailurePolicy"]["rules"][1]["onExitCodes"]["values"] = [0]


def leave_out_the_status(spec: Any) -> None:
    del spec["podFailurePolicy"]["rules"][2]["onPodConditions"][0]["status"]


def bad_action(spec: Any) -> None:
    spec["podFailurePolicy"]["rules"][0]["action"] = "FailJobSet"


def number_in_env(spec: Any) -> None:
    spec["template"]["spec"]["containers"][0]["env"][0]["value"] = 2


FAULTS = (
    misspell, as_text, restart_in_place, list_zero, leave_out_the_status, bad_action, number_in_env,
)  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", FILES)
def test_a_fault_in_a_file_is_found(name: str, fault: Any) -> None:
    *_, thing = copy.deepcopy(objects(name))
    spec = thing["spec"]
    fault(spec if name == "job.yaml" else spec["replicatedJobs"][0]["template"]["spec"])
    assert faults(thing)


def action(spec: Any, code: int, disrupted: bool = False) -> str:
    """What the Job does with a pod that has ended: the action of the first rule that fits, or Count."""
    for rule in spec["podFailurePolicy"]["rules"]:
        if code in rule.get("onExitCodes", {}).get("values", []):
            return rule["action"]
        if disrupted and {"type": "DisruptionTarget", "status": "True"} in rule.get("onPodConditions", []):
            return rule["action"]
    return "Count"


@pytest.mark.parametrize("name", FILES)
def test_errors_are_final_and_stops_are_not(name: str) -> None:
    """docs/launching.md has the exit codes."""
    spec = job_spec(name)
    actions = {code: action(spec, code) for code in (1, 2, 3, 4, 5, 6, 75, 130, 137, 143)}
    assert {code for code, does in actions.items() if does == "FailJob"} == {2, 3, 4, 6}
    assert {code for code, does in actions.items() if does == "Ignore"} == {75}
    assert action(spec, 137, disrupted=True) == "Ignore"
    rules = [rule["onExitCodes"] for rule in spec["podFailurePolicy"]["rules"] if "onExitCodes" in rule]
    assert {(rule["containerName"], rule["operator"]) for rule in rules} == {(container(name)["name"], "In")}


@pytest.mark.parametrize("name", FILES)
def test_the_values_in_a_file_fit_each_other(name: str) -> None:
    spec, env = job_spec(name), variables(name)
    pod = spec["template"]["spec"]
    assert spec["completions"] == spec["parallelism"] == int(env["NNODES"])
    assert container(name)["resources"]["limits"]["nvidia.com/gpu"] == int(env["NGPU"])
    assert int(env["GRACE"]) < pod["terminationGracePeriodSeconds"]
    mounted = {mount["name"] for mount in container(name)["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}


def test_the_first_pod_has_the_name_of_the_endpoint() -> None:
    service, job = objects("job.yaml")
    name, subdomain = job["metadata"]["name"], service["metadata"]["name"]
    assert job["spec"]["template"]["spec"]["subdomain"] == subdomain
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": name}
    assert variables("job.yaml")["RDZV_ENDPOINT"].split(":")[0] == f"{name}-0.{subdomain}"
    (jobset,) = objects("jobset.yaml")
    name, (node,) = jobset["metadata"]["name"], jobset["spec"]["replicatedJobs"]
    assert node["replicas"] == 1
    assert variables("jobset.yaml")["RDZV_ENDPOINT"].split(":")[0] == f"{name}-{node['name']}-0-0.{name}"


@pytest.mark.full
@pytest.mark.parametrize("name", FILES)
def test_a_pod_waits_for_the_first_and_starts_its_node(name: str, tmp_path: Path) -> None:
    for program, text in {"run_train.sh": TRAINER, "getent": GETENT}.items():
        (tmp_path / program).write_text(text)
        (tmp_path / program).chmod(0o755)
    own = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "JOB_COMPLETION_INDEX": "1",
        "RDZV_ENDPOINT": "localhost:29500",
        "RDZV_ID": "uid",
    }
    pod = container(name)
    run = subprocess.run(
        [*pod["command"], *pod["args"]], cwd=tmp_path, env=os.environ | variables(name) | own,
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    first, config, *overrides = run.stdout.splitlines()
    assert first == "2 1 localhost:29500 uid 8 3 290"
    assert (ROOT / f"train_configs/{config}.toml").is_file()
    paths = [mount["mountPath"] for mount in pod["volumeMounts"]]
    assert all(override.split("=")[1].startswith(f"{paths[0]}/") for override in overrides)
    assert (tmp_path / "asked").read_text().count("\n") == 2
