"""How this process treats the memory that tensors on the CPU give back."""

from __future__ import annotations

import ctypes
import sys

# glibc's mallopt parameters (malloc.h).
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -2, -4, -8


def keep_freed_memory() -> None:
    """Make the C library keep what tensors give back.

    By default glibc returns large blocks to the kernel, and each decoded picture and each activation of a CPU run is
    faulted in again, page by page. Nothing happens where the C library is another.
    """
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt"):
        return
    for parameter, value in ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, 2**31 - 1), (_M_TOP_PAD, 2**26), (_M_ARENA_MAX, 1)):
        libc.mallopt(parameter, value)
