"""A plugin of pytest that runs CPU kernels as on a 64-bit ARM processor, in QEMU's user mode:
python -m pytest -p tests.emulation tests/unit/common/engine/devices/cpu/kernels/test_linear_kernel.py

Kernels are compiled for such a processor and linked with a program that reads memory, calls one of them and writes the
memory again; torch's operators, which they are compared with, run on this one. Needs Debian's packages qemu-user-static
and binutils-aarch64-linux-gnu.
"""

import ctypes
import gc
import itertools
import shutil
import subprocess
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from llvmlite import binding

QEMU, ASSEMBLER, LINKER = "qemu-aarch64-static", "aarch64-linux-gnu-as", "aarch64-linux-gnu-ld"
_TRIPLE = "aarch64-unknown-linux-gnu"
_BASE, _SIZE, _LINE = 1 << 32, 1 << 28, 64
_DEADLINE_S = 300.0  # of a kernel, which takes milliseconds
_SYSTEM = """
.global system
system:
  mov x8, x0
  mov x0, x1
  mov x1, x2
  mov x2, x3
  mov x3, x4
  mov x4, x5
  mov x5, #0
  svc #0
  ret
"""
_START = f"""
declare i64 @system(i64, i64, i64, i64, i64, i64)

define void @_start() {{
entry:
  %mapped = call i64 @system(i64 222, i64 {_BASE}, i64 {_SIZE}, i64 3, i64 50, i64 -1)
  br label %reading
reading:
  %size = phi i64 [0, %entry], [%larger, %reading]
  %to = add i64 %size, {_BASE}
  %got = call i64 @system(i64 63, i64 0, i64 %to, i64 65536, i64 0, i64 0)
  %larger = add i64 %size, %got
  %more = icmp sgt i64 %got, 0
  br i1 %more, label %reading, label %run
run:
  %place = inttoptr i64 {_BASE} to ptr
  %block = load i64, ptr %place
  %argument = inttoptr i64 %block to ptr
  call void @KERNEL(ptr %argument)
  br label %writing
writing:
  %written = phi i64 [0, %run], [%further, %writing]
  %from = add i64 %written, {_BASE}
  %left = sub i64 %size, %written
  %put = call i64 @system(i64 64, i64 1, i64 %from, i64 %left, i64 0, i64 0)
  %further = add i64 %written, %put
  %unfinished = icmp slt i64 %further, %size
  br i1 %unfinished, label %writing, label %end
end:
  %ended = call i64 @system(i64 93, i64 0, i64 0, i64 0, i64 0, i64 0)
  unreachable
}}
"""
_programs: dict[int, Path] = {}  # by what stands for the addresses of kernels
_numbers = itertools.count(1)
_scratch = tempfile.TemporaryDirectory(prefix="emulation-")

if shutil.which(QEMU) and shutil.which(LINKER):
    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    binding.get_process_triple = lambda: _TRIPLE
    binding.get_host_cpu_features = lambda: binding.FeatureMap(neon=True)
    _machine = binding.Target.from_triple(_TRIPLE).create_target_machine(cpu="neoverse-n1", opt=3)

    from common.engine.devices.cpu.kernels import compiling, threads


def pytest_configure(config):
    if "compiling" not in globals():
        pytest.exit(f"{QEMU} or {LINKER} is missing: install qemu-user-static and binutils-aarch64-linux-gnu", 1)
    compiling._compile = _compile
    threads.Calls.run = _run


def _compile(name, body, _):
    parsed = binding.parse_assembly(compiling.module_text(name, body) + _START.replace("KERNEL", name))
    parsed.verify()
    number = next(_numbers)
    program = Path(_scratch.name) / f"{number}-{name}"
    program.with_suffix(".o").write_bytes(_machine.emit_object(parsed))
    subprocess.run([ASSEMBLER, "-o", program.with_suffix(".s.o")], input=_SYSTEM.encode(), check=True)
    subprocess.run([LINKER, "-o", program, program.with_suffix(".o"), program.with_suffix(".s.o")], check=True)
    _programs[number] = program
    return SimpleNamespace(get_function_address=lambda _: number)


def _run(calls, num_threads):
    for address in calls._list[2:]:
        _run_block(address)


def _run_block(address):
    """The block's addresses become those of copies; what they point to is copied there and back."""
    objects = gc.get_objects()
    arrays = (each for each in objects if issubclass(type(each), ctypes.Array))
    block = list(next(each for each in arrays if ctypes.addressof(each) == address))
    storages = sorted({_range_of(each) for each in objects if issubclass(type(each), torch.Tensor)})
    memory, places = bytearray(-(-8 * (1 + len(block)) // _LINE) * _LINE), {}
    for place, value in enumerate(block):
        storage = next((each for each in storages if each[0] <= value < each[1]), None)
        if storage is None:
            continue
        if storage not in places:
            places[storage] = len(memory)
            memory += ctypes.string_at(storage[0], storage[1] - storage[0])
            memory += bytes(-len(memory) % _LINE)
        block[place] = _BASE + places[storage] + value - storage[0]
    memory[:8] = (_BASE + 8).to_bytes(8, "little")
    memory[8 : 8 * (1 + len(block))] = bytes((ctypes.c_int64 * len(block))(*block))
    command = [QEMU, str(_programs[block[threads.FUNCTION]])]
    found = subprocess.run(command, input=bytes(memory), stdout=subprocess.PIPE, check=True, timeout=_DEADLINE_S).stdout
    assert len(found) == len(memory)
    for (start, end), place in places.items():
        ctypes.memmove(start, found[place : place + end - start], end - start)


def _range_of(tensor):
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()
