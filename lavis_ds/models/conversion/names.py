"""Names of tensors, one layout's in another's."""

from __future__ import annotations

import re
from collections.abc import Sequence


def rename(name: str, table: Sequence[tuple[str, str]]) -> str:
    r"""The name with its beginning replaced by the first row of the table that matches; itself where none does.

    Args:
        name: of a tensor.
        table: pattern of a beginning, and what stands in its place, with `\1` for its first group.
    """
    for old, new in table:
        if found := re.match(old, name):
            return found.expand(new) + name[found.end() :]
    return name
