"""Ids of server-sent events, by which a client resumes a broken stream.

    id: 1.<identity>.<request id>.<position>-<position>-...

Where the client asks for ids, each event that brings text has one. It says all that is needed to go on exactly, at any
router: clients send it back as `Last-Event-ID`, with the same body, to any router of the cluster.

    identity   base64url of 20 bytes: a digest of what was asked for, by whom, of which model; then the seed
    position   of each choice: the number of tokens that were delivered, "_", and their CRC-32, both in
               hexadecimal; "!" at the end says that the choice is complete

The digest binds the id to the request. The CRC binds it to the answer: where an answer is computed again and is not
the same, as on other hardware, the client gets an error, never the end of another answer.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple, NoReturn
from zlib import crc32

import msgspec

from common.errors import InvalidRequestError, UnavailableError, quoted
from common.types import FinishReason
from router.dispatching.kept import KeptStream, KnownChoice, ResumableStreams, StreamKey
from router.fairness.tenant import Tenant
from router.gateway.bodies.generation_body import GenerationBody
from router.requests.request import GenerationRequest, Resumption

HEADER = "last-event-id"
RESUMABLE_HEADER = "x-baton-resumable"
_NAME = "Last-Event-ID"  # as errors call it
_VERSION = "1"
_TAKE_OVER_S = 5.0  # seconds for the old connection to end, which may still look alive
_NUM_DIGEST_BYTES = 12
_NUM_SEED_BYTES = 8
_POSITION = re.compile(r"(?P<num_tokens>[0-9a-f]{1,8})_(?P<checksum>[0-9a-f]{1,8})(?P<ended>!?)")


class Position(NamedTuple):
    """The part of one choice that the client has."""

    num_tokens: int = 0
    checksum: int = 0  # CRC-32 of these tokens
    ended: bool = False

    def __str__(self) -> str:
        return f"{self.num_tokens:x}_{self.checksum:x}{'!' if self.ended else ''}"


_NOTHING = str(Position()).encode()


class EventId(NamedTuple):
    """The part of a stream that a client has."""

    digest: bytes
    seed: int
    request_id: str
    positions: tuple[Position, ...]


class ResumeOptions(NamedTuple):
    """How a stream can be resumed, and whether it is being resumed."""

    last_id: EventId | None  # where the client left off; None: it starts at the beginning
    has_ids: bool  # its events have ids


class Stream:
    """The content of a stream's ids. Grows with each delivery."""

    def __init__(self, digest: bytes, seed: int, request_id: str, positions: Sequence[Position]) -> None:
        self.identity = digest + seed.to_bytes(_NUM_SEED_BYTES, "big")
        self.request_id = request_id
        encoded = base64.urlsafe_b64encode(self.identity).rstrip(b"=")
        self._head = _VERSION.encode() + b"." + encoded + b"." + request_id.encode() + b"."
        self._num_tokens = [position.num_tokens for position in positions]
        self._checksums = [position.checksum for position in positions]
        self._positions = [str(position).encode() for position in positions]

    def has_begun(self, index: int) -> bool:
        """Whether the client has something of this choice."""
        return self._positions[index] != _NOTHING

    def advance(self, index: int, token_ids: Sequence[int], *, ended: bool) -> bytes:
        """The id line of the event that brings these tokens of choice `index`."""
        return b"id: %b\n" % self.advance_id(index, token_ids, ended=ended)

    def advance_id(self, index: int, token_ids: Sequence[int], *, ended: bool) -> bytes:
        """The id of the event that brings these tokens of choice `index`."""
        num_tokens = self._num_tokens[index] = self._num_tokens[index] + len(token_ids)
        checksum = self._checksums[index] = checksum_of(token_ids, self._checksums[index])
        position = b"%x_%x!" % (num_tokens, checksum) if ended else b"%x_%x" % (num_tokens, checksum)
        self._positions[index] = position
        return self._head + (position if len(self._positions) == 1 else b"-".join(self._positions))


def checksum_of(token_ids: Sequence[int], before: int = 0) -> int:
    """CRC-32 of tokens that follow those with the checksum `before`."""
    return crc32(array("I", token_ids), before)


def digest_of(body: msgspec.Struct, tenant: Tenant, fingerprint: bytes) -> bytes:
    """Returns the digest of a request: its body, its tenant, its model and adapter (`fingerprint`). Equal bodies have
    equal digests, however they are written as JSON."""
    return digest_of_bytes(type(body).__name__, msgspec.json.encode(body), tenant, fingerprint)


def digest_of_bytes(kind: str, asked: bytes, tenant: Tenant, fingerprint: bytes) -> bytes:
    """See `digest_of`; `asked` is the same for equal requests of this kind."""
    parts = (kind.encode(), asked, tenant.name.encode(), fingerprint)
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "big") + part)
    return digest.digest()[:_NUM_DIGEST_BYTES]


