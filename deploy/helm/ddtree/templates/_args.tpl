{{/* tritonserver's arguments, and the environment that the models' config.pbtxt read. */}}

{{- define "ddtree.args" -}}
{{- $s := .Values.server -}}
- --model-repository={{ eq .Values.engine.topology "in_process" | ternary "/models-in-process" "/models" }}
{{- if .Values.watchdog.enabled }}
- --model-control-mode=explicit
{{- range splitList " " (include "ddtree.models" .) }}
- --load-model={{ . }}
{{- end }}
{{- else }}
- --model-control-mode=none
{{- end }}
- --disable-auto-complete-config
- --strict-readiness=true
- --exit-on-error=true
- --exit-timeout-secs={{ $s.exitTimeoutSeconds }}
- --backend-config=python,shm-region-prefix-name=ddtree_server_
- --backend-config=python,thread-pool-size={{ $s.threadPoolSize }}
- --backend-config=python,stub-timeout-seconds={{ $s.stubTimeoutSeconds }}
- --http-port=8000
- --http-address={{ $s.http.exposed | ternary "0.0.0.0" "127.0.0.1" }}
- --grpc-port=8001
- --metrics-port=8002
{{- if $s.grpc.maxConnectionAgeSeconds }}
- --grpc-max-connection-age={{ mul $s.grpc.maxConnectionAgeSeconds 1000 }}
- --grpc-max-connection-age-grace={{ mul $s.grpc.maxConnectionAgeGraceSeconds 1000 }}
{{- end }}
{{- if .Values.tls.enabled }}
- {{ .Values.tls.mutual | ternary "--grpc-use-ssl-mutual=true" "--grpc-use-ssl=true" }}
- --grpc-server-cert=/etc/ddtree-tls/tls.crt
- --grpc-server-key=/etc/ddtree-tls/tls.key
{{- if .Values.tls.mutual }}
- --grpc-root-cert=/etc/ddtree-tls/ca.crt
{{- end }}
{{- end }}
- --log-verbose={{ $s.logVerbose }}
{{- range $s.extraArgs }}
- {{ . | quote }}
{{- end }}
{{- end -}}

{{- define "ddtree.env" -}}
{{- $e := .Values.engine -}}
- name: DDTREE_TARGET
  value: {{ include "ddtree.checkpointPath" (dict "root" . "which" "target") | quote }}
- name: DDTREE_DRAFT
  value: {{ include "ddtree.checkpointPath" (dict "root" . "which" "draft") | quote }}
{{- range $name, $value := dict
    "TOPOLOGY" $e.topology
    "ENGINE" $e.runtime
    "DTYPE" $e.dtype
    "DEVICE" (include "ddtree.device" (dict "root" . "which" "target"))
    "TENSOR_PARALLEL" ($e.tensorParallel | int64)
    "KV_CACHE_MIB" ($e.kvCacheMiB | int64)
    "DRAFT_KV_CACHE_MIB" ($e.draftKvCacheMiB | int64)
    "STATE_CACHE_MIB" ($e.stateCacheMiB | int64)
    "PAGE_SIZE" ($e.pageSize | int64)
    "PREFILL_CHUNK" ($e.prefillChunk | int64)
    "MAX_SEQUENCES" ($e.maxSequences | int64)
    "MAX_WAITING" ($e.maxWaiting | int64)
    "QUEUE_TIMEOUT_MS" ($e.queueTimeoutMs | int64)
    "DRAFT_TIMEOUT_MS" ($e.draftTimeoutMs | int64)
    "MAX_NODES" ($e.maxNodes | int64)
    "MAX_STEP_NODES" ($e.maxStepNodes | int64)
    "SESSION_TTL_S" ($e.sessionTtlSeconds | int64)
    "PREFIX_CACHE" $e.prefixCache
    "CUDA_GRAPHS" $e.cudaGraphs
    "FEATURES_BY_REFERENCE" $e.featuresByReference
    "TREES_BUILT_BY" $e.treesBuiltBy
    "STAGE_CALLS" $e.stageCalls }}
- name: DDTREE_{{ $name }}
  value: {{ $value | toString | quote }}
{{- end }}
- name: DDTREE_DRAIN_FILE
  value: /tmp/ddtree-drain
{{- if .Values.watchdog.enabled }}
- name: DDTREE_WATCHED
  value: {{ include "ddtree.models" . }}
{{- end }}
- name: DDTREE_STAGE_RECOVERY_S
  value: {{ .Values.watchdog.enabled | ternary (.Values.watchdog.recoverySeconds | int64) 0 | toString | quote }}
- name: DDTREE_THREADS
{{- if int64 $e.threads }}
  value: {{ $e.threads | int64 | toString | quote }}
{{- else }}
  valueFrom:
    resourceFieldRef:
      resource: limits.cpu
{{- end }}
{{- if eq .Values.gpu.placement "split" }}
- name: DDTREE_DRAFT_DEVICE
  value: {{ include "ddtree.device" (dict "root" . "which" "draft") | quote }}
{{- end }}
{{- /* The root filesystem is read-only: everything that caches is led to /tmp, and nothing asks the hub. */}}
- name: HOME
  value: /tmp
- name: HF_HUB_OFFLINE
  value: "1"
- name: TRITON_CACHE_DIR
  value: /tmp/triton-kernels
- name: TORCHINDUCTOR_CACHE_DIR
  value: /tmp/torch-inductor
- name: CUDA_CACHE_PATH
  value: /tmp/cuda
{{- with .Values.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* The device of a stage. Arguments: dict "root" $ "which" "target" or "draft". */}}
{{- define "ddtree.device" -}}
{{- if not (int .root.Values.gpu.count) -}}
cpu
{{- else if and (eq .root.Values.gpu.placement "split") (eq .which "draft") -}}
cuda:{{ .root.Values.engine.tensorParallel | int64 }}
{{- else -}}
cuda:0
{{- end -}}
{{- end -}}
