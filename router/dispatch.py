"""Sends requests to pods. The life of one request in the router:

1. A front (HTTP or gRPC) turns what the client sent into a Draft.                         gateway/, grpc_servicer
2. It is validated, tokenised once, its blocks are hashed once.                            preprocess
3. It is admitted, or refused with 429 or 503.                                             service
4. A decode pod is chosen, and a prefill pod if a remote prefill is wanted and possible.   Dispatcher.route
5. Both legs open at once: Submit on the decode pod's session, a Prefill call.             Generation
6. The first token to arrive, usually prefill's, goes to the client at once; decode brings the rest. Each index is
   accepted once, and a different token for it is never passed over in silence.
7. If prefill fails, the decode pod is told and computes the prompt itself, or ends the request with an error that is
   not retried if its kv_failure_policy is fail: it alone knows what has come. If decode is lost, another decode pod
   gets the prompt and the output so far; seeds are positional, so the client sees no seam.
8. Tokens become text; a stop string ends the request.                                     output
9. The front streams; its going away ends both legs at once, as does the deadline.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Sequence
from itertools import count
from typing import NamedTuple

from common.errors import UnavailableError
from router.config import RouterConfig
from router.generation import Generation
from router.metrics import RouterMetrics
from router.pods import Cluster, Pod
from router.policies import Policy, RequestFacts, create_policy
from router.request import GenerationRequest

logger = logging.getLogger(__name__)

_NO_PREFILL_POD = "no prefill pod is ready that fits a decode pod, and remote_prefill is always"


class Route(NamedTuple):
    """The pods of one dispatch."""

    decode: Pod
    prefill: Pod | None  # None: the decode pod prefills


class Dispatcher:
    """Owns the policies and gives each request its transfer id."""

    def __init__(self, cluster: Cluster, config: RouterConfig, metrics: RouterMetrics) -> None:
        self.cluster = cluster
        self.config = config
        self.metrics = metrics
        self._prefill_policy = create_policy(config.prefill_policy)
        self._decode_policy = create_policy(config.decode_policy)
        self._router_id = secrets.token_hex(4)  # pods serve several routers
        self._numbers = count(1)

    @property
    def unavailable_reason(self) -> str:
        """Why no request can be dispatched now; empty: one can."""
        decode_pods = self.cluster.ready_decode()
        if not decode_pods:
            return self.cluster.explain()
        if self.config.remote_prefill == "always" and not any(self._partners(decode, 0) for decode in decode_pods):
            return _NO_PREFILL_POD
        return ""

    def generate(self, request: GenerationRequest) -> Generation:
        """A generation that is dispatched when its context is entered."""
        return Generation(request, self, f"{request.request_id}.{self._router_id}-{next(self._numbers)}")

    def route(self, request: GenerationRequest, *, resumed: bool, avoid: Pod | None) -> Route:
        """Choose pods. A resumed request has output already; `avoid` is used only if nothing else is ready.

        Raises UnavailableError if no decode pod is ready, or no prefill pod is and a remote prefill is a must.
        """
        facts = RequestFacts(
            num_prompt_tokens=len(request.prompt_token_ids),
            max_tokens=request.sampling.max_tokens,
            block_hashes=request.block_hashes,
            priority=request.priority,
        )
        candidates = self.cluster.ready_decode()
        decode = _choose(self._decode_policy, facts, [pod for pod in candidates if pod is not avoid] or candidates)
        if decode is None:
            raise UnavailableError(self.cluster.explain())
        if reason := self._reason_to_prefill_locally(facts, resumed=resumed):
            self.metrics.dispatched.labels("local", reason).inc()
            return Route(decode, None)
        prefill = _choose(self._prefill_policy, facts, self._partners(decode, facts.num_prompt_tokens))
        if prefill is None:
            if self.config.remote_prefill == "always":
                raise UnavailableError(_NO_PREFILL_POD)
            self.metrics.dispatched.labels("local", "no_prefill_pod").inc()
            logger.info("%s: prefilled by decode pod %s: no prefill pod is ready", request.request_id, decode.address)
            return Route(decode, None)
        self.metrics.dispatched.labels("remote", "planned").inc()
        return Route(decode, prefill)

    def _reason_to_prefill_locally(self, facts: RequestFacts, *, resumed: bool) -> str:
        """Metric label of the reason; empty: the prompt should go to a prefill pod."""
        config = self.config
        if resumed:
            return "resumed"
        if config.remote_prefill == "never" or not config.prefill:
            return "colocated"
        if config.remote_prefill == "auto" and facts.num_prompt_tokens < config.min_remote_prefill_tokens:
            return "short_prompt"
        return ""

    def _partners(self, decode: Pod, num_prompt_tokens: int) -> list[Pod]:
        """Prefill pods that can hand such a prompt over to `decode`."""
        assert decode.info is not None
        connector = decode.info.connector
        return [
            pod
            for pod in self.cluster.ready_prefill()
            if pod.info is not None
            and connector
            and pod.info.connector == connector
            and pod.info.max_model_len > num_prompt_tokens
        ]


def _choose(policy: Policy, facts: RequestFacts, pods: Sequence[Pod]) -> Pod | None:
    chosen = policy.choose(facts, [pod.snapshot() for pod in pods])
    return next((pod for pod in pods if chosen is not None and pod.address == chosen.address), None)
