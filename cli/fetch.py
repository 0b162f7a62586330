"""`baton fetch`: downloads a model from the hub into a directory that processes then read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cli.exit_codes import OF_TOOLS
from common.config import ArgumentParser, epilog_of
from deploy.cluster_config import ModelSource
from deploy.model_download import fetch_to
from deploy.terminal import Terminal

EXAMPLES = ("baton fetch Qwen/Qwen3-0.6B --revision main --directory /models/qwen3",)


def main(argv: Sequence[str]) -> int:
    """Downloads the files that pods and router read. Returns 0; raises ConfigError."""
    parser = ArgumentParser(
        prog="baton fetch",
        usage="%(prog)s MODEL --directory DIR [options]",
        description="Downloads a model from the hub into a directory, for `--model` of pods and router. What is there "
        "already and has not changed is kept.",
        epilog=epilog_of(
            examples=EXAMPLES, exit_codes=OF_TOOLS, more="HF_TOKEN in the environment gives access to gated models."
        ),
    )
    parser.add_argument("model", metavar="MODEL", help="Id of the model on the hub.")
    parser.add_argument("--directory", required=True, metavar="DIR", type=Path, help="Where the files go.")
    parser.add_argument("--revision", help="Branch, tag or commit; default: the main branch.")
    args = parser.parse_args(argv)
    fetch_to(ModelSource(args.model, args.revision, "MODEL"), args.directory, Terminal())
    return 0
