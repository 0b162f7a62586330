"""A table whose rows are sorted by one of its columns, and which draws again only the lines that have changed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Generic, NamedTuple, Protocol, TypeVar

from rich.cells import cell_len, set_cell_size
from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.binding import Binding, BindingType
from textual.geometry import Region, Size, Spacing
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip

from cli.top.columns import Column, Order, Tone, in_order


class Keyed(Protocol):
    """A row that can be told from others."""

    @property
    def key(self) -> str:
        """The same for what is the same row at another time."""


Row = TypeVar("Row", bound=Keyed)

_GAP = 2  # cells between columns; the arrow of the sorted column is in the first of them
_HEADER = 1  # lines
_ARROWS = {False: "▲", True: "▼"}


class _Line(NamedTuple):
    """A row as it is drawn."""

    key: str
    cells: tuple[str, ...]
    tones: tuple[Tone, ...]


class SortedTable(ScrollView, Generic[Row], can_focus=True):
    """Rows with a header, and a cursor that stays on its row when the order changes; on the first line it stays there.

    All texts are drawn as they are: nothing in them is markup. A column must return text that is safe to print.
    """

    COMPONENT_CLASSES: ClassVar[set[str]] = {
        "table--header", "table--cursor", "table--good", "table--warn", "table--bad",
    }  # fmt: skip
    DEFAULT_CSS = """
    SortedTable { height: 1fr; }
    SortedTable > .table--header { text-style: bold; }
    SortedTable > .table--cursor { text-style: reverse; }
    SortedTable > .table--good { color: ansi_green; }
    SortedTable > .table--warn { color: ansi_yellow; text-style: bold; }
    SortedTable > .table--bad { color: ansi_red; text-style: bold; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "move(-1)", show=False),
        Binding("down,j", "move(1)", show=False),
        Binding("pageup", "move_page(-1)", show=False),
        Binding("pagedown", "move_page(1)", show=False),
        Binding("home", "move_to(0)", show=False),
        Binding("end", "move_to(-1)", show=False),
        Binding("enter", "open", show=False),
    ]

    class Moved(Message):
        """Another row is under the cursor, or there is something new in it."""

    class Opened(Message):
        """The row under the cursor was chosen."""

    def __init__(self, columns: Sequence[Column[Row]], order: Order, *, id: str) -> None:  # noqa: A002
        super().__init__(id=id)
        self.columns = columns
        self.order = order
        self._rows: list[Row] = []  # as they are shown
        self._lines: list[_Line] = []
        self._widths = [cell_len(column.title) for column in columns]
        self._cursor = 0

    # --- rows ---

    @property
    def selected(self) -> Row | None:
        """The row under the cursor."""
        return self._rows[self._cursor] if self._rows else None

    def show(self, rows: Sequence[Row]) -> None:
        """Shows these rows."""
        chosen = self._lines[self._cursor].key if self._lines and self._cursor else None
        column = self.columns[self.order.column]
        self._rows = in_order(rows, column, is_descending=self.order.is_descending)
        before, self._lines = self._lines, [self._line(row) for row in self._rows]
        has_new_widths = self._measure()
        self._follow(chosen)
        if has_new_widths or len(before) != len(self._lines):
            self.refresh()
        else:
            for number, (old, new) in enumerate(zip(before, self._lines, strict=True)):
                if old != new:
                    self.refresh_line(number + _HEADER)
        self.post_message(self.Moved())

    def _line(self, row: Row) -> _Line:
        cells = tuple(column.text(row) for column in self.columns)
        return _Line(row.key, cells, tuple(column.tone(row) for column in self.columns))

    def _measure(self) -> bool:
        """Fits the columns to their cells. Returns whether one has another width now."""
        columns = list(zip(*(line.cells for line in self._lines), strict=True)) or [()] * len(self.columns)
        widths = [
            max([cell_len(column.title), *map(cell_len, cells)])
            for column, cells in zip(self.columns, columns, strict=True)
        ]
        has_changed, self._widths = widths != self._widths, widths
        self.virtual_size = Size(sum(widths) + _GAP * len(widths), len(self._lines) + _HEADER)
        return has_changed

    def _follow(self, key: str | None) -> None:
        """Moves the cursor to the row that it was on, and keeps it in sight if it was."""
        keys = [line.key for line in self._lines]
        number = keys.index(key) if key in keys else min(self._cursor, max(0, len(keys) - 1))
        if number != self._cursor:
            was_in_sight = 0 <= self._cursor - self.scroll_offset.y < self.size.height - _HEADER
            self._put_cursor(number, is_in_sight=was_in_sight)

    # --- order ---

    def sort_by(self, column: int) -> None:
        """Sorts by a column, or reverses the order if it is sorted by it."""
        if column == self.order.column:
            self.order = self.order._replace(is_descending=not self.order.is_descending)
        else:
            self.order = Order(column, self.columns[column].is_number)
        self.show(self._rows)
        self.refresh()

    def reverse(self) -> None:
        """Reverses the order."""
        self.sort_by(self.order.column)

    def sort_by_next(self, step: int) -> None:
        """Sorts by a neighbour of the present column."""
        self.sort_by((self.order.column + step) % len(self.columns))
        left = sum(self._widths[: self.order.column]) + _GAP * self.order.column
        self.scroll_to_region(Region(left, round(self.scroll_y), self._widths[self.order.column], 1), animate=False)

    # --- drawing ---

    def render_line(self, y: int) -> Strip:
        """Draws one line of what is visible; the first one is the header. The first column does not scroll sideways."""
        scroll_x, scroll_y = self.scroll_offset
        number = scroll_y + y - _HEADER
        if y < _HEADER:
            segments = self._header_segments()
        elif number < len(self._lines):
            segments = self._segments(self._lines[number], is_chosen=number == self._cursor)
        else:
            return Strip.blank(self.size.width, self.rich_style)
        fixed = min(self._widths[0] + _GAP, self.size.width)
        strip = Strip(segments)
        width = self.size.width
        parts = [strip.crop(0, fixed), strip.crop(scroll_x + fixed, scroll_x + width)]
        return Strip.join(parts).adjust_cell_length(width, segments[-1].style).apply_style(self.rich_style)

    def _header_segments(self) -> list[Segment]:
        style = self.get_component_rich_style("table--header")
        segments = []
        for number, (column, width) in enumerate(zip(self.columns, self._widths, strict=True)):
            arrow = _ARROWS[self.order.is_descending] if number == self.order.column else " "
            segments.append(Segment(_fit(column.title, width, column.is_number) + arrow + " " * (_GAP - 1), style))
        return segments

    def _segments(self, line: _Line, *, is_chosen: bool) -> list[Segment]:
        base = self.get_component_rich_style("table--cursor") if is_chosen else Style.null()
        segments = []
        for column, width, cell, tone in zip(self.columns, self._widths, line.cells, line.tones, strict=True):
            style = base + self.get_component_rich_style(f"table--{tone}") if tone and not is_chosen else base
            segments += [Segment(_fit(cell, width, column.is_number), style), Segment(" " * _GAP, base)]
        return segments

    # --- cursor ---

    def _put_cursor(self, number: int, *, is_in_sight: bool = True) -> None:
        self.refresh_line(self._cursor + _HEADER)
        self._cursor = number
        self.refresh_line(number + _HEADER)
        if is_in_sight:
            region = Region(round(self.scroll_x), number + _HEADER, 1, 1)
            self.scroll_to_region(region, spacing=Spacing(top=_HEADER), animate=False)

    def action_move(self, step: int) -> None:
        """Moves the cursor by this many rows."""
        if self._lines:
            self._put_cursor(min(max(self._cursor + step, 0), len(self._lines) - 1))
            self.post_message(self.Moved())

    def action_move_page(self, step: int) -> None:
        """Moves the cursor by this many pages."""
        self.action_move(step * max(1, self.size.height - _HEADER - 1))

    def action_move_to(self, number: int) -> None:
        """Moves the cursor to this row; -1: the last one."""
        self.action_move(number % max(1, len(self._lines)) - self._cursor)

    def action_open(self) -> None:
        """Chooses the row under the cursor."""
        if self._lines:
            self.post_message(self.Opened())

    def on_click(self, event: events.Click) -> None:
        """Sorts by a column whose title was clicked, or moves to a row; a double click chooses it."""
        if event.y < _HEADER:
            self._sort_at(event.x)
            return
        number = self.scroll_offset.y + event.y - _HEADER
        if number < len(self._lines):
            self.action_move(number - self._cursor)
            if event.chain > 1:
                self.action_open()

    def _sort_at(self, x: int) -> None:
        end = 0
        at = x if x < self._widths[0] + _GAP else x + self.scroll_offset.x
        for number, width in enumerate(self._widths):
            end += width + _GAP
            if at < end:
                self.sort_by(number)
                return


def _fit(text: str, width: int, is_number: bool) -> str:
    """Pads the text to a number of cells."""
    padding = width - cell_len(text)
    return " " * padding + text if is_number and padding > 0 else set_cell_size(text, width)
