"""The pods that the router sends work to: connections, health, load, and whether they fit together."""

from router.pods.cluster import Cluster, ModelFacts
from router.pods.pod import Pod, PodClaim, PodState
from router.pods.session import DecodeSession, DeltaSink

__all__ = ["Cluster", "DecodeSession", "DeltaSink", "ModelFacts", "Pod", "PodClaim", "PodState"]
