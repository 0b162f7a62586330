"""Draws the time of a request as bars over router, prefill pod, wire and decode pod."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from cli.top.answers import Event, Gaps, Phase, Request, Timeline
from cli.top.words import UNKNOWN, count, duration, plain, words

_LANES = {"router": "Router", "prefill": "Prefill pod", "wire": "Wire", "decode": "Decode pod"}
_STYLES = {"router": "blue", "prefill": "green", "wire": "yellow", "decode": "magenta"}
_MIN_BAR_CELLS = 12
_MAX_LABEL_CELLS = 32
_DURATION_CELLS = 9
_GAP_CHAR, _EVENT_CHAR = "░", "!"


def draw(timeline: Timeline, width: int) -> Text:
    """Returns the figures, the bars, fallbacks and gaps of a request, in lines of at most `width` cells."""
    text = Text(no_wrap=True, overflow="ellipsis", end="")
    text.append("\n".join(_figures(timeline)) + "\n\n")
    _Chart(timeline, width, text).draw()
    if timeline.events:
        text.append("\nFallbacks\n", "bold")
        text.append("".join(f"  {line}\n" for line in _event_lines(timeline.events)))
    if timeline.num_left_out:
        text.append(f"  {count(timeline.num_left_out)} more attempts and events are not kept\n")
    if timeline.gaps is not None:
        text.append("\nGaps between deliveries of tokens\n", "bold")
        text.append("".join(f"  {line}\n" for line in _gap_lines(timeline.gaps, width)))
    text.rstrip()
    return text


def _figures(timeline: Timeline) -> Iterator[str]:
    request, gaps = timeline.request, timeline.gaps
    how = request.error or request.finish_reason
    status = words(f"{request.status}: {how}" if how else request.status)
    longest = f"{duration(gaps.longest_ms)}, before token {count(gaps.longest_before_token)}" if gaps else UNKNOWN
    routes = [words(phase.reason or UNKNOWN) for phase in timeline.phases if phase.name == "route"]
    yield f"Request {plain(request.id)}"
    yield "   ".join(filter(None, (status, plain(request.model), plain(request.tenant))))
    yield (
        f"Prompt {count(request.num_prompt_tokens)} tokens, {count(request.num_cached_tokens)} cached   "
        f"Output {count(request.num_output_tokens)} tokens{_drafts(request)}"
    )
    yield f"First token {duration(request.ttft_ms)}   Total {duration(request.duration_ms)}   Longest gap {longest}"
    yield f"Route {', then '.join(routes) or UNKNOWN}   Fallbacks {len(timeline.events) or 'none'}"


def _drafts(request: Request) -> str:
    num_verified = request.num_verified_drafts
    return f", {count(request.num_accepted_drafts)} of {count(num_verified)} drafts right" if num_verified else ""


def _event_lines(events: list[Event]) -> Iterator[str]:
    for event in events:
        parts = (words(event.event), words(event.reason), plain(event.pod or ""))
        yield f"{duration(event.at_ms)}: {', '.join(filter(None, parts))}"


def _gap_lines(gaps: Gaps, width: int) -> Iterator[str]:
    labels = [f"up to {duration(upper)}" for upper in gaps.upper_ms] + [f"over {duration(gaps.longest_ms)}"]
    if gaps.upper_ms:
        labels[-1] = f"over {duration(gaps.upper_ms[-1])}"
    most = max([1, *gaps.counts])
    cells = max(_MIN_BAR_CELLS, width - 32)
    for label, number in zip(labels, gaps.counts, strict=False):
        if number:
            yield f"{label:<16} {count(number):>8}  {bar(0.0, number / most, cells)}"


class _Chart:
    """Bars below each other, one for each phase, under the name of their lane."""

    def __init__(self, timeline: Timeline, width: int, text: Text) -> None:
        self._timeline = timeline
        self._text = text
        self._total_ms = max(timeline.request.duration_ms, 0.001)
        labels = [_label(phase) for phase in timeline.phases] + ["longest gap"]
        self._label_cells = min(_MAX_LABEL_CELLS, max(map(cell_len, labels)))
        self._bar_cells = max(_MIN_BAR_CELLS, width - self._label_cells - _DURATION_CELLS - 6)

    def draw(self) -> None:
        """Appends all lanes to the text."""
        self._axis()
        for lane, title in _LANES.items():
            phases = [phase for phase in self._timeline.phases if _lane_of(phase) == lane and phase.name != "route"]
            attempts = {phase.attempt for phase in phases}
            for (pod, attempt), group in groupby(phases, lambda phase: (phase.pod, phase.attempt)):
                where = f" {plain(pod)}" if pod and lane != "wire" else ""
                which = f", attempt {attempt}" if attempt and len(attempts) > 1 else ""
                self._text.append(f"{title}{where}{which}\n", "bold")
                for phase in group:
                    line = bar(phase.start_ms / self._total_ms, phase.duration_ms / self._total_ms, self._bar_cells)
                    self._line(_label(phase), duration(phase.duration_ms), line, _STYLES[lane])
            if lane == "router":
                self._events()
            if lane == "decode":
                self._longest_gap()

    def _axis(self) -> None:
        """The scale, above the bars."""
        middle, end = duration(self._total_ms / 2), duration(self._total_ms)
        scale = f"0{middle:^{self._bar_cells - 1 - len(end)}}{end}"
        self._line("", "", scale, "dim")

    def _events(self) -> None:
        if self._timeline.events:
            marks = [" "] * self._bar_cells
            for event in self._timeline.events:
                at = int(self._bar_cells * event.at_ms / self._total_ms)
                marks[min(max(at, 0), self._bar_cells - 1)] = _EVENT_CHAR
            self._line("fallbacks", "", "".join(marks), "bold red")

    def _longest_gap(self) -> None:
        gaps = self._timeline.gaps
        if gaps is not None:
            line = bar(
                gaps.longest_at_ms / self._total_ms, gaps.longest_ms / self._total_ms, self._bar_cells, _GAP_CHAR
            )
            self._line("longest gap", duration(gaps.longest_ms), line, "")

    def _line(self, label: str, took: str, line: str, style: str) -> None:
        self._text.append(f"  {set_cell_size(label, self._label_cells)} {took:>{_DURATION_CELLS}}  ")
        self._text.append(f"{line.rstrip()}\n", style)


def bar(start: float, size: float, cells: int, full: str = "█") -> str:
    """Returns a bar over a part of the width; `start` and `size` are shares of it. Half cells are drawn, and a bar has
    at least one half."""
    first = min(max(round(2 * cells * start), 0), 2 * cells - 1)
    end = min(max(round(2 * cells * (start + size)), first + 1), 2 * cells)
    if full != "█":
        return " " * (first // 2) + full * ((end + 1) // 2 - first // 2)
    left = "▐" if first % 2 else ""
    whole = (end - first - len(left)) // 2
    return " " * (first // 2) + left + "█" * whole + ("▌" if end % 2 else "")


def _lane_of(phase: Phase) -> str:
    return "wire" if phase.name == "transfer" else phase.where


def _label(phase: Phase) -> str:
    name = words(phase.name)
    return f"{name}: {words(phase.reason)}" if phase.reason and phase.name != "route" else name
