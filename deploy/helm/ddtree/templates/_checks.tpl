{{/* Rules between values, which the schema cannot say. Each message names the value, the rule and the way out. */}}
{{- define "ddtree.check" -}}
{{- include "ddtree.checkCheckpoints" . -}}
{{- $v := .Values -}}
{{- if and (ne $v.engine.runtime "torch") (eq $v.engine.topology "in_process") -}}
{{- fail (printf "engine.runtime is %s, but with engine.topology in_process the target shares the orchestrator's process: set engine.topology to bls" $v.engine.runtime) -}}
{{- end -}}
{{- if and (gt (int $v.engine.tensorParallel) 1) (ne $v.engine.runtime "torch") -}}
{{- fail (printf "engine.tensorParallel must be 1 with engine.runtime %s, got %d: the engine divides its model itself" $v.engine.runtime (int $v.engine.tensorParallel)) -}}
{{- end -}}
{{- $needed := add (int $v.engine.tensorParallel) (ternary 1 0 (eq $v.gpu.placement "split")) -}}
{{- if and (gt (int $v.engine.tensorParallel) 1) (int $v.gpu.count) (lt (int $v.gpu.count) (int $needed)) -}}
{{- fail (printf "engine.tensorParallel is %d with gpu.placement %s, which needs gpu.count of at least %d, got %d: raise it, or lower engine.tensorParallel" (int $v.engine.tensorParallel) $v.gpu.placement (int $needed) (int $v.gpu.count)) -}}
{{- end -}}
{{- if and (eq $v.gpu.placement "split") (lt (int $v.gpu.count) 2) -}}
{{- fail (printf "gpu.placement is split, which needs gpu.count of at least 2, got %d: raise it, or set gpu.placement to shared" (int $v.gpu.count)) -}}
{{- end -}}
{{- if and (eq $v.gpu.placement "split") (eq $v.engine.topology "in_process") -}}
{{- fail "gpu.placement is split, but with engine.topology in_process a drafter on another GPU than the target's has neither kernels nor graphs, and no round stays on the device: set engine.topology to bls, or gpu.placement to shared" -}}
{{- end -}}
{{- if and $v.tls.enabled (not $v.tls.secretName) -}}
{{- fail "tls.enabled needs tls.secretName: a secret with tls.crt and tls.key (and ca.crt for tls.mutual)" -}}
{{- end -}}
{{- if and $v.tls.enabled $v.server.http.exposed -}}
{{- fail "server.http.exposed would answer in plain text beside tls.enabled, as Triton has no TLS on HTTP: set one of them to false" -}}
{{- end -}}
{{- if and $v.tls.mutual (not $v.tls.enabled) -}}
{{- fail "tls.mutual needs tls.enabled: set it, or set tls.mutual to false" -}}
{{- end -}}
{{- if and $v.tls.mutual $v.test.enabled (not $v.tls.clientSecretName) -}}
{{- fail "tls.mutual needs tls.clientSecretName for `helm test`: a secret with tls.crt, tls.key and ca.crt of a client; or set test.enabled to false" -}}
{{- end -}}
{{- if and $v.autoscaling.hpa.enabled $v.autoscaling.keda.enabled -}}
{{- fail "autoscaling.hpa.enabled and autoscaling.keda.enabled would fight over the replicas: set one of them to false" -}}
{{- end -}}
{{- if gt (int $v.autoscaling.minReplicas) (int $v.autoscaling.maxReplicas) -}}
{{- fail (printf "autoscaling.minReplicas must not exceed autoscaling.maxReplicas, got %d and %d" (int $v.autoscaling.minReplicas) (int $v.autoscaling.maxReplicas)) -}}
{{- end -}}
{{- if and $v.autoscaling.keda.enabled (not $v.autoscaling.keda.serverAddress) -}}
{{- fail "autoscaling.keda.enabled needs autoscaling.keda.serverAddress: the URL of the Prometheus that scrapes these pods" -}}
{{- end -}}
{{- if and $v.gateway.enabled (not $v.gateway.parentRefs) -}}
{{- fail "gateway.enabled needs gateway.parentRefs: name at least one Gateway" -}}
{{- end -}}
{{- if and $v.ingress.enabled (not $v.ingress.hosts) -}}
{{- fail "ingress.enabled needs ingress.hosts: name at least one host" -}}
{{- end -}}
{{- if and $v.leaderWorkerSet.enabled (not $v.leaderWorkerSet.worker.command) -}}
{{- fail "leaderWorkerSet.enabled needs leaderWorkerSet.worker.command: what the other nodes of a group run (LWS_LEADER_ADDRESS, LWS_GROUP_SIZE and LWS_WORKER_INDEX are set for it)" -}}
{{- end -}}
{{- end -}}

{{- define "ddtree.checkCheckpoints" -}}
{{- $c := .Values.checkpoints -}}
{{- range $which := list "target" "draft" -}}
{{- $value := index $c $which -}}
{{- if not $value -}}
{{- fail (printf "checkpoints.%s is empty: with checkpoints.source %s it is %s" $which $c.source (include "ddtree.checkpointMeaning" $c.source)) -}}
{{- end -}}
{{- if and (eq $c.source "baked") (not (hasPrefix "/" $value)) -}}
{{- fail (printf "checkpoints.%s must be an absolute folder of the image with checkpoints.source baked, got %s" $which $value) -}}
{{- end -}}
{{- if and (eq $c.source "persistentVolume") (or (hasPrefix "/" $value) (contains ".." $value)) -}}
{{- fail (printf "checkpoints.%s must be a folder inside the claim, without a leading / or .., got %s" $which $value) -}}
{{- end -}}
{{- if and (eq $c.source "s3") (not (hasPrefix "s3://" $value)) -}}
{{- fail (printf "checkpoints.%s must start with s3:// with checkpoints.source s3, got %s" $which $value) -}}
{{- end -}}
{{- end -}}
{{- if and (eq $c.source "persistentVolume") (not $c.storage.existingClaim) -}}
{{- fail "checkpoints.source persistentVolume needs checkpoints.storage.existingClaim: the claim that holds the folders" -}}
{{- end -}}
{{- if and $c.storage.existingClaim $c.storage.create -}}
{{- fail "checkpoints.storage.existingClaim and checkpoints.storage.create exclude each other: use the claim there is, or have one made" -}}
{{- end -}}
{{- if and (eq $c.source "ociImage") (semverCompare "<1.31.0-0" .Capabilities.KubeVersion.Version) -}}
{{- fail (printf "checkpoints.source ociImage needs Kubernetes 1.31 with the feature ImageVolume, got %s: use persistentVolume, huggingFace, s3 or baked" .Capabilities.KubeVersion.Version) -}}
{{- end -}}
{{- end -}}

{{- define "ddtree.checkpointMeaning" -}}
{{- get (dict
  "huggingFace" "a repository of the Hugging Face hub, such as Qwen/Qwen3-8B"
  "s3" "a prefix such as s3://bucket/folder"
  "persistentVolume" "a folder inside checkpoints.storage.existingClaim"
  "ociImage" "an image that holds the checkpoint, by digest"
  "baked" "an absolute folder inside the server's image") . -}}
{{- end -}}
