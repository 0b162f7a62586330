"""One model's tokenizer, read from its directory with the `tokenizers` library alone.

`transformers.AutoTokenizer` is not used: it imports torch and costs the router 245 MB.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import tokenizers

from common.errors import ConfigError, InvalidRequestError
from common.tokenization.chat import ChatTemplate

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_MAX_SHRINKAGE = 4  # characters that a normaliser may make one of; Unicode's composition stays below
_CHARS_AT_ONCE = 4  # per token that a text may have: up to so many are encoded without looking at pieces first
_PIECE_CHARS = 2**14
_MAX_SPELLINGS = 1024  # of words that are kept: a request may have hundreds, and spell them for many prompts
_SPECIAL_TOKEN_KEYS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class TooManyTokensError(ValueError):
    """A text has more tokens than it may have. The message says how many of what it has."""


class Tokenizer:
    """Encodes, decodes and renders chats. Safe to use from several threads."""

    def __init__(self, backend: tokenizers.Tokenizer, *, chat_template: ChatTemplate | None = None) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._chat_template = chat_template
        self.chat_template_source = "" if chat_template is None else chat_template.source
        added = backend.get_added_tokens_decoder()
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._added = {token_id: token.content for token_id, token in added.items()}
        decoder = backend.decoder
        layout = repr(decoder) if decoder is not None else ""
        self.byte_level = "ByteLevel" in layout  # a token is any run of bytes, whatever characters they belong to
        self._sentencepiece = "\u2581" in layout
        # The text of tokens is that of their bytes, whatever stands beside them.
        self.decodes_bytes = layout.startswith("ByteLevel(") and all(
            backend.decode([token_id], skip_special_tokens=False) == content
            for token_id, content in self._added.items()
        )
        # A list of token ids shares these integers: 8 bytes each in place of 40, for as long as a request lives.
        vocab = backend.get_vocab()
        self._ids = tuple(range(max(vocab.values(), default=-1) + 1))
        self._is_visible = _flags(set(vocab.values()) - self._special_ids, len(self._ids))
        self._longest_token = max(map(len, vocab), default=1)
        self._keeps_length = self.byte_level or _keeps_unknown_characters(backend.model)
        # Bounded by the vocabulary, and a hit costs a third of a decode.
        self._bytes_of = functools.cache(self._uncached_token_bytes)
        self._spellings_of = functools.lru_cache(_MAX_SPELLINGS)(self._uncached_spellings)

    @classmethod
    def from_directory(cls, path: str | Path) -> Tokenizer:
        """Read tokenizer.json and, if present, tokenizer_config.json and chat_template.jinja.

        Raises ConfigError if a file is missing or unreadable.
        """
        directory = Path(path)
        file = directory / "tokenizer.json"
        if not file.is_file():
            raise ConfigError.of("model", f"{directory} has no tokenizer.json")
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:
            raise ConfigError.of("model", f"{file} cannot be read: {error}") from error
        settings = _read_settings(directory)
        source = _chat_template_source(directory, settings)
        template = ChatTemplate(source, _special_tokens(settings)) if source else None
        return cls(backend, chat_template=template)

    @property
    def has_chat_template(self) -> bool:
        """True if `render_chat` can be used."""
        return self._chat_template is not None

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids of the special tokens, which `decode` skips."""
        return self._special_ids

    def special_ids_of(self, texts: Iterable[str]) -> frozenset[int]:
        """Ids of the special tokens that are spelled so."""
        wanted = set(texts)
        return frozenset(token_id for token_id in self._special_ids if self._added[token_id] in wanted)

    def end_of(self, text: str, max_tokens: int) -> str:
        """The end of `text`, which has at least `max_tokens` tokens if the text has."""
        starts = range(0, len(text), _PIECE_CHARS)[::-1]
        return text[self._exceeding(text, starts, max_tokens) or 0 :]

    def encode(self, text: str, *, add_special_tokens: bool = True, max_tokens: int | None = None) -> list[int]:
        """Token ids of `text`. Releases the GIL, so a long text can be encoded on a thread. Raises TooManyTokensError
        if there are more than `max_tokens`, after a time in proportion to `max_tokens`, however long the text is."""
        if max_tokens is not None and not self._may_fit(text, max_tokens):
            raise TooManyTokensError(f"has {len(text)} characters, more than a context of {max_tokens} tokens holds")
        encoding = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
        if max_tokens is not None and len(encoding) > max_tokens:
            raise TooManyTokensError(f"has {len(encoding)} tokens, more than the limit of {max_tokens}")
        return list(map(self._ids.__getitem__, encoding.ids))

    def encode_pair(self, first: str, second: str, *, max_tokens: int | None = None) -> list[int]:
        """Token ids of two texts that belong together, joined as the tokenizer says. Otherwise as `encode`."""
        if max_tokens is not None and not all(self._may_fit(text, max_tokens) for text in (first, second)):
            num_chars = len(first) + len(second)
            raise TooManyTokensError(f"has {num_chars} characters, more than a context of {max_tokens} tokens holds")
        encoding = self._backend.encode_batch_fast([(first, second)], add_special_tokens=True)[0]
        if max_tokens is not None and len(encoding) > max_tokens:
            raise TooManyTokensError(f"has {len(encoding)} tokens, more than the limit of {max_tokens}")
        return list(map(self._ids.__getitem__, encoding.ids))

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `token_ids`. Ids that the tokenizer does not know have no text."""
        return self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def decode_long(self, token_ids: Sequence[int]) -> str:
        """Text of `token_ids`, special tokens included. Releases the GIL, so many can be decoded on a thread."""
        return self._backend.decode_batch([token_ids], skip_special_tokens=False)[0]

    def pieces(self, token_ids: Sequence[int]) -> list[str]:
        """The tokens as the vocabulary spells them; empty for ids that it does not have."""
        return [self._backend.id_to_token(token_id) or "" for token_id in token_ids]

    def is_visible(self, token_id: int) -> bool:
        """True if `decode` does not skip the token."""
        return token_id < len(self._is_visible) and self._is_visible[token_id] != 0

    def added_text(self, token_id: int) -> str | None:
        """How an added token, such as a special one, is spelled; None: it is an ordinary one."""
        return self._added.get(token_id)

    def tag_ids(self, tag: str) -> tuple[int, ...]:
        """Token ids of a tag with added tokens at both ends, which is spelled in one way, whatever stands beside
        it. Empty: it has none."""
        token_ids = tuple(self.encode(tag, add_special_tokens=False))
        is_own = bool(token_ids) and self._added.keys() >= {token_ids[0], token_ids[-1]}
        return token_ids if is_own else ()

    def spellings(self, word: str) -> list[tuple[int, ...]]:
        """Token ids of a word, as it begins a text and after a space."""
        return list(self._spellings_of(word))

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one token stands for; part of a character where characters are split over tokens."""
        return self._bytes_of(token_id)

    def token_text(self, token_id: int) -> str:
        """One token on its own, special ones included; bytes that are no character become U+FFFD."""
        return self._bytes_of(token_id).decode("utf-8", "replace")

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        """The prompt text of a conversation; encode it with `add_special_tokens=False`.

        Raises InvalidRequestError if the model has no chat template or the template rejects the messages.
        """
        if self._chat_template is None:
            raise InvalidRequestError("the model has no chat template; use the completions API", param="messages")
        return self._chat_template.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables=variables,
        )

    def _may_fit(self, text: str, max_tokens: int) -> bool:
        """False if `text` certainly has more than `max_tokens` tokens."""
        if self._keeps_length and len(text) > max_tokens * self._longest_token * _MAX_SHRINKAGE:
            return False
        return self._exceeding(text, range(0, len(text), _PIECE_CHARS), max_tokens) is None

    def _exceeding(self, text: str, starts: Sequence[int], max_tokens: int) -> int | None:
        """Returns the first of `starts` with which the pieces of `text` that begin there have certainly more than
        `max_tokens` tokens. None: the text may have fewer, or is so short that it can be encoded at once."""
        if len(text) <= max_tokens * (_CHARS_AT_ONCE if text.isascii() else 1):  # each of 4 bytes at most
            return None
        num_tokens = 0
        for num_cuts, start in enumerate(starts):
            piece = text[start : start + _PIECE_CHARS]
            num_tokens += len(self._backend.encode_batch_fast([piece], add_special_tokens=False)[0])
            if num_tokens - 2 * num_cuts > 2 * max_tokens:  # as a cut makes two tokens of one, or spoils a few merges
                return start
        return None

    def _uncached_spellings(self, word: str) -> tuple[tuple[int, ...], ...]:
        word = word.lstrip()
        variants = (tuple(self.encode(text, add_special_tokens=False)) for text in (word, f" {word}"))
        return tuple(token_ids for token_ids in dict.fromkeys(variants) if token_ids)

    def _uncached_token_bytes(self, token_id: int) -> bytes:
        if (content := self._added.get(token_id)) is not None:
            return content.encode()
        piece = self._backend.id_to_token(token_id)
        if piece is None:
            return b""
        if self.byte_level:
            table = _byte_of_character()
            known = [table[char] for char in piece if char in table]
            return b"".join(known) if len(known) == len(piece) else piece.encode()
        if match := _BYTE_PIECE.fullmatch(piece):
            return bytes.fromhex(match[1])
        return (piece.replace("\u2581", " ") if self._sentencepiece else piece).encode()


