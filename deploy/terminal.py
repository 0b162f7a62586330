"""The terminal of a local cluster: progress on stdout, the pods' own lines on stderr; in the background a log."""

from __future__ import annotations

import os
import re
import sys
from typing import TextIO

from deploy.cluster_log import ClusterLog
from deploy.pod_process import PodSpec, describe_exit

_COLOURS = (36, 32, 33, 35, 34, 96, 92, 93)  # of pod names, in order of appearance
_BOLD, _RED, _DIM = 1, 31, 2
_PAINT = re.compile(r"\x1b\[\d+m")


class Terminal:
    """Plain text without a terminal or with NO_COLOR; the same text with colours otherwise."""

    def __init__(self, out: TextIO | None = None, err: TextIO | None = None, log: ClusterLog | None = None) -> None:
        """`log` gets everything as well, and after `detach` it alone."""
        self._out = out if out is not None else sys.stdout
        self._err = err if err is not None else sys.stderr
        self._log = log
        self._is_detached = False
        self._colour_of: dict[str, int] = {}

    @property
    def shows_progress(self) -> bool:
        """Whether somebody could watch a progress bar."""
        return not self._is_detached and self._err.isatty()

    def detach(self) -> None:
        """Writes to the log only from now on."""
        self._is_detached = True

    def say(self, text: str = "") -> None:
        """A line of progress."""
        self._write(self._out, text)
        self._note(text)

    def warn(self, text: str) -> None:
        """A line about something that went wrong."""
        self._write(self._err, self._paint(self._err, text, _RED))
        self._note(text)

    def pod_line(self, name: str, line: str) -> None:
        """A pod's own line, under the pod's name; lines that start with the name keep the one they have."""
        text = line.removeprefix(f"[{name}]").lstrip() if line.startswith(f"[{name}]") else line
        self._write(self._err, f"{self._paint(self._err, f'[{name}]', self._colour(name))} {text}")
        if self._log is not None:
            self._log.write(f"[{name}] {text}")

    def pod_ready(self, spec: PodSpec, seconds: float, *, again: bool) -> None:
        """A pod serves."""
        name = self._paint(self._out, f"{spec.name:<10}", self._colour(spec.name))
        self.say(f"  {name} {spec.role:<8} {spec.address:<22} ready{' again' if again else ''} in {seconds:.1f} s")

    def pod_died(self, spec: PodSpec, exit_code: int, delay_s: float) -> None:
        """A pod ended unasked."""
        self.warn(f"  {spec.name:<10} {spec.role:<8} ended ({describe_exit(exit_code)}), restart in {delay_s:g} s")

    def bold(self, text: str) -> str:
        """`text` for emphasis in `say`."""
        return self._paint(self._out, text, _BOLD)

    def dim(self, text: str) -> str:
        """`text` for an aside in `say`."""
        return self._paint(self._out, text, _DIM)

    def _colour(self, name: str) -> int:
        return self._colour_of.setdefault(name, _COLOURS[len(self._colour_of) % len(_COLOURS)])

    def _paint(self, stream: TextIO, text: str, colour: int) -> str:
        if not stream.isatty() or "NO_COLOR" in os.environ:
            return text
        return f"\x1b[{colour}m{text}\x1b[0m"

    def _note(self, text: str) -> None:
        if self._log is not None:
            self._log.write_own(_PAINT.sub("", text))

    def _write(self, stream: TextIO, text: str) -> None:
        if self._is_detached:
            return
        try:
            stream.write(text + "\n")
            stream.flush()
        except (OSError, ValueError):  # the terminal is gone; the cluster goes on
            pass
