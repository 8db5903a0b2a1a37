"""A kernel that reads and writes one element past its arrays, once: what memcheck has to find to be believed."""

import torch
import triton
import triton.language as tl


@triton.jit
def copy_kernel(source_ptr, target_ptr, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(target_ptr + at, tl.load(source_ptr + at, mask=at <= n, other=0), mask=at <= n)


if __name__ == "__main__":
    source = torch.arange(1000, dtype=torch.int32, device="cuda")
    target = torch.zeros_like(source)
    copy_kernel[(1,)](source, target, len(source), BLOCK=1024)
    torch.cuda.synchronize()
    print("1 passed")
