{{/* Template of pods of a role: root context, role, and component, which is the role or that of its other nodes. */}}
{{- define "baton.podTemplate" -}}
{{- $root := index . 0 -}}
{{- $role := index . 1 -}}
{{- $component := index . 2 -}}
{{- $leads := eq $role $component -}}
{{- $pod := get $root.Values $role -}}
{{- $several := gt (int $pod.nodes) 1 -}}
{{- $onGpu := gt (int $pod.gpu.count) 0 -}}
{{- $connector := $root.Values.connector -}}
{{- $rdma := and (eq $connector.type "nixl") $connector.nixl.rdma.enabled -}}
{{- $mtls := ne $root.Values.clusterTls.mode "off" -}}
metadata:
  labels:
    {{- include "baton.podLabels" (list $root $component $pod.podLabels) | nindent 4 }}
  annotations:
    checksum/config: {{ include "baton.config" (list $root $role) | sha256sum }}
    {{- with $pod.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  serviceAccountName: {{ include "baton.serviceAccountName" $root }}
  automountServiceAccountToken: false
  enableServiceLinks: false
  {{- with $root.Values.image.pullSecrets }}
  imagePullSecrets:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $pod.runtimeClassName }}
  runtimeClassName: {{ . }}
  {{- end }}
  securityContext:
    {{- include "baton.podSecurityContext" $root | nindent 4 }}
  terminationGracePeriodSeconds: {{ $pod.terminationGracePeriodSeconds }}
  {{- include "baton.scheduling" (list $root $role $component) | nindent 2 }}
  containers:
    - name: {{ $role }}
      image: {{ include "baton.image" (list $root (ternary $root.Values.image.cuda $root.Values.image.cpu $onGpu)) | quote }}
      imagePullPolicy: {{ $root.Values.image.pullPolicy }}
      args:
        - serve
        - {{ $role }}
        - --config=/etc/baton/config/baton.yaml
        {{- if include "baton.usesRedis" $root }}
        - --config=/etc/baton/redis/baton.yaml
        {{- end }}
        - --pod-id=$(POD_NAME)
        {{- if $several }}
        - --nnodes={{ $pod.nodes }}
        - --node-rank=$(NODE_RANK)
        - --master-addr=$({{ ternary "POD_IP" "LWS_LEADER_ADDRESS" $leads }})
        {{- end }}
      env:
        {{- include "baton.env" $root | nindent 8 }}
        {{- if $several }}
        - name: NODE_RANK
          valueFrom: {fieldRef: {fieldPath: "metadata.labels['leaderworkerset.sigs.k8s.io/worker-index']"}}
        - name: POD_IP
          valueFrom: {fieldRef: {fieldPath: status.podIP}}
        {{- end }}
        {{- if not $onGpu }}
        - name: OMP_NUM_THREADS
          {{- $ranks := int (include "baton.ranksPerNode" $pod) }}
          {{- if gt $ranks 1 }}
          value: {{ include "baton.threadsPerRank" (list $pod $ranks) | quote }}
          {{- else }}
          valueFrom: {resourceFieldRef: {containerName: {{ $role }}, resource: {{ ternary "limits" "requests" (hasKey (default dict $pod.resources.limits) "cpu") }}.cpu, divisor: "1"}}
          {{- end }}
        {{- end }}
        {{- if eq $connector.type "nixl" }}
        {{- with $connector.nixl.ucxTls }}
        - {name: UCX_TLS, value: {{ . | quote }}}
        {{- end }}
        {{- with $connector.nixl.ucxNetDevices }}
        - {name: UCX_NET_DEVICES, value: {{ . | quote }}}
        {{- end }}
        {{- end }}
        {{- with $pod.extraEnv }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      {{- if $leads }}
      ports:
        - {name: grpc, containerPort: {{ include "baton.podPort" $role }}}
        - {name: metrics, containerPort: 9100}
        {{- if $several }}
        - {name: nodes, containerPort: 29500}
        {{- end }}
      {{- if $mtls }}
      # The kubelet cannot show a certificate, so the probes ask the metrics port, which opens once the pod serves.
      startupProbe:
        httpGet: {path: /metrics, port: metrics}
        periodSeconds: 5
        timeoutSeconds: 5
        failureThreshold: {{ div (add $pod.startupSeconds 4) 5 }}
      livenessProbe:
        httpGet: {path: /metrics, port: metrics}
        periodSeconds: 10
        timeoutSeconds: 5
        failureThreshold: 6
      readinessProbe:
        httpGet: {path: /metrics, port: metrics}
        periodSeconds: 5
        timeoutSeconds: 5
      {{- else }}
      # A pod that drains is alive, but not ready.
      startupProbe:
        grpc: {port: {{ include "baton.podPort" $role }}, service: liveness}
        periodSeconds: 5
        timeoutSeconds: 5
        failureThreshold: {{ div (add $pod.startupSeconds 4) 5 }}
      livenessProbe:
        grpc: {port: {{ include "baton.podPort" $role }}, service: liveness}
        periodSeconds: 10
        timeoutSeconds: 5
        failureThreshold: 6
      readinessProbe:
        grpc: {port: {{ include "baton.podPort" $role }}}
        periodSeconds: 2
        timeoutSeconds: 5
      {{- end }}
      {{- end }}
      resources:
        {{- $resources := deepCopy $pod.resources }}
        {{- $limits := default dict $resources.limits }}
        {{- if $onGpu }}
        {{- $_ := set $limits $pod.gpu.resource (int $pod.gpu.count) }}
        {{- end }}
        {{- if $rdma }}
        {{- $_ := set $limits $connector.nixl.rdma.resource (int $connector.nixl.rdma.count) }}
        {{- end }}
        {{- $_ := set $resources "limits" $limits }}
        {{- toYaml $resources | nindent 8 }}
      securityContext:
        {{- if and $rdma $connector.nixl.rdma.ipcLock }}
        allowPrivilegeEscalation: false
        readOnlyRootFilesystem: true
        capabilities: {drop: [ALL], add: [IPC_LOCK]}
        {{- else }}
        {{- include "baton.containerSecurityContext" $root | nindent 8 }}
        {{- end }}
      volumeMounts:
        {{- include "baton.mounts" $root | nindent 8 }}
        {{- if $pod.sharedMemory }}
        - {name: shm, mountPath: /dev/shm}
        {{- end }}
        {{- if include "baton.usesSharedStorage" $root }}
        - {name: kv, mountPath: /kv}
        {{- end }}
        {{- if include "baton.usesRedis" $root }}
        - {name: redis, mountPath: /etc/baton/redis, readOnly: true}
        {{- end }}
  volumes:
    {{- include "baton.volumes" (list $root $role) | nindent 4 }}
    {{- with $pod.sharedMemory }}
    - name: shm
      emptyDir: {medium: Memory, sizeLimit: {{ . }}}
    {{- end }}
    {{- if include "baton.usesSharedStorage" $root }}
    - name: kv
      persistentVolumeClaim: {claimName: {{ include "baton.kvClaim" $root }}}
    {{- end }}
    {{- if include "baton.usesRedis" $root }}
    - name: redis
      secret:
        secretName: {{ include "baton.redisSecret" $root }}
        defaultMode: 0440
        items: [{key: baton.yaml, path: baton.yaml}]
    {{- end }}
{{- end -}}
