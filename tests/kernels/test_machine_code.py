"""The padding kernel becomes machine code for a GPU on a machine without one: the interpreter accepts more than Triton."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys

_COMPILE = """
import sys
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from njt.kernels.padding_triton_runs import _RUNTIME, move_runs

for case in eval(sys.argv[1]):
    unpad, has_lengths, left, one_plane, narrow, word, runs, width = case
    constants = dict(
        UNPAD=unpad, HAS_LENGTHS=has_lengths, LEFT=left, ONE_PLANE=one_plane, NARROW=narrow,
        WORD=getattr(tl, word), G=runs, W=width,
    )
    types = ["*u8", "*u8", "*i64", "*i32"] + ["i64"] * (len(_RUNTIME) - 4)
    signature = dict(zip(_RUNTIME, types)) | dict.fromkeys(constants, "constexpr")
    places = {(move_runs.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(move_runs, signature, constexprs=places)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32))
    assert made.asm["cubin"]
    assert made.metadata.num_warps == 4
"""
# each way and flag at least once with each width of words
CASES = [
    (unpad, unpad != left, left, not left, narrow, word, *tile)
    for (unpad, left), (narrow, word, tile) in itertools.product(
        itertools.product([False, True], repeat=2),
        [(True, "int64", (1, 2048)), (False, "int64", (4, 512)), (False, "uint8", (16, 128))],
    )
]


def test_the_kernel_compiles() -> None:
    """Triton's compiler and its assembler for compute capability 9.0, in a process that doesn't interpret."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", _COMPILE, repr(CASES)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
