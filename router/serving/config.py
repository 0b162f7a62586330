"""Settings of what is served: the models, and what becomes of requests for them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta

from router.admission.config import AdmissionConfig
from router.dispatching.config import SurvivalConfig
from router.placing.config import RoutingConfig
from router.requests.bounds import MAX_MODEL_CHARS
from router.requests.request import KVFailurePolicy
from router.tracing.config import RouterTracingConfig


def is_model_name(name: str) -> bool:
    """Whether a model may have this name."""
    return 0 < len(name) <= MAX_MODEL_CHARS and name.isprintable() and not name.isspace()


def names_by_location(models: Mapping[str, str]) -> dict[str, list[str]]:
    """Turns name -> location around: several names of one location are aliases."""
    names: dict[str, list[str]] = {}
    for name, location in models.items():
        names.setdefault(location, []).append(name)
    return names


class ModelsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Model: which ones are served, and how their answers are read."""

    TOPICS: ClassVar[dict[str, tuple[str, ...]]] = {"Answers": ("tool_parser", "reasoning_parser")}

    model: Annotated[
        str,
        Meta(
            description="Directory or hub id of the model, for its tokenizer and chat template; empty: the demo model."
        ),
    ] = ""
    revision: Annotated[str | None, Meta(description="Revision on the hub.")] = None
    served_model_name: Annotated[
        list[str],
        Meta(
            description="Names of the model in the API, the first of which is in answers; default: the last part of "
            "its path, or its hub id."
        ),
    ] = []
    models: Annotated[
        dict[str, str],
        Meta(
            description="Several models, as name=directory or name=hub id; names of the same one are its aliases. A "
            "pod belongs to the model that its own --served-model-name names."
        ),
    ] = {}
    models_file: Annotated[
        str,
        Meta(
            description="YAML file of several models, as name: directory or name: hub id. It is read again when it "
            "changes, so that models are added and removed while the router runs."
        ),
    ] = ""
    generation_config: Annotated[
        str,
        Meta(
            description="Sampling defaults: auto, generation_config.json in the model's directory; none, those of "
            "OpenAI's API; or the directory of another generation_config.json."
        ),
    ] = "auto"
    override_generation_config: Annotated[
        dict[str, int | float],
        Meta(description="Sampling defaults by their names in generation_config.json, which they win over."),
    ] = {}
    tool_parser: Annotated[
        str,
        Meta(
            description="How tool calls are found in answers: auto, by the chat template; none; hermes, llama3_json, "
            "mistral, pythonic; or one that a package adds."
        ),
    ] = "auto"
    reasoning_parser: Annotated[
        str,
        Meta(
            description="How reasoning is told from the rest of an answer: auto, by the chat template; none; "
            "deepseek_r1, mistral, qwen3."
        ),
    ] = "auto"

    def __post_init__(self) -> None:
        several = [setting for setting in ("models_file", "models") if getattr(self, setting)]
        others = [setting for setting in ("model", "revision", "served_model_name") if getattr(self, setting)]
        if several and (exclusive := [*several, *others])[1:]:
            first, second, *_ = [f"--{setting.replace('_', '-')}" for setting in exclusive]
            raise ValueError(f"{first} and {second} exclude each other")
        for setting in ("served_model_name", "models"):
            names: Collection[str] = getattr(self, setting)
            if len(names) != len(set(names)) or not all(map(is_model_name, names)):
                problem = f"names must differ and have 1 to {MAX_MODEL_CHARS} printable characters"
                raise ValueError(f"--{setting.replace('_', '-')}: {problem}")


class ServingConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Serving."""

    TOPICS: ClassVar[dict[str, tuple[str, ...]]] = {
        "Routing": ("kv_failure_policy",),
        "Limits on requests": (
            "request_timeout_s",
            "max_body_bytes",
            "max_choices",
            "max_prompt_tokens",
            "max_request_tokens",
            "max_body_values",
        ),
        "Process": ("max_timelines",),
    }
    DIVIDED: ClassVar[tuple[str, ...]] = ("max_timelines",)

    served_models: ModelsConfig = ModelsConfig()
    routing: RoutingConfig = RoutingConfig()
    kv_failure_policy: Annotated[
        KVFailurePolicy,
        Meta(
            description="What happens if the KV of a prompt does not arrive, unless the request has its own policy. "
            "recompute: the decode pod computes the prompt; fail: the request ends with 503."
        ),
    ] = "recompute"
    request_timeout_s: Annotated[float, Meta(gt=0, description="Seconds after which a request ends with 504.")] = 600.0
    max_body_bytes: Annotated[int, Meta(ge=1024, description="Largest HTTP request body and gRPC message.")] = 8 * 2**20
    max_choices: Annotated[int, Meta(ge=1, description="Most generations of one HTTP request: prompts times n.")] = 128
    max_prompt_tokens: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="Longest prompt; default: what fits the model's context."),
    ] = None
    max_request_tokens: Annotated[
        int,
        Meta(
            ge=1,
            description="Most prompt tokens of one request, over its prompts and n; a single prompt may always fill "
            "the model's context.",
        ),
    ] = 2**20
    max_body_values: Annotated[
        int,
        Meta(
            ge=1024,
            description="Most JSON values of an HTTP body, counted as commas and opening brackets; more if the model's "
            "context is longer. Parsing 250,000 delays all other requests by about 15 ms.",
        ),
    ] = 2**18
    admission: AdmissionConfig = AdmissionConfig()
    survival: SurvivalConfig = SurvivalConfig()
    tracing: RouterTracingConfig = RouterTracingConfig()
    max_timelines: Annotated[
        int,
        Meta(
            ge=0,
            le=100_000,
            description="Requests whose timelines are kept for /v1/requests, the last ones; about 3 KB each. 0: none.",
        ),
    ] = 1000
