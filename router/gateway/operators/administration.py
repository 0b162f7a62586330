"""Endpoints for operators: POST /admin/pods/ADDRESS/drain and /undrain, POST /reset_prefix_cache, GET
/admin/step_times."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from router.fairness.tenant import Tenant
from router.placing.policies import PodTable
from router.security.access import AccessControl
from router.serving.served_model import ServedModel
from router.serving.service import InferenceService
from router.wire.answer_struct import AnswerStruct
from router.wire.exchange import TENANT

RESET_PATH = "/reset_prefix_cache"  # vLLM's
STEP_TIMES_PATH = "/admin/step_times"
POD_PATH = "/admin/pods/{address}"


class Drained(AnswerStruct):
    """Answer to draining a pod: requests and transfers of all routers that still run on it."""

    address: str
    num_unfinished: int


class Undrained(AnswerStruct):
    """Answer to taking a drained pod back."""

    address: str


class LearnedTimes(AnswerStruct):
    """The steps of a role's pods, by a line that the router has fitted to what they report; the least of their limits.

    `is_known`: enough steps were seen. Before that the line is a guess."""

    num_pods: int
    is_known: bool
    base_s: float  # seconds of any step
    token_s: float  # for each token that it computes
    context_s: float  # for each token of the requests there
    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int


class ModelStepTimes(AnswerStruct):
    """A served model; `null` for a role without ready pods. Handoffs take `handoff_s`, and `handoff_token_s` for each
    token whose KV is moved. Drafts are those of its ready decode pods since their start; see GET /v1/cluster."""

    name: str
    block_size: int
    max_model_len: int
    handoff_s: float
    handoff_token_s: float
    prefill: LearnedTimes | None
    decode: LearnedTimes | None
    num_verified_drafts: int
    num_accepted_drafts: int
    num_draft_verifications: int


class StepTimesOfModels(AnswerStruct):
    """Answer of GET /admin/step_times."""

    models: list[ModelStepTimes]


class PrefixCachesReset(AnswerStruct):
    """Answer of POST /reset_prefix_cache."""

    pods: list[str]


class AdministrationEndpoints:
    """Calls Administration. The guard above has checked the key."""

    def __init__(self, service: InferenceService, access: AccessControl) -> None:
        self._service = service
        self._administration = service.administration
        self._access = access

    @property
    def routes(self) -> list[Route]:
        """All of them."""
        return [
            Route(f"{POD_PATH}/drain", self._drain, methods=["POST"]),
            Route(f"{POD_PATH}/undrain", self._undrain, methods=["POST"]),
            Route(RESET_PATH, self._reset, methods=["POST"]),
            Route(STEP_TIMES_PATH, self._step_times, methods=["GET"]),
        ]

    async def _drain(self, request: Request) -> Response:
        address = request.path_params["address"]
        num_unfinished = await self._administration.drain(address, self._operator(request))
        return _json(Drained(address, num_unfinished))

    async def _undrain(self, request: Request) -> Response:
        address = request.path_params["address"]
        await self._administration.undrain(address, self._operator(request))
        return _json(Undrained(address))

    async def _reset(self, request: Request) -> Response:
        return _json(PrefixCachesReset(await self._administration.reset_prefix_caches(self._operator(request))))

    async def _step_times(self, request: Request) -> Response:
        return _json(StepTimesOfModels([_learned(model) for model in self._service.models]))

    def _operator(self, request: Request) -> Tenant:
        """Raises PermissionDeniedError for a web page if there are no keys."""
        self._access.check_no_page(request.headers.get("origin"))
        tenant = request.scope[TENANT]
        assert isinstance(tenant, Tenant)
        return tenant


def _learned(model: ServedModel) -> ModelStepTimes:
    pods, handoff = model.pods, model.dispatcher.estimates.handoff
    drafts = [stats.drafts for pod in pods.ready_decode() if (stats := pod.stats) is not None]
    num_verified = sum(each.num_verified for each in drafts)
    return ModelStepTimes(
        name=model.name,
        block_size=0 if pods.facts is None else pods.facts.block_size,
        max_model_len=model.max_model_len,
        handoff_s=handoff.base_s,
        handoff_token_s=handoff.token_s,
        prefill=_times_of(pods.prefill_table),
        decode=_times_of(pods.decode_table),
        num_verified_drafts=num_verified,
        num_accepted_drafts=min(sum(each.num_accepted for each in drafts), num_verified),
        num_draft_verifications=sum(each.num_verifications for each in drafts),
    )


def _times_of(table: PodTable) -> LearnedTimes | None:
    columns = table.columns()
    if not len(columns):
        return None
    line = table.step_times.line
    return LearnedTimes(
        num_pods=len(columns),
        is_known=table.step_times.is_known,
        base_s=line.base_s,
        token_s=line.token_s,
        context_s=line.context_s,
        num_blocks=int(columns.num_blocks.min()),
        max_num_seqs=int(columns.max_num_seqs.min()),
        max_num_batched_tokens=int(columns.max_num_batched_tokens.min()),
    )


def _json(answer: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(answer), media_type="application/json")
