{{- define "baton.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Labels that select the pods of a component: list of the root context and the component. */}}
{{- define "baton.selector" -}}
{{- $root := index . 0 -}}
app.kubernetes.io/name: {{ default $root.Chart.Name $root.Values.nameOverride | trunc 63 | trimSuffix "-" }}
app.kubernetes.io/instance: {{ $root.Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end -}}

{{- define "baton.labels" -}}
{{- $root := index . 0 -}}
{{ include "baton.selector" . }}
app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ $root.Release.Service }}
app.kubernetes.io/part-of: baton
helm.sh/chart: {{ printf "%s-%s" $root.Chart.Name $root.Chart.Version }}
{{- with $root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Labels of the template of a component's pods: root context, component, and labels of the user's. */}}
{{- define "baton.podLabels" -}}
{{ include "baton.selector" (list (index . 0) (index . 1)) }}
app.kubernetes.io/part-of: baton
{{- with (index . 0).Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- with index . 2 }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "baton.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "baton.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{/* Image of a repository: root context and the repository's name. */}}
{{- define "baton.image" -}}
{{- $root := index . 0 -}}
{{- $image := $root.Values.image -}}
{{- with $image.registry }}{{ . | trimSuffix "/" }}/{{ end -}}
{{ index . 1 }}:{{ default $root.Chart.AppVersion $image.tag }}
{{- end -}}

{{/* The name in the certificates of prefill and decode pods. */}}
{{- define "baton.tlsName" -}}
{{- default (printf "%s-pods" (include "baton.fullname" .)) .Values.clusterTls.name -}}
{{- end -}}

{{/* Secret with the cluster certificate of a component. */}}
{{- define "baton.tlsSecret" -}}
{{- $root := index . 0 -}}
{{- $component := index . 1 -}}
{{- if eq $root.Values.clusterTls.mode "secret" -}}
{{- get $root.Values.clusterTls.secrets $component -}}
{{- else -}}
{{- printf "%s-%s-cluster-tls" (include "baton.fullname" $root) $component -}}
{{- end -}}
{{- end -}}

{{- define "baton.clientTlsSecret" -}}
{{- default (printf "%s-router-tls" (include "baton.fullname" .)) .Values.router.tls.secret -}}
{{- end -}}

{{- define "baton.redisSecret" -}}
{{- default (printf "%s-redis" (include "baton.fullname" .)) .Values.redis.existingSecret -}}
{{- end -}}

{{- define "baton.modelClaim" -}}
{{- default (printf "%s-model" (include "baton.fullname" .)) .Values.model.volume.existingClaim -}}
{{- end -}}

{{- define "baton.kvClaim" -}}
{{- default (printf "%s-kv" (include "baton.fullname" .)) .Values.connector.sharedStorage.existingClaim -}}
{{- end -}}

{{/* The option by which the connector, or the store below it, gets what it needs: the root context, and "redis" for the
URL of a server or "directory" for one that all pods see. Empty: it needs none. */}}
{{- define "baton.connectorOption" -}}
{{- $connector := (index . 0).Values.connector -}}
{{- $kinds := (index . 0).Files.Get "connectors.json" | fromJson -}}
{{- $below := default dict (get $kinds (toString $connector.options.store)) -}}
{{- with get (get $kinds $connector.type) (index . 1) }}{{ . }}{{ else }}{{ with get $below (index $ 1) }}store.{{ . }}{{ end }}{{ end -}}
{{- end -}}

{{/* "true" if blocks go from pod to pod, not through a store. */}}
{{- define "baton.isDirect" -}}
{{- if get (get (.Files.Get "connectors.json" | fromJson) .Values.connector.type) "direct" -}}true{{- end -}}
{{- end -}}

{{/* "true" if the connector uses Redis. */}}
{{- define "baton.usesRedis" -}}
{{- if include "baton.connectorOption" (list . "redis") -}}true{{- end -}}
{{- end -}}

{{/* "true" if the connector keeps blocks in a shared directory. */}}
{{- define "baton.usesSharedStorage" -}}
{{- if include "baton.connectorOption" (list . "directory") -}}true{{- end -}}
{{- end -}}

{{/* Value of the setting `model`. */}}
{{- define "baton.modelPath" -}}
{{- $model := .Values.model -}}
{{- if eq $model.source "hub" -}}{{ $model.hub.repository }}
{{- else if eq $model.source "volume" -}}{{ clean (printf "/models/%s" $model.volume.path) }}
{{- else if eq $model.source "image" -}}{{ clean (printf "/models/%s" $model.image.path) }}
{{- end -}}
{{- end -}}

