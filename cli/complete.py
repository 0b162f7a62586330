"""`baton complete`: continues a prompt on a running router."""

from __future__ import annotations

from collections.abc import Sequence

from cli.exit_codes import OF_CLIENTS
from cli.generation import ENVIRONMENT_HELP, Answer, open_router, parse_generation, read_stdin, report_router_error
from cli.router_client import RouterError
from common.config import ArgumentParser, epilog_of
from common.errors import ConfigError

EXAMPLES = (
    'baton complete "The capital of Italy is" --temperature 0',
    "baton complete --verbose --max-tokens 500 < prompt.txt",
)


def main(argv: Sequence[str]) -> int:
    """Prints the continuation of the prompt. Returns the exit code; raises ConfigError."""
    parser = ArgumentParser(
        prog="baton complete",
        usage="%(prog)s [PROMPT] [options]",
        description="Prints how the model continues a prompt.",
        epilog=epilog_of(examples=EXAMPLES, exit_codes=OF_CLIENTS, more=ENVIRONMENT_HELP),
    )
    parser.add_argument("prompt", nargs="?", help="The text to continue; default: read from stdin.")
    args, options = parse_generation(parser, argv)
    try:
        prompt = args.prompt if args.prompt is not None else read_stdin("the prompt")
        if not prompt:
            raise ConfigError("no prompt: give one as argument or on stdin")
        with open_router(options) as router:
            body = options.body(options.model or router.default_model()) | {"prompt": prompt}
            answer = Answer(verbose=options.verbose)
            answer.write(router.stream_complete(body) if options.stream else [router.complete(body)])
    except RouterError as error:
        return report_router_error(error)
    return 0
