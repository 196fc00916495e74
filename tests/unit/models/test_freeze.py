from __future__ import annotations

from collections.abc import Callable

import pytest

from lavis_ds.errors import ConfigError
from lavis_ds.models.patterns import matching
from lavis_ds.models.vlm import Vlm

MakeVlm = Callable[..., Vlm]


def frozen(model: Vlm) -> set[str]:
    return {name for name, p in model.named_parameters() if not p.requires_grad}


def test_part_module_and_pattern(make_vlm: MakeVlm) -> None:
    model = make_vlm(freeze=["vision", "projector.layers.0", "language.*.layers.1.*"])
    names = {name for name, _ in model.named_parameters()}
    prefixes = ("vision.", "projector.layers.0.", "language.lm.model.layers.1.")
    assert frozen(model) == {name for name in names if name.startswith(prefixes)}


def test_a_name_does_not_match_longer_ones() -> None:
    names = ["language.layers.1.w", "language.layers.11.w", "language_head.w"]
    assert matching("language", names) == names[:2]
    assert matching("language.layers.1", names) == names[:1]
    assert matching("*.layers.1.*", names) == names[:1]


@pytest.mark.parametrize(
    ("pattern", "hint"),
    [
        ("vison", "vision"),
        ("projector.layer.0", r"projector\.layers\.0"),
        ("x.*", "one of vision, projector, language"),
    ],
)
def test_a_pattern_that_matches_nothing(make_vlm: MakeVlm, pattern: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=hint) as info:
        make_vlm(freeze=["vision", pattern])
    assert pattern in str(info.value)


def test_frozen_parts_and_their_frozen_submodules_stay_in_eval_mode(make_vlm: MakeVlm) -> None:
    qformer = {"name": "qformer", "num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 4}
    model = make_vlm(projector=qformer, freeze=["vision", "projector.qformer"])
    for _ in range(2):
        assert (model.vision.training, model.vision.vit.training) == (False, False)
        assert (model.projector.training, model.projector.qformer.training) == (True, False)
        assert (model.projector.linear.training, model.language.lm.training) == (True, True)
        assert not any(module.training for module in model.eval().modules())
        model.train()
