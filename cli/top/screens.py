"""Screens above the two views: the timeline of a request, and the help."""

from __future__ import annotations

from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen, Screen
from textual.widgets import Footer, Static

from cli.top.answers import Request, Timeline
from cli.top.columns import POD_COLUMNS, REQUEST_COLUMNS
from cli.top.timeline_chart import draw
from cli.top.words import plain

_SCROLLBAR_CELLS = 2
_KEYS = (
    ("1, 2", "the cluster, its last requests"),
    ("< >", "sort by the column to the left or right"),
    ("r", "reverse the order"),
    ("f", "show only prefill, decode or those that are not ready;"),
    ("", "of requests, those under way, failed or with fallbacks"),
    ("m", "show only one model"),
    ("up down", "move; also j k, page up, page down, home, end, mouse"),
    ("left right", "scroll columns that do not fit"),
    ("enter", "the timeline of a request"),
    ("tab", "from the table to what is below it"),
    ("escape", "back"),
    ("q", "quit"),
)


class TimelineScreen(Screen[None]):
    """The timeline of one request."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,backspace", "dismiss", "Back", key_display="esc")]

    def __init__(self, request: Request) -> None:
        super().__init__()
        self.request = request
        self.is_settled = False  # the request has ended, and its timeline is final
        self.status = Static(classes="status")  # of the router
        self._timeline: Timeline | None = None
        self._chart = Static(f"Request {plain(self.request.id)}\nWaiting for the router.", id="chart", markup=False)

    def compose(self) -> ComposeResult:
        """See Screen."""
        yield self.status
        with VerticalScroll():
            yield self._chart
        yield Footer(show_command_palette=False)

    def show(self, timeline: Timeline) -> None:
        """Draws it."""
        self._timeline = timeline
        self.is_settled = timeline.request.is_over
        self.on_resize()

    def fail(self, why: str) -> None:
        """Says why there is none."""
        self.is_settled = True
        self._chart.update(Text(f"Request {plain(self.request.id)}\n{why}"))

    def on_resize(self) -> None:
        """Fits it to the width of the terminal."""
        if self._timeline is not None and self.size:
            self._chart.update(draw(self._timeline, self.size.width - _SCROLLBAR_CELLS))


class HelpScreen(ModalScreen[None]):
    """Keys, and what columns mean."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q,question_mark,enter", "dismiss", "Close", show=False)]

    def compose(self) -> ComposeResult:
        """See Screen."""
        with VerticalScroll(id="help"):
            yield Static(_help_text(), markup=False)


def _help_text() -> Text:
    text = Text("Keys (escape closes this)\n", "bold")
    text.append(_table(_KEYS), "not bold")
    for title, columns in (("Pods", POD_COLUMNS), ("Requests", REQUEST_COLUMNS)):
        text.append(f"\n\n{title}\n", "bold")
        text.append(_table([(column.title, column.about) for column in columns]), "not bold")
    return text


def _table(rows: tuple[tuple[str, str], ...] | list[tuple[str, str]]) -> str:
    return "\n".join(f"  {name:<12} {about}" for name, about in rows)
