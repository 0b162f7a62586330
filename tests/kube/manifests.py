"""What the chart renders, as `podman kube play` takes it.

Podman 4.3, Debian's, is no kubelet. What is changed for it, and nothing else:

1. Kinds that it does not know are left out: Service, ServiceAccount, PodDisruptionBudget and what needs a controller.
   The DNS names of a Service become aliases of its pods in Podman's network, which has them all, ready or not: what the
   headless Services of the chart ask for.
2. A Deployment is played once for each replica, under a name of its own: Podman runs one replica.
3. Each pod has copies of its ConfigMaps, and volumes named after the pod: Podman keeps one volume for all pods that use
   a name, even of an emptyDir. The one at /dev/shm is left out, as users may not write to it there:
   Podman's own is as large (tests/kube/podman.py).
4. Secrets are played as ConfigMaps with the mounted keys: Podman ignores `stringData` and `items`, and mounts `data`
   undecoded. It also ignores `defaultMode` and `fsGroup`: files are readable to all users of the pod.
5. A claim is owned by the pods' user, by an annotation of Podman's, in place of `fsGroup`.
6. Probes are left out, and run by the test from outside, as the kubelet does (tests/deploy/probes.py): Podman knows no
   gRPC probe, and runs others inside the container, with curl.
7. `ports` are left out: Podman publishes each on the host, where those of a second pod collide. Kubernetes does not.
8. `preStop: sleep` is left out: Podman has no hooks. Grace periods are passed on by the test, when it deletes a pod.
9. `$(POD_NAME)` in arguments is replaced: Podman does not.

Images need no change: `IfNotPresent` finds those that were built here. Users, read-only roots, dropped capabilities,
`no-new-privileges`, memory limits, environment, arguments and restart policy are Podman's to apply as they are.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator

from tests.deploy.chart import NAMESPACE, Manifest, Rendered

_KUBELET = ("startupProbe", "livenessProbe", "readinessProbe", "lifecycle", "ports")


def claims(rendered: Rendered) -> list[Manifest]:
    """The PersistentVolumeClaims, owned by the pods' user."""
    owned = copy.deepcopy(rendered.of_kind("PersistentVolumeClaim"))
    for claim in owned:
        context = _pod_spec_with_claim(rendered, claim["metadata"]["name"])["securityContext"]
        owner = {"volume.podman.io/uid": str(context["runAsUser"]), "volume.podman.io/gid": str(context["fsGroup"])}
        claim["metadata"].setdefault("annotations", {}).update(owner)
    return owned


def pod_manifests(rendered: Rendered, workload: Manifest, pod_name: str) -> list[Manifest]:
    """One replica of a Deployment, and the objects that it mounts."""
    played = copy.deepcopy(workload)
    played["metadata"]["name"] = pod_name
    played["spec"]["replicas"] = 1
    spec = played["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    for key in _KUBELET:
        container.pop(key, None)
    container["args"] = [word.replace("$(POD_NAME)", pod_name) for word in container["args"]]
    spec["volumes"] = [volume for volume in spec["volumes"] if volume["name"] != "shm"]
    container["volumeMounts"] = [mount for mount in container["volumeMounts"] if mount["name"] != "shm"]
    for named in [*spec["volumes"], *container["volumeMounts"]]:
        named["name"] = f"{pod_name}-{named['name']}"
    return [*_mounted_objects(rendered, spec), played]


def dns_names(rendered: Rendered, workload: Manifest) -> Iterator[str]:
    """The names of the Services that select the pods of a Deployment."""
    labels = workload["spec"]["template"]["metadata"]["labels"]
    for service in rendered.of_kind("Service"):
        if service["spec"]["selector"].items() <= labels.items():
            name = service["metadata"]["name"]
            yield from (name, f"{name}.{NAMESPACE}.svc.cluster.local")


def _mounted_objects(rendered: Rendered, spec: Manifest) -> Iterator[Manifest]:
    """Objects with the names of the volumes, which then refer to them."""
    for volume in spec["volumes"]:
        if source := volume.get("configMap"):
            data = rendered.named("ConfigMap", source["name"])["data"]
        elif source := volume.pop("secret", None):
            texts = rendered.named("Secret", source["secretName"])["stringData"]
            data = {item["path"]: texts[item["key"]] for item in source["items"]}
        else:
            continue
        volume["configMap"] = {"name": volume["name"]}
        yield {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": volume["name"]}, "data": data}


def _pod_spec_with_claim(rendered: Rendered, name: str) -> Manifest:
    for _, template in rendered.pod_templates():
        for volume in template["spec"]["volumes"]:
            if volume.get("persistentVolumeClaim", {}).get("claimName") == name:
                return dict(template["spec"])
    raise AssertionError(f"no pod mounts the claim {name}")
