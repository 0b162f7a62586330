"""`baton chat`: a conversation with a running router."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence

from cli.generation import (
    GenerationOptions,
    open_router,
    parse_generation,
    read_stdin,
    report_router_error,
    write_pieces,
)
from cli.router_client import RouterClient, RouterError
from common.config import ArgumentParser

HELP = "/reset forgets the conversation, /exit or Ctrl-D ends; Ctrl-C cuts an answer short."


class Conversation:
    """The messages so far; each turn adds what was said by both."""

    def __init__(self, router: RouterClient, options: GenerationOptions, model: str, system: str | None) -> None:
        self._router = router
        self._options = options
        self._model = model
        self._system = [{"role": "system", "content": system}] if system else []
        self.messages: list[dict[str, str]] = []

    def say(self, text: str) -> None:
        """Sends the user's `text` and prints the answer. If that fails the conversation stays as it was."""
        messages = [*self.messages, {"role": "user", "content": text}]
        body = self._options.body(self._model) | {"messages": [*self._system, *messages]}
        answer = write_pieces(self._router.stream_chat(body) if self._options.stream else [self._router.chat(body)])
        self.messages = [*messages, {"role": "assistant", "content": answer}]

    def reset(self) -> None:
        """Forgets everything but the system message."""
        self.messages = []


def main(argv: Sequence[str]) -> int:
    """One turn if a message is given or piped in, else a conversation. Returns the exit code; raises ConfigError."""
    parser = ArgumentParser(prog="baton chat", description="Talks to the model.", epilog=HELP, allow_abbrev=False)
    parser.add_argument("message", nargs="*", help="A single message; default: stdin, or a conversation at a terminal.")
    parser.add_argument("--system", metavar="TEXT", help="System message.")
    args, options = parse_generation(parser, argv)
    try:
        message = " ".join(args.message) or read_stdin("the message").strip()
        with open_router(options) as router:
            model = options.model or router.default_model()
            conversation = Conversation(router, options, model, args.system)
            if message:
                conversation.say(message)
            else:
                _converse(conversation, model)
    except RouterError as error:
        return report_router_error(error)
    return 0


def _converse(conversation: Conversation, model: str) -> None:
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (line editing and history for input())
    print(f"{model} at your service. {HELP}")
    while True:
        try:
            text = input("> ").strip()
        except EOFError:
            print()
            return
        except KeyboardInterrupt:  # at the prompt: drop the line
            print()
            continue
        if text in ("/exit", "/quit"):
            return
        if text == "/reset":
            conversation.reset()
        elif text.startswith("/"):
            print(HELP)
        elif text:
            _turn(conversation, text)


def _turn(conversation: Conversation, text: str) -> None:
    """One exchange; what goes wrong ends the turn, not the conversation."""
    try:
        conversation.say(text)
    except KeyboardInterrupt:
        print("(cut short)")
    except RouterError as error:
        sys.stdout.flush()
        report_router_error(error)
