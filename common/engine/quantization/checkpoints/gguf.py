"""GGUF: weights in blocks along inputs, each with its scales, in one file of llama.cpp's.

| type | inputs of a block | weight |
|---|---|---|
| Q4_0 | 32 | (code of 4 bits - 8) * scale |
| Q8_0 | 32 | int8 * scale |
| Q4_K | 256, in groups of 32 | code of 4 bits * scale * factor - minimum * factor, factors of 6 bits |
| Q6_K | 256, in groups of 16 | (code of 6 bits - 32) * scale * factor, factors of 8 bits |

The file is read beside the model's config.json. Of what it says of the model, architecture and heads are used.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from common.engine.quantization.checkpoints.base import Packed, bad_weight
from common.engine.quantization.grouped import MIDDLE, GroupedLinear, pack_words
from common.errors import ConfigError, ModelLoadError

GGUF_SUFFIX = ".gguf"  # of file names

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_NUM_SAMPLES = 3  # of each tensor, for the model's fingerprint
_ALIGNMENT = 32  # bytes, unless the file says another
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}  # of values
_TEXT, _LIST = 8, 9
_ARCHITECTURES = ("llama", "qwen2", "qwen3")
_PLAIN = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}  # types by number
_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    **{f"attn_{part}": f"self_attn.{part}_proj" for part in "qkv"},
    "attn_output": "self_attn.o_proj",
    **{f"attn_{part}_norm": f"self_attn.{part}_norm" for part in "qk"},
    **{f"ffn_{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")},
}
_NAME = re.compile(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)")
_OF_HEADS = re.compile(r"\.self_attn\.([qk])_proj\.")


class _Type(NamedTuple):
    """A type of quantised weights."""

    name: str
    inputs: int  # of a block
    num_bytes: int  # of a block
    decode: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray, np.ndarray | None]]
    """Blocks [outputs, blocks, bytes] -> integers [outputs, inputs], scales and shifts [outputs, groups]."""


def _halves(raw: np.ndarray) -> np.ndarray:
    """Numbers of float16 as float32."""
    return np.ascontiguousarray(raw).view(np.float16).astype(np.float32)


def _q8_0(raw: np.ndarray) -> tuple[np.ndarray, np.ndarray, None]:
    return _flat(np.ascontiguousarray(raw[..., 2:]).view(np.int8)), _flat(_halves(raw[..., :2])), None


def _q4_0(raw: np.ndarray) -> tuple[np.ndarray, np.ndarray, None]:
    codes = np.concatenate([raw[..., 2:] & 15, raw[..., 2:] >> 4], -1).astype(np.int8)
    return _flat(codes - MIDDLE), _flat(_halves(raw[..., :2])), None


def _q4_k(raw: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    scale, minimum, packed = _halves(raw[..., :2]), _halves(raw[..., 2:4]), raw[..., 4:16]
    first, second, third = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    factors = np.concatenate([first & 63, (third & 15) | (first >> 6 << 4)], -1)
    minima = np.concatenate([second & 63, (third >> 4) | (second >> 6 << 4)], -1)
    codes = raw[..., 16:].reshape(*raw.shape[:2], 4, 32)
    codes = np.stack([codes & 15, codes >> 4], 3).reshape(*raw.shape[:2], -1).astype(np.int8)
    scales, shifts = scale * factors, -(minimum * minima)
    return _flat(codes - MIDDLE), _flat(scales), _flat(shifts + MIDDLE * scales)


def _q6_k(raw: np.ndarray) -> tuple[np.ndarray, np.ndarray, None]:
    shape = raw.shape[:2]
    low, high = raw[..., :128].reshape(*shape, 2, 2, 32), raw[..., 128:192].reshape(*shape, 2, 32)
    quarters = [(low[..., i % 2, :] >> i // 2 * 4 & 15) | ((high >> 2 * i & 3) << 4) for i in range(4)]
    codes = np.stack(quarters, 3).reshape(*shape, -1).astype(np.int8) - 32
    factors = np.ascontiguousarray(raw[..., 192:208]).view(np.int8)
    return _flat(codes), _flat(_halves(raw[..., 208:]) * factors), None


def _flat(blocks: np.ndarray) -> np.ndarray:
    return blocks.reshape(len(blocks), -1)


_TYPES = {
    2: _Type("Q4_0", 32, 18, _q4_0),
    8: _Type("Q8_0", 32, 34, _q8_0),
    12: _Type("Q4_K", 256, 144, _q4_k),
    14: _Type("Q6_K", 256, 210, _q6_k),
}
_BY_NAME = {each.name: each for each in _TYPES.values()}
_OF_4_BITS = frozenset({"Q4_0", "Q4_K"})


class GGUF:
    """See CheckpointFormat. The last part of a quantised weight's name is its type; see GGUFFile."""

    suffixes = frozenset(_BY_NAME)

    def is_quantized(self, suffixes: Iterable[str]) -> bool:
        """See CheckpointFormat."""
        return not self.suffixes.isdisjoint(suffixes)

    def linear(self, tensors: Mapping[str, torch.Tensor], shape: torch.Size, dtype: torch.dtype) -> GroupedLinear:
        """See CheckpointFormat."""
        (name,) = tensors
        kind, (num_outputs, num_inputs) = _BY_NAME[name], shape
        if num_inputs % kind.inputs:
            bad_weight(f"{num_inputs} inputs are not blocks of {kind.inputs}")
        row_bytes = num_inputs // kind.inputs * kind.num_bytes
        raw = Packed(tensors).take(name, (num_outputs, row_bytes), torch.uint8)
        parts = kind.decode(raw.numpy().reshape(num_outputs, -1, kind.num_bytes))
        codes, scale, shift = (None if part is None else torch.from_numpy(part).T for part in parts)
        assert codes is not None
        assert scale is not None
        return GroupedLinear(pack_words(codes) if name in _OF_4_BITS else codes, scale, shift, None, dtype)


