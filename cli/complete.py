"""`baton complete`: continues a prompt on a running router."""

from __future__ import annotations

from collections.abc import Sequence

from cli.exit_codes import OF_CLIENTS
from cli.generation import ENVIRONMENT_HELP, PrintedAnswer, default_model, open_router, parse_generation, read_stdin
from common.config import ArgumentParser, epilog_of
from common.errors import ConfigError

EXAMPLES = (
    'baton complete "The capital of Italy is" --temperature 0',
    "baton complete --verbose --max-tokens 500 < prompt.txt",
)


def main(argv: Sequence[str]) -> int:
    """Prints the continuation of the prompt. Returns 0; raises BatonError."""
    parser = ArgumentParser(
        prog="baton complete",
        usage="%(prog)s [PROMPT] [options]",
        description="Prints how the model continues a prompt.",
        epilog=epilog_of(examples=EXAMPLES, exit_codes=OF_CLIENTS, more=ENVIRONMENT_HELP),
    )
    parser.add_argument("prompt", nargs="?", help="The text to continue; default: read from stdin.")
    args, options = parse_generation(parser, argv)
    prompt = args.prompt if args.prompt is not None else read_stdin("the prompt")
    if not prompt:
        raise ConfigError("no prompt: give one as argument or on stdin")
    with open_router(options) as router:
        request = options.request(options.model or default_model(router))
        answer = PrintedAnswer(verbose=options.verbose)
        answer.write(router.stream(prompt, **request) if options.stream else [router.generate(prompt, **request)])
    return 0
