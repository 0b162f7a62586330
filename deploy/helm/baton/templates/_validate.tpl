{{/* Values that contradict each other; each ends with what to change. */}}
{{- define "baton.validate" -}}
{{- include "baton.validate.model" . -}}
{{- include "baton.validate.connector" . -}}
{{- include "baton.validate.drain" . -}}
{{- include "baton.validate.scaling" . -}}
{{- include "baton.validate.security" . -}}
{{- include "baton.validate.nodes" . -}}
{{- include "baton.validate.routes" . -}}
{{- include "baton.validate.monitoring" . -}}
{{- end -}}

{{- define "baton.validate.model" -}}
{{- $model := .Values.model -}}
{{- $downloads := or (eq $model.source "hub") (and (eq $model.source "volume") $model.volume.download) -}}
{{- if and $downloads (not $model.hub.repository) -}}
{{- fail "model: a download from the hub needs an id: set model.hub.repository" -}}
{{- end -}}
{{- if and $downloads (not $model.hub.revision) -}}
{{- fail "model.hub.revision is empty, so that pods which start at different times could load different weights and refuse each other: set it to a commit or tag of model.hub.repository" -}}
{{- end -}}
{{- if and (eq $model.source "volume") (not $model.volume.existingClaim) (not $model.volume.download) -}}
{{- fail "model.source is volume, and the volume would be empty: set model.volume.existingClaim, or model.volume.download: true" -}}
{{- end -}}
{{- if and $model.volume.download (ne $model.source "volume") -}}
{{- fail (printf "model.volume.download has no effect with model.source: %s; set model.source: volume, or remove it" $model.source) -}}
{{- end -}}
{{- if and (eq $model.source "image") (not $model.image.reference) -}}
{{- fail "model.source is image: set model.image.reference to the image with the model" -}}
{{- end -}}
{{- if and $model.hub.repository (not $downloads) -}}
{{- fail (printf "model.hub.repository has no effect with model.source: %s; set model.source: hub, or model.source: volume with model.volume.download: true" $model.source) -}}
{{- end -}}
{{- end -}}

{{- define "baton.validate.connector" -}}
{{- $connector := .Values.connector -}}
{{- range $role := list "prefill" "decode" -}}
{{- $pod := get $.Values $role -}}
{{- if and (eq $connector.type "nixl") (not $pod.sharedMemory) -}}
{{- fail (printf "connector.type is nixl, and UCX needs shared memory: set %s.sharedMemory, for example to 1Gi" $role) -}}
{{- end -}}
{{- $ranks := int (include "baton.ranksPerNode" $pod) -}}
{{- if and (gt (int $pod.gpu.count) 0) (ne (int $pod.gpu.count) $ranks) -}}
{{- fail (printf "%s.gpu.count is %d, and %s.settings and nodes make for %d ranks in each pod, which use a GPU each: set it to %d, or %s.settings.tensor_parallel_size; for more pods raise %s.replicas" $role (int $pod.gpu.count) $role $ranks $ranks $role $role) -}}
{{- end -}}
{{- end -}}
{{- if and $connector.nixl.rdma.enabled (ne $connector.type "nixl") -}}
{{- fail (printf "connector.nixl.rdma.enabled has no effect with connector.type: %s; set connector.type: nixl, or disable it" $connector.type) -}}
{{- end -}}
{{- if and $connector.nixl.rdma.ipcLock (not $connector.nixl.rdma.enabled) -}}
{{- fail "connector.nixl.rdma.ipcLock needs RDMA: set connector.nixl.rdma.enabled: true, or remove ipcLock" -}}
{{- end -}}
{{- if and $connector.options.store (not (include "baton.isDirect" .)) -}}
{{- fail (printf "connector.options.store is an option of nixl, and connector.type is %s: set connector.type: nixl, or remove it" $connector.type) -}}
{{- end -}}
{{- range $key := list "url" "store.url" -}}
{{- if hasKey $connector.options $key -}}
{{- fail (printf "connector.options has %s, which may hold a password and would be readable in a ConfigMap: put it into the Secret of redis.existingSecret" $key) -}}
{{- end -}}
{{- end -}}
{{- $redis := .Values.redis -}}
{{- if and $redis.bundled $redis.existingSecret -}}
{{- fail "redis.bundled and redis.existingSecret exclude each other: keep the one whose server is to hold the blocks" -}}
{{- end -}}
{{- if and (include "baton.usesRedis" .) (not $redis.bundled) (not $redis.existingSecret) -}}
{{- fail "the connector needs Redis: set redis.bundled: true, or redis.existingSecret to the Secret with the URL of your server" -}}
{{- end -}}
{{- if and (not (include "baton.usesRedis" .)) (or $redis.bundled $redis.existingSecret) -}}
{{- fail "redis is configured, and the connector does not use it: set connector.type: redis, or connector.options.store: redis with nixl, or remove redis.bundled and redis.existingSecret" -}}
{{- end -}}
{{- end -}}

