"""Columns of pods and of requests: what a cell shows, and how rows are sorted by it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any, Generic, Literal, NamedTuple, TypeVar

from cli.top.answers import Request
from cli.top.figures import READY, PodFigures, natural
from cli.top.words import UNKNOWN, count, duration, percent, plain, rate, words

Row = TypeVar("Row")
Tone = Literal["", "good", "warn", "bad"]

_MAX_NAME_CHARS = 32
_BAD_STATES = ("down", "ejected", "refused")


class Column(NamedTuple, Generic[Row]):
    """A column of a table."""

    title: str
    about: str  # for the help
    text: Callable[[Row], str]  # safe to print
    order: Callable[[Row], Any]  # what rows are sorted by; None: they come last
    is_number: bool = True  # aligned to the right; sorted from the largest to the smallest at first
    tone: Callable[[Row], Tone] = lambda _: ""


class Order(NamedTuple):
    """The order of a table's rows."""

    column: int
    is_descending: bool


def in_order(rows: Sequence[Row], column: Column[Row], *, is_descending: bool) -> list[Row]:
    """Returns the rows sorted by a column; those that are equal keep their order, those without a value come last."""
    keyed = [(column.order(row), row) for row in rows]
    known = [each for each in keyed if each[0] is not None]
    known.sort(key=lambda each: each[0], reverse=is_descending)
    return [row for _, row in known] + [row for value, row in keyed if value is None]


# --- pods ---


def _load(field: str) -> tuple[Callable[[PodFigures], str], Callable[[PodFigures], int | None]]:
    """How a figure of the pod's last report is shown and sorted."""

    def order(row: PodFigures) -> int | None:
        return None if row.pod.load is None else int(getattr(row.pod.load, field))

    def text(row: PodFigures) -> str:
        value = order(row)
        return UNKNOWN if value is None else count(value)

    return text, order


def _state_tone(row: PodFigures) -> Tone:
    if row.pod.state == READY:
        return "good"
    return "bad" if row.pod.state in _BAD_STATES else "warn"


POD_COLUMNS: tuple[Column[PodFigures], ...] = (
    Column(
        "POD",
        "its id, or its address before it is first connected",
        lambda row: plain(row.pod.name, _MAX_NAME_CHARS),
        lambda row: natural(row.pod.name),
        is_number=False,
    ),
    Column(
        "ROLE", "prefill or decode", lambda row: row.pod.role, lambda row: row.pod.role != "prefill", is_number=False
    ),
    Column(
        "STATE", "why: last column", lambda row: words(row.pod.state), lambda row: row.pod.state, False, _state_tone
    ),
    Column("RUN", "requests that it computes", *_load("num_running")),
    Column("WAIT", "requests in its queue", *_load("num_waiting")),
    Column("KV WAIT", "requests whose KV is on its way to it", *_load("num_waiting_for_remote_kv")),
    Column("KV", "share of its KV blocks in use", lambda row: percent(row.kv_use), lambda row: row.kv_use),
    Column("PROMPT/S", "prompt tokens per second", lambda row: rate(row.prompt_rate), lambda row: row.prompt_rate),
    Column("OUTPUT/S", "output tokens per second", lambda row: rate(row.output_rate), lambda row: row.output_rate),
    Column("HIT", "prefix cache hits since its start", lambda row: percent(row.hit_rate), lambda row: row.hit_rate),
    Column(
        "DRAFTS",
        "what proposes them, and the share of those verified that were right, since its start",
        lambda row: (
            f"{plain(row.pod.proposer, _MAX_NAME_CHARS)} {percent(row.draft_share)}" if row.pod.proposer else UNKNOWN
        ),
        lambda row: row.draft_share,
    ),
    Column(
        "TOK/STEP",
        "tokens per step of a request that verified drafts",
        lambda row: rate(row.tokens_per_step),
        lambda row: row.tokens_per_step,
    ),
    Column(
        "RANKS",
        "how its model is cut over ranks: TP 2 is a tensor_parallel_size of 2",
        lambda row: row.pod.cut or UNKNOWN,
        lambda row: row.pod.cut or None,
        is_number=False,
    ),
    Column(
        "ADDRESS",
        "where the router reaches it",
        lambda row: plain(row.pod.address, 2 * _MAX_NAME_CHARS),
        lambda row: natural(row.pod.address),
        is_number=False,
    ),
    Column(
        "MODEL",
        "what it serves",
        lambda row: plain(row.pod.model or UNKNOWN, _MAX_NAME_CHARS),
        lambda row: row.pod.model,
        is_number=False,
    ),
    Column(
        "WHY",
        "why it is in this state",
        lambda row: plain(row.pod.detail),
        lambda row: row.pod.detail or None,
        is_number=False,
    ),
)

# --- requests ---


def _status(row: Request) -> str:
    how = row.error or row.finish_reason
    return words(f"{row.status}: {how}" if how else row.status)


def _status_tone(row: Request) -> Tone:
    return "bad" if row.status == "failed" else "" if row.status == "finished" else "good"


def _clock(row: Request) -> str:
    """The local time of its start."""
    try:
        return datetime.fromisoformat(row.started_at).astimezone().strftime("%H:%M:%S")
    except (ValueError, OverflowError):
        return plain(row.started_at, _MAX_NAME_CHARS)


REQUEST_COLUMNS: tuple[Column[Request], ...] = (
    Column("REQUEST", "its id", lambda row: plain(row.id, _MAX_NAME_CHARS), lambda row: natural(row.id), False),
    Column("STARTED", "when it came, in local time", _clock, lambda row: row.started_at),
    Column("STATUS", "and how it ended", _status, _status, False, _status_tone),
    Column("TTFT", "time to its first token", lambda row: duration(row.ttft_ms), lambda row: row.ttft_ms),
    Column("GAP", "its longest gap", lambda row: duration(row.longest_gap_ms), lambda row: row.longest_gap_ms),
    Column("TOTAL", "from arrival to end, or now", lambda row: duration(row.duration_ms), lambda row: row.duration_ms),
    Column("PROMPT", "tokens", lambda row: count(row.num_prompt_tokens), lambda row: row.num_prompt_tokens),
    Column("CACHED", "prompt tokens", lambda row: count(row.num_cached_tokens), lambda row: row.num_cached_tokens),
    Column("OUTPUT", "tokens", lambda row: count(row.num_output_tokens), lambda row: row.num_output_tokens),
    Column(
        "FALLBACKS",
        "what went otherwise than planned",
        lambda row: count(row.num_events),
        lambda row: row.num_events,
        tone=lambda row: "warn" if row.num_events else "",
    ),
    Column("MODEL", "its model", lambda row: plain(row.model, _MAX_NAME_CHARS), lambda row: row.model, False),
    Column(
        "TENANT", "whose key", lambda row: plain(row.tenant or UNKNOWN, _MAX_NAME_CHARS), lambda row: row.tenant, False
    ),
    Column(
        "PREFILL POD", "its last", lambda row: plain(row.prefill_pod or UNKNOWN, 64), lambda row: row.prefill_pod, False
    ),
    Column(
        "DECODE POD", "its last", lambda row: plain(row.decode_pod or UNKNOWN, 64), lambda row: row.decode_pod, False
    ),
)