def parse_event_id(text: str) -> EventId:
    """Raises InvalidRequestError if no router of ours can have made it."""
    version, _, rest = text.partition(".")
    encoded, _, rest = rest.partition(".")
    request_id, _, positions = rest.rpartition(".")
    if version != _VERSION or not request_id:
        _refuse("is not an event id of this server")
    try:
        identity = base64.b64decode(encoded + "=" * (-len(encoded) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        _refuse("is damaged")
    if len(identity) != _NUM_DIGEST_BYTES + _NUM_SEED_BYTES:
        _refuse("is damaged")
    seed = int.from_bytes(identity[_NUM_DIGEST_BYTES:], "big")
    return EventId(
        identity[:_NUM_DIGEST_BYTES], seed, request_id, tuple(_parse_position(each) for each in positions.split("-"))
    )


def read_resume_options(header: Callable[[str], str], body: GenerationBody) -> ResumeOptions:
    """`header` gives the value of a header by its lower-case name, or "". Events have ids only on request, since many
    clients take every event to begin with `data:`. Raises InvalidRequestError for what cannot be resumed."""
    wanted, text = header(RESUMABLE_HEADER), header(HEADER)
    if wanted not in ("", "0", "1"):
        problem = f"{RESUMABLE_HEADER} must be 0 or 1, got {quoted(wanted)}"
        raise InvalidRequestError(problem, param=RESUMABLE_HEADER)
    if not text:
        return ResumeOptions(None, has_ids=wanted == "1" or body.wants_event_ids)
    if not body.stream:
        _refuse("is for streams: stream must be true")
    return ResumeOptions(parse_event_id(text), has_ids=True)


async def begin(
    streams: ResumableStreams,
    event_id: EventId | None,
    digest: bytes,
    request_id: str,
    choices: list[GenerationRequest],
) -> tuple[Stream, list[GenerationRequest]]:
    """A stream of these choices, and the choices as they are to be generated: from the beginning, or from where the
    client has them. Raises InvalidRequestError if the id is another request's, and UnavailableError if the connection
    that is to be replaced does not end."""
    seed = choices[0].sampling.settled_seed
    if event_id is None:
        return Stream(digest, seed, request_id, [Position()] * len(choices)), choices
    check_fits(event_id, digest, seed, choices)
    stream = Stream(digest, seed, request_id, event_id.positions)
    try:
        kept = await streams.take_over(
            StreamKey(choices[0].terms.tenant.name, request_id), stream.identity, _TAKE_OVER_S
        )
    except TimeoutError as error:
        raise UnavailableError(
            "the connection that the stream had has not ended yet; try again", param=_NAME
        ) from error
    wants_logprobs = choices[0].sampling.num_logprobs is not None
    resumptions = resumptions_of(event_id, kept, wants_logprobs=wants_logprobs)
    return stream, [_resumed(choice, resumption) for choice, resumption in zip(choices, resumptions, strict=True)]


def _resumed(choice: GenerationRequest, resumption: Resumption) -> GenerationRequest:
    """Returns the rest of a choice. Log probabilities of the prompt come with the first tokens, so a client that has
    these has them."""
    sampling = choice.sampling
    if resumption.num_delivered:
        sampling = msgspec.structs.replace(sampling, prompt_logprobs=None)
    return replace(choice, sampling=sampling, resumption=resumption)


def check_fits(event_id: EventId, digest: bytes, seed: int, choices: Sequence[GenerationRequest]) -> None:
    """Raises InvalidRequestError if the id is another request's, which has this digest and seed."""
    if (event_id.digest, event_id.seed) != (digest, seed) or len(event_id.positions) != len(choices):
        _refuse("belongs to another request: the body must be the same")
    for position, choice in zip(event_id.positions, choices, strict=True):
        if position.num_tokens > (choice.sampling.max_tokens or 0):
            _refuse("says that more was delivered than was asked for")


def resumption_of(position: Position, known: KnownChoice | None, *, wants_logprobs: bool) -> Resumption:
    """How one choice goes on. Log probabilities are not kept, so with them only what the client has counts as known."""
    has_all = Resumption(position.num_tokens, position.checksum, finish_reason=FinishReason.STOP, ended=True)
    if known is None:
        return has_all if position.ended else Resumption(position.num_tokens, position.checksum)
    token_ids, finish_reason, speculation = known
    if position.ended:
        return replace(has_all, speculation=speculation)
    if wants_logprobs and len(token_ids) > position.num_tokens:
        token_ids, finish_reason = token_ids[: position.num_tokens], None
    return Resumption(position.num_tokens, position.checksum, token_ids, finish_reason, speculation=speculation)


def resumptions_of(event_id: EventId, kept: KeptStream | None, *, wants_logprobs: bool) -> list[Resumption]:
    """How each choice goes on."""
    known: Sequence[KnownChoice | None] = [None] * len(event_id.positions) if kept is None else kept.choices
    return [
        resumption_of(position, each, wants_logprobs=wants_logprobs)
        for position, each in zip(event_id.positions, known, strict=True)
    ]


def _parse_position(text: str) -> Position:
    match = _POSITION.fullmatch(text)
    if match is None:
        _refuse("is damaged")
    return Position(int(match["num_tokens"], 16), int(match["checksum"], 16), bool(match["ended"]))


def _refuse(problem: str) -> NoReturn:
    raise InvalidRequestError(f"{_NAME} {problem}", param=_NAME)
