"""Settings of the process that must be made before the heavy libraries start to work."""

from __future__ import annotations

import ctypes
import os
import sys
import warnings

# glibc's mallopt parameters (malloc.h).
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -2, -4, -8


def prepare() -> None:
    """Quieten what users can do nothing about, and let a CPU run keep its memory."""
    # DeepSpeed compiles with the `ninja` beside this interpreter, also where its environment isn't activated.
    os.environ["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)])
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # loader processes are forks; a warning each otherwise
    # DeepSpeed calls collectives by their old names; one warning a rank and call otherwise.
    warnings.filterwarnings("ignore", message=r".*torch\.distributed\.\w+` is deprecated", category=FutureWarning)


def keep_freed_memory() -> None:
    """Make the C library keep what tensors give back.

    By default glibc returns large blocks to the kernel, and every step of a CPU run faults its activations in again.
    On GPUs activations live elsewhere, so only CPU runs call this. Nothing happens where the C library is another.
    """
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt"):
        return
    for parameter, value in ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, 2**31 - 1), (_M_TOP_PAD, 2**26), (_M_ARENA_MAX, 1)):
        libc.mallopt(parameter, value)