{{- define "baton.usesPrefill" -}}
{{- if or (gt (int .Values.prefill.replicas) 0) .Values.prefill.autoscaling.enabled -}}true{{- end -}}
{{- end -}}

{{/* Entry of the router's settings for the pods of a role, found by DNS. */}}
{{- define "baton.dnsEntry" -}}
{{- $root := index . 0 -}}
{{- printf "dns:%s-%s.%s.svc.%s:%d" (include "baton.fullname" $root) (index . 1) $root.Release.Namespace $root.Values.clusterDomain (int (index . 2)) -}}
{{- end -}}

{{/* Settings that all processes have. */}}
{{- define "baton.commonSettings" -}}
{{- $root := index . 0 -}}
{{- $component := index . 1 -}}
host: {{ $root.Values.listenAddress | quote }}
{{- with include "baton.modelPath" $root }}
model: {{ . | quote }}
{{- end }}
{{- if eq $root.Values.model.source "hub" }}
revision: {{ $root.Values.model.hub.revision | quote }}
{{- end }}
{{- if ne $root.Values.clusterTls.mode "off" }}
cluster_ca: /etc/baton/cluster-tls/ca.crt
cluster_cert: /etc/baton/cluster-tls/tls.crt
cluster_key: /etc/baton/cluster-tls/tls.key
cluster_tls_name: {{ include "baton.tlsName" $root | quote }}
{{- end }}
{{- end -}}

{{- define "baton.routerSettings" -}}
{{ include "baton.commonSettings" (list . "router") }}
port: 8000
grpc_port: 9000
{{- if include "baton.usesPrefill" . }}
prefill: [{{ include "baton.dnsEntry" (list . "prefill" 8100) | quote }}]
{{- end }}
decode: [{{ include "baton.dnsEntry" (list . "decode" 8200) | quote }}]
{{- with .Values.model.name }}
served_model_name: [{{ . | quote }}]
{{- end }}
shutdown_grace_s: {{ .Values.router.drainSeconds }}
{{- $settings := .Values.router.settings }}
{{- $bounded := or (hasKey $settings "max_unfinished_body_bytes") (hasKey $settings "max_unfinished_body_bytes_per_client") }}
{{- if and (or .Values.ingress.enabled .Values.httpRoute.enabled) (not $bounded) }}
max_unfinished_body_bytes_per_client: 268435456  # all of them: a proxy sends the requests of all clients
{{- end }}
{{- if .Values.router.apiKeys.existingSecret }}
api_keys_file: /etc/baton/keys/{{ .Values.router.apiKeys.key }}
{{- end }}
{{- if .Values.router.tls.enabled }}
tls_cert: /etc/baton/tls/tls.crt
tls_key: /etc/baton/tls/tls.key
{{- end }}
{{- end -}}

{{- define "baton.podSettings" -}}
{{- $root := index . 0 -}}
{{- $role := index . 1 -}}
{{- $pod := get $root.Values $role -}}
{{ include "baton.commonSettings" (list $root $role) }}
port: {{ include "baton.podPort" $role }}
metrics_port: 9100
{{- with $root.Values.model.name }}
served_model_name: {{ . | quote }}
{{- end }}
drain_timeout_s: {{ $pod.drainSeconds }}
device: {{ ternary "cuda" "cpu" (gt (int $pod.gpu.count) 0) }}
connector: {{ $root.Values.connector.type }}
{{- $options := deepCopy $root.Values.connector.options }}
{{- with include "baton.connectorOption" (list $root "directory") }}
{{- $_ := set $options . "/kv" }}
{{- end }}
{{- with $options }}
connector_options:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* What has the pods of a role: root context and role. */}}
{{- define "baton.workload" -}}
{{- $several := gt (int (get (index . 0).Values (index . 1)).nodes) 1 -}}
{apiVersion: {{ ternary "leaderworkerset.x-k8s.io/v1, kind: LeaderWorkerSet" "apps/v1, kind: Deployment" $several }}, name: {{ include "baton.fullname" (index . 0) }}-{{ index . 1 }}}
{{- end -}}

{{- define "baton.podPort" -}}
{{- if eq . "prefill" -}}8100{{- else -}}8200{{- end -}}
{{- end -}}

{{/* The YAML file of a component: what the chart decides, and the user's settings. */}}
{{- define "baton.config" -}}
{{- $root := index . 0 -}}
{{- $component := index . 1 -}}
{{- $own := ternary "baton.routerSettings" "baton.podSettings" (eq $component "router") -}}
{{- $context := ternary $root . (eq $component "router") -}}
{{- $settings := include $own $context | fromYaml -}}
{{- $settings = merge $settings (deepCopy (get $root.Values $component).settings) -}}
{{- dict $component $settings | toYaml -}}
{{- end -}}

