"""What holds for every pod of every example: who it runs as, what it may write, whom it may talk to."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

from tests.deploy.kube.admission import pod_specs
from tests.deploy.kube.helm import Manifest, Rendering, ci_names, containers
from tests.deploy.kube.tools import deploy_tools

# What checkov finds and we leave, with the reason. Anything else fails, and so does an entry nobody needs.
ACCEPTED = {
    ("CKV_K8S_8", "Pod"): "the pod of `helm test` runs once and ends: nothing to restart",
    ("CKV_K8S_9", "Pod"): "the pod of `helm test` serves nobody",
    ("CKV_K8S_40", "openshift"): "the platform chooses the user ids",
    ("CKV_K8S_43", "extras"): "shows a tag instead of a digest",
}


def pods(manifests: list[Manifest]) -> Iterator[tuple[Manifest, Manifest]]:
    """(labels, specification) of every pod."""
    for manifest in manifests:
        for path, spec in pod_specs(manifest):
            owner: Any = manifest
            for key in path.split(".")[:-1]:
                owner = owner[key]
            yield owner["metadata"]["labels"], dict(spec)


@pytest.mark.parametrize("name", ci_names())
def test_every_container_is_locked_down(name: str) -> None:
    found = list(pods(Rendering(name).manifests()))
    assert found
    for _, pod in found:
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
        for container in containers(pod):
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "capabilities": {"drop": ["ALL"]},
                "privileged": False,
                "readOnlyRootFilesystem": True,
            }
            assert {"cpu", "memory"} <= container["resources"]["limits"].keys()


@pytest.mark.parametrize("name", ci_names())
def test_no_mount_lies_inside_another(name: str) -> None:
    # A container runtime cannot make the inner folder in a read-only volume: the pod would never start.
    for _, pod in pods(Rendering(name).manifests()):
        for container in containers(pod):
            paths = [PurePosixPath(mount["mountPath"]) for mount in container["volumeMounts"]]
            assert not [(a, b) for a in paths for b in paths if a in b.parents]


@pytest.mark.parametrize("name", ci_names())
def test_secrets_are_referred_to_and_never_made(name: str) -> None:
    manifests = Rendering(name).manifests()
    assert "Secret" not in {each["kind"] for each in manifests}
    assert "secretKeyRef" not in json.dumps(manifests)


@pytest.mark.parametrize("name", ci_names())
def test_a_server_reads_checkpoints_and_never_writes_them(name: str) -> None:
    for labels, pod in pods(Rendering(name).manifests()):
        if labels["app.kubernetes.io/component"] not in ("server", "worker"):
            continue
        mounts = [
            mount for mount in pod["containers"][0]["volumeMounts"] if "checkpoints" in mount["mountPath"]
        ]
        assert all(mount["readOnly"] for mount in mounts)
        assert bool(mounts) == (name != "baked")


@pytest.mark.parametrize("name", [name for name in ci_names() if name != "no-network-policy"])
def test_every_pod_has_a_policy_for_both_directions(name: str) -> None:
    manifests = Rendering(name).manifests()
    policies = [each["spec"] for each in manifests if each["kind"] == "NetworkPolicy"]
    for labels, _ in pods(manifests):
        mine = [each for each in policies if each["podSelector"]["matchLabels"].items() <= labels.items()]
        assert {kind for policy in mine for kind in policy["policyTypes"]} == {"Ingress", "Egress"}
        # A policy without ports or peers would let everything through.
        assert all("from" in rule for policy in mine for rule in policy["ingress"])
        assert all(
            "ports" in rule or "podSelector" in str(rule["to"])
            for policy in mine
            for rule in policy["egress"]
        )


def test_the_metrics_port_is_open_to_monitoring_alone() -> None:
    (policy,) = [
        each["spec"]
        for each in Rendering("network").manifests()
        if each["kind"] == "NetworkPolicy" and each["metadata"]["name"] == "rel-ddtree"
    ]
    rules = [rule for rule in policy["ingress"] if {"port": "metrics"} in rule["ports"]]
    assert [rule["from"][0]["podSelector"]["matchLabels"] for rule in rules] == [
        {"app.kubernetes.io/name": "prometheus"}
    ]
    service = Rendering("network").only("Service", "rel-ddtree")
    assert [port["name"] for port in service["spec"]["ports"]] == ["grpc"]


def test_a_server_that_downloads_nothing_reaches_nobody() -> None:
    policy = Rendering("persistent-volume").only("NetworkPolicy", "rel-ddtree")["spec"]
    assert policy["egress"] == []


def test_checkov_finds_nothing_that_is_not_listed(tmp_path: Path) -> None:
    for name in ci_names():
        (tmp_path / f"{name}.yaml").write_text(Rendering(name).text())
    result = subprocess.run(
        [str(deploy_tools().checkov), "--directory", str(tmp_path), "--framework", "kubernetes",
         "--skip-download", "--quiet", "--output", "json"],
        capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    report = json.loads(result.stdout)
    assert report["summary"]["parsing_errors"] == 0
    assert report["summary"]["passed"] > 1000, "checkov looked at too little to mean anything"
    used, unlisted = set(), []
    for failure in report["results"]["failed_checks"]:
        keys = {
            (failure["check_id"], failure["resource"].split(".")[0]),
            (failure["check_id"], Path(failure["file_path"]).stem),
        }
        used |= keys & ACCEPTED.keys()
        if not keys & ACCEPTED.keys():
            unlisted.append(
                (failure["check_id"], failure["check_name"], failure["file_path"], failure["resource"])
            )
    assert not unlisted
    assert used == ACCEPTED.keys(), "an accepted finding is not found any more: take it off the list"
    assert report["summary"]["resource_count"] > 5 * len(ci_names())
