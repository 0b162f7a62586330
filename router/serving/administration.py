"""Operators' actions on pods: drain one, take it back, reset all prefix caches."""

from __future__ import annotations

import asyncio
import logging

from common.errors import BatonError, UnavailableError, UnknownPodError, quoted
from router.fairness.tenant import Tenant
from router.pods.cluster import Cluster
from router.pods.pod import Pod

logger = logging.getLogger(__name__)


class Administration:
    """Passes an operator's wishes on to the pods. Callers have checked that it is an operator."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    async def drain(self, address: str, operator: Tenant) -> int:
        """Has the pod take no new requests of any router. Returns how many requests and transfers still run on it.

        Raises UnknownPodError, UnavailableError or DeadlineExceededError.
        """
        pod = self._pod(address)
        num_unfinished = await pod.drain()
        _log(f"{pod.role_name} pod {address} was drained, {num_unfinished} requests and transfers remain", operator)
        return num_unfinished

    async def undrain(self, address: str, operator: Tenant) -> None:
        """Has the pod take requests again. Raises as `drain` does, and UnavailableError if it shuts down."""
        pod = self._pod(address)
        await pod.undrain()
        _log(f"{pod.role_name} pod {address} was undrained", operator)

    async def reset_prefix_caches(self, operator: Tenant) -> list[str]:
        """Empties the prefix caches of all pods. Returns the pods' addresses. Raises UnavailableError, which names the
        pods that could not be reset; the others were."""
        pods = self._cluster.pods
        problems = [problem for problem in await asyncio.gather(*map(_reset, pods)) if problem]
        _log(f"the prefix caches of {len(pods) - len(problems)} of {len(pods)} pods were reset", operator)
        if problems:
            raise UnavailableError(f"prefix caches were not reset: {'; '.join(problems)}")
        return [pod.address for pod in pods]

    def _pod(self, address: str) -> Pod:
        pod = self._cluster.by_address.get(address)
        if pod is None:
            raise UnknownPodError(f"there is no pod at {quoted(address)}", param="address")
        return pod


async def _reset(pod: Pod) -> str:
    """Returns what went wrong; empty: nothing."""
    try:
        await pod.reset_prefix_cache()
    except BatonError as error:
        return f"{pod.role_name} pod {pod.address}: {error.message}"
    return ""


def by_operator(operator: Tenant) -> str:
    """Who has done something, for the log."""
    return f"by operator {operator.name}" if operator.name else "by a client without a key"


def _log(event: str, operator: Tenant) -> None:
    logger.info("%s, %s", event, by_operator(operator))
