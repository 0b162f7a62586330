"""`baton up --dry-run`: what would be started, and starts nothing."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Mapping

import msgspec
import yaml

from deploy.cluster_config import ClusterCommand
from deploy.cluster_plan import ClusterPlan, plan_cluster, public_ports
from deploy.model_download import check_models
from deploy.pod_process import PodSpec
from deploy.scratch import scratch_directory

_SECRETS = (
    (re.compile(r"://[^@/\s]*@"), "://***@"),  # user and password of a URL
    (re.compile(r"^(requirepass) .*$", re.MULTILINE), r"\1 ***"),
)


def print_plan(command: ClusterCommand) -> int:
    """Prints configuration, files and commands without passwords. Asks no hub for models. Returns 0; raises ConfigError
    as the start would."""
    check_models(command.model_sources)
    config = command.config
    port, grpc_port = public_ports(config)
    with scratch_directory() as scratch:
        plan = plan_cluster(
            config, port, grpc_port, scratch, command.config_file, command.passed, os.environ, command.parallel
        )
    settings = msgspec.structs.asdict(msgspec.structs.replace(config, port=port, grpc_port=grpc_port))
    engine = msgspec.to_builtins(settings.pop("engine"))
    parts = ["# Settings of the cluster", _yaml({"cluster": msgspec.to_builtins(settings) | _flat(engine)})]
    for file, text in plan.files.items():
        parts += [f"# {file}, for this user's eyes only, with passwords that differ at each start", text]
    parts += ["# Processes in the order of their start; the pods and the router at once", *_commands(plan)]
    sys.stdout.write(_without_secrets("\n".join(parts)) + "\n")
    return 0


def _flat(settings: Mapping[str, object]) -> dict[str, object]:
    """Settings without the structs that group them, as they stand in files."""
    flat: dict[str, object] = {}
    for name, value in settings.items():
        flat |= _flat(value) if isinstance(value, dict) else {name: value}
    return flat


def _yaml(document: object) -> str:
    return yaml.safe_dump(document, sort_keys=False, default_flow_style=False)


def _commands(plan: ClusterPlan) -> list[str]:
    specs = [*(store.spec for store in plan.stores), *plan.pods, plan.router]
    return [f"# {spec.name}\n{_shell_line(spec)}" for spec in specs]


def _shell_line(spec: PodSpec) -> str:
    added = {name: value for name, value in spec.env.items() if os.environ.get(name) != value}
    variables = [f"{name}={shlex.quote(value)}" for name, value in added.items()]
    return " ".join([*variables, shlex.join(spec.command)])


def _without_secrets(text: str) -> str:
    for pattern, replacement in _SECRETS:
        text = pattern.sub(replacement, text)
    return text