{{- define "baton.validate.drain" -}}
{{- $margin := 10 -}}
{{- range $component := list "router" "prefill" "decode" -}}
{{- $values := get $.Values $component -}}
{{- $preStop := default 0 $values.preStopSeconds | float64 -}}
{{- $needed := addf $preStop (float64 $values.drainSeconds) $margin -}}
{{- if gt $needed (float64 $values.terminationGracePeriodSeconds) -}}
{{- fail (printf "%s would be killed before it has drained: terminationGracePeriodSeconds is %v, and preStopSeconds + drainSeconds + %d is %v; raise %s.terminationGracePeriodSeconds or lower %s.drainSeconds" $component $values.terminationGracePeriodSeconds $margin $needed $component $component) -}}
{{- end -}}
{{- $strategy := $values.strategy -}}
{{- if and (eq (toString $strategy.maxSurge) "0") (eq (toString $strategy.maxUnavailable) "0") -}}
{{- fail (printf "%s.strategy allows no upgrade: set maxSurge or maxUnavailable to 1" $component) -}}
{{- end -}}
{{- if and (eq $values.topology.mode "pack") $values.affinity -}}
{{- fail (printf "%s.topology.mode is pack, which sets an affinity, as %s.affinity does: set topology.mode: none, or remove affinity" $component $component) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "baton.validate.scaling" -}}
{{- if and (lt (int .Values.decode.replicas) 1) (not .Values.decode.autoscaling.enabled) -}}
{{- fail "decode.replicas is 0, and every request needs a decode pod: set it to at least 1" -}}
{{- end -}}
{{- if lt (int .Values.router.replicas) 1 -}}
{{- fail "router.replicas is 0: set it to at least 1" -}}
{{- end -}}
{{- range $role := list "prefill" "decode" -}}
{{- $scaling := (get $.Values $role).autoscaling -}}
{{- if $scaling.enabled -}}
{{- if lt (int $scaling.minReplicas) 1 -}}
{{- fail (printf "%s.autoscaling.minReplicas is %d, and a role without pods reports no load that would bring one back: set it to at least 1" $role (int $scaling.minReplicas)) -}}
{{- end -}}
{{- if lt (int $scaling.maxReplicas) (int $scaling.minReplicas) -}}
{{- fail (printf "%s.autoscaling.maxReplicas is %d, less than minReplicas, %d: raise maxReplicas" $role (int $scaling.maxReplicas) (int $scaling.minReplicas)) -}}
{{- end -}}
{{- if and (eq $.Values.autoscaling.kind "keda") (not $.Values.monitoring.enabled) -}}
{{- fail (printf "%s.autoscaling asks Prometheus for metrics with the labels that this chart's monitors add: set monitoring.enabled: true, or autoscaling.kind: hpa" $role) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "baton.validate.security" -}}
{{- $tls := .Values.clusterTls -}}
{{- if eq $tls.mode "secret" -}}
{{- range $component := list "router" "prefill" "decode" -}}
{{- if not (get $tls.secrets $component) -}}
{{- fail (printf "clusterTls.mode is secret: set clusterTls.secrets.%s to the Secret with its ca.crt, tls.crt and tls.key" $component) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $client := .Values.router.tls -}}
{{- if and $client.enabled (not $client.secret) (not $client.certManager.issuerRef) -}}
{{- fail "router.tls.enabled needs a certificate: set router.tls.secret, or router.tls.certManager.issuerRef" -}}
{{- end -}}
{{- if and $client.secret $client.certManager.issuerRef -}}
{{- fail "router.tls.secret and router.tls.certManager.issuerRef exclude each other: remove one" -}}
{{- end -}}
{{- if and $client.certManager.issuerRef (not $client.certManager.dnsNames) -}}
{{- fail "router.tls.certManager.issuerRef needs names for the certificate: set router.tls.certManager.dnsNames" -}}
{{- end -}}
{{- if and (not $client.enabled) (or $client.secret $client.certManager.issuerRef) -}}
{{- fail "router.tls has a certificate and is off: set router.tls.enabled: true, or remove the certificate" -}}
{{- end -}}
{{- $policy := .Values.networkPolicy -}}
{{- $outside := or (eq .Values.model.source "hub") .Values.redis.existingSecret -}}
{{- if and $policy.enabled $policy.restrictEgress $outside (not $policy.extraEgress) -}}
{{- fail "networkPolicy.restrictEgress cuts pods off from the hub or from your Redis server: name it in networkPolicy.extraEgress" -}}
{{- end -}}
{{- if and $policy.restrictEgress (not $policy.enabled) -}}
{{- fail "networkPolicy.restrictEgress has no effect: set networkPolicy.enabled: true" -}}
{{- end -}}
{{- end -}}

