"""OpenVINO GenAI's continuous batching as one of the sides, in the environment of `make peers`."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_genai

_CACHE_GIB = 2
_MAX_BATCH_TOKENS = 2048
_HINTS = {"float32": "f32", "bfloat16": "bf16"}


class OpenVino:
    """See Generator. Keeps KV in the type that it computes in, not in its default of 8 bits."""

    def __init__(self, directory: str, dtype: str) -> None:
        scheduling = openvino_genai.SchedulerConfig()
        scheduling.cache_size = _CACHE_GIB
        scheduling.max_num_batched_tokens = _MAX_BATCH_TOKENS
        scheduling.enable_prefix_caching = False
        properties = {
            "INFERENCE_PRECISION_HINT": _HINTS[dtype],
            "KV_CACHE_PRECISION": _HINTS[dtype],
            "INFERENCE_NUM_THREADS": len(os.sched_getaffinity(0)),
        }
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(directory, scheduling, "CPU", properties)
        self._num_requests = 0

    def generate(
        self, prompts: Sequence[Sequence[int]], num_tokens: int, on_step: Callable[[int], None]
    ) -> list[list[int]]:
        """See Generator."""
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens, config.do_sample, config.ignore_eos = num_tokens, False, True
        handles: list[Any] = []
        for prompt in prompts:
            tokens = openvino.Tensor(np.array([prompt], dtype=np.int64))
            handles.append(self._pipeline.add_request(self._num_requests, tokens, config))
            self._num_requests += 1
        found: list[list[int]] = [[] for _ in prompts]
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            for own, handle in zip(found, handles, strict=True):
                while handle.can_read():
                    own += [token for output in handle.read().values() for token in output.generated_ids]
            on_step(min(map(len, found)))
        return found

    def close(self) -> None:
        """See Generator."""


def load(_: str, directory: str, dtype: str, quantization: str | None) -> OpenVino:
    """Returns the side with a model, which is converted first, by the program that OpenVINO's documentation names."""
    with tempfile.TemporaryDirectory(prefix="openvino-") as converted:
        program = str(Path(sys.executable).with_name("optimum-cli"))
        weights = "int8" if quantization else "fp32"
        options = ["--task", "text-generation-with-past", "--weight-format", weights]
        subprocess.run([program, "export", "openvino", "--model", directory, *options, converted], check=True)
        return OpenVino(converted, dtype)
