"""`baton profile-engine`: runs the engine's steps on this machine, and writes what `baton plan` needs to know of it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from cli.exit_codes import OF_TOOLS
from common.config import ArgumentParser, add_arguments, build, epilog_of
from common.demo_model import DEMO_MODEL_NAME, demo_model_path
from common.engine.config import CacheConfig, ModelConfig, SchedulerConfig

_DESCRIPTION = (
    "Runs steps of the real engine in this process, prompts and batches of several sizes, and writes how long they "
    "take as a profile for `baton plan`. Give it the cores and the device that a pod will have, and nothing else to do."
)
_EXAMPLES = (
    "baton profile-engine --output demo.json",
    "baton profile-engine Qwen/Qwen3-0.6B --dtype bfloat16 --num-threads 8 --output qwen3.json",
    "taskset -c 0 baton profile-engine --num-threads 1",
)


class ProfileSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Measuring: for how long."""

    seconds: Annotated[
        float, Meta(ge=1, le=3600, description="Time for steps; more of it takes in larger batches.")
    ] = 20.0


# What is measured, and those of its settings that are not an engine's own or make no difference.
_EXCLUDED: dict[type[msgspec.Struct], frozenset[str]] = {
    ProfileSettings: frozenset(),
    ModelConfig: frozenset({"model", "logits_processors"}),
    CacheConfig: frozenset({"enable_prefix_caching"}),
    SchedulerConfig: frozenset({"target_itl_ms", "max_num_waiting", "policy"}),
}


def main(argv: Sequence[str]) -> int:
    """Measures and writes. Returns the exit code; raises ConfigError."""
    parser = ArgumentParser(
        prog="baton profile-engine",
        description=_DESCRIPTION,
        epilog=epilog_of(examples=_EXAMPLES, exit_codes=OF_TOOLS),
        usage="%(prog)s [MODEL] [options]",
    )
    parser.add_argument("name", metavar="MODEL", nargs="?", help="Directory or hub id. (default: the demo model)")
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("profile.json"),
        metavar="FILE",
        help="Where to write. (default: %(default)s)",
    )
    for component, excluded in _EXCLUDED.items():
        add_arguments(parser, component, exclude=excluded)
    args = parser.parse_args(argv)
    settings, model, cache, scheduler = (
        build(component, args, exclude=excluded) for component, excluded in _EXCLUDED.items()
    )
    assert isinstance(settings, ProfileSettings)
    assert isinstance(model, ModelConfig)
    assert isinstance(cache, CacheConfig)
    assert isinstance(scheduler, SchedulerConfig)
    from planning.measuring import measure_profile
    from planning.profile import write_profile

    profile = measure_profile(
        msgspec.structs.replace(model, model=args.name or str(demo_model_path())),
        msgspec.structs.replace(scheduler, target_itl_ms=None),  # so that a step takes what it is given
        cache,
        seconds=settings.seconds,
        say=_say,
    )
    write_profile(msgspec.structs.replace(profile, model=args.name or DEMO_MODEL_NAME), args.output)
    print(f"{args.output}: {len(profile.points)} kinds of steps, median error of the fit {profile.fit_error:.1%}")
    return 0


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
