"""Learning rates that shrink from a part's last layer to its first (BEiT, https://arxiv.org/abs/2106.08254)."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

_LAYER = re.compile(r"^(.*?)\.(\d+)\.")
"""A numbered module, and the list it is in."""


def depths(names: Sequence[str]) -> dict[str, int] | None:
    """Parameter name -> distance of its layer from the output, for a part with one stack of layers.

    0 for what comes behind the stack, 1 for its last layer, L for its first, L + 1 for what comes before it. The stack
    is the list of modules that most parameters are in.

    Args:
        names: all parameters of the part, in the model's order.

    Returns:
        None where there is no list of at least two modules.
    """
    places = {name: (match[1], int(match[2])) for name in names if (match := _LAYER.match(name))}
    if not places:
        return None
    stack = Counter(place[0] for place in places.values()).most_common(1)[0][0]
    numbers = {name: number for name, (module, number) in places.items() if module == stack}
    num_layers = max(numbers.values()) + 1
    if num_layers < 2:
        return None
    first = next(place for place, name in enumerate(names) if name in numbers)
    behind = {name: 0 if place > first else num_layers + 1 for place, name in enumerate(names)}
    return {**behind, **{name: num_layers - number for name, number in numbers.items()}}
