"""The two views of `baton top`: the cluster, and its last requests."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Generic

from rich.text import Text
from textual import on
from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.widgets import Static

from cli.top.answers import ClusterView, Request, RequestList
from cli.top.columns import POD_COLUMNS, REQUEST_COLUMNS, Order
from cli.top.figures import READY, ClusterFigures, PodFigures, changes_between, figures_of, handoff_lines, rank_lines
from cli.top.table import Row, SortedTable
from cli.top.words import plain

_MAX_CHANGES = 100
_NEWEST_FIRST = Order(column=1, is_descending=True)
_Filter = tuple[str, Callable[[Row], bool]]  # its name, and which rows it lets through


class Lines(Vertical):
    """Lines of text under a title, which can be scrolled."""

    DEFAULT_CSS = """
    Lines > .title { height: 1; text-style: bold; }
    Lines:focus-within > .title { text-style: bold reverse; }
    Lines Static { text-wrap: nowrap; text-overflow: ellipsis; }
    Lines .lines { height: auto; }
    """

    def __init__(self, title: str, *, empty: str, id: str) -> None:  # noqa: A002
        super().__init__(id=id)
        self._title = title
        self._empty = empty

    def compose(self) -> ComposeResult:
        """See Widget."""
        yield Static(self._title, classes="title", markup=False)
        with VerticalScroll():
            yield Static(classes="lines")

    def show(self, lines: list[str]) -> None:
        """Shows these."""
        self.query_one(".lines", Static).update(Text("\n".join(lines or [self._empty])))


class TablePane(Vertical, Generic[Row]):
    """A table of rows of one kind, of which filters let some through; a line above it says which."""

    noun = ""
    model_of: Callable[[Row], str | None]
    filters: Sequence[_Filter[Row]] = ()

    def __init__(self, table: SortedTable[Row], *, id: str) -> None:  # noqa: A002
        super().__init__(id=id)
        self.table = table
        self.model: str | None = None  # None: all models
        self._filter = 0
        self._all: list[Row] = []

    def filter_next(self) -> None:
        """Lets other rows through."""
        self._filter = (self._filter + 1) % len(self.filters)
        self.show_rows(self._all)

    def choose_model(self, model: str | None) -> None:
        """Lets only rows of this model through; None: of all."""
        self.model = model
        self.show_rows(self._all)

    def show_rows(self, rows: list[Row]) -> None:
        """Shows those of the rows that the filters let through."""
        self._all = rows
        name, lets_through = self.filters[self._filter]
        seen = [row for row in rows if lets_through(row) and self.model in (None, type(self).model_of(row))]
        self.table.show(seen)
        active = [name] if name else []
        active += [f"model {plain(self.model)}"] if self.model is not None else []
        self.show_caption(f"{len(seen)} of {len(rows)} {self.noun}: {', '.join(active)}" if active else "")

    def show_caption(self, active: str) -> None:
        """Says which filters are active, if any."""
        for caption in self.query(".caption").results(Static):  # none while the pane is being mounted or removed
            caption.update(Text(active or f"All {len(self._all)} {self.noun}"))


class ClusterPane(TablePane[PodFigures]):
    """Pods, handoffs between them, and what has changed while one looked."""

    noun = "pods"
    filters = (
        ("", lambda row: True),
        ("prefill", lambda row: row.pod.role == "prefill"),
        ("decode", lambda row: row.pod.role == "decode"),
        ("not ready", lambda row: row.pod.state != READY),
    )

    def __init__(self) -> None:
        super().__init__(SortedTable(POD_COLUMNS, Order(column=1, is_descending=False), id="pods"), id="cluster")
        self._changes: deque[str] = deque(maxlen=_MAX_CHANGES)
        self._last: ClusterView | None = None
        self._has_gap = False  # answers were missed since the last one that was shown

    @staticmethod
    def model_of(row: PodFigures) -> str | None:
        """The model that a pod serves."""
        return row.pod.model

    def compose(self) -> ComposeResult:
        """See Widget."""
        yield Static(classes="caption")
        yield self.table
        yield Static(id="pod-detail")
        with Horizontal(id="below"):
            yield Lines("Handoffs (ended: in the last 10 s)", empty="none", id="handoffs")
            yield Lines("Changes", empty="none since the start of baton top", id="changes")

    def show_view(self, view: ClusterView) -> ClusterFigures:
        """Shows an answer of the router. Returns its figures."""
        last, self._last = self._last, view
        figures = figures_of(view, None if self._has_gap else last)
        self._has_gap = False
        if last is not None:
            now = datetime.now().astimezone().strftime("%H:%M:%S")
            self._changes.extendleft(f"{now} {change}" for change in changes_between(last, view))
        self.show_rows(figures.pods)
        self.query_one("#handoffs", Lines).show(handoff_lines(view))
        self.query_one("#changes", Lines).show(list(self._changes))
        return figures

    def note_gap(self) -> None:
        """Answers are missing: there are no rates until there are two again."""
        self._has_gap = True

    @on(SortedTable.Moved)
    def show_detail(self) -> None:
        """Shows what does not fit into the row under the cursor."""
        row = self.table.selected
        self.query_one("#pod-detail", Static).update(Text("" if row is None else _describe(row)))


class RequestsPane(TablePane[Request]):
    """The last requests."""

    noun = "requests"
    filters = (
        ("", lambda row: True),
        ("under way", lambda row: not row.is_over),
        ("failed", lambda row: row.status == "failed"),
        ("with fallbacks", lambda row: row.num_events > 0),
    )

    def __init__(self) -> None:
        super().__init__(SortedTable(REQUEST_COLUMNS, _NEWEST_FIRST, id="recent"), id="requests")
        self._empty = "Waiting for the router."

    @staticmethod
    def model_of(row: Request) -> str | None:
        """The model that a request is for."""
        return row.model

    def compose(self) -> ComposeResult:
        """See Widget."""
        yield Static(self._empty, classes="caption", markup=False)
        yield self.table

    def show_list(self, answer: RequestList) -> None:
        """Shows an answer of the router."""
        self._empty = "No request yet." if answer.max_kept else "The router keeps no timelines: max_timelines is 0."
        self.show_rows(answer.data)

    def show_caption(self, active: str) -> None:
        """Says which filters are active, if any, and why there is nothing."""
        super().show_caption(active or (f"The last {len(self._all)} requests" if self._all else self._empty))


def _describe(row: PodFigures) -> str:
    pod = row.pod
    facts = [plain(pod.name), plain(pod.address)] if pod.pod_id else [plain(pod.address)]
    facts += [f"version {plain(pod.version)}"] if pod.version else []
    facts += [f"model {plain(pod.model)}"] if pod.model else []
    why = f": {plain(pod.detail)}" if pod.detail else ""
    return "\n".join([f"{'  '.join(facts)}  {plain(pod.state)}{why}", *rank_lines(pod)])
