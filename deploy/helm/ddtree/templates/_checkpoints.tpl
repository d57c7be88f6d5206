{{/*
Where the two checkpoints come from, as volumes, mounts and, for huggingFace and s3, a download.
A download goes into a folder named after what it is, so that a new version never writes under running pods
and a rollback finds the old folder again.
*/}}

{{- define "ddtree.isDownloaded" -}}
{{- if has .Values.checkpoints.source (list "huggingFace" "s3") -}}
true
{{- end -}}
{{- end -}}

{{/* "true" when downloads are kept in a claim, which one Job fills for all pods. */}}
{{- define "ddtree.isShared" -}}
{{- $storage := .Values.checkpoints.storage -}}
{{- if and (include "ddtree.isDownloaded" .) (or $storage.create $storage.existingClaim) -}}
true
{{- end -}}
{{- end -}}

{{- define "ddtree.claimName" -}}
{{- .Values.checkpoints.storage.existingClaim | default (printf "%s-checkpoints" (include "ddtree.fullname" .)) -}}
{{- end -}}

{{/* The folder of a checkpoint inside the pod. Arguments: dict "root" $ "which" "target" or "draft". */}}
{{- define "ddtree.checkpointPath" -}}
{{- $c := .root.Values.checkpoints -}}
{{- $value := index $c .which -}}
{{- if eq $c.source "baked" -}}
{{- $value -}}
{{- else if eq $c.source "persistentVolume" -}}
{{- printf "/checkpoints/%s" $value -}}
{{- else if eq $c.source "ociImage" -}}
{{- printf "/checkpoints/%s%s" .which (index $c.ociImage (printf "%sPath" .which)) -}}
{{- else -}}
{{- $revision := index $c.huggingFace (printf "%sRevision" .which) -}}
{{- printf "/checkpoints/%s-%s" .which (printf "%s %s %s" $c.source $value $revision | sha256sum | trunc 12) -}}
{{- end -}}
{{- end -}}

{{- define "ddtree.checkpointVolumes" -}}
{{- $c := .Values.checkpoints -}}
{{- if eq $c.source "ociImage" }}
- name: target
  image:
    reference: {{ $c.target | quote }}
    pullPolicy: IfNotPresent
- name: draft
  image:
    reference: {{ $c.draft | quote }}
    pullPolicy: IfNotPresent
{{- else if or (eq $c.source "persistentVolume") (include "ddtree.isShared" .) }}
- name: checkpoints
  persistentVolumeClaim:
    claimName: {{ include "ddtree.claimName" . }}
{{- else if include "ddtree.isDownloaded" . }}
- name: checkpoints
  emptyDir:
    sizeLimit: {{ $c.storage.size }}
{{- include "ddtree.credentialsVolume" . }}
{{- end }}
{{- end -}}

{{/* How the server sees them: read-only, always. */}}
{{- define "ddtree.checkpointMounts" -}}
{{- $c := .Values.checkpoints -}}
{{- if eq $c.source "ociImage" }}
- name: target
  mountPath: /checkpoints/target
  readOnly: true
- name: draft
  mountPath: /checkpoints/draft
  readOnly: true
{{- else if ne $c.source "baked" }}
- name: checkpoints
  mountPath: /checkpoints
  readOnly: true
{{- end }}
{{- end -}}