{{- define "baton.podSecurityContext" -}}
{{- toYaml .Values.podSecurityContext }}
runAsNonRoot: true
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "baton.containerSecurityContext" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}

{{/* Scheduling of a component: root context, the section of its values, and the component. */}}
{{- define "baton.scheduling" -}}
{{- $root := index . 0 -}}
{{- $values := get $root.Values (index . 1) -}}
{{- with $values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- if eq $values.topology.mode "spread" }}
topologySpreadConstraints:
  - topologyKey: {{ $values.topology.key }}
    maxSkew: 1
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- include "baton.selector" (list $root (index . 2)) | nindent 8 }}
{{- end }}
{{- if eq $values.topology.mode "pack" }}
affinity:
  podAffinity:
    preferredDuringSchedulingIgnoredDuringExecution:
      - weight: 100
        podAffinityTerm:
          topologyKey: {{ $values.topology.key }}
          labelSelector:
            matchLabels:
              app.kubernetes.io/instance: {{ $root.Release.Name }}
              app.kubernetes.io/part-of: baton
{{- else if $values.affinity }}
affinity:
  {{- toYaml $values.affinity | nindent 2 }}
{{- end }}
{{- with $values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- end -}}

{{/* Environment of all Baton processes. */}}
{{- define "baton.env" -}}
- name: POD_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
- {name: HOME, value: /tmp}
{{- if eq .Values.model.source "hub" }}
- {name: HF_HOME, value: /models/hub}
{{- with .Values.model.hub.tokenSecret }}
- name: HF_TOKEN
  valueFrom: {secretKeyRef: {name: {{ . }}, key: {{ $.Values.model.hub.tokenKey }}}}
{{- end }}
{{- else }}
- {name: HF_HUB_OFFLINE, value: "1"}
{{- end }}
{{- end -}}

{{- define "baton.mounts" -}}
- {name: config, mountPath: /etc/baton/config, readOnly: true}
- {name: tmp, mountPath: /tmp}
{{- if ne .Values.model.source "demo" }}
- {name: model, mountPath: /models{{ if ne .Values.model.source "hub" }}, readOnly: true{{ end }}}
{{- end }}
{{- if ne .Values.clusterTls.mode "off" }}
- {name: cluster-tls, mountPath: /etc/baton/cluster-tls, readOnly: true}
{{- end }}
{{- end -}}

{{- define "baton.volumes" -}}
{{- $root := index . 0 -}}
{{- $component := index . 1 -}}
{{- $model := $root.Values.model -}}
- name: config
  configMap:
    name: {{ include "baton.fullname" $root }}-{{ $component }}
- name: tmp
  emptyDir: {}
{{- if eq $model.source "hub" }}
- name: model
  emptyDir: {sizeLimit: {{ $model.hub.cacheSize }}}
{{- else if eq $model.source "volume" }}
- name: model
  persistentVolumeClaim: {claimName: {{ include "baton.modelClaim" $root }}, readOnly: true}
{{- else if eq $model.source "image" }}
- name: model
  image: {reference: {{ $model.image.reference | quote }}, pullPolicy: {{ $model.image.pullPolicy }}}
{{- end }}
{{- if ne $root.Values.clusterTls.mode "off" }}
- name: cluster-tls
  secret: {secretName: {{ include "baton.tlsSecret" . }}, defaultMode: 0440}
{{- end }}
{{- end -}}

{{/* How many ranks run in each pod of a role, whose values are the argument. */}}
{{- define "baton.ranksPerNode" -}}
{{- $settings := .settings -}}
{{- $ranks := mul (default 1 $settings.tensor_parallel_size) (default 1 $settings.pipeline_parallel_size) (default 1 $settings.data_parallel_size) -}}
{{- max 1 (div $ranks (max 1 (int .nodes))) -}}
{{- end -}}

{{/* Threads of each rank: values of the role, and ranks in a pod. They share its CPUs; one each where none are set. */}}
{{- define "baton.threadsPerRank" -}}
{{- $resources := (index . 0).resources -}}
{{- $cpu := toString (default (default 1 (default dict $resources.requests).cpu) (default dict $resources.limits).cpu) -}}
{{- $milli := ternary (trimSuffix "m" $cpu | int) (mulf (float64 $cpu) 1000 | int) (hasSuffix "m" $cpu) -}}
{{- max 1 (div $milli (mul 1000 (index . 1))) -}}
{{- end -}}
