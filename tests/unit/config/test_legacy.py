from __future__ import annotations

import copy
from typing import Any

import pytest
import yaml

from lavis_ds.config.decode import decode
from lavis_ds.config.legacy import translate
from lavis_ds.config.schema import RootConfig
from lavis_ds.engines.ds_config import batch_plan, derive
from lavis_ds.errors import ConfigError

# The keys of MiniGPT4Qwen's DeepSpeed projects, with values of our own.
DEEPSPEED_PROJECT = """
model:
  arch: minigpt4qwen
  model_type: qwen7b_chat
  load_finetuned: false
  load_pretrained: true
  pretrained: weights/blip2_converted
  finetuned: ""
  vit_model: eva_clip_g
  image_size: 196
  drop_path_rate: 0
  use_grad_checkpoint: true
  vit_precision: fp16
  freeze_vit: true
  unfreeze_pos_embed: false
  num_query_token: 16
  qformer_text_input: false
  freeze_qformer: true
  freeze_queries: true
  freeze_proj: false
  llm_model: weights/qwen
  llm_device_map: cpu
  get_lora: false
  lora_alpha: 32
  lora_r: 8
  lora_dropout: 0.05
  max_txt_len: 300
  enable_autocast: false
datasets:
  minigpt4_instruction:
    data_type: images
    build_info:
      annotations:
        train:
          url: /somewhere/else.json
          storage: data/minigpt4.json
      images:
        storage: data/pictures
    vis_processor:
      train: {name: blip2_image_train, image_size: 196}
    text_processor:
      train: {name: base_instruction, max_words: 100}
  llava_instruct_156k:
    build_info:
      annotations:
        train: {storage: [data/a.json, data/b.json]}
        val: {storage: data/val.json}
    vis_processor:
      train: {name: blip2_image_train, min_scale: 0.8}
      eval: {name: blip_image_eval}
    text_processor:
      train: {name: blip_caption}
      eval: {name: blip_caption, max_words: 50}
run:
  runner: deepspeed_runner
  task: deepspeed_image_text_pretrain
  lr_sched: linear_warmup_cosine_lr
  init_lr: 0.0003
  min_lr: 0.000001
  warmup_lr: 0
  warmup_steps: 40
  max_epoch: 3
  batch_size_train: 2
  batch_size_eval: 1
  num_workers: 4
  seed: 7
  output_dir: out
  log_freq: 32
  resume_ckpt_load_dir: null
  resume_ckpt_tag: null
  evaluate: false
  train_splits: [train]
  world_size: 1
  dist_url: env://
  distributed: true
  deepspeed_config:
    gradient_accumulation_steps: 8
    train_micro_batch_size_per_gpu: 2
    gradient_clipping: 0.7
    steps_per_print: 128
    wall_clock_breakdown: false
    fp16: {enabled: false, loss_scale: 0, initial_scale_power: 12}
    bf16: {enabled: true}
    optimizer:
      type: AdamW
      params: {lr: 0.0003, betas: [0.9, 0.99], eps: 0.0000001, weight_decay: 0.02}
    zero_optimization:
      stage: 1
      offload_optimizer: {device: cpu, pin_memory: true}
      allgather_bucket_size: 200000000.0
"""

# The keys of MiniGPT4Qwen's plain projects and of LAVIS's `run:` blocks.
PLAIN_PROJECT = """
env: {cache_root: cache}
model:
  arch: minigpt4qwen
  load_finetuned: true
  load_pretrained: false
  pretrained: weights/file.pth
  finetuned: weights/stage1
  vit_model: eva_clip_g
  freeze_vit: true
  num_query_token: 32
  llm_model: weights/qwen
  freeze_llm: false
datasets:
  llava_instruction:
    vis_processor:
      train: {name: blip_image_train, image_size: 224}
    text_processor:
      train: {name: base_instruction}
preprocess:
  vis_processor:
    train: {name: blip2_image_train}
run:
  runner: runner_base
  task: image_text_pretrain
  lr_sched: linear_warmup_cosine_lr_step-wise
  init_lr: 0.0001
  weight_decay: 0.05
  grad_norm_clip: 2.0
  max_epoch: 1
  batch_size_train: 1
  accum_grad_iters: 16
  warmup_ratio: 0.1
  log_freq: 64
  save_freq: 1
  val_freq: 1
  valid_splits: [val]
  amp: true
  autocast_dtype: bf16
  loss_scale: false
  resume_ckpt_path: null
  use_dist_eval_sampler: false
  find_unused_parameters: true
  device: cuda
  world_size: 1
  dist_url: env://
  distributed: true
"""