{{/* A container that downloads, or waits for, both checkpoints. Arguments: dict "root" $ "action" fetch or wait. */}}
{{- define "ddtree.fetchContainer" -}}
{{- $c := .root.Values.checkpoints -}}
name: {{ .action }}-checkpoints
image: {{ include "ddtree.image" .root | quote }}
imagePullPolicy: {{ include "ddtree.pullPolicy" .root }}
command: [python3, /etc/ddtree/fetch_checkpoints.py]
args:
  - {{ .action }}
{{- if eq .action "wait" }}
  - --timeout-seconds={{ $c.download.timeoutSeconds | int64 }}
{{- end }}
{{- range $which := list "target" "draft" }}
{{- $path := include "ddtree.checkpointPath" (dict "root" $.root "which" $which) }}
{{- if eq $.action "wait" }}
  - {{ $path }}
{{- else if eq $c.source "s3" }}
  - {{ printf "%s=%s" $path (index $c $which) | quote }}
{{- else }}
  - {{ printf "%s=hf://%s@%s" $path (index $c $which) (index $c.huggingFace (printf "%sRevision" $which)) | quote }}
{{- end }}
{{- end }}
env:
  - name: HOME
    value: /tmp
{{- if eq .action "fetch" }}
{{- if eq $c.source "huggingFace" }}
  # The image switches the hub off for everybody else.
  - name: HF_HUB_OFFLINE
    value: "0"
  - name: HF_ENDPOINT
    value: {{ $c.huggingFace.endpoint | quote }}
{{- if $c.huggingFace.tokenSecret.name }}
  - name: HF_TOKEN_PATH
    value: /etc/ddtree-credentials/file
{{- end }}
{{- else }}
  - name: AWS_DEFAULT_REGION
    value: {{ $c.s3.region | quote }}
{{- if $c.s3.credentialsSecret.name }}
  - name: AWS_SHARED_CREDENTIALS_FILE
    value: /etc/ddtree-credentials/file
{{- end }}
{{- with $c.s3.endpoint }}
  - name: AWS_ENDPOINT_URL_S3
    value: {{ . | quote }}
{{- end }}
{{- end }}
{{- with $c.download.extraEnv }}
{{ toYaml . | indent 2 }}
{{- end }}
{{- end }}
resources: {{- toYaml $c.download.resources | nindent 2 }}
securityContext: {{- toYaml .root.Values.containerSecurityContext | nindent 2 }}
volumeMounts:
  - name: checkpoints
    mountPath: /checkpoints
    readOnly: {{ eq .action "wait" }}
  - name: scripts
    mountPath: /etc/ddtree
    readOnly: true
  - name: tmp
    mountPath: /tmp
{{- if and (eq .action "fetch") (include "ddtree.credentials" .root) }}
  - name: credentials
    mountPath: /etc/ddtree-credentials
    readOnly: true
{{- end }}
{{- end -}}

{{/* Name and key, separated by a space, of the secret a download needs; empty when it needs none. */}}
{{- define "ddtree.credentials" -}}
{{- $c := .Values.checkpoints -}}
{{- $secret := dict "huggingFace" $c.huggingFace.tokenSecret "s3" $c.s3.credentialsSecret -}}
{{- with get $secret $c.source -}}
{{- if .name -}}
{{- printf "%s %s" .name .key -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* As a file, readable by the container alone: variables are inherited and printed. */}}
{{- define "ddtree.credentialsVolume" -}}
{{- with include "ddtree.credentials" . }}
{{- $secret := splitList " " . }}
- name: credentials
  secret:
    secretName: {{ first $secret }}
    defaultMode: 0440
    items: [{key: {{ last $secret }}, path: file}]
{{- end }}
{{- end -}}

{{/* Before a server or worker starts: wait for the Job's download, or download into the pod's own folder. */}}
{{- define "ddtree.initContainers" -}}
{{- if include "ddtree.isDownloaded" . }}
initContainers:
  - {{- include "ddtree.fetchContainer" (dict "root" . "action" (eq "true" (include "ddtree.isShared" .) | ternary "wait" "fetch")) | nindent 4 }}
{{- end }}
{{- end -}}

{{/* The Job's pod, without what changes between releases of the same content: its hash names the Job. */}}
{{- define "ddtree.fetchPod" -}}
serviceAccountName: {{ include "ddtree.serviceAccountName" . }}
automountServiceAccountToken: false
restartPolicy: OnFailure
securityContext: {{- toYaml .Values.podSecurityContext | nindent 2 }}
{{- with .Values.image.pullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
containers:
  - {{- include "ddtree.fetchContainer" (dict "root" . "action" "fetch") | nindent 4 }}
volumes:
  - name: checkpoints
    persistentVolumeClaim:
      claimName: {{ include "ddtree.claimName" . }}
  - name: scripts
    configMap:
      name: {{ include "ddtree.fullname" . }}-scripts
  - name: tmp
    emptyDir: {}
  {{- include "ddtree.credentialsVolume" . | nindent 2 }}
{{- end -}}
