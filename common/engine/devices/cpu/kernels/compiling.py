"""Compiles functions for the processor at hand."""

from __future__ import annotations

import ctypes
import hashlib
import inspect
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from llvmlite import __version__ as llvmlite_version
from llvmlite import binding, ir

from common import engine
from common.engine.cache_directory import cached
from common.engine.devices.cpu.kernels.language import MAX_LANES, Builder, ElementType, Pointer
from common.engine.devices.cpu.kernels.pairs import MULTIPLIES_PAIRS
from common.engine.devices.cpu.kernels.processor import features
from common.engine.devices.cpu.kernels.tiles import has_tiles

_OPTIMIZATION = 3  # of LLVM

Body = Callable[[Builder, Pointer], None]
"""(builder, the function's argument): appends the instructions."""


def instructions() -> str:
    """Names what the kernels are compiled for, as far as it decides how they round."""
    of_bytes = [name for name in ("avx512vnni", "avx512vbmi") if features().get(name)]
    return f"{MAX_LANES} lanes, pairs {MULTIPLIES_PAIRS}, tiles {has_tiles()}, bytes {of_bytes}"


class Function:
    """A compiled function of one address."""

    def __init__(self, name: str, body: Body, made_by: str | None = None) -> None:
        """The address is of INT64 numbers. `made_by` names what makes the instructions, and of what: if an earlier
        process has compiled them, `body` is not called."""
        self._engine = _compile(name, body, made_by)  # owns the machine code
        self.address: int = self._engine.get_function_address(name)

    def keep(self) -> None:
        """Keeps the machine code until the process ends."""
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._engine))


def _compile(name: str, body: Body, made_by: str | None) -> Any:
    """An engine with the function's machine code."""
    sources = _sources() if made_by else None
    if made_by and sources:
        origin = [sources, instructions(), made_by]
        code = cached("kernels", [*_compiler(), *origin], lambda: _machine_code(module_text(name, body)))
    else:
        text = module_text(name, body)
        code = cached("kernels", [*_compiler(), text], lambda: _machine_code(text))
    engine = binding.create_mcjit_compiler(binding.parse_assembly(""), _target_machine())
    engine.add_object_file(binding.ObjectFileRef.from_data(code))
    engine.finalize_object()
    return engine


def module_text(name: str, body: Body) -> str:
    """Returns a module with the function, in LLVM's language."""
    module = ir.Module(name)
    module.triple = binding.get_process_triple()
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [ir.PointerType()]), name)
    function.attributes.add("nounwind")
    builder = Builder(function)
    body(builder, Pointer(builder, function.args[0], ElementType.INT64))
    builder.ir.ret_void()
    return str(module)


def _machine_code(text: str) -> bytes:
    """Compiles a module into an object file."""
    parsed = binding.parse_assembly(text)
    parsed.verify()
    target = _target_machine()
    tuning = binding.create_pipeline_tuning_options(speed_level=_OPTIMIZATION)
    tuning.slp_vectorization = tuning.loop_vectorization = False  # the kernels say themselves what is a vector
    passes = binding.create_pass_builder(target, tuning)
    passes.getModulePassManager().run(parsed, passes)
    code: bytes = target.emit_object(parsed)
    return code


@cache
def _compiler() -> list[str]:
    """Names all that machine code depends on beside the module."""
    llvm = ".".join(map(str, binding.llvm_version_info))
    steps = [inspect.getsource(_machine_code), inspect.getsource(_target_machine)]
    processor = [binding.get_process_triple(), binding.get_host_cpu_name(), _features()]
    return [f"llvmlite {llvmlite_version}, LLVM {llvm}, level {_OPTIMIZATION}", *steps, *processor]


@cache
def _sources() -> str | None:
    """Digest of the source files of this process's engine. None: there are none, or one of them has changed since they
    were imported, or cannot be read."""
    directory = Path(engine.__file__).parent
    digest, changed_at = hashlib.sha256(), 0.0
    try:
        files = sorted(directory.rglob("*.py"))
        for file in files:
            content = file.read_bytes()
            digest.update(f"{file.relative_to(directory)} {len(content)} ".encode())
            digest.update(content)
            changed_at = max(changed_at, file.stat().st_ctime)  # after the read: it may change meanwhile
    except OSError:
        return None
    return digest.hexdigest() if files and changed_at < engine.IMPORTED_AT else None


def _features() -> str:
    """Names the processor's features, as far as kernels use them."""
    found = features()
    if found.get("avx512f"):
        found["prefer-256-bit"] = False  # LLVM's default for some processors halves the vectors
    return str(found.flatten())


def _target_machine() -> Any:
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    return binding.Target.from_default_triple().create_target_machine(
        cpu=binding.get_host_cpu_name(), features=_features(), opt=_OPTIMIZATION, jit=True
    )