CAPTION = {"name": "blip_caption", "prompt": "a photo of "}


def decoded(tree: dict[str, Any]) -> RootConfig:
    """As `load` does: an entry without `builder` is built by the builder of its name."""
    return decode(RootConfig, {**tree, "datasets": {k: {"builder": k, **v} for k, v in tree["datasets"].items()}})


def translated_run(**run: Any) -> tuple[dict[str, Any], list[str]]:
    tree, notices = translate({"run": run})
    return tree["run"], notices


def translated_model(**model: Any) -> tuple[dict[str, Any], list[str]]:
    tree, notices = translate({"model": model})
    return tree["model"], notices


def test_deepspeed_project_decodes_to_the_same_training() -> None:
    tree, _ = translate(yaml.safe_load(DEEPSPEED_PROJECT))
    config = decoded(tree)
    run, model = config.run, config.model.model_dump()
    assert (run.task.name, run.runner.name) == ("instruct", "train")
    assert (run.log_every, run.accum_grad_iters, run.grad_clip, run.precision) == (32, 8, 0.7, "bf16")
    assert (run.optimizer.betas, run.optimizer.eps, run.weight_decay) == ((0.9, 0.99), 1e-7, 0.02)
    vision = model["vision"]
    assert (vision["model_name"], vision["image_size"]) == ("eva_giant_patch14_clip_224", 196)
    assert (vision["select_layer"], vision["select_tokens"], vision["final_norm"], vision["layer_norm"]) == (
        -2,
        "all",
        False,
        True,
    )
    assert vision["gradient_checkpointing"]
    assert model["projector"]["num_query_tokens"] == 16
    assert model["language"]["path"] == "weights/qwen"
    assert model["max_txt_len"] == 300
    assert model["pretrained"].endswith("/weights/blip2_converted")
    frozen = ["vision.vit", "vision.layer_norm", "projector.qformer", "projector.query_tokens", "language"]
    assert model["freeze"] == frozen
    first, second = config.datasets["minigpt4_instruction"], config.datasets["llava_instruct_156k"]
    assert {first.builder, second.builder} == {"minigpt4qwen_json"}
    assert first.annotations["train"][0].endswith("/data/minigpt4.json")
    assert first.image_root is not None
    assert first.image_root.endswith("/data/pictures")
    assert [len(second.annotations[split]) for split in ("train", "val")] == [2, 1]
    assert first.vis_processor is not None
    assert first.vis_processor.train.model_dump()["horizontal_flip"] is True
    assert first.vis_processor.train.model_dump()["image_size"] == 196
    assert first.text_processor.train.model_dump()["system"] == "You are a helpful assistant."
    assert second.vis_processor is not None
    assert second.vis_processor.train.model_dump()["image_size"] == 364  # LAVIS's default of this processor
    assert second.vis_processor.train.model_dump()["min_scale"] == 0.8
    assert second.vis_processor.eval.model_dump()["image_size"] == 384


def test_deepspeed_project_gives_settings_that_pass_the_lint() -> None:
    run = decoded(translate(yaml.safe_load(DEEPSPEED_PROJECT))[0]).run
    settings = derive(run, batch_plan(run, 4), data_parallel_size=4)
    assert settings["train_batch_size"] == 2 * 8 * 4
    assert settings["gradient_clipping"] == 0.7
    assert settings["bf16"] == {"enabled": True}
    assert settings["fp16"] == {"enabled": False, "loss_scale": 0, "initial_scale_power": 12}
    assert settings["zero_optimization"]["allgather_bucket_size"] == 200_000_000
    assert settings["steps_per_print"] == 128


def test_plain_project_decodes_to_the_same_training() -> None:
    tree, notices = translate(yaml.safe_load(PLAIN_PROJECT))
    config = decoded(tree)
    run = config.run
    assert (run.log_every, run.grad_clip, run.precision, run.save_every, run.eval_every) == (
        64,
        2.0,
        "bf16",
        "epoch",
        "epoch",
    )
    assert config.model.pretrained is None
    assert config.model.finetuned is not None
    assert config.model.finetuned.endswith("/weights/stage1")
    assert config.model.freeze == ["vision.vit"]
    assert any("RandAugment" in line for line in notices)


