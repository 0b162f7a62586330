"""Model fingerprint: two engines with equal ones compute interchangeable KV.

SHA-256 over

- of each weight file, in order of file name: its length, its whole safetensors header (names, types, shapes, offsets),
  and of its tensors `NUM_CHUNKS` evenly spaced chunks of `CHUNK_BYTES` and one from the middle of each: a checkpoint of
  which a tensor was trained or quantised again differs in them, and reading them takes milliseconds. Of a GGUF file,
  names, types, shapes and places of its tensors, and chunks of each;
- the parsed config.json without fields that change no number;
- dtype of the computation and of the KV;
- how the weights were quantised while they were loaded;
- where KV is the same to the last bit (`batch_invariant`), the instructions that rounded it.

Paths are no part of it: the same files fingerprint the same everywhere. Nor is the layout of the KV (`KVLayout`), which
says how it is cut and where it lies, but not what it is; engines that exchange KV compare it separately.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common.engine.quantization.checkpoints.gguf import GGUF_SUFFIX, GGUFFile

CHUNK_BYTES = 4096
NUM_CHUNKS = 256
_MAX_HEADER_BYTES = 100_000_000  # the limit of the format

_IRRELEVANT = frozenset(
    {"_name_or_path", "_commit_hash", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache"}
)


def fingerprint_model(
    weight_files: Sequence[Path],
    config: dict[str, Any],
    *,
    dtype: str,
    kv_dtype: str,
    quantization: str | None = None,
    rounding: str = "",
) -> bytes:
    """The 32-byte fingerprint. `config` is the parsed config.json; `quantization` as in ModelConfig; `rounding` names
    the instructions, if they matter. Raises OSError if a file cannot be read."""
    digest = hashlib.sha256(b"baton.fingerprint.v3")
    for path in sorted(weight_files, key=lambda path: path.name):
        digest.update(_digest_weights(path))
    relevant = {key: value for key, value in config.items() if key not in _IRRELEVANT}
    digest.update(json.dumps(relevant, sort_keys=True).encode())
    digest.update(f"dtype {dtype};KV {kv_dtype};".encode())
    if quantization is not None:
        digest.update(f"quantization {quantization};".encode())
    digest.update(rounding.encode())
    return digest.digest()


def _digest_weights(path: Path) -> bytes:
    if path.suffix == GGUF_SUFFIX:
        with GGUFFile(path) as gguf:
            return hashlib.sha256(b"".join(gguf.samples(CHUNK_BYTES))).digest()
    size = path.stat().st_size
    digest = hashlib.sha256(size.to_bytes(8, "little"))
    with path.open("rb") as file:
        header_bytes = min(int.from_bytes(file.read(8), "little"), _MAX_HEADER_BYTES)
        header = file.read(header_bytes)
        digest.update(header)
        start = 8 + header_bytes
        step = max(CHUNK_BYTES, (size - start) // NUM_CHUNKS)
        for offset in sorted({*range(start, size, step), *_middles(header, start)}):
            file.seek(offset)
            digest.update(file.read(CHUNK_BYTES))
    return digest.digest()


def _middles(header: bytes, start: int) -> list[int]:
    """Returns where the chunk from the middle of each tensor begins. None of a header that is not one: what loads the
    file says what is wrong with it."""
    try:
        tensors = [each for name, each in json.loads(header).items() if name != "__metadata__"]
        places = [(int(begin), int(end)) for begin, end in (each["data_offsets"] for each in tensors)]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return []
    return [start + max(begin, (begin + end - CHUNK_BYTES) // 2) for begin, end in places if 0 <= begin <= end]