{{- define "baton.validate.nodes" -}}
{{- range $role := list "prefill" "decode" -}}
{{- $pod := get $.Values $role -}}
{{- $ranks := mul (default 1 $pod.settings.tensor_parallel_size) (default 1 $pod.settings.pipeline_parallel_size) -}}
{{- if and (gt (int $pod.nodes) 1) (mod $ranks $pod.nodes) -}}
{{- fail (printf "%s.nodes is %d, and %d ranks cannot be shared evenly by as many: set %s.settings.tensor_parallel_size to a multiple" $role (int $pod.nodes) (int $ranks) $role) -}}
{{- end -}}
{{- if and (gt (int $pod.nodes) 1) (eq $.Values.clusterTls.mode "off") -}}
{{- fail (printf "%s.nodes is %d, and nodes know each other by certificates: set clusterTls.mode" $role (int $pod.nodes)) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "baton.validate.routes" -}}
{{- if and .Values.ingress.enabled (not .Values.ingress.hosts) -}}
{{- fail "ingress.enabled needs a host name: set ingress.hosts" -}}
{{- end -}}
{{- if and .Values.httpRoute.enabled (not .Values.httpRoute.parentRefs) -}}
{{- fail "httpRoute.enabled needs a Gateway: set httpRoute.parentRefs" -}}
{{- end -}}
{{- if and .Values.httpRoute.enabled .Values.router.tls.enabled -}}
{{- fail "httpRoute.enabled sends plain HTTP to routers, and router.tls.enabled makes them refuse it: terminate TLS at the Gateway and disable router.tls, or write an HTTPRoute and a BackendTLSPolicy of your own" -}}
{{- end -}}
{{- end -}}

{{- define "baton.validate.monitoring" -}}
{{- $monitoring := .Values.monitoring -}}
{{- $open := and (hasKey .Values.router.settings "metrics_need_key") (not .Values.router.settings.metrics_need_key) -}}
{{- if and $monitoring.enabled .Values.router.apiKeys.existingSecret (not $monitoring.apiKeySecret) (not $open) -}}
{{- fail "monitoring.enabled with API keys needs an operator's key to read the router's metrics: set monitoring.apiKeySecret, or router.settings.metrics_need_key: false" -}}
{{- end -}}
{{- if and $monitoring.rules.enabled (not $monitoring.enabled) -}}
{{- fail "monitoring.rules.enabled needs metrics with the labels that this chart's monitors add: set monitoring.enabled: true" -}}
{{- end -}}
{{- end -}}
