"""`baton run-batch`: answers the requests of a file in OpenAI's batch format."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, ClassVar

import uvloop
from msgspec import Meta

from cli.exit_codes import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_UNREACHABLE
from cli.http_endpoint import ENVIRONMENT_HELP, EndpointOptions, allow_connections, open_endpoint
from cli.progress import ProgressBar
from common.config import ArgumentParser, add_arguments, build, epilog_of
from common.errors import ConfigError
from loadgen.batch.output import OutputFile
from loadgen.batch.runner import Batch, InputFile
from loadgen.http_client import HttpClient

_DESCRIPTION = (
    "Sends the requests of a JSONL file in OpenAI's batch format to a running endpoint and appends each answer to "
    "another file as it comes. The same command continues a batch that was interrupted; no request that has an answer "
    "is sent again."
)
_EXAMPLES = (
    "baton run-batch -i requests.jsonl -o answers.jsonl",
    "baton run-batch -i requests.jsonl -o answers.jsonl --url http://10.0.0.3:8000 --max-concurrency 256",
)
_EXIT_CODES = {
    0: "every request was answered with status 200",
    EXIT_FAILED: "some have an error, which their lines name; or the run ended early, as with a refused API key",
    2: "a wrong option, or files that do not belong together",
    EXIT_UNREACHABLE: "the endpoint does not answer; the same command continues",
    EXIT_INTERRUPTED: "interrupted; the same command continues",
}


class BatchOptions(EndpointOptions, frozen=True, kw_only=True):
    """Endpoint: where requests go."""

    TOPICS: ClassVar[dict[str, tuple[str, ...]]] = {
        "Endpoint": ("url", "tls_ca", "timeout_s"),
        "Batch": ("max_concurrency", "retries"),
    }

    max_concurrency: Annotated[int, Meta(ge=1, le=65536, description="Requests under way at most.")] = 64
    retries: Annotated[
        int,
        Meta(
            ge=0,
            le=100,
            description="How often a request is sent again after a broken connection, a time-out or status 408, 429, "
            "500, 502, 503 or 504; after 1 s, 2 s, 4 s ... or what Retry-After says, at most 60 s.",
        ),
    ] = 5


def main(argv: Sequence[str]) -> int:
    """Runs the batch, or what is left of it. Returns the exit code; raises BatonError."""
    parser = ArgumentParser(
        prog="baton run-batch",
        usage="%(prog)s -i FILE -o FILE [options]",
        description=_DESCRIPTION,
        epilog=epilog_of(examples=_EXAMPLES, exit_codes=_EXIT_CODES, more=ENVIRONMENT_HELP),
    )
    parser.add_argument("-i", "--input-file", type=Path, required=True, metavar="FILE", help="Requests.")
    parser.add_argument("-o", "--output-file", type=Path, required=True, metavar="FILE", help="Answers.")
    add_arguments(parser, BatchOptions)
    args = parser.parse_args(argv)
    options = build(BatchOptions, args)
    return _run(InputFile(args.input_file), args.output_file, options)


def _run(source: InputFile, output_path: Path, options: BatchOptions) -> int:
    if not source.path.is_file():
        raise ConfigError(f"--input-file: {source.path} is no file", param="input_file")
    if output_path.exists() and output_path.samefile(source.path):
        raise ConfigError("--output-file: is the input file", param="output_file")
    allow_connections()
    client, output = open_endpoint(options), OutputFile(output_path)
    try:
        total, before = source.check_answered_by(output), len(output.done)
        if output.num_cut:
            sys.stderr.write(f"{output_path}: an incomplete last line of {output.num_cut} bytes was cut off\n")
        if before:
            sys.stderr.write(f"{output_path} has {before} of {total} answers\n")
        try:
            uvloop.run(_send(source, output, client, options, total))
        except KeyboardInterrupt:
            sys.stderr.write(f"interrupted at {len(output.done)} of {total} answers; the same command continues\n")
            raise
    finally:
        output.close()
    failed = len(output.done) - output.num_good
    print(f"{total} requests: {output.num_good} answered, {failed} with an error; {before} of them in earlier runs")
    return EXIT_FAILED if failed else 0


async def _send(source: InputFile, output: OutputFile, client: HttpClient, options: BatchOptions, total: int) -> None:
    try:
        with ProgressBar(total, done=len(output.done)) as bar:
            batch = Batch(
                source,
                output,
                client,
                retries=options.retries,
                timeout_s=options.timeout_s,
                on_answer=lambda answer: bar.advance(has_failed=not answer.is_good),
            )
            await batch.run(options.max_concurrency)
    finally:
        client.close()
