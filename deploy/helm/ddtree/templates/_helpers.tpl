{{/* Names, labels and the image: what every other template asks for. */}}

{{- define "ddtree.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if contains "ddtree" .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- /* 40 leaves room for what is appended: a Service or Job name must fit into 63. */ -}}
{{- printf "%s-ddtree" (.Release.Name | trunc 33 | trimSuffix "-") -}}
{{- end -}}
{{- end -}}

{{/* Labels that select pods. Arguments: dict "root" $ "component" one of server, worker, fetch, test. */}}
{{- define "ddtree.selectorLabels" -}}
app.kubernetes.io/name: ddtree
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{/* Labels of a pod; same arguments. No versions, so that a new chart alone does not roll pods. */}}
{{- define "ddtree.podLabels" -}}
{{ include "ddtree.selectorLabels" . }}
app.kubernetes.io/part-of: ddtree
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- with .root.Values.podLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* All labels of another object; same arguments. */}}
{{- define "ddtree.labels" -}}
{{ include "ddtree.selectorLabels" . }}
app.kubernetes.io/part-of: ddtree
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "ddtree.image" -}}
{{- $image := .Values.image -}}
{{- $repository := required "image.repository is empty: build deploy/docker/Dockerfile, push it, and name its repository here" $image.repository -}}
{{- if $image.digest -}}
{{- printf "%s@%s" $repository $image.digest -}}
{{- else -}}
{{- printf "%s:%s" $repository ($image.tag | default .Chart.AppVersion) -}}
{{- end -}}
{{- end -}}

{{/* What a digest names cannot change; a tag can. */}}
{{- define "ddtree.pullPolicy" -}}
{{- .Values.image.pullPolicy | default (empty .Values.image.digest | not | ternary "IfNotPresent" "Always") -}}
{{- end -}}

{{- define "ddtree.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- .Values.serviceAccount.name | default (include "ddtree.fullname" .) -}}
{{- else -}}
{{- .Values.serviceAccount.name | default "default" -}}
{{- end -}}
{{- end -}}

{{/*
"true" when the cluster knows a kind, else nothing. Arguments: dict "root" $ "api" "group/version/Kind".
`helm template` asks no cluster: pass --api-versions, or list the kind in assumeApis.
*/}}
{{- define "ddtree.hasApi" -}}
{{- if or (.root.Capabilities.APIVersions.Has .api) (has .api .root.Values.assumeApis) -}}
true
{{- end -}}
{{- end -}}

{{/* The models that must be ready, in load order. */}}
{{- define "ddtree.models" -}}
{{- if eq .Values.engine.topology "in_process" -}}
ddtree
{{- else -}}
tree_builder drafter target_verifier ddtree
{{- end -}}
{{- end -}}

{{/* Seconds from SIGTERM's announcement to SIGKILL: the drain, Triton's own exit, and a margin. */}}
{{- define "ddtree.gracePeriod" -}}
{{- add .Values.drain.settleSeconds .Values.drain.timeoutSeconds .Values.server.exitTimeoutSeconds 15 -}}
{{- end -}}

{{- define "ddtree.scaleTarget" -}}
{{- if .Values.leaderWorkerSet.enabled -}}
apiVersion: leaderworkerset.x-k8s.io/v1
kind: LeaderWorkerSet
{{- else -}}
apiVersion: apps/v1
kind: Deployment
{{- end }}
name: {{ include "ddtree.fullname" . }}
{{- end -}}

{{/* "true" when something else than this chart sets the number of replicas. */}}
{{- define "ddtree.isScaled" -}}
{{- if or .Values.autoscaling.hpa.enabled .Values.autoscaling.keda.enabled -}}
true
{{- end -}}
{{- end -}}
