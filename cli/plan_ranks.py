"""`baton plan ranks`: how many ranks a model needs, and what each of them takes."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from cli.exit_codes import OF_TOOLS
from common.config import ArgumentParser, epilog_of
from common.demo_model import demo_model_path
from common.errors import ConfigError
from common.setting_values import parse_byte_size

_DESCRIPTION = (
    "Says what each rank of a model takes, by how many there are (--tensor-parallel-size), and how many it takes for a "
    "given memory of each. Reads the model's config.json, no weights. For models whose layers cache keys and values."
)
_EXAMPLES = (
    "baton plan ranks Qwen/Qwen3-0.6B --memory 1GiB",
    "baton plan ranks /models/llama --memory 80GB --dtype bfloat16 --tensor-parallel-size 4",
)
_DEGREES = (1, 2, 4, 8, 16, 32)
_MAX_RANKS = 1024


def main(argv: Sequence[str]) -> int:
    """Prints the table. Returns the exit code; raises ConfigError."""
    parser = ArgumentParser(
        prog="baton plan ranks",
        description=_DESCRIPTION,
        epilog=epilog_of(examples=_EXAMPLES, exit_codes=OF_TOOLS),
        usage="%(prog)s [MODEL] --memory SIZE [options]",
    )
    parser.add_argument("model", metavar="MODEL", nargs="?", help="Directory or hub id. (default: the demo model)")
    parser.add_argument("--memory", required=True, metavar="SIZE", help="What each rank may take: 80GB, 512MiB.")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="Default: the model's own.")
    parser.add_argument(
        "--kv-cache-dtype", choices=("auto", "int8", "fp8"), default="auto", help="auto: that of --dtype. (default)"
    )
    parser.add_argument("--block-size", default="16", metavar="N", help="Tokens of a KV block. (default: %(default)s)")
    parser.add_argument(
        "--tensor-parallel-size", metavar="N", help=f"Only this many ranks. (default: {', '.join(map(str, _DEGREES))})"
    )
    parser.add_argument(
        "--pipeline-parallel-size",
        default="1",
        metavar="N",
        help="Stages, each of as many ranks: 4x2 in the table. (default: %(default)s)",
    )
    parser.add_argument("--enable-expert-parallel", action="store_true", help="Experts are cut whole over the ranks.")
    args = parser.parse_args(argv)
    memory, block_size, degrees = _memory(args), _integer(args, "block_size", 1024), _degrees(args)
    from planning.ranks import describe_ranks, rank_table  # imports torch

    table = rank_table(
        args.model or str(demo_model_path()),
        degrees,
        args.dtype,
        pipeline_parallel_size=_integer(args, "pipeline_parallel_size", _MAX_RANKS),
        enable_expert_parallel=args.enable_expert_parallel,
        kv_cache_dtype=args.kv_cache_dtype,
    )
    print(describe_ranks(table, memory, block_size))
    return 0


def _memory(args: argparse.Namespace) -> int:
    try:
        return parse_byte_size(args.memory)
    except ValueError as error:
        raise ConfigError(f"--memory: {error}", param="memory") from error


def _degrees(args: argparse.Namespace) -> tuple[int, ...]:
    if args.tensor_parallel_size is None:
        return _DEGREES
    return (_integer(args, "tensor_parallel_size", _MAX_RANKS),)


def _integer(args: argparse.Namespace, name: str, most: int) -> int:
    text = getattr(args, name)
    if not text.isdecimal() or not 1 <= int(text) <= most:
        option = name.replace("_", "-")
        raise ConfigError(f"--{option}: must be an integer from 1 to {most}, got {text}", param=name)
    return int(text)
