{{/* PromQL label matchers of a component's metrics: root context and component. */}}
{{- define "baton.matchers" -}}
{{- $root := index . 0 -}}
namespace="{{ $root.Release.Namespace }}",app_kubernetes_io_instance="{{ $root.Release.Name }}",app_kubernetes_io_component="{{ index . 1 }}"
{{- end -}}

{{/* A quantile of one of the router's histograms, 0 without requests: root context, metric without _bucket, quantile, window. */}}
{{- define "baton.quantile" -}}
(histogram_quantile({{ index . 2 }}, sum by (le) (rate({{ index . 1 }}_bucket{ {{- include "baton.matchers" (list (index . 0) "router") }}}[{{ index . 3 }}]))) > 0) or vector(0)
{{- end -}}
