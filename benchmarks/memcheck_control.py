"""A kernel that steps one element past an array's end: what memcheck has to find to be believed.

python memcheck_control.py read|write
"""

import sys

import torch
import triton
import triton.language as tl


@triton.jit
def copy_kernel(source_ptr, target_ptr, read, written, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(target_ptr + at, tl.load(source_ptr + at, mask=at < read, other=0), mask=at < written)


if __name__ == "__main__":
    n = 1000
    source = torch.arange(n, dtype=torch.int32, device="cuda")
    target = torch.zeros_like(source)
    copy_kernel[(1,)](source, target, n + (sys.argv[1] == "read"), n + (sys.argv[1] == "write"), BLOCK=1024)
    torch.cuda.synchronize()