def _keeps_unknown_characters(model: Any) -> bool:
    """False if any number of characters outside the vocabulary may become one token, or none."""
    if not isinstance(model, tokenizers.models.BPE):
        return False
    return bool(model.byte_fallback or (model.unk_token is not None and not model.fuse_unk))


def _flags(positions: Iterable[int], size: int) -> bytes:
    """1 at each of the positions, else 0: a byte per token, asked once per token of output."""
    flags = bytearray(size)
    for position in positions:
        flags[position] = 1
    return bytes(flags)


@functools.cache
def _byte_of_character() -> dict[str, bytes]:
    """Byte-level BPE writes each byte as a printable character: itself if it is one, else one from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): bytes([byte]) for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    table.update({chr(0x100 + rank): bytes([byte]) for rank, byte in enumerate(others)})
    return table


def _read_settings(directory: Path) -> dict[str, Any]:
    file = directory / "tokenizer_config.json"
    if not file.is_file():
        return {}
    try:
        settings = json.loads(file.read_bytes())
    except ValueError as error:
        raise ConfigError.of("model", f"{file} is not valid JSON: {error}") from error
    if not isinstance(settings, dict):
        raise ConfigError.of("model", f"{file} does not hold a JSON object")
    return settings


def _chat_template_source(directory: Path, settings: Mapping[str, Any]) -> str | None:
    file = directory / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    source = settings.get("chat_template")
    if isinstance(source, list):  # several named templates
        source = {entry["name"]: entry["template"] for entry in source}.get("default")
    return source


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    tokens = {}
    for key in _SPECIAL_TOKEN_KEYS:
        value = settings.get(key)
        if isinstance(value, dict):  # a serialised AddedToken
            value = value.get("content")
        if isinstance(value, str):
            tokens[key] = value
    return tokens
