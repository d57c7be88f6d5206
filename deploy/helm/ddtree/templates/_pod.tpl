{{/* The pod that serves. Deployment and LeaderWorkerSet (its leader) use the same one. */}}

{{- define "ddtree.podTemplate" -}}
metadata:
  labels: {{- include "ddtree.podLabels" (dict "root" . "component" "server") | nindent 4 }}
  annotations:
    {{- include "ddtree.podAnnotations" . | nindent 4 }}
spec:
  {{- include "ddtree.scheduling" . | nindent 2 }}
  {{- with .Values.affinity }}
  affinity: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.topologySpread }}
  topologySpreadConstraints:
    {{- range . }}
    - {{- toYaml . | nindent 6 }}
      labelSelector:
        matchLabels: {{- include "ddtree.selectorLabels" (dict "root" $ "component" "server") | nindent 10 }}
    {{- end }}
  {{- end }}
  terminationGracePeriodSeconds: {{ include "ddtree.gracePeriod" . }}
  {{- include "ddtree.initContainers" . | nindent 2 }}
  containers:
    - {{- include "ddtree.serverContainer" . | nindent 6 }}
  volumes:
    - name: scripts
      configMap:
        name: {{ include "ddtree.fullname" . }}-scripts
    - name: shm
      emptyDir:
        medium: Memory
        sizeLimit: {{ .Values.shm.sizeLimit }}
    - name: tmp
      emptyDir:
        sizeLimit: {{ .Values.tmp.sizeLimit }}
    {{- if .Values.tls.enabled }}
    - name: tls
      secret:
        secretName: {{ .Values.tls.secretName }}
        defaultMode: 0440
    {{- end }}
    {{- with .Values.server.adminKeySecret }}
    {{- if .name }}
    - name: admin-key
      secret:
        secretName: {{ .name }}
        defaultMode: 0440
        items: [{key: {{ .key }}, path: key}]
    {{- end }}
    {{- end }}
    {{- include "ddtree.checkpointVolumes" . | nindent 4 }}
    {{- with .Values.extraVolumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end -}}

{{/* A change of what is mounted rolls the pods, as a change of the pod itself does anyway. */}}
{{- define "ddtree.podAnnotations" -}}
checksum/scripts: {{ include "ddtree.scripts" . | sha256sum }}
{{- /* Triton reads its certificates once. A renewed secret is seen at the next upgrade that asks a cluster. */}}
{{- if .Values.tls.enabled }}
{{- with lookup "v1" "Secret" .Release.Namespace .Values.tls.secretName }}
checksum/tls: {{ .data | toJson | sha256sum }}
{{- end }}
{{- end }}
{{- with .Values.podAnnotations }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Who runs the pod, and on which nodes it may. */}}
{{- define "ddtree.scheduling" -}}
serviceAccountName: {{ include "ddtree.serviceAccountName" . }}
automountServiceAccountToken: false
enableServiceLinks: false
securityContext: {{- toYaml .Values.podSecurityContext | nindent 2 }}
{{- with .Values.image.pullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.gpu.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- with .Values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .Values.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "ddtree.resources" -}}
{{- $resources := deepCopy .Values.resources -}}
{{- if int .Values.gpu.count -}}
{{- $limits := merge (dict .Values.gpu.resourceName (int .Values.gpu.count)) (get $resources "limits" | default dict) -}}
{{- $resources = set $resources "limits" $limits -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}
