{{/* The container that runs tritonserver, its probes and its drain. */}}

{{- define "ddtree.serverContainer" -}}
name: triton
image: {{ include "ddtree.image" . | quote }}
imagePullPolicy: {{ include "ddtree.pullPolicy" . }}
command: [/bin/sh, /etc/ddtree/start.sh]
args:
  {{- include "ddtree.args" . | nindent 2 }}
env:
  {{- include "ddtree.env" . | nindent 2 }}
{{- with .Values.extraEnvFrom }}
envFrom: {{- toYaml . | nindent 2 }}
{{- end }}
ports:
  {{- if .Values.server.http.exposed }}
  - name: http
    containerPort: 8000
  {{- end }}
  - name: grpc
    containerPort: 8001
  - name: metrics
    containerPort: 8002
resources: {{- include "ddtree.resources" . | nindent 2 }}
securityContext: {{- toYaml .Values.containerSecurityContext | nindent 2 }}
{{- include "ddtree.probes" . | nindent 0 }}
volumeMounts:
  - name: scripts
    mountPath: /etc/ddtree
    readOnly: true
  - name: shm
    mountPath: /dev/shm
  - name: tmp
    mountPath: /tmp
  {{- if .Values.tls.enabled }}
  - name: tls
    mountPath: /etc/ddtree-tls
    readOnly: true
  {{- end }}
  {{- if .Values.server.adminKeySecret.name }}
  - name: admin-key
    mountPath: /etc/ddtree-admin
    readOnly: true
  {{- end }}
  {{- include "ddtree.checkpointMounts" . | nindent 2 }}
  {{- with .Values.extraVolumeMounts }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end -}}

{{/*
Start-up and readiness ask for every model; liveness generates one token, because a server whose stage died says
that it is ready (before Triton 25.12). A server that is busy with other requests is alive without an answer.
*/}}
{{- define "ddtree.probes" -}}
{{- $p := .Values.probes -}}
{{- $probe := list "python3" "/etc/ddtree/probe.py" -}}
{{- $ready := concat $probe (list "ready") (splitList " " (include "ddtree.models" .)) -}}
startupProbe:
  exec:
    command: {{ toJson $ready }}
  periodSeconds: 10
  timeoutSeconds: 10
  failureThreshold: {{ div (add (int64 $p.startup.timeoutSeconds) 9) 10 }}
readinessProbe:
  exec:
    command: {{ toJson $ready }}
  periodSeconds: {{ $p.readiness.periodSeconds }}
  timeoutSeconds: 10
  failureThreshold: {{ $p.readiness.failureThreshold }}
{{- if $p.liveness.enabled }}
livenessProbe:
  exec:
    command: {{ toJson (concat $probe (list "alive" (printf "--timeout-seconds=%d" (int $p.liveness.timeoutSeconds)))) }}
  periodSeconds: {{ $p.liveness.periodSeconds }}
  timeoutSeconds: {{ add (int $p.liveness.timeoutSeconds) 10 }}
  failureThreshold: {{ $p.liveness.failureThreshold }}
{{- end }}
lifecycle:
  preStop:
    exec:
      command: {{ toJson (list "ddtree" "drain" (printf "--settle=%d" (int .Values.drain.settleSeconds)) (printf "--timeout=%d" (int .Values.drain.timeoutSeconds))) }}
{{- end -}}
