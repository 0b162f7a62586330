"""The `baton` command: finds the command's module and imports nothing else, so that `baton --help` is instant."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import NamedTuple

from cli.exit_codes import EXIT_INTERRUPTED, report_error
from common import __version__


class Command(NamedTuple):
    """A command's module, and its line in the help."""

    module: str  # with a function main(argv) -> exit code
    summary: str
    extra: str = "all"  # extra of the distribution that the command needs


COMMANDS = {
    "up": Command("cli.up", "Start a cluster on this machine, in the foreground or with -d in the background."),
    "status": Command("cli.status", "Show the clusters in the background and their processes."),
    "top": Command("cli.top.command", "Show a cluster and its requests live in the terminal.", "top"),
    "logs": Command("cli.logs", "Show what the processes of a cluster in the background say."),
    "down": Command("cli.down", "End a cluster in the background."),
    "serve": Command("cli.serve", "Run one process: router, prefill or decode."),
    "health": Command("cli.health", "Ask one process whether it serves; for probes of containers."),
    "doctor": Command("cli.doctor", "Check what this machine has of what Baton needs."),
    "fetch": Command("cli.fetch", "Download a model from the hub into a directory.", "router"),
    "complete": Command("cli.complete", "Continue a prompt."),
    "chat": Command("cli.chat", "Talk to the model."),
    "bench": Command("cli.bench", "Measure an endpoint under load, search its limit, or compare two.", "router"),
    "run-batch": Command("cli.run_batch", "Answer the requests of a file in OpenAI's batch format.", "router"),
    "plan": Command("cli.plan", "Say how many prefill and decode pods a load needs, and why.", "router"),
    "profile-engine": Command("cli.profile_engine", "Measure the engine's steps here, for plans.", "engine"),
    "profile": Command("cli.profile", "Take a trace of a pod's engine while it serves.", "router"),
    "keys": Command("cli.keys", "Make API keys of the router.", "router"),
    "certs": Command("cli.certs", "Make certificates for router and pods, for development.", "certs"),
    "kv": Command("cli.kv", "Look into a store of KV blocks, check it, or empty it.", "engine"),
}
TOPICS = {
    "clusters": ("up", "status", "top", "logs", "down", "serve", "health"),
    "clients": ("complete", "chat", "run-batch"),
    "sizing": ("bench", "plan", "profile-engine"),
    "tools": ("doctor", "profile", "fetch", "kv", "keys", "certs"),
}
_HELP_END = """\
examples:
  baton up Qwen/Qwen3-0.6B -d        # a cluster in the background
  baton chat                         # talk to it
  baton down

environment:
  BATON_URL      address of the router for clients, http://host:port or grpc://host:port
  BATON_API_KEY  API key for clients

exit codes:
  0 success, 1 failure or a refused API key, 2 wrong option or setting, 3 nothing answers or runs, 130 interrupted

`baton COMMAND --help` describes a command's options and exit codes; `baton --version` prints the version."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command that `argv` (default: the process's arguments) names. Returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        code = _run(arguments)
        sys.stdout.flush()  # here, where a closed pipe is expected
        return code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of our output has closed it; keep the interpreter from failing once more when it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def help_text() -> str:
    """Returns the text that `baton --help` prints."""
    width = max(map(len, COMMANDS))
    lines = [
        "usage: baton COMMAND [options]",
        "",
        "Serves large language models with prefill and decode on separate pods.",
    ]
    for topic, names in TOPICS.items():
        lines += ["", f"{topic}:", *(f"  {name:<{width}}  {COMMANDS[name].summary}" for name in names)]
    return "\n".join([*lines, "", _HELP_END])


def _run(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(help_text())
        return 0
    if arguments[0] in ("-V", "--version"):
        print(f"baton {__version__}")
        return 0
    return _run_command(arguments[0], arguments[1:])


def _run_command(name: str, arguments: list[str]) -> int:
    from cli.extras import import_with_extra
    from common.config import report_config_error
    from common.errors import BatonError, ConfigError

    try:
        command = COMMANDS.get(name)
        if name in TOPICS["clients"]:
            os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # read at its import; it logs each failed handshake
        if command is None:
            import difflib  # costs as much time as the rest of this module

            close = difflib.get_close_matches(name, COMMANDS, n=1)
            hint = f"did you mean {close[0]}?" if close else f"known: {', '.join(COMMANDS)}"
            raise ConfigError(f"{name}: unknown command; {hint}")
        return int(import_with_extra(command.module, name, command.extra).main(arguments))
    except ConfigError as error:
        return report_config_error(error)
    except BatonError as error:
        return report_error(error)


if __name__ == "__main__":
    sys.exit(main())
