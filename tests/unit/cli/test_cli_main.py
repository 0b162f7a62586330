"""The `baton` command itself."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from cli.main import COMMANDS, main
from common import __version__


def test_help_lists_every_command_and_imports_nothing_heavy() -> None:
    script = (
        "import sys; from cli.main import main; code = main(['--help']);"
        "heavy = {'torch', 'transformers', 'grpc', 'httpx', 'msgspec', 'fastapi'} & set(sys.modules);"
        "sys.exit(f'imported {heavy}' if heavy else code)"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert all(name in result.stdout for name in COMMANDS)


@pytest.mark.parametrize("argv", [["--help"], ["--version"], ["chat", "--help"]])
def test_a_reader_that_has_enough_is_no_error(argv: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "cli.main", *argv]
    result = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize(
    ("argv", "package", "message"),
    [
        (["serve", "router"], "uvicorn", "router: uvicorn is not installed; pip install 'baton-llm[router]'"),
        (["serve", "decode"], "zmq", "decode: zmq is not installed; pip install 'baton-llm[engine]'"),
        (["kv", "inspect"], "xxhash", "kv: xxhash is not installed; pip install 'baton-llm[engine]'"),
    ],
)
def test_a_missing_extra_is_named(argv: list[str], package: str, message: str) -> None:
    script = f"import sys; sys.modules[{package!r}] = None; from cli.main import main; sys.exit(main({argv!r}))"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (2, f"baton: error: {message}\n")


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"baton {__version__}\n"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["upp"], "upp: unknown command; did you mean up?"),
        (["serve", "gateway"], "gateway: unknown role; known: router, prefill, decode"),
        (["up", "--decode", "x"], "--decode: expected an integer, got 'x'"),
        (["up", "--gibberish"], "--gibberish: unknown option; see baton up --help-all"),
        (["up", "--remote-prefil=auto"], "--remote-prefil: unknown option; did you mean --remote-prefill?"),
        (["serve", "decode", "--max_num_seqs", "4"], "--max_num_seqs: unknown option; did you mean --max-num-seqs?"),
        (["complete", "hi", "--tempratur", "0"], "--tempratur: unknown option; did you mean --temperature?"),
        (["kv", "verify", "--delete"], "--delete: unknown option; did you mean --delete-corrupt?"),
        (["keys", "new", "--nam", "x"], "--nam: unknown option; did you mean --name?"),
        (["down", "now"], "'now': unexpected argument; see baton down --help"),
        (
            ["complete", "hi", "--url", "nonsense"],
            "--url: expected http://host:port or grpc://host:port, got 'nonsense'",
        ),
        (["kv", "purge"], "one of the arguments --namespace --all is required"),
        (["fetch", "/"], "the following arguments are required: --directory"),
        (["fetch", "/", "--directory", "x"], "MODEL: expected the id of a model on the hub, got the directory /"),
        (["fetch", "./none", "--directory", "x"], "MODEL: ./none does not exist"),
        (["fetch", "acme/tiny", "--directory", "/dev/null/x"], "--directory: cannot make /dev/null/x: Not a directory"),
        (["complete", ""], "no prompt: give one as argument or on stdin"),
    ],
)
def test_usage_errors_are_one_line_and_code_2(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    assert capsys.readouterr().err == f"baton: error: {message}\n"


@pytest.mark.parametrize("command", list(COMMANDS))
def test_every_command_has_help(command: str) -> None:
    result = subprocess.run([sys.executable, "-m", "cli.main", command, "--help"], capture_output=True, check=False)
    assert result.returncode == 0
    assert b"usage: baton " + command.encode() in result.stdout
