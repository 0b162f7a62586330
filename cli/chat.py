"""`baton chat`: a conversation with a running router."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from baton import Client
from cli.exit_codes import OF_CLIENTS, report_error
from cli.generation import (
    ENVIRONMENT_HELP,
    GenerationOptions,
    PrintedAnswer,
    default_model,
    open_router,
    parse_generation,
    read_stdin,
)
from common.config import ArgumentParser, build, epilog_of
from common.errors import BatonError, ConfigError
from deploy.cluster_state import StateError, state_root

EXAMPLES = (
    "baton chat                              # a conversation; /help there lists its commands",
    'baton chat "What is the capital of France?" --temperature 0',
    'cat report.txt | baton chat --system "Summarise the text." --verbose',
)
GREETING = "/help lists commands, Ctrl-C stops an answer, Ctrl-D ends."
COMMANDS_HELP = '''\
/system [TEXT]     show the system message, or replace it; "none" removes it
/set [NAME VALUE]  show the settings, or change one; "none" leaves it to the router
/clear             forget the conversation, not the system message
/help              this text
/exit              end, as does Ctrl-D

A message of several lines stands between """ and """, or has a backslash at the end of each line but the last.
Ctrl-C stops an answer; what was said so far stays in the conversation.'''
_QUOTES = '"""'
_FIXED = frozenset({"url", "tls_ca", "timeout_s"})  # what /set cannot change
_HISTORY_FILE, _MAX_HISTORY = "chat_history", 1000


