"""From files and options to one configuration: layers, whole components, presets, interpolation, and back to YAML."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from lavis_ds.config import load as load_module
from lavis_ds.config.load import configs_dir, load, read_yaml, to_yaml
from lavis_ds.engines import ds_config
from lavis_ds.errors import ConfigError

Write = Callable[..., Path]
Tree = dict[str, Any]


def dumped(write: Write, tree: Tree, *options: str) -> Any:
    return load(write(tree), options).config.model_dump(mode="json")


@pytest.fixture
def defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of defaults of our own, so that the shipped ones may change."""
    folder = tmp_path / "defaults"
    model = {
        "max_txt_len": 100,
        "vision": {"name": "timm_vit", "image_size": 64, "drop_path_rate": 0.1},
        "projector": {"name": "mlp", "depth": 3, "merge_size": 2},
        "language": {"name": "hf_causal_lm", "path": "some/model"},
    }
    dataset = {
        "image_root": "/pictures",
        "vis_processor": {"train": {"name": "image_train", "image_size": 64, "min_scale": 0.9}},
        "text_processor": {"train": {"name": "chat", "system": "Be short.", "turns": "independent"}},
    }
    for name, content in {"models/vlm/small": model, "datasets/llava_json": dataset}.items():
        path = folder / f"{name}.yaml"
        path.parent.mkdir(parents=True)
        path.write_text(yaml.safe_dump(content))
    monkeypatch.setattr(load_module, "configs_dir", lambda: folder)
    return folder


@pytest.fixture
def small(tree: Tree, defaults: Path) -> Tree:
    tree["model"] = {"arch": "vlm", "model_type": "small"}
    return tree


def test_defaults_alone(write: Write, small: Tree) -> None:
    config = dumped(write, small)
    assert config["model"]["max_txt_len"] == 100
    assert config["model"]["projector"] == {"name": "mlp", "depth": 3, "merge_size": 2, "layer_norm": False}
    assert config["datasets"]["talk"]["image_root"] == "/pictures"
    assert config["datasets"]["talk"]["vis_processor"]["train"]["min_scale"] == 0.9


def test_later_layers_win_key_by_key(write: Write, small: Tree) -> None:
    small["model"] |= {"max_txt_len": 200, "vision": {"image_size": 128}, "projector": {"depth": 4}}
    small["datasets"]["talk"]["vis_processor"] = {"train": {"min_scale": 0.8}}
    config = dumped(write, small, "model.max_txt_len=300", "datasets.talk.vis_processor.train.image_size=32")
    assert config["model"]["max_txt_len"] == 300  # default 100, file 200
    assert (config["model"]["vision"]["image_size"], config["model"]["vision"]["drop_path_rate"]) == (128, 0.1)
    assert config["model"]["projector"] == {"name": "mlp", "depth": 4, "merge_size": 2, "layer_norm": False}
    train = config["datasets"]["talk"]["vis_processor"]["train"]
    assert (train["image_size"], train["min_scale"]) == (32, 0.8)


@pytest.mark.parametrize("value", ["linear", {"name": "linear"}])
def test_component_of_another_name_replaces_the_default_as_a_whole(value: Any, write: Write, small: Tree) -> None:
    small["model"]["projector"] = value  # of depth and merge_size, linear knows none
    assert dumped(write, small)["model"]["projector"] == {"name": "linear"}


@pytest.mark.parametrize("value", ["mlp", {"name": "mlp"}, {}])
def test_component_of_the_same_name_keeps_the_default(value: Any, write: Write, small: Tree) -> None:
    small["model"]["projector"] = value
    assert dumped(write, small)["model"]["projector"] == {
        "name": "mlp",
        "depth": 3,
        "merge_size": 2,
        "layer_norm": False,
    }


def test_one_processor_for_both_replaces_a_default_pair(write: Write, small: Tree) -> None:
    small["datasets"]["talk"]["text_processor"] = {"name": "chat"}
    processors = dumped(write, small)["datasets"]["talk"]["text_processor"]
    assert processors["train"] == processors["eval"]
    assert (processors["train"]["system"], processors["train"]["turns"]) == (None, "conversation")


def test_null_takes_a_default_away(write: Write, small: Tree) -> None:
    small["datasets"]["talk"]["vis_processor"] = None
    assert dumped(write, small)["datasets"]["talk"]["vis_processor"] is None


def test_entry_is_named_after_its_builder_where_it_names_none(write: Write, small: Tree) -> None:
    small["datasets"] = {"llava_json": {"annotations": {"train": ["a.json"]}}}
    entry = dumped(write, small)["datasets"]["llava_json"]
    assert (entry["builder"], entry["image_root"]) == ("llava_json", "/pictures")


def test_wrong_model_type_names_the_types(write: Write, small: Tree) -> None:
    small["model"]["model_type"] = "smal"
    with pytest.raises(ConfigError, match=r"model\.model_type: .*'smal'.*one of small.*'small'"):
        load(write(small))


def test_shipped_defaults_are_found() -> None:
    assert (configs_dir() / "models" / "llava_qwen" / "tiny.yaml").is_file()
    assert (configs_dir() / "deepspeed" / "zero3.json").is_file()


