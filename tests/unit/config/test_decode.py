"""A wrong tree ends in one line a finding: key path, what was given, what is allowed, the nearest name."""

from __future__ import annotations

from typing import Any

import pytest

from lavis_ds import registry
from lavis_ds.config.decode import decode
from lavis_ds.config.schema import RootConfig, RunConfig
from lavis_ds.errors import ConfigError


def full_tree() -> dict[str, Any]:
    return {
        "model": {
            "arch": "vlm",
            "vision": {"name": "timm_vit"},
            "projector": {"name": "mlp"},
            "language": {"name": "hf_causal_lm", "path": "some/model"},
        },
        "datasets": {
            "talk": {
                "builder": "llava_json",
                "vis_processor": {"train": {"name": "image_train"}},
                "text_processor": {"train": {"name": "chat"}},
            }
        },
        "run": {"max_steps": 1, "batch_size_train": 1},
    }


def with_value(path: str, value: Any) -> dict[str, Any]:
    tree = full_tree()
    inner: Any = tree
    *parents, leaf = path.split(".")
    for name in parents:
        inner = inner.setdefault(name, {})
    inner[leaf] = value
    return tree


def findings(tree: dict[str, Any]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        decode(RootConfig, tree)
    return str(caught.value).splitlines()


def test_a_right_tree_gives_the_classes_that_the_names_ask_for() -> None:
    config = decode(RootConfig, full_tree())
    names = [type(part).__name__ for part in (config.model, config.model.projector, config.datasets["talk"])]  # type: ignore[attr-defined]
    assert names == ["VlmConfig", "MLPProjectorConfig", "LlavaJsonConfig"]
    assert type(config.run.task).__name__ == "InstructConfig"


def test_configurations_are_frozen() -> None:
    config = decode(RootConfig, full_tree())
    with pytest.raises(ValueError, match="frozen"):
        config.run.seed = 3  # type: ignore[misc]


def test_every_finding_is_reported() -> None:
    tree = full_tree()
    tree["run"] |= {"seed": -1, "precison": "fp32", "max_steps": "many"}
    tree["model"]["projector"]["depth"] = 0
    del tree["model"]["vision"]
    tree["datasets"]["talk"]["text_processor"]["train"]["turns"] = "some"
    assert findings(tree) == [
        "model.vision: this key is required (pixels to patch features) and was not given.",
        "model.projector.depth: Input should be greater than or equal to 1. Given: 0.",
        "datasets.talk.text_processor.train.turns: Input should be 'conversation' or 'independent'. Given: 'some'.",
        "datasets.talk.text_processor.eval.turns: Input should be 'conversation' or 'independent'. Given: 'some'.",
        "run.seed: Input should be greater than or equal to 0. Given: -1.",
        "run.max_steps: Input should be a valid integer, unable to parse string as an integer. Given: 'many'.",
        "run.precison: there is no such key. Did you mean 'precision'?",
    ]


@pytest.mark.parametrize(
    ("path", "nearest"),
    [
        ("rum", "run"),
        ("model.visoin", "vision"),
        ("model.vision.imagesize", "image_size"),
        ("model.projector.merge_sise", "merge_size"),
        ("datasets.talk.image_rot", "image_root"),
        ("datasets.talk.vis_processor.trian", "train"),
        ("datasets.talk.vis_processor.train.min_scal", "min_scale"),
        ("datasets.talk.text_processor.train.shufle_turns", "shuffle_turns"),
        ("run.init_rl", "init_lr"),
        ("run.optimizer.beta", "betas"),
        ("run.param_groups.vision.lrr", "lr"),
    ],
)
def test_nearest_name_at_every_level(path: str, nearest: str) -> None:
    assert findings(with_value(path, 1))[0].startswith(f"{path}: there is no such key. Did you mean '{nearest}'")


def test_nearest_name_of_a_tasks_options() -> None:
    tree = with_value("run.task", {"name": "vqa", "max_token": 3})
    assert findings(tree) == ["run.task.max_token: there is no such key. Did you mean 'max_new_tokens'?"]


def test_nothing_near_lists_the_known_keys() -> None:
    assert findings(with_value("model.projector.zzz", 1)) == [
        "model.projector.zzz: there is no such key. Known keys: name, depth, merge_size, layer_norm."
    ]


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("model.projector", "mpl", "there is no projector named 'mpl'. Expected: {projectors}. Did you mean 'mlp'?"),
        ("model.projector", {}, "`name` must name a projector: {projectors}."),
        ("model.projector", 3, "`name` must name a projector: {projectors}."),
        ("model", {}, "`arch` must name a model: {models}."),
        ("datasets.talk", None, "`builder` must name a dataset builder: {builders}."),
    ],
)
def test_components(path: str, value: Any, message: str) -> None:
    known = {kind: f"one of {', '.join(parts.names())}" for kind, parts in registry.KINDS.items()}
    assert findings(with_value(path, value)) == [f"{path}: {message.format(**known)}"]


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("run.save_every", 0, "Input should be 'epoch' or greater than or equal to 1. Given: 0."),
        ("run.deepspeed_config", [1], "Input should be a valid dictionary or a valid string. Given: [1]."),
    ],
)
def test_members_of_a_union_make_one_finding_without_their_tags(path: str, value: Any, message: str) -> None:
    assert findings(with_value(path, value)) == [f"{path}: {message}"]


def test_keys_that_look_like_tags_stay_in_the_path() -> None:
    assert findings(with_value("run.param_groups", {"language.*.layers": {"lr": -1}, "str": {"lr": -1}})) == [
        "run.param_groups.language.*.layers.lr: Input should be greater than or equal to 0. Given: -1.",
        "run.param_groups.str.lr: Input should be greater than or equal to 0. Given: -1.",
    ]


def test_finding_about_a_whole_block_does_not_print_the_block() -> None:
    tree = with_value("run", {"max_steps": 1, "max_epoch": 1, "batch_size_train": 1})
    assert findings(tree) == ["run: max_epoch (1) and max_steps (1) are both given; keep one."]


def test_where_stands_before_the_path() -> None:
    with pytest.raises(ConfigError, match=r"^somewhere\.seed: "):
        decode(RunConfig, {"max_steps": 1, "batch_size_train": 1, "seed": -1}, where="somewhere")


def test_infinite_numbers_are_refused() -> None:
    assert "finite" in findings(with_value("run.init_lr", float("inf")))[0]
