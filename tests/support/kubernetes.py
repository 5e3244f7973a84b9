"""The part of the Kubernetes API that the files in kubernetes/ use, as a JSON schema.

Written from the reference of batch/v1 and v1, https://kubernetes.io/docs/reference/kubernetes-api/, and of
jobset.x-k8s.io/v1alpha2, https://jobset.sigs.k8s.io/docs/reference/. A key that is not here is an error: look
it up there and add it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

Schema = dict[str, Any]
STRING: Schema = {"type": "string"}
COUNT: Schema = {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}
BOOLEAN: Schema = {"type": "boolean"}
NAME: Schema = {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", "maxLength": 63}
STRINGS: Schema = {"type": "object", "additionalProperties": STRING}


def one_of(*values: Any) -> Schema:
    """One of some values."""
    return {"enum": list(values)}


def array(items: Schema) -> Schema:
    """A list of at least one item."""
    return {"type": "array", "items": items, "minItems": 1}


def table(required: str = "", **fields: Schema) -> Schema:
    """An object with these fields and no others. `required`: names separated by spaces."""
    properties = {"type": "object", "properties": fields, "additionalProperties": False}
    return properties | {"required": required.split()}


METADATA = table("name", name=NAME, labels=STRINGS, annotations=STRINGS)
ENV = {
    "oneOf": [
        table("name value", name=STRING, value=STRING),
        table(
            "name valueFrom",
            name=STRING,
            valueFrom=table("fieldRef", fieldRef=table("fieldPath", fieldPath=STRING)),
        ),
    ]
}
VOLUME = {
    "oneOf": [
        table(
            "name persistentVolumeClaim",
            name=NAME,
            persistentVolumeClaim=table("claimName", claimName=STRING),
        ),
        table("name emptyDir", name=NAME, emptyDir=table(medium=one_of("", "Memory"))),
    ]
}
CONTAINER = table(
    "name image",
    name=NAME,
    image=STRING,
    command=array(STRING),
    args=array(STRING),
    env=array(ENV),
    resources=table(limits={"type": "object", "additionalProperties": {"type": ["integer", "string"]}}),
    volumeMounts=array(table("name mountPath", name=NAME, mountPath=STRING)),
)
POD = table(
    "containers restartPolicy",  # a Job's pods have no default of restartPolicy
    subdomain=NAME,
    restartPolicy=one_of("Never"),  # OnFailure cannot have a podFailurePolicy
    terminationGracePeriodSeconds=COUNT,
    containers=array(CONTAINER),
    volumes=array(VOLUME),
)
EXIT_CODES = table(
    "operator values",
    containerName=NAME,
    operator=one_of("In", "NotIn"),
    values=array({"type": "integer", "minimum": 1, "maximum": 255}),  # 0 cannot be listed
)
CONDITIONS = array(table("type status", type=STRING, status=one_of("True", "False", "Unknown")))
ACTIONS = one_of("FailJob", "FailIndex", "Ignore", "Count")
RULE = {
    "oneOf": [
        table("action onExitCodes", action=ACTIONS, onExitCodes=EXIT_CODES),
        table("action onPodConditions", action=ACTIONS, onPodConditions=CONDITIONS),
    ]
}
JOB_SPEC = table(
    "template",
    completionMode=one_of("Indexed", "NonIndexed"),
    completions=COUNT,
    parallelism=COUNT,
    backoffLimit=COUNT,
    backoffLimitPerIndex=COUNT,
    maxFailedIndexes=COUNT,
    podFailurePolicy=table("rules", rules=array(RULE)),
    template=table("spec", spec=POD),
) | {
    "dependentRequired": {"maxFailedIndexes": ["backoffLimitPerIndex"]},
    "if": {"required": ["backoffLimitPerIndex"]},
    "then": {"required": ["completionMode"], "properties": {"completionMode": {"const": "Indexed"}}},
}
SERVICE = table(
    "apiVersion kind metadata spec",
    apiVersion=one_of("v1"),
    kind=one_of("Service"),
    metadata=METADATA,
    spec=table(clusterIP=one_of("None"), publishNotReadyAddresses=BOOLEAN, selector=STRINGS),
)
JOB = table(
    "apiVersion kind metadata spec",
    apiVersion=one_of("batch/v1"),
    kind=one_of("Job"),
    metadata=METADATA,
    spec=JOB_SPEC,
)
FAILURE_RULE = table(
    "action name",
    name={"type": "string", "pattern": "^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$"},
    action=one_of("FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts"),
    onJobFailureReasons=array(one_of("BackoffLimitExceeded", "FailedIndexes", "PodFailurePolicy")),
)
JOB_SET = table(
    "apiVersion kind metadata spec",
    apiVersion=one_of("jobset.x-k8s.io/v1alpha2"),
    kind=one_of("JobSet"),
    metadata=METADATA,
    spec=table(
        "replicatedJobs",
        failurePolicy=table(maxRestarts=COUNT, rules=array(FAILURE_RULE)),
        replicatedJobs=array(
            table("name template", name=NAME, replicas=COUNT, template=table("spec", spec=JOB_SPEC))
        ),
    ),
)
SCHEMAS = {"Service": SERVICE, "Job": JOB, "JobSet": JOB_SET}


def read(path: Path) -> list[Any]:
    """The objects in a file."""
    import yaml

    return list(yaml.safe_load_all(path.read_text()))


def faults(thing: Any) -> list[str]:
    """What is wrong with an object, by its schema."""
    from jsonschema import Draft202012Validator

    errors = Draft202012Validator(SCHEMAS[thing["kind"]]).iter_errors(thing)
    return [f"{error.json_path}: {error.message}" for error in errors]
