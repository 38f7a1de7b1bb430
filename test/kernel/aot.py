"""Compile what a launcher would launch for GPUs that are not there, and read the compiler's resource report.

The process must not have TRITON_INTERPRET set: kernels are then defined for the interpreter.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

SHARED_MEMORY = {90: 232_448, 100: 232_448, 120: 101_376}  # bytes a block may have, by compute capability
OPTIONS = ("num_warps", "num_stages", "maxnreg", "num_ctas", "launch_pdl")
TYPES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int8: "i8",
    torch.bool: "i1",
    torch.uint8: "u8",
}


@dataclass(frozen=True)
class Resources:
    kernel: str
    shared: int  # bytes of shared memory
    registers: int
    stack: int  # bytes a thread spills, or keeps in arrays that it indexes at run time


@contextmanager
def record_launches():
    """Yields a list of (kernel, args, kwargs) of launches, none of which happens: meta tensors will do."""
    launches, run = [], JITFunction.run
    JITFunction.run = lambda self, *args, grid, warmup, **kwargs: launches.append((self, args, kwargs))
    try:
        yield launches
    finally:
        JITFunction.run = run


def _source(kernel: JITFunction, args: tuple, kwargs: dict) -> ASTSource:
    """Specialised as a launch specialises: divisible by 16 (pointers: assumed), equal to 1, None."""
    values = dict(zip(kernel.arg_names, args, strict=False)) | {
        name: x for name, x in kwargs.items() if name not in OPTIONS
    }
    signature, constants, attributes = {}, {}, {}
    for i, parameter in enumerate(kernel.params):
        name, x = parameter.name, values.get(parameter.name, parameter.default)
        divisible = False
        if parameter.is_constexpr or x is None or (isinstance(x, int) and x == 1):
            signature[name], constants[(i,)] = "constexpr", x
        elif isinstance(x, torch.Tensor):
            signature[name], divisible = "*" + TYPES[x.dtype], True
        elif isinstance(x, int):
            signature[name] = "i32" if -(2**31) <= x < 2**31 else "i64"
            divisible = x % 16 == 0 and not parameter.do_not_specialize
        else:
            signature[name] = "fp32"
        if divisible:
            attributes[(i,)] = [["tt.divisibility", 16]]
    return ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)


def compile_launch(kernel: JITFunction, args: tuple, kwargs: dict, capability: int) -> Resources:
    options = {name: x for name, x in kwargs.items() if name in OPTIONS}
    compiled = triton.compile(
        _source(kernel, args, kwargs), target=GPUTarget("cuda", capability, 32), options=options
    )
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        report = subprocess.run(
            [tool, "--dump-resource-usage", cubin.name], capture_output=True, text=True, check=True
        )
    found = re.search(r"REG:(\d+) STACK:(\d+)", report.stdout)
    return Resources(kernel.__name__, compiled.metadata.shared, int(found[1]), int(found[2]))
