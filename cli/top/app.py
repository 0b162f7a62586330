"""The terminal application of `baton top`."""

from __future__ import annotations

from typing import Any, ClassVar

from rich.text import Text
from textual import on
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.widgets import ContentSwitcher, Footer, Static

from cli.top.answers import ClusterView
from cli.top.panes import ClusterPane, RequestsPane, TablePane
from cli.top.poller import Poller
from cli.top.router_api import RouterApi
from cli.top.screens import HelpScreen, TimelineScreen
from cli.top.table import SortedTable
from cli.top.words import plain
from common.errors import BatonError, UnknownRequestError

_SLOW_S = 2.0  # the status line names a router that takes longer to answer
_CLUSTER, _REQUESTS = "cluster", "requests"


class TopApp(App[BatonError]):
    """Shows a cluster until the user quits. It returns an error if the router refuses the API key."""

    ENABLE_COMMAND_PALETTE = False
    VERTICAL_BREAKPOINTS = [(0, "-low"), (20, "-high")]  # noqa: RUF012  (as Textual declares it)
    CSS = """
    .status, #totals, #pod-detail, .caption { text-wrap: nowrap; text-overflow: ellipsis; }
    .status { height: 1; text-style: bold; }
    .status.-failing { color: ansi_red; text-style: bold reverse; }
    #totals { height: 3; }
    ContentSwitcher { height: 1fr; }
    .caption { height: 1; }
    #pod-detail { height: auto; max-height: 5; }
    .caption { text-style: bold; }
    #below { height: 5; }
    .-low #below { display: none; }
    #changes { margin: 0 0 0 1; }
    * { scrollbar-size-vertical: 1; scrollbar-color: ansi_bright_black; scrollbar-background: ansi_default; }
    HelpScreen { align: center middle; }
    #help { width: 84; max-width: 100%; height: auto; max-height: 100%; border: ascii; padding: 0 1; }
    TimelineScreen VerticalScroll { height: 1fr; }
    #chart { height: auto; }
    Footer, FooterKey, FooterKey .footer-key--key { background: ansi_default; color: ansi_default; }
    FooterKey .footer-key--key { text-style: reverse; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("1", "view('cluster')", "Cluster"),
        Binding("2", "view('requests')", "Requests"),
        Binding("less_than_sign", "sort(-1)", show=False),
        Binding("greater_than_sign", "sort(1)", "Sort", key_display="< >"),
        Binding("r", "reverse", "Reverse"),
        Binding("f", "filter", "Filter"),
        Binding("m", "model", "Model"),
        Binding("question_mark", "help", "Help", key_display="?"),
        Binding("q", "quit", "Quit"),
        Binding("ctrl+c", "quit", show=False, priority=True),
        Binding("ctrl+z", "suspend_process", show=False, priority=True),
    ]

    def __init__(self, api: RouterApi, first: ClusterView, interval_s: float) -> None:
        """`first` is what the router has answered already."""
        super().__init__(ansi_color=True)  # the terminal's own colours, or none with NO_COLOR
        self.theme = "ansi-dark"
        self.poller = Poller(self._refresh, interval_s)
        self._api = api
        self._first = first
        self._interval_s = interval_s
        self._status = Static(classes="status")
        self._totals = Static(id="totals")
        self._views = ContentSwitcher(initial=_CLUSTER)
        self._cluster = ClusterPane()
        self._requests = RequestsPane()
        self._models: list[str] = []
        self._opened: TimelineScreen | None = None

    def compose(self) -> ComposeResult:
        """See App."""
        yield self._status
        yield self._totals
        with self._views:
            yield self._cluster
            yield self._requests
        yield Footer(show_command_palette=False)

    def on_mount(self) -> None:
        """Shows the first answer and begins to poll."""
        self._show_cluster(self._first)
        self._cluster.table.focus()
        self.set_interval(1.0, self._show_status)
        self.run_worker(self._poll(), name="poll")

    async def _poll(self) -> None:
        try:
            await self.poller.run()
        except BatonError as error:  # the API key is refused: nothing else ends it
            self.exit(error)

    async def _refresh(self) -> None:
        try:
            if self._opened is not None and not self._opened.is_settled:
                await self._load_timeline(self._opened)
            if self._is_shown(_REQUESTS):
                self._requests.show_list(await self._api.requests())
            view = await self._api.cluster()
            if self.is_running:  # else it is being closed, and panes have lost what they consist of
                self._show_cluster(view)
        except BatonError:
            self._cluster.note_gap()
            raise

    async def _load_timeline(self, screen: TimelineScreen) -> None:
        try:
            timeline = await self._api.timeline(screen.request)
        except UnknownRequestError as error:
            screen.fail(error.message)
        else:
            screen.show(timeline)

    # --- what is shown ---

    def _show_cluster(self, view: ClusterView) -> None:
        figures = self._cluster.show_view(view)
        before, self._models = self._models, [model.name for model in view.models]
        if before != self._models:
            self.refresh_bindings()  # the key for choosing a model is shown only if there are several
        self._totals.update(Text("\n".join(figures.summary)))
        self._show_status()

    def _show_status(self) -> None:
        poller = self.poller
        state = f"every {self._interval_s:g} s"
        if poller.problem:
            next_try = f"next try in {poller.next_in_s:.0f} s" if poller.next_in_s else "trying again"
            state = f"no answer for {poller.failing_s:.0f} s, {next_try}: {poller.problem}"
        elif poller.waiting_s > _SLOW_S:
            state = f"waiting for an answer for {poller.waiting_s:.0f} s"
        for status in (self._status, *((self._opened.status,) if self._opened is not None else ())):
            status.set_class(bool(poller.problem), "-failing")
            status.update(Text(f"{self._api.url}  {plain(state)}"))

    def _is_shown(self, view: str) -> bool:
        return self._views.current == view

    @property
    def _pane(self) -> TablePane[Any]:
        return self._cluster if self._is_shown(_CLUSTER) else self._requests

    # --- keys ---

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Disables the keys of tables above a timeline, and the choice between models if there is one."""
        if action in ("view", "sort", "reverse", "filter", "model") and self._opened is not None:
            return False
        return action != "model" or len(self._models) > 1 or self._pane.model is not None

    def action_view(self, view: str) -> None:
        """Shows the other view."""
        self._views.current = view
        self._pane.table.focus()
        self.poller.now()

    def action_sort(self, step: int) -> None:
        """Sorts by a neighbour of the present column."""
        self._pane.table.sort_by_next(step)

    def action_reverse(self) -> None:
        """Reverses the order."""
        self._pane.table.reverse()

    def action_filter(self) -> None:
        """Shows other rows."""
        self._pane.filter_next()

    def action_model(self) -> None:
        """Shows only rows of the next model, or of all again."""
        choices = [None, *self._models]
        pane = self._pane
        at = choices.index(pane.model) if pane.model in choices else -1
        pane.choose_model(choices[(at + 1) % len(choices)])

    def action_help(self) -> None:
        """Shows keys and what columns mean."""
        self.push_screen(HelpScreen())

    @on(SortedTable.Opened)
    def open_timeline(self) -> None:
        """Shows where the time of a request went."""
        request = self._requests.table.selected if self._is_shown(_REQUESTS) else None
        if request is not None and self._opened is None:
            self._opened = TimelineScreen(request)
            self.push_screen(self._opened, self._close_timeline)
            self.poller.now()

    def _close_timeline(self, _: None) -> None:
        self._opened = None
        self.refresh_bindings()
