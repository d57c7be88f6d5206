"""What the chart refuses, and that its values, its documentation and the models' settings agree."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml

from ddtree.config import ServingConfig
from ddtree.errors import ConfigError
from deploy.helm import chart_docs
from tests.deploy.kube.helm import CHART, HelmError, Rendering, ci_names, environment, helm
from tests.deploy.kube.tools import ROOT

MODELS = ROOT / "model_repository"


@pytest.mark.parametrize(
    ("name", "setting", "message"),
    [
        ("minimal", "checkpoints.target=", "checkpoints.target is empty: .* such as Qwen/Qwen3-8B"),
        ("minimal", "image.repository=", "image.repository is empty: build deploy/docker/Dockerfile"),
        ("baked", "checkpoints.draft=drafts/x", "must be an absolute folder of the image .* got drafts/x"),
        ("persistent-volume", "checkpoints.target=/abs", "without a leading / or .., got /abs"),
        ("persistent-volume", "checkpoints.target=../x", "without a leading / or .., got ../x"),
        (
            "persistent-volume",
            "checkpoints.storage.existingClaim=",
            "needs checkpoints.storage.existingClaim",
        ),
        ("s3", "checkpoints.draft=models/x", "must start with s3:// .* got models/x"),
        ("s3", "checkpoints.storage.create=true", "exclude each other"),
        ("two-gpus", "gpu.count=1", "needs gpu.count of at least 2, got 1: raise it"),
        ("two-gpus", "engine.topology=in_process", "neither kernels nor graphs.* set engine.topology"),
        ("engine", "engine.topology=in_process", "engine.runtime is trtllm, .* set engine.topology to bls"),
        ("tls", "tls.secretName=", "tls.enabled needs tls.secretName"),
        ("tls", "server.http.exposed=true", "plain text beside tls.enabled"),
        ("minimal", "tls.mutual=true", "tls.mutual needs tls.enabled"),
        ("mutual-tls", "tls.clientSecretName=", "or set test.enabled to false"),
        ("hpa", "autoscaling.keda.enabled=true", "would fight over the replicas"),
        ("hpa", "autoscaling.minReplicas=9", "must not exceed autoscaling.maxReplicas, got 9 and 8"),
        ("keda", "autoscaling.keda.serverAddress=", "needs autoscaling.keda.serverAddress"),
        ("gateway", "gateway.parentRefs=null", "needs gateway.parentRefs"),
        ("ingress", "ingress.hosts=null", "needs ingress.hosts"),
        ("leader-worker-set", "leaderWorkerSet.worker.command=null", "needs leaderWorkerSet.worker.command"),
    ],
)
@pytest.mark.parametrize("which", ["helm3", "helm4"])
def test_values_that_do_not_go_together_are_refused(
    which: str, name: str, setting: str, message: str
) -> None:
    with pytest.raises(HelmError) as refused:
        Rendering(name, (setting,), helm=which).text()
    assert re.search(message, refused.value.message), refused.value.message


@pytest.mark.parametrize(
    ("setting", "where"),
    [
        ("replicaz=3", "replicaz"),
        ("replicas=many", "replicas"),
        ("engine.topology=ensemble", "topology"),
        ("engine.kvCacheMiB=0", "kvCacheMiB"),
        ("engine.kvCacheMb=1", "kvCacheMb"),
        ("image.digest=latest", "digest"),
        ("shm.sizeLimit=2 GB", "sizeLimit"),
        ("checkpoints.source=ftp", "source"),
        ("server.extraArgs={model-repository}", "extraArgs"),
        ("gpu.count=-1", "count"),
        ("tls.enabled=maybe", "enabled"),
        ("monitoring.podMonitor.interval=often", "interval"),
    ],
)
def test_the_schema_refuses_and_names_the_value(setting: str, where: str) -> None:
    with pytest.raises(HelmError) as refused:
        Rendering(settings=(setting,)).text()
    assert where in refused.value.message
    assert "schema" in refused.value.message or "/" in refused.value.message


def test_nothing_is_rendered_without_saying_what_to_serve() -> None:
    with pytest.raises(HelmError, match="is empty"):
        helm("helm4", "template", "rel", str(CHART))


def test_the_documentation_is_up_to_date() -> None:
    written = (CHART / "README.md").read_text()
    assert written == chart_docs.render(), "run `python deploy/helm/chart_docs.py`"
    assert all(f"ci/{name}-values.yaml" in written for name in ci_names())


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"a": 1, "b": 2}, "values.yaml has b"),
        ({}, "values.schema.json describes a"),
    ],
)
def test_the_documentation_notices_a_value_that_only_one_side_has(
    values: Mapping[str, Any], message: str
) -> None:
    schema = {"properties": {"a": {"type": "integer", "description": "A number."}}}
    with pytest.raises(chart_docs.DocsError, match=message):
        list(chart_docs.rows(schema, values))
    with pytest.raises(chart_docs.DocsError, match="a has no description"):
        list(chart_docs.rows({"properties": {"a": {"type": "integer"}}}, {"a": 1}))


def test_unknown_values_are_refused_at_every_level() -> None:
    def walk(path: str, node: Mapping[str, Any]) -> None:
        if "properties" in node:
            assert node.get("additionalProperties") is False, path
            for name, child in node["properties"].items():
                walk(f"{path}.{name}", child)

    walk("", json.loads((CHART / "values.schema.json").read_text()))


def variables_read() -> set[str]:
    text = "".join(path.read_text() for path in MODELS.glob("*/config.pbtxt"))
    return set(re.findall(r"\$\{(DDTREE_[A-Z_]+)", text))


def test_the_chart_sets_what_the_models_read() -> None:
    server = Rendering("two-gpus").server()
    chart = {entry["name"] for entry in server["env"] if entry["name"].startswith("DDTREE_")}
    assert chart == variables_read()


def test_the_engines_settings_are_the_librarys() -> None:
    known = {field.name: field.default for field in fields(ServingConfig)}
    values = yaml.safe_load((CHART / "values.yaml").read_text())["engine"]
    sent = environment(Rendering().server())
    names = {f"DDTREE_{name.upper()}" for name in known}
    assert {name for name in sent if name.startswith("DDTREE_")} <= names
    # The caches are sized for a GPU; everything else is as the library has it.
    for value, name in (("prefillChunk", "prefill_chunk"), ("pageSize", "page_size"),
                        ("maxSequences", "max_sequences"), ("maxWaiting", "max_waiting"),
                        ("queueTimeoutMs", "queue_timeout_ms"), ("maxNodes", "max_nodes"),
                        ("maxStepNodes", "max_step_nodes"), ("sessionTtlSeconds", "session_ttl_s"),
                        ("prefixCache", "prefix_cache"), ("featuresByReference", "features_by_reference"),
                        ("treesBuiltBy", "trees_built_by"), ("stageCalls", "stage_calls"),
                        ("threads", "threads"), ("topology", "topology"), ("dtype", "dtype")):  # fmt: skip
        assert values[value] == known[name], name


def test_the_engines_choices_are_the_librarys() -> None:
    engine = json.loads((CHART / "values.schema.json").read_text())["properties"]["engine"]["properties"]
    choices = {"topology": "topology", "dtype": "dtype", "featuresByReference": "features_by_reference",
               "treesBuiltBy": "trees_built_by", "stageCalls": "stage_calls"}  # fmt: skip
    for value, name in choices.items():
        for choice in engine[value]["enum"]:
            ServingConfig.from_parameters({"target": "t", "draft": "d", name: choice}, {})
        with pytest.raises(ConfigError):
            ServingConfig.from_parameters({"target": "t", "draft": "d", name: "something else"}, {})
    for runtime in engine["runtime"]["enum"]:
        ServingConfig.from_parameters({"target": "t", "draft": "d", "engine": runtime}, {})


def test_the_probes_ask_for_the_models_there_are() -> None:
    command = Rendering().server()["readinessProbe"]["exec"]["command"]
    assert set(command[3:]) == {path.parent.name for path in MODELS.glob("*/config.pbtxt")}


def test_a_download_goes_where_its_name_says() -> None:
    """Another version gets a folder and a Job of its own; more replicas change neither."""
    first = Rendering("hugging-face-job")
    newer = Rendering("hugging-face-job", ("checkpoints.huggingFace.draftRevision=v2",))
    wider = Rendering("hugging-face-job", ("replicas=5",))
    paths = [
        {key: environment(each.server())[key] for key in ("DDTREE_TARGET", "DDTREE_DRAFT")}
        for each in (first, newer, wider)
    ]
    assert paths[0]["DDTREE_TARGET"] == paths[1]["DDTREE_TARGET"]
    assert paths[0]["DDTREE_DRAFT"] != paths[1]["DDTREE_DRAFT"]
    assert paths[0] == paths[2]
    jobs = [each.only("Job") for each in (first, newer, wider)]
    assert jobs[0]["metadata"]["name"] != jobs[1]["metadata"]["name"]
    assert jobs[0] == jobs[2]
    fetched = [arg.split("=")[0] for arg in jobs[0]["spec"]["template"]["spec"]["containers"][0]["args"][1:]]
    assert fetched == list(paths[0].values())
    waited = first.pod()["initContainers"][0]["args"][2:]
    assert waited == fetched


def test_a_token_is_a_file_of_the_download_alone() -> None:
    job = Rendering("hugging-face-job").only("Job")["spec"]["template"]["spec"]
    assert "hugging-face" in json.dumps(job["volumes"])
    assert "hugging-face" not in json.dumps(Rendering("hugging-face-job").pod())


def test_fullname_override_names_everything(tmp_path: Path) -> None:
    names = {each["metadata"]["name"] for each in Rendering("extras").manifests()}
    assert all(name.startswith("tree-decoding") for name in names)
    values = tmp_path / "long.yaml"
    shutil.copy(CHART / "ci" / "hugging-face-job-values.yaml", values)
    text = helm("helm4", "template", "a" * 53, str(CHART), "--values", str(values))
    assert all(len(name) <= 63 for name in re.findall(r"^  name: (\S+)$", text, re.MULTILINE))