def named_keys(notices: list[str]) -> set[str]:
    """`run.a and b: ...` names run.a and run.b."""
    heads = [line.split(": ")[0] for line in notices]
    return {
        key if key == head or key.startswith(f"{head.split('.')[0]}.") else f"{head.split('.')[0]}.{key}"
        for head in heads
        for key in head.split(" and ")
    }


def leaves(tree: Any, path: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    if not isinstance(tree, dict):
        return {path: tree}
    return {leaf: value for key, inner in tree.items() for leaf, value in leaves(inner, (*path, key)).items()}


@pytest.mark.parametrize("project", [DEEPSPEED_PROJECT, PLAIN_PROJECT])
def test_every_old_key_stays_or_has_a_notice(project: str) -> None:
    before = yaml.safe_load(project)
    after, notices = translate(before)
    kept, named = leaves(after), named_keys(notices)
    silent = [
        ".".join(path)
        for path, value in leaves(before).items()
        if (path not in kept or kept[path] != value)
        and not any(".".join(path[:length]) in named for length in range(1, len(path) + 1))
    ]
    assert silent == []


def test_translate_leaves_its_argument_and_new_files_alone() -> None:
    old = yaml.safe_load(PLAIN_PROJECT)
    kept = copy.deepcopy(old)
    translate(old)
    assert old == kept
    new = {
        "model": {"arch": "vlm", "vision": "timm_vit", "pretrained": None, "freeze": ["vision"], "max_txt_len": 64},
        "datasets": {"a": {"builder": "llava_json", "annotations": {"train": "a.json"}, "text_processor": "chat"}},
        "run": {"max_steps": 3, "batch_size_train": 2, "valid_splits": ["val"], "deepspeed_config": "zero2"},
    }
    assert translate(new) == (new, [])


# run: one key at a time


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"log_freq": 20}, {"log_every": 20}),
        ({"grad_norm_clip": 0.5}, {"grad_clip": 0.5}),
        ({"grad_norm_clip": None}, {"grad_clip": None}),
        ({"beta2": 0.98}, {"optimizer": {"betas": [0.9, 0.98]}}),
        ({"amp": True}, {"precision": "fp16"}),  # LAVIS's autocast without a type
        ({"amp": True, "autocast_dtype": "bf16"}, {"precision": "bf16"}),
        ({"amp": True, "autocast_dtype": "float16", "loss_scale": True}, {"precision": "fp16"}),
        ({"amp": False, "autocast_dtype": "bf16"}, {"precision": "fp32"}),
        ({"save_freq": 1}, {"save_every": "epoch"}),
        ({"save_freq": 5}, {"save_every": "epoch"}),
        ({"save_freq": -1}, {"save_every": None}),
        ({"val_freq": 1}, {"eval_every": "epoch"}),
        ({"eval_freq": 0}, {"eval_every": None}),
        ({"runner": "runner_iter", "max_iters": 1000}, {"runner": "train", "max_steps": 1000}),
        ({"max_iters": 1000, "accum_grad_iters": 3}, {"max_steps": 334, "accum_grad_iters": 3}),
        ({"iters_per_inner_epoch": 2e3}, {"save_every": 2000}),
        (
            {"iters_per_inner_epoch": 100, "val_freq": 2, "accum_grad_iters": 4, "valid_splits": ["val"]},
            {"save_every": 25, "eval_every": 50, "accum_grad_iters": 4, "valid_splits": ["val"]},
        ),
        ({"log_freq": 9, "valid_splits": ["val"]}, {"log_every": 9, "valid_splits": ["val"], "eval_every": "epoch"}),
        (
            {"resume_ckpt_load_dir": "out/x", "resume_ckpt_tag": "global_step9"},
            {"resume_ckpt_path": "out/x/global_step9"},
        ),
        ({"resume_ckpt_load_dir": "out/x", "resume_ckpt_tag": None}, {"resume_ckpt_path": "out/x"}),
        ({"resume_ckpt_load_dir": None}, {}),
        ({"device": "cuda"}, {}),
        ({"dist_url": "env://"}, {}),
        ({"find_unused_parameters": True}, {}),
        ({"lr_layer_decay": 1}, {}),
        ({"fsdp": False}, {}),
        ({"runner": "deepspeed_runner"}, {"runner": "train"}),
        ({"task": "image_text_pretrain"}, {"task": "instruct"}),
        ({"deepspeed_config": {"gradient_clipping": 0.3}}, {"deepspeed_config": {}, "grad_clip": 0.3}),
        ({"deepspeed_config": {"gradient_clipping": 0}}, {"deepspeed_config": {}, "grad_clip": None}),
        ({"deepspeed_config": {"train_batch_size": 8}}, {"deepspeed_config": {}, "global_batch_size": 8}),
        ({"deepspeed_config": {"fp16": {"enabled": True}}}, {"deepspeed_config": {}, "precision": "fp16"}),
        ({"deepspeed_config": {"bf16": {"enabled": False}}}, {"deepspeed_config": {}, "precision": "fp32"}),
        (
            {"deepspeed_config": {"optimizer": {"type": "AdamW", "params": {"lr": 0.1, "eps": 0.2}}}},
            {
                "deepspeed_config": {"optimizer": {"type": "AdamW", "params": {}}},
                "init_lr": 0.1,
                "optimizer": {"eps": 0.2},
            },
        ),
    ],
)
def test_run_key(old: dict[str, Any], new: dict[str, Any]) -> None:
    run, notices = translated_run(**old)
    assert run == new
    assert notices
    assert all(line.startswith("run.") for line in notices)