class Conversation:
    """The messages so far; each turn adds what was said by both."""

    def __init__(self, router: Client, options: GenerationOptions, model: str, system: str | None) -> None:
        self._router = router
        self.options = options
        self._model = model
        self.system = system
        self.messages: list[dict[str, str]] = []

    def say(self, text: str) -> None:
        """Sends the user's `text` and prints the answer.

        If that fails, or is interrupted before there is an answer, the conversation stays as it was. Raises BatonError
        or KeyboardInterrupt.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        system = [{"role": "system", "content": self.system}] if self.system else []
        said, request = [*system, *messages], self.options.request(self.options.model or self._model)
        answer = PrintedAnswer(verbose=self.options.verbose)
        router = self._router
        try:
            answer.write(router.stream_chat(said, **request) if self.options.stream else [router.chat(said, **request)])
        except KeyboardInterrupt:
            if answer.text:
                self.messages = [*messages, {"role": "assistant", "content": answer.text}]
            raise
        self.messages = [*messages, {"role": "assistant", "content": answer.text}]

    def clear(self) -> None:
        """Forgets everything but the system message."""
        self.messages = []

    def set(self, name: str, value: str) -> None:
        """Changes an option to what its text means. Raises ConfigError."""
        names = sorted(settings_of(self.options))
        if name not in names:
            close = difflib.get_close_matches(name, names, n=1)
            raise ConfigError(
                f"{name}: unknown setting; " + (f"did you mean {close[0]}?" if close else ", ".join(names))
            )
        if name == "stop":
            stop = [] if value == "none" else [value]
            self.options = msgspec.structs.replace(self.options, stop=stop)
            return
        changed = build(GenerationOptions, argparse.Namespace(**{name: value}))
        self.options = msgspec.structs.replace(self.options, **{name: getattr(changed, name)})


def settings_of(options: GenerationOptions) -> dict[str, object]:
    """The settings that /set can change, by name."""
    return {name: getattr(options, name) for name in options.__struct_fields__ if name not in _FIXED}


def main(argv: Sequence[str]) -> int:
    """One turn if a message is given or piped in, else a conversation. Returns 0; raises BatonError."""
    parser = ArgumentParser(
        prog="baton chat",
        usage="%(prog)s [MESSAGE] [options]",
        description="Talks to the model.",
        epilog=epilog_of(examples=EXAMPLES, exit_codes=OF_CLIENTS, more=ENVIRONMENT_HELP),
    )
    parser.add_argument("message", nargs="*", help="A single message; default: stdin, or a conversation at a terminal.")
    parser.add_argument("--system", metavar="TEXT", help="System message.")
    args, options = parse_generation(parser, argv)
    message = " ".join(args.message) or read_stdin("the message").strip()
    with open_router(options) as router:
        model = options.model or default_model(router)
        conversation = Conversation(router, options, model, args.system)
        if message:
            conversation.say(message)
        else:
            with _line_editing():
                _converse(conversation, model)
    return 0


def _converse(conversation: Conversation, model: str) -> None:
    print(f"{model} at your service. {GREETING}")
    while True:
        try:
            text, is_command = read_message(input)
        except EOFError:
            print()
            return
        except KeyboardInterrupt:  # at the prompt: drop the message
            print()
            continue
        if is_command and text in ("/exit", "/quit"):
            return
        if is_command:
            try:
                print(_command(conversation, text))
            except ConfigError as error:
                print(error.message)
        elif text:
            _turn(conversation, text)


class Typed(NamedTuple):
    """A line that was typed at the prompt."""

    text: str
    is_command: bool


def read_message(ask: Callable[[str], str]) -> Typed:
    """A command, or a message of one line or, between quotes or with backslashes, of several.

    Raises EOFError or KeyboardInterrupt.
    """
    text = ask("> ").strip()
    if text.startswith(_QUOTES):
        text = text.removeprefix(_QUOTES)
        while not text.rstrip().endswith(_QUOTES):
            text += "\n" + ask("... ")
        return Typed(text.rstrip().removesuffix(_QUOTES).strip("\n"), is_command=False)
    while text.endswith("\\"):
        text = text.removesuffix("\\") + "\n" + ask("... ").rstrip()
    return Typed(text, is_command=text.startswith("/"))


def _command(conversation: Conversation, text: str) -> str:
    """Carries out a command and returns what to print. Raises ConfigError."""
    name, _, rest = text.partition(" ")
    rest = rest.strip()
    match name:
        case "/help":
            return COMMANDS_HELP
        case "/clear":
            conversation.clear()
            return "The conversation is forgotten."
        case "/system":
            if rest:
                conversation.system = None if rest == "none" else rest
            return f"system message: {conversation.system or 'none'}"
        case "/set":
            setting, _, value = rest.partition(" ")
            if setting and not value.strip():
                raise ConfigError(f"{setting}: a value is missing: /set {setting} VALUE")
            if setting:
                conversation.set(setting, value.strip())
            return "\n".join(_show(conversation.options, setting))
    close = difflib.get_close_matches(name, ("/help", "/clear", "/system", "/set", "/exit"), n=1)
    return f"{name}: unknown command; " + (f"did you mean {close[0]}?" if close else "see /help")


def _show(options: GenerationOptions, only: str = "") -> Iterator[str]:
    for name, value in settings_of(options).items():
        if only in ("", name):
            text = {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)
            yield f"{name:<12} {'the router decides' if value in (None, []) else text}"


def _turn(conversation: Conversation, text: str) -> None:
    """One exchange; what goes wrong ends the turn, not the conversation."""
    try:
        conversation.say(text)
    except KeyboardInterrupt:
        print("(stopped)")
    except BatonError as error:
        sys.stdout.flush()
        report_error(error)


@contextlib.contextmanager
def _line_editing() -> Iterator[None]:
    """Line editing for input(), with the messages of earlier conversations, which only this user can read."""
    try:
        import readline
    except ImportError:  # readline is missing on some platforms
        yield
        return
    try:
        file = state_root() / _HISTORY_FILE
    except StateError:  # without a state directory there is no history
        yield
        return
    with contextlib.suppress(OSError):
        readline.read_history_file(file)
    readline.set_history_length(_MAX_HISTORY)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.close(os.open(file, os.O_WRONLY | os.O_CREAT, 0o600))
            readline.write_history_file(file)
