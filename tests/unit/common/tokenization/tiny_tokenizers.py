"""Small tokenizers of the kinds that models use."""

from __future__ import annotations

import functools

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from common.tokenization import Tokenizer

_TEXT = ["hello world, hello there. the capital of France is Paris", "日本語のテキスト", "naïve café 😀 👩‍👩‍👧"] * 4
SPECIALS = ["<s>", "</s>"]


@functools.cache
def byte_level() -> Tokenizer:
    """GPT-2 style: any id sequence is some byte string."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        _TEXT,
        trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, special_tokens=SPECIALS, show_progress=False),
    )
    return Tokenizer(backend)


@functools.cache
def sentencepiece() -> Tokenizer:
    """Llama-2 style: `▁` for spaces, `<0xXX>` for bytes outside the vocabulary, leading space stripped."""
    pieces = ["<unk>", *SPECIALS, *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"helowrdtFancP", "▁h", "▁he", "▁w"]
    vocabulary = {piece: rank for rank, piece in enumerate(pieces)}
    merges = [("▁", "h"), ("▁h", "e"), ("▁", "w")]
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.add_special_tokens(SPECIALS)
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return Tokenizer(backend)


@functools.cache
def metaspace() -> Tokenizer:
    """T5 style: the decoder itself drops the first space."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.train_from_iterator(
        _TEXT, trainers.BpeTrainer(vocab_size=150, special_tokens=SPECIALS, show_progress=False)
    )
    return Tokenizer(backend)


KINDS = {"byte_level": byte_level, "sentencepiece": sentencepiece, "metaspace": metaspace}