@pytest.mark.parametrize("given", ["zero3", {"preset": "zero3"}])
def test_option_goes_into_a_preset_instead_of_replacing_it(given: Any, write: Write, tree: Tree) -> None:
    tree["run"]["deepspeed_config"] = given
    option = "run.deepspeed_config.zero_optimization.stage3_prefetch_bucket_size=7"
    settings = ds_config.load(load(write(tree), [option]).config.run.deepspeed_config)
    zero = settings["zero_optimization"]
    assert (zero["stage"], zero["stage3_prefetch_bucket_size"]) == (3, 7)
    assert "stage3_param_persistence_threshold" in zero  # of the preset


def test_numbers_as_yaml_1_1_does_not_read_them(write: Write, tree: Tree) -> None:
    path = write(yaml.safe_dump(tree).replace("run:", "run:\n  init_lr: 1e-4\n  min_lr: 2e-5"))
    config = load(path, ["run.weight_decay=1e-2"]).config
    assert (config.run.init_lr, config.run.min_lr, config.run.weight_decay) == (1e-4, 2e-5, 1e-2)


def test_interpolation(write: Write, tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLACE_OF_DATA", "/data/set")
    tree["datasets"]["talk"]["image_root"] = "${oc.env:PLACE_OF_DATA}/pictures"
    tree["run"]["global_batch_size"] = "${run.batch_size_train}"
    config = load(write(tree), ["run.batch_size_train=6"]).config
    assert config.datasets["talk"].image_root == "/data/set/pictures"
    assert config.run.global_batch_size == 6  # resolved after the options


def test_unknown_interpolation_is_refused(write: Write, tree: Tree) -> None:
    tree["run"]["output_dir"] = "${oc.env:SURELY_NOT_SET_XYZ}"
    with pytest.raises(ConfigError, match="SURELY_NOT_SET_XYZ"):
        load(write(tree))


def test_resolved_yaml_gives_the_same_configuration(write: Write, tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    tree["model"] |= {"projector": "linear", "freeze": "vision"}
    tree["datasets"]["talk"] |= {"image_root": "pictures", "vis_processor": {"train": {"name": "image_train"}}}
    tree["datasets"]["talk"]["text_processor"] = {"name": "chat", "system": r"Say \${x}, $y or 100%: # 'no'"}
    tree["run"] |= {
        "deepspeed_config": {"preset": "zero2"},
        "param_groups": {"projector": {"lr": 1e-3}},
        "save_every": "epoch",
        "eval_every": 3,
        "task": {"name": "vqa", "max_new_tokens": 4},
        "optimizer": {"betas": [0.9, 0.95]},
    }
    first = load(write(tree), ["run.init_lr=3e-4"]).config
    assert "Say ${x}, $y" in first.datasets["talk"].text_processor.train.system  # type: ignore[attr-defined]
    path = write(to_yaml(first), "elsewhere/config.yaml")
    monkeypatch.chdir(path.parent)  # relative paths have become absolute ones
    second = load(path)
    assert second.config == first
    assert second.notices == ()
    assert to_yaml(second.config) == to_yaml(first)


def test_old_keys_are_translated_with_a_notice_each(write: Write, tree: Tree) -> None:
    tree["run"] |= {"log_freq": 5, "grad_norm_clip": 0.5, "runner": "runner_base"}
    loaded = load(write(tree))
    assert (loaded.config.run.log_every, loaded.config.run.grad_clip) == (5, 0.5)
    assert {notice.partition(":")[0] for notice in loaded.notices} == {
        "run.log_freq", "run.grad_norm_clip", "run.runner",
    }  # fmt: skip


def test_old_keys_are_understood_in_options(write: Write, tree: Tree) -> None:
    assert load(write(tree), ["run.log_freq=7"]).config.run.log_every == 7


@pytest.mark.usefixtures("own_registries")
def test_plugins_register_before_names_are_checked(write: Write, tree: Tree) -> None:
    code = """
    from lavis_ds import registry
    from lavis_ds.models.configs import ProjectorConfig
    @registry.register_projector("of_a_plugin_{n}")
    class Part:
        class Config(ProjectorConfig):
            width: int = 3
    """
    write("\n".join(line[4:] for line in code.splitlines()).replace("{n}", "a"), "parts.py")
    tree |= {"plugins": "parts.py"}
    tree["model"]["projector"] = {"name": "of_a_plugin_a", "width": 5}
    config = load(write(tree)).config
    assert config.model.projector.width == 5  # type: ignore[attr-defined]
    assert config.plugins == [str(write("", "unused").with_name("parts.py"))]


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("run.max_steps", "key=value"),
        ("=3", "key=value"),
        ("datasets=[]", "--options: .*datasets="),
        ("run.max_steps=[1", "configuration: "),
    ],
)
def test_options_that_are_none(option: str, message: str, write: Write, tree: Tree) -> None:
    with pytest.raises(ConfigError, match=message):
        load(write(tree), [option])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a: [1", "not valid YAML"),
        ("- a", "must hold a mapping"),
        ("a: ${b", "not valid YAML"),
    ],
)
def test_files_that_are_no_configuration(content: str, message: str, write: Write) -> None:
    with pytest.raises(ConfigError, match=message):
        read_yaml(write(content))


def test_missing_file_names_its_neighbour(write: Write) -> None:
    with pytest.raises(ConfigError, match=r"no such file.*'stage1\.yaml'"):
        read_yaml(write("a: 1", "stage1.yaml").with_name("stag1.yaml"))


def test_file_that_is_not_text(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not valid YAML"):
        read_yaml(tmp_path / "a.yaml")


def test_loading_needs_no_torch(write: Write, tree: Tree) -> None:
    code = (
        f"import sys; from lavis_ds.config.load import load; load({str(write(tree))!r}); print('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
