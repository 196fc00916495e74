"""How this process treats the memory that tensors on the CPU give back."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager

# glibc's mallopt parameters (malloc.h), and the largest threshold that it sets by itself.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -2, -3, -4, -8
_LARGEST_THRESHOLD = 2**25

_keeps: set[bool] = set()


def keep_freed_memory() -> None:
    """Make the C library keep what tensors give back.

    By default glibc returns large blocks to the kernel, and each decoded picture and each activation of a CPU run is
    faulted in again, page by page. Nothing happens where the C library is another.
    """
    _keeps.add(True)
    _set({_M_MMAP_MAX: 0, _M_TRIM_THRESHOLD: 2**31 - 1, _M_TOP_PAD: 2**26, _M_ARENA_MAX: 1})


@contextmanager
def returning_freed_memory() -> Iterator[None]:
    """Inside, the kernel gets back what large tensors held as soon as they are gone.

    By default glibc takes those of up to 32 MiB from its heap, where others that stay soon lie between, and what was
    freed is of little use: twice the memory in use, where tensors come and go that differ in size.
    """
    _set({_M_MMAP_THRESHOLD: 2**17, _M_MMAP_MAX: 2**16})
    try:
        yield
    finally:
        _set({_M_MMAP_THRESHOLD: _LARGEST_THRESHOLD})
        if _keeps:
            keep_freed_memory()


def _set(options: dict[int, int]) -> None:
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt"):
        return
    for parameter, value in options.items():
        libc.mallopt(parameter, value)
