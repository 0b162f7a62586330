"""The pods that the router sends work to: connections, health, load, and whether they fit together."""

from router.pods.cluster import Cluster
from router.pods.load import PodClaim, PodLoad, Share
from router.pods.model_pods import ModelFacts, ModelPods
from router.pods.pod import Pod, PodState
from router.pods.session import DecodeSession, DeltaSink

__all__ = [
    "Cluster",
    "DecodeSession",
    "DeltaSink",
    "ModelFacts",
    "ModelPods",
    "Pod",
    "PodClaim",
    "PodLoad",
    "PodState",
    "Share",
]