@pytest.mark.parametrize(
    "settings",
    [{"gradient_clipping": "auto"}, {"bf16": {"enabled": "auto"}}, {"optimizer": {"params": {"lr": "auto"}}}],
)
def test_auto_is_left_for_the_lint_to_refuse(settings: dict[str, Any]) -> None:
    assert translated_run(deepspeed_config=settings) == ({"deepspeed_config": settings}, [])


def test_a_number_that_run_has_stays_where_it_is_for_derive_to_compare() -> None:
    run, notices = translated_run(grad_clip=1.0, deepspeed_config={"gradient_clipping": 0.3})
    assert run == {"grad_clip": 1.0, "deepspeed_config": {"gradient_clipping": 0.3}}
    assert notices == []


def test_our_key_beside_its_old_name_wins() -> None:
    run, notices = translated_run(log_freq=64, log_every=5)
    assert run == {"log_every": 5}
    assert notices == ["run.log_freq: gives way to run.log_every: 5, which is given too."]


def test_interval_that_changes_and_steps_that_mean_something_else_are_told() -> None:
    _, notices = translated_run(save_freq=5, warmup_steps=10, accum_grad_iters=4)
    assert "every epoch, not every 5" in notices[0]
    assert notices[1] == "run.warmup_steps: counts optimizer steps; it used to count micro-batches."


def test_refusals_of_run() -> None:
    with pytest.raises(ConfigError) as caught:
        translated_run(lr_layer_decay=0.9, fsdp=True, amp=True, autocast_dtype="int8")
    lines = str(caught.value).splitlines()
    assert [line.split(":")[0] for line in lines] == ["run.autocast_dtype", "run.lr_layer_decay", "run.fsdp"]
    assert "run.param_groups" in lines[1]
    assert "zero3" in lines[2]


# model: one key at a time


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"image_size": 364}, {"vision": {"image_size": 364}}),
        ({"vision": "timm_vit", "image_size": 364}, {"vision": {"name": "timm_vit", "image_size": 364}}),
        ({"drop_path_rate": 0.1}, {"vision": {"drop_path_rate": 0.1}}),
        ({"use_grad_checkpoint": True}, {"vision": {"gradient_checkpointing": True}}),
        ({"num_query_token": 64}, {"projector": {"name": "qformer", "num_query_tokens": 64}}),
        ({"qformer_text_input": False}, {}),
        ({"llm_device_map": "auto"}, {}),
        ({"vit_precision": "fp32"}, {}),
        ({"enable_autocast": True}, {}),
        ({"get_lora": False, "lora_r": 8}, {}),
        ({"freeze_vit": True}, {"freeze": ["vision.vit"]}),
        ({"freeze_vit": False}, {}),
        ({"freeze_qformer": True}, {"freeze": ["vision.layer_norm", "projector.qformer"]}),
        ({"freeze_queries": True}, {"freeze": ["projector.query_tokens"]}),
        ({"freeze_proj": True, "freeze": "vision"}, {"freeze": ["vision", "projector.linear"]}),
        ({"freeze_llm": True, "freeze": ["language"]}, {"freeze": ["language"]}),
        ({"unfreeze_pos_embed": False}, {}),
        ({"load_pretrained": False, "pretrained": "x.pth"}, {"pretrained": None}),
        ({"load_pretrained": True, "pretrained": "folder"}, {"pretrained": "folder"}),
        ({"load_finetuned": True, "finetuned": "b", "pretrained": "a"}, {"pretrained": "a", "finetuned": "b"}),
        ({"load_finetuned": False, "finetuned": "b", "pretrained": "a"}, {"pretrained": "a", "finetuned": None}),
        ({"load_pretrained": True, "pretrained": "blip2.pth"}, {"pretrained": "blip2.pth"}),
        ({"load_pretrained": False}, {"pretrained": None}),
        ({"finetuned": ""}, {"finetuned": None}),
    ],
)
def test_model_key(old: dict[str, Any], new: dict[str, Any]) -> None:
    model, notices = translated_model(**old)
    assert model == new
    assert notices
    assert all(line.startswith("model.") for line in notices)


