"""What a person sees."""

from __future__ import annotations

import io

import pytest

from deploy.pod_process import PodSpec
from deploy.terminal import Terminal

SPEC = PodSpec("prefill-0", "prefill", (), {}, "127.0.0.1:1")


class Tty(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_plain_without_a_terminal() -> None:
    out, err = io.StringIO(), io.StringIO()
    terminal = Terminal(out, err)
    terminal.pod_ready(SPEC, 1.25, again=False)
    terminal.pod_line("prefill-0", "[prefill-0] a log line")
    terminal.pod_line("prefill-0", "print")
    terminal.pod_died(SPEC, -9, 0.5)
    assert out.getvalue().split() == ["prefill-0", "prefill", "127.0.0.1:1", "ready", "in", "1.2", "s"]
    assert err.getvalue().splitlines()[:2] == ["[prefill-0] a log line", "[prefill-0] print"]
    assert "killed by SIGKILL" in err.getvalue()
    assert "\x1b" not in out.getvalue() + err.getvalue()


def test_colours_on_a_terminal_unless_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b" in Terminal(Tty(), Tty()).bold("x")
    monkeypatch.setenv("NO_COLOR", "1")
    assert Terminal(Tty(), Tty()).bold("x") == "x"


def test_a_reader_that_left_does_not_end_the_cluster() -> None:
    closed = io.StringIO()
    closed.close()
    Terminal(closed, closed).say("nobody hears")
