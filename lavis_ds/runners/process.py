"""Settings of the process that must be made before the heavy libraries start to work."""

from __future__ import annotations

import os
import sys
import warnings


def prepare(log_level: str = "warning") -> None:
    """Choose how much libraries say, and quieten what users can do nothing about.

    Args:
        log_level: debug, info, warning or error; DeepSpeed's logger gets it later, since importing it resets it.
    """
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", log_level)  # read where it is first imported
    # DeepSpeed compiles with the `ninja` beside this interpreter, also where its environment isn't activated.
    os.environ["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)])
    if "TORCH_NCCL_TRACE_BUFFER_SIZE" not in os.environ:  # the old name of the next one
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")  # collectives that PyTorch remembers, for the watchdog
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # loader processes are forks; a warning each otherwise
    # DeepSpeed calls collectives by their old names; one warning a rank and call otherwise.
    warnings.filterwarnings("ignore", message=r".*torch\.distributed\.\w+` is deprecated", category=FutureWarning)