class _Tensor(NamedTuple):
    name: str  # in the file
    type: int
    shape: list[int]
    start: int  # in the data


class GGUFFile:
    """The tensors of a file under the model's names, with the interface of `safetensors`. That of a quantised weight
    `X.weight` is called `X.` and its type, and holds its bytes, [outputs, bytes]."""

    def __init__(self, path: Path) -> None:
        """Raises ModelLoadError if it cannot be read, and ConfigError for what is not supported."""
        try:
            reader = _Reader(path)
        except (OSError, ValueError, struct.error, UnicodeDecodeError, KeyError, TypeError) as error:
            raise ModelLoadError(f"{path} cannot be read: {error}", param="model") from error
        self._data, self._values = reader.data, reader.values
        self._architecture = str(self._values.get("general.architecture"))
        if self._architecture not in _ARCHITECTURES:
            known = ", ".join(_ARCHITECTURES)
            raise ConfigError.of("model", f"{path.name} is of architecture {self._architecture}, none of {known}")
        self._tensors = dict(self._named(tensor) for tensor in reader.tensors if tensor.name != "rope_freqs.weight")

    def __enter__(self) -> GGUFFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._tensors.clear()

    def samples(self, num_bytes: int) -> Iterator[bytes]:
        """Yields what each tensor is, and so many bytes from each of some places in it; first what is used of the
        rest of the header."""
        heads = {key: value for key, value in self._values.items() if ".attention.head_count" in key}
        yield f"{self._architecture} {sorted(heads.items())}".encode()
        for tensor in sorted(self._tensors.values(), key=lambda each: each.start):
            yield repr(tensor).encode()
            size = self._num_bytes(tensor)
            for place in range(_NUM_SAMPLES):
                start = tensor.start + max(0, size - num_bytes) * place // (_NUM_SAMPLES - 1)
                yield bytes(self._data[start : min(start + num_bytes, tensor.start + size)])

    def _num_bytes(self, tensor: _Tensor) -> int:
        if (plain := _PLAIN.get(tensor.type)) is not None:
            return int(np.prod(tensor.shape)) * plain.itemsize
        kind = _TYPES[tensor.type]
        return int(np.prod(tensor.shape)) // kind.inputs * kind.num_bytes

    def keys(self) -> Iterable[str]:
        """The names."""
        return self._tensors.keys()

    def get_tensor(self, name: str) -> torch.Tensor:
        """A copy of a tensor. Raises ModelLoadError if the file is shorter than it says."""
        tensor = self._tensors[name]
        plain = _PLAIN.get(tensor.type)
        if plain is None:
            kind = _TYPES[tensor.type]
            shape, dtype = [*tensor.shape[:-1], tensor.shape[-1] // kind.inputs * kind.num_bytes], torch.uint8
        else:
            shape, dtype = tensor.shape, plain
        num_bytes = int(np.prod(shape)) * dtype.itemsize
        raw = self._data[tensor.start : tensor.start + num_bytes]
        if len(raw) < num_bytes:
            raise ModelLoadError(f"the file ends before {tensor.name}", param="model")
        found = torch.from_numpy(np.array(raw)).view(dtype).view(shape)
        part = _OF_HEADS.search(name)
        return self._in_halves(found, part[1]) if part is not None and self._architecture == "llama" else found

    def get_slice(self, name: str) -> WholeTensor:
        """The tensor, of which parts may be taken."""
        return WholeTensor(self.get_tensor(name))

    def _in_halves(self, tensor: torch.Tensor, part: str) -> torch.Tensor:
        """Rows of heads as `transformers` rotates them, halves: llama.cpp has them in pairs."""
        key = "head_count" if part == "q" else "head_count_kv"
        num_heads = int(self._values.get(f"llama.attention.{key}", self._values["llama.attention.head_count"]))
        return tensor.view(num_heads, -1, 2, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)

    def _named(self, tensor: _Tensor) -> tuple[str, _Tensor]:
        match = _NAME.fullmatch(tensor.name)
        if match is None or match[2] not in _NAMES:
            raise ConfigError.of("model", f"a GGUF file with a tensor {tensor.name} is not supported")
        if tensor.type not in _PLAIN and tensor.type not in _TYPES:
            known = ", ".join(_BY_NAME)
            raise ConfigError.of("model", f"{tensor.name} is of GGUF's type {tensor.type}, none of {known}")
        own = _NAMES[match[2]] if match[1] is None else f"model.layers.{match[1]}.{_NAMES[match[2]]}"
        return f"{own}.{match[3] if tensor.type in _PLAIN else _TYPES[tensor.type].name}", tensor


class WholeTensor:
    """A tensor with the interface of a slice of `safetensors`."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def get_shape(self) -> list[int]:
        """The shape of the whole."""
        return list(self._tensor.shape)

    def __getitem__(self, place: Any) -> torch.Tensor:
        return self._tensor[place]


class _Reader:
    """Header of a file: values and tensors. Raises ValueError, OSError, struct.error and KeyError."""

    def __init__(self, path: Path) -> None:
        self._raw = np.memmap(path, np.uint8, "r")
        self._place = 0
        if bytes(self._take(4)) != _MAGIC:
            raise ValueError("it does not begin as a GGUF file does")
        version, num_tensors, num_values = self._number("I"), self._number("Q"), self._number("Q")
        if version not in _VERSIONS:
            raise ValueError(f"GGUF version {version} is none of {_VERSIONS}")
        self.values = dict(self._value() for _ in range(num_values))
        self.tensors = [self._tensor() for _ in range(num_tensors)]
        alignment = int(self.values.get("general.alignment", _ALIGNMENT))
        if alignment < 1:
            raise ValueError(f"its alignment is {alignment} bytes")
        self.data = self._raw[-(-self._place // alignment) * alignment :]

    def _take(self, count: int) -> np.ndarray:
        if count > len(self._raw) - self._place:
            raise ValueError("it ends within its header")
        self._place += count
        return self._raw[self._place - count : self._place]

    def _number(self, kind: str) -> Any:
        return struct.unpack(f"<{kind}", bytes(self._take(struct.calcsize(f"<{kind}"))))[0]

    def _text(self) -> str:
        return bytes(self._take(self._number("Q"))).decode()

    def _value(self) -> tuple[str, Any]:
        name = self._text()
        return name, self._of_type(self._number("I"))

    def _of_type(self, kind: int) -> Any:
        if kind == _TEXT:
            return self._text()
        if kind != _LIST:
            return self._number(_NUMBERS[kind])
        inner, count = self._number("I"), self._number("Q")
        if inner in _NUMBERS:
            self._take(count * struct.calcsize(f"<{_NUMBERS[inner]}"))  # such lists are of no use here
            return None
        for _ in range(count):
            self._of_type(inner)
        return None

    def _tensor(self) -> _Tensor:
        name = self._text()
        dims = [self._number("Q") for _ in range(self._number("I"))]
        return _Tensor(name, self._number("I"), dims[::-1], self._number("Q"))