def test_language_model_of_minigpt4qwen_is_frozen_where_nothing_is_said() -> None:
    model, notices = translated_model(llm_model="weights/qwen", freeze_vit=False)
    assert model["language"] == {"name": "hf_causal_lm", "path": "weights/qwen", "gradient_checkpointing": True}
    assert model["freeze"] == ["language"]
    assert any(line.startswith("model.freeze_llm: was left out") for line in notices)


@pytest.mark.parametrize(
    ("old", "text"),
    [
        ({"get_lora": True, "lora_r": 8}, "model.get_lora: LoRA is not there yet"),
        ({"qformer_text_input": True}, "model.qformer_text_input: is not supported"),
        ({"unfreeze_pos_embed": True}, "model.unfreeze_pos_embed: is not supported"),
        ({"vit_model": "clip_L"}, "model.vit_model: only eva_clip_g is translated, not clip_L"),
        ({"pretrained": "https://host/blip2.pth"}, "model.pretrained: nothing is downloaded; give the file's path."),
        ({"load_finetuned": True, "finetuned": "http://host/x"}, "model.finetuned: nothing is downloaded"),
    ],
)
def test_refusals_of_model(old: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        translated_model(**old)
    assert text in str(caught.value)


# datasets:


@pytest.mark.parametrize(
    "name",
    ["minigpt4_instruction", "llava_instruction", "llava_pretrain", "llava_instruct_100k", "llava_instruct_156k"],
)
def test_builder_names(name: str) -> None:
    tree, notices = translate({"datasets": {name: None, "mine": {"builder": name}}})
    assert tree["datasets"] == {name: {"builder": "minigpt4qwen_json"}, "mine": {"builder": "minigpt4qwen_json"}}
    assert len(notices) == 2


def test_annotations_without_storage_take_a_local_url() -> None:
    entry = {"build_info": {"annotations": {"train": {"url": "data/a.json"}}}}
    tree, notices = translate({"datasets": {"llava_json": entry}})
    assert tree["datasets"]["llava_json"] == {"annotations": {"train": "data/a.json"}}
    assert "working directory" in notices[0]


@pytest.mark.parametrize(
    ("entry", "text"),
    [
        ({"build_info": {"annotations": {"train": {"url": "https://host/a.json"}}}}, "nothing is downloaded"),
        ({"data_type": "videos"}, "datasets.a.data_type: videos are not there yet"),
        ({"builder": "videochatgpt_100k"}, "videos are not there yet"),
    ],
)
def test_refusals_of_datasets(entry: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        translate({"datasets": {"a": entry}})
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("block", "key"),
    [
        ({"model": {"arch": "minigpt4qwen", "apply_lemmatizer": True}}, "model.apply_lemmatizer"),
        ({"run": {"max_len": 30}}, "run.max_len"),
        ({"run": {"train_dataset_ratios": {"a": 1}}}, "run.train_dataset_ratios"),
        ({"datasets": {"llava_pretrain": {"build_info": {"max_frames": 8}}}}, "build_info"),
        (
            {"datasets": {"llava_pretrain": {"build_info": {"annotations": {"train": {"storage": "a", "md5": "0"}}}}}},
            "build_info",
        ),
        ({"datasets": {"llava_pretrain": {"text_processor": {"train": CAPTION, "eval": "chat"}}}}, "prompt"),
        (
            {"datasets": {"llava_pretrain": {"vis_processor": {"train": {"name": "blip2_image_train", "mean": 0}}}}},
            "mean",
        ),
    ],
)
def test_what_is_not_known_is_left_for_decode_to_refuse(block: dict[str, Any], key: str) -> None:
    tree = yaml.safe_load(PLAIN_PROJECT)
    for name, values in block.items():
        tree[name] = {**tree[name], **values}
    with pytest.raises(ConfigError) as caught:
        decoded(translate(tree)[0])
    assert key in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1
