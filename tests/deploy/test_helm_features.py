"""Each feature of the chart, in the objects it renders to."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.deploy.kube.helm import CHART, Manifest, Rendering, ci_names, environment

DIGEST = "registry.example.com/ddtree@sha256:" + "0123456789abcdef" * 4


def test_the_digest_decides_what_runs() -> None:
    assert Rendering().server()["image"] == DIGEST
    assert Rendering().server()["imagePullPolicy"] == "IfNotPresent"
    assert Rendering("extras").server()["image"] == "registry.example.com/ddtree:0.1.0-site"
    assert Rendering("extras").server()["imagePullPolicy"] == "Always"


def test_the_grace_period_holds_the_drain_and_tritons_own_exit() -> None:
    pod = Rendering("probes-and-drain").pod()
    assert pod["terminationGracePeriodSeconds"] == 20 + 600 + 60 + 15
    server = pod["containers"][0]
    assert server["lifecycle"]["preStop"]["exec"]["command"] == [
        "ddtree", "drain", "--settle=20", "--timeout=600"
    ]  # fmt: skip
    assert "--exit-timeout-secs=60" in server["args"]


def test_a_watched_server_takes_orders_to_load_and_no_other_does() -> None:
    arguments = Rendering("watchdog").server()["args"]
    assert "--model-control-mode=explicit" in arguments
    loaded = {each.partition("=")[2] for each in arguments if each.startswith("--load-model=")}
    assert loaded == {"ddtree", "drafter", "target_verifier", "tree_builder"}
    environment = {entry["name"]: entry.get("value") for entry in Rendering("watchdog").server()["env"]}
    assert environment["DDTREE_WATCHED"].split() == ["tree_builder", "drafter", "target_verifier", "ddtree"]
    assert environment["DDTREE_STAGE_RECOVERY_S"] == "120"
    assert "--model-control-mode=none" in Rendering().server()["args"]
    assert "DDTREE_WATCHED" not in {entry["name"] for entry in Rendering().server()["env"]}


def test_a_slow_load_is_waited_for() -> None:
    deployment = Rendering("probes-and-drain").only("Deployment")
    probe = Rendering("probes-and-drain").server()["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] == 3600
    assert deployment["spec"]["progressDeadlineSeconds"] > 3600


@pytest.mark.parametrize(
    ("name", "models", "repository"),
    [
        ("minimal", {"ddtree", "drafter", "tree_builder", "target_verifier"}, "/models"),
        ("in-process", {"ddtree"}, "/models-in-process"),
    ],
)
def test_readiness_asks_for_every_model_of_the_topology(name: str, models: set[str], repository: str) -> None:
    server = Rendering(name).server()
    for probe in ("startupProbe", "readinessProbe"):
        command = server[probe]["exec"]["command"]
        assert command[:3] == ["python3", "/etc/ddtree/probe.py", "ready"]
        assert set(command[3:]) == models
    assert f"--model-repository={repository}" in server["args"]


def test_liveness_outlasts_its_own_request() -> None:
    probe = Rendering("probes-and-drain").server()["livenessProbe"]
    assert probe["exec"]["command"][2:] == ["alive", "--timeout-seconds=60"]
    assert probe["timeoutSeconds"] > 60


def test_shared_memory_is_sized_and_in_memory() -> None:
    pod = Rendering("probes-and-drain").pod()
    (volume,) = [each for each in pod["volumes"] if each["name"] == "shm"]
    assert volume["emptyDir"] == {"medium": "Memory", "sizeLimit": "8Gi"}
    mounts = pod["containers"][0]["volumeMounts"]
    assert {"name": "shm", "mountPath": "/dev/shm"} in mounts


def test_gpus_devices_and_threads() -> None:
    shared, split, cpu = Rendering().server(), Rendering("two-gpus").server(), Rendering("cpu").server()
    assert shared["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert split["resources"]["limits"]["nvidia.com/gpu"] == 2
    assert "nvidia.com/gpu" not in cpu["resources"]["limits"]
    assert environment(shared)["DDTREE_DEVICE"] == "cuda:0"
    assert "DDTREE_DRAFT_DEVICE" not in environment(shared)
    assert environment(split)["DDTREE_DEVICE"] == "cuda:0"
    assert environment(split)["DDTREE_DRAFT_DEVICE"] == "cuda:1"
    assert environment(cpu)["DDTREE_DEVICE"] == "cpu"
    assert environment(cpu)["DDTREE_THREADS"] == "8"
    (threads,) = [each for each in shared["env"] if each["name"] == "DDTREE_THREADS"]
    assert threads["valueFrom"] == {"resourceFieldRef": {"resource": "limits.cpu"}}


def test_large_numbers_stay_numbers() -> None:
    assert environment(Rendering("engine").server())["DDTREE_MAX_WAITING"] == "1000000"


def test_scheduling_reaches_the_pod() -> None:
    pod = Rendering("scheduling").pod()
    assert pod["runtimeClassName"] == "nvidia"
    assert pod["priorityClassName"] == "inference"
    assert pod["nodeSelector"] == {"nvidia.com/gpu.product": "NVIDIA-H200"}
    assert pod["tolerations"][0]["value"] == "inference"
    assert pod["containers"][0]["resources"]["limits"]["nvidia.com/mig-3g.40gb"] == 1
    spread = pod["topologySpreadConstraints"]
    assert [each["topologyKey"] for each in spread] == [
        "topology.kubernetes.io/zone", "kubernetes.io/hostname"
    ]  # fmt: skip
    labels = Rendering("scheduling").only("Deployment")["spec"]["template"]["metadata"]["labels"]
    assert all(each["labelSelector"]["matchLabels"].items() <= labels.items() for each in spread)


def test_either_autoscaler_sets_the_replicas_by_our_gauges() -> None:
    assert Rendering("scheduling").only("Deployment")["spec"]["replicas"] == 3
    for name in ("hpa", "keda"):
        assert "replicas" not in Rendering(name).only("Deployment")["spec"]
    hpa = Rendering("hpa").only("HorizontalPodAutoscaler")["spec"]
    assert {each["pods"]["metric"]["name"]: each["pods"]["target"] for each in hpa["metrics"]} == {
        "ddtree_active_requests": {"type": "AverageValue", "averageValue": "24"},
        "ddtree_queued_requests": {"type": "AverageValue", "averageValue": "2"},
    }
    keda = Rendering("keda").only("ScaledObject")["spec"]
    queries = [each["metadata"]["query"] for each in keda["triggers"]]
    assert queries[0] == 'sum(ddtree_active_requests{namespace="inference",pod=~"rel-ddtree-.*"})'
    for spec in (hpa, keda):
        assert spec["scaleTargetRef"]["name"] == "rel-ddtree"


def test_selectors_find_the_pods_they_are_for() -> None:
    for name in ci_names():
        manifests = Rendering(name).manifests()
        (owner,) = [each for each in manifests if each["kind"] in ("Deployment", "LeaderWorkerSet")]
        spec = owner["spec"]
        template = spec.get("template") or spec["leaderWorkerTemplate"]["leaderTemplate"]
        labels = template["metadata"]["labels"]
        ports = {port["name"] for port in template["spec"]["containers"][0]["ports"]}
        for each in manifests:
            if each["kind"] == "Service":
                assert each["spec"]["selector"].items() <= labels.items()
                assert {port["targetPort"] for port in each["spec"]["ports"]} <= ports
            elif each["kind"] in ("PodDisruptionBudget", "PodMonitor"):
                assert each["spec"]["selector"]["matchLabels"].items() <= labels.items()
            if each["kind"] == "PodMonitor":
                assert [end["port"] for end in each["spec"]["podMetricsEndpoints"]] == ["metrics"]


def test_tls_is_asked_for_and_mounted() -> None:
    plain, mutual = Rendering("tls").server(), Rendering("mutual-tls").server()
    assert "--grpc-use-ssl=true" in plain["args"]
    assert "--grpc-use-ssl-mutual=true" in mutual["args"]
    assert "--grpc-root-cert=/etc/ddtree-tls/ca.crt" in mutual["args"]
    assert "/etc/ddtree-tls" in {mount["mountPath"] for mount in mutual["volumeMounts"]}
    test = Rendering("mutual-tls").only("Pod")["spec"]
    assert "--tls-cert=/etc/ddtree-tls/tls.crt" in test["containers"][0]["args"]
    assert {"secret": {"secretName": "ddtree-client-tls", "defaultMode": 0o440}, "name": "tls"} in test[
        "volumes"
    ]
    # With TLS alone a client needs the authority and must not get the server's key.
    (volume,) = [each for each in Rendering("tls").only("Pod")["spec"]["volumes"] if each["name"] == "tls"]
    assert volume["secret"]["items"] == [{"key": "ca.crt", "path": "ca.crt"}]


def test_routes_let_in_the_methods_of_clients_alone() -> None:
    route = Rendering("gateway").only("GRPCRoute")["spec"]["rules"][0]
    routed = {match["method"]["method"] for match in route["matches"]}
    assert "ModelStreamInfer" in routed
    assert not {"RepositoryModelLoad", "SystemSharedMemoryRegister", "LogSettings"} & routed
    ingress = Rendering("ingress").only("Ingress")["spec"]["rules"][0]
    paths = {path["path"] for path in ingress["http"]["paths"]}
    assert paths == {f"/inference.GRPCInferenceService/{method}" for method in routed}


def test_http_is_inside_the_pod_unless_asked_for() -> None:
    assert "--http-address=127.0.0.1" in Rendering().server()["args"]
    exposed = Rendering("load-balancer")
    assert "--http-address=0.0.0.0" in exposed.server()["args"]
    service = exposed.only("Service", "rel-ddtree")
    assert {port["name"] for port in service["spec"]["ports"]} == {"grpc", "http"}
    assert service["spec"]["type"] == "LoadBalancer"


def test_the_headless_service_names_every_pod() -> None:
    service = Rendering().only("Service", "-headless")["spec"]
    assert service["clusterIP"] == "None"
    assert "--grpc-max-connection-age=600000" in Rendering("network").server()["args"]


def test_a_group_over_nodes_has_one_leader_that_serves() -> None:
    rendering = Rendering("leader-worker-set-download")
    spec = rendering.only("LeaderWorkerSet")["spec"]
    group = spec["leaderWorkerTemplate"]
    assert group["size"] == 4
    assert spec["startupPolicy"] == "LeaderCreated"
    leader, worker = group["leaderTemplate"], group["workerTemplate"]
    assert leader["spec"]["containers"][0]["name"] == "triton"
    assert worker["spec"]["containers"][0]["command"] == ["/opt/verifier/worker"]
    assert worker["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == 8
    assert [each["name"] for each in worker["spec"]["initContainers"]] == ["fetch-checkpoints"]
    service = rendering.only("Service", "rel-ddtree")["spec"]["selector"]
    assert not service.items() <= worker["metadata"]["labels"].items()
    target = Rendering("leader-worker-set").only("HorizontalPodAutoscaler")["spec"]["scaleTargetRef"]
    assert target["kind"] == "LeaderWorkerSet"


def template_of(rendering: Rendering) -> Manifest:
    template = rendering.only("Deployment")["spec"]["template"]
    assert isinstance(template, dict)
    return template


def test_a_changed_script_rolls_the_pods_and_a_new_chart_version_alone_does_not(tmp_path: Path) -> None:
    changed = tmp_path / "changed" / "ddtree"
    shutil.copytree(CHART, changed)
    with (changed / "files" / "probe.py").open("a") as script:
        script.write("# another line\n")
    before, after = template_of(Rendering()), template_of(Rendering(chart=changed))
    assert before["metadata"]["annotations"] != after["metadata"]["annotations"]
    assert before["spec"] == after["spec"]
    newer = tmp_path / "newer" / "ddtree"
    shutil.copytree(CHART, newer)
    chart = newer / "Chart.yaml"
    chart.write_text(chart.read_text().replace("\nversion: 0.1.0", "\nversion: 0.1.1"))
    assert template_of(Rendering(chart=newer)) == before
    assert Rendering(chart=newer).manifests() != Rendering().manifests()


def test_a_changed_setting_rolls_the_pods() -> None:
    assert template_of(Rendering(settings=("engine.kvCacheMiB=8192",))) != template_of(Rendering())
    assert template_of(Rendering(settings=("replicas=3",))) == template_of(Rendering())


def test_dashboards_and_rules_are_taken_from_the_charts_folders(tmp_path: Path) -> None:
    chart = tmp_path / "ddtree"
    shutil.copytree(CHART, chart)
    (chart / "dashboards" / "Extra_Board.json").write_text('{"title": "{{ not a template }}"}')
    (chart / "rules" / "extra.yml").write_text(
        "groups:\n  - name: extra\n    rules:\n      - alert: X\n        expr: up == 0\n"
        '        annotations: {summary: "{{ $labels.pod }} is down"}\n'
    )
    rendering = Rendering("monitoring", chart=chart)
    board = rendering.only("ConfigMap", "-extra-board")
    assert board["data"] == {"Extra_Board.json": '{"title": "{{ not a template }}"}\n'}
    assert board["metadata"]["namespace"] == "monitoring"
    assert board["metadata"]["labels"]["grafana_dashboard"] == "1"
    groups = rendering.only("PrometheusRule")["spec"]["groups"]
    assert groups[-1]["rules"][0]["annotations"]["summary"] == "{{ $labels.pod }} is down"
    assert len(groups) > 1
