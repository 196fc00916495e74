from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from lavis_ds.config.decode import decode
from lavis_ds.config.load import configs_dir
from lavis_ds.config.schema import RunConfig
from lavis_ds.engines.ds_config import BatchPlan, batch_plan, derive, lint, load, log_level, zero_stage
from lavis_ds.engines.ds_lint import checked
from lavis_ds.engines.ds_schema import installed_schema
from lavis_ds.errors import ConfigError

PRESETS = ["zero0", "zero1", "zero2", "zero2_offload", "zero3", "zero3_offload"]


def make_run(**keys: Any) -> RunConfig:
    return decode(RunConfig, {"max_steps": 1, "batch_size_train": 4, **keys})


def derive_for(ranks: int = 2, **keys: Any) -> dict[str, Any]:
    run = make_run(**keys)
    return derive(run, batch_plan(run, ranks), data_parallel_size=ranks)


def nest(path: str, value: Any) -> dict[str, Any]:
    for name in reversed(path.split(".")):
        value = {name: value}
    return value


# The schema


@pytest.mark.parametrize(
    ("path", "types"),
    [
        ("train_batch_size", {"int"}),
        ("gradient_clipping", {"float"}),
        ("zero_allow_untested_optimizer", {"bool"}),
        ("zero_optimization.reduce_bucket_size", {"int"}),
        ("zero_optimization.stage3_param_persistence_threshold", {"int"}),  # by alias
        ("zero_optimization.param_persistence_threshold", {"int"}),  # by field name
        ("zero_optimization.offload_optimizer.ratio", {"float"}),  # Optional[Model] in another file
        ("zero_optimization.leaf_module.classes", {"list"}),
        ("bf16.check_grad_overflow", {"bool"}),  # one variable reads two blocks
        ("bfloat16.enabled", {"bool"}),
        ("csv_monitor.job_name", {"str"}),  # dictionary comprehension
        ("flops_profiler.profile_step", {"int"}),  # get_scalar_param with constants of another file
        ("aio.queue_depth", {"int"}),
        ("checkpoint.parallel_write.pipeline_stage", {"bool"}),
        ("checkpoint.writer.io_buffer_size", {"int"}),
        ("expert_parallel.autoep_size", {"int"}),  # import inside a function
        ("pipeline.partition", {"str"}),  # loop over items
        ("data_efficiency.data_routing.random_ltd.enabled", {"bool"}),
        ("weight_quantization.num_bits", {"int"}),  # inherited field
        ("timers.throughput.synchronized", {"bool"}),
    ],
)
def test_schema_has_key_with_its_type(path: str, types: set[str]) -> None:
    assert dict(installed_schema().root.walk())[path].types == types


def test_schema_knows_choices_bounds_and_auto() -> None:
    keys = dict(installed_schema().root.walk())
    assert keys["zero_optimization.stage"].choices == (0, 1, 2, 3)
    assert keys["zero_optimization.offload_param.device"].choices == ("none", "cpu", "nvme")
    assert keys["zero_optimization.offload_optimizer.ratio"].bounds == ((">=", 0.0), ("<=", 1.0))
    assert keys["data_types.keep_in_fp32_modules"].takes_auto
    assert not keys["gradient_clipping"].takes_auto


def test_lint_takes_under_a_second_and_imports_neither_torch_nor_deepspeed() -> None:
    code = (
        "import sys, time; from lavis_ds.engines import ds_config; start = time.perf_counter();"
        "ds_config.lint({'zero_optimization': {'stage': 2}}); took = time.perf_counter() - start;"
        "print(took, 'torch' in sys.modules, 'deepspeed' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    took, torch_loaded, deepspeed_loaded = out.stdout.split()
    assert float(took) < 1.0  # measured 0.2 s on two busy cores
    assert (torch_loaded, deepspeed_loaded) == ("False", "False")


def test_second_lint_reads_nothing_again() -> None:
    lint({})
    start = time.perf_counter()
    lint({"zero_optimization": {"stage": 3}})
    assert time.perf_counter() - start < 0.05  # measured below 0.001 s


# Lint: what passes

GOOD = [
    ("train_batch_size", 32), ("train_micro_batch_size_per_gpu", 4), ("gradient_accumulation_steps", 2.0),
    ("gradient_clipping", 1), ("steps_per_print", 100), ("wall_clock_breakdown", True), ("memory_breakdown", False),
    ("dump_state", False), ("prescale_gradients", False), ("communication_data_type", "fp32"),
    ("zero_force_ds_cpu_optimizer", False), ("gradient_allreduce_op", "mean"),
    ("zero_optimization.stage", 0), ("zero_optimization.stage", 3.0), ("zero_optimization.reduce_bucket_size", 2e8),
    ("zero_optimization.overlap_comm", True), ("zero_optimization.sub_group_size", 1e9),
    ("zero_optimization.stage3_prefetch_bucket_size", 5e7),
    ("zero_optimization", {"stage": 3, "zero_hpz_partition_size": 8}),
    ("zero_optimization.stage3_gather_16bit_weights_on_model_save", True),
    ("zero_optimization.offload_optimizer.device", "cpu"), ("zero_optimization.offload_optimizer", None),
    ("zero_optimization.offload_optimizer.pin_memory", True), ("zero_optimization.leaf_module.names", ["mlp"]),
    ("zero_optimization.offload_optimizer.buffer_count", 4), ("bf16.enabled", True),
    ("bf16.check_grad_overflow", False),
    ("fp16.initial_scale_power", 16), ("fp16.loss_scale", 0), ("fp16.min_loss_scale", 1),
    ("torch_autocast.enabled", False), ("tensorboard.enabled", True), ("wandb.project", "x"),
    ("csv_monitor.output_path", "logs"), ("comet.workspace", None), ("flops_profiler.detailed", False),
    ("flops_profiler.output_file", "flops.txt"), ("comms_logger.prof_ops", ["all_reduce"]),
    ("activation_checkpointing.cpu_checkpointing", True), ("activation_checkpointing.number_checkpoints", 4),
    ("checkpoint.tag_validation", "Fail"), ("checkpoint.load_universal", True), ("data_types.grad_accum_dtype", "fp32"),
    ("data_types.keep_in_fp32_modules", "auto"), ("aio.block_size", 1048576), ("compile.deepcompile", False),
    ("timers.throughput.enabled", False), ("optimizer.type", "AdamW"),
    ("optimizer.params.lr", 1e-4), ("optimizer.params.adam_w_mode", True),
    ("data_efficiency.data_sampling.curriculum_learning.curriculum_metrics", {"seqlen": {}}),
]  # fmt: skip


@pytest.mark.parametrize(("path", "value"), GOOD)
def test_lint_accepts(path: str, value: Any) -> None:
    lint(nest(path, value))


# Lint: what is refused, and what the message says

BAD = [
    ("zero_optimization.stagee", 3, "Did you mean 'stage'"),
    ("zero_optimisation", {"stage": 3}, "Did you mean 'zero_optimization'"),
    ("stage", 3, "There is zero_optimization.stage"),
    ("bf16.enable", True, "Did you mean 'enabled'"),
    ("gradient_cliping", 1.0, "Did you mean 'gradient_clipping'"),
    ("zero_optimization.offload_optimizer.devise", "cpu", "Did you mean 'device'"),
    ("flops_profiler.profile_steps", 1, "Did you mean 'profile_step'"),
    ("comms_logger.colour", True, "Known keys: debug, enabled"),
    ("zero_optimization.stage", 4, "one of 0, 1, 2, 3"),
    ("zero_optimization.stage", True, "one of 0, 1, 2, 3"),
    ("zero_optimization.stage", "2", "one of 0, 1, 2, 3"),
    ("zero_optimization.offload_param.device", "gpu", "one of none, cpu, nvme"),
    ("zero_optimization.reduce_bucket_size", "1e9", "a whole number, not text in quotes"),
    ("zero_optimization.reduce_bucket_size", 2.5, "a whole number"),
    ("zero_optimization.reduce_bucket_size", 0, "must be > 0"),
    ("zero_optimization.offload_optimizer.ratio", 1.5, "must be <= 1"),
    ("zero_optimization.overlap_comm", "yes", "true or false"),
    ("zero_optimization", True, "must be a mapping"),
    ("zero_optimization.reduce_bucket_size", "auto", "Remove the key"),
    ("gradient_clipping", "auto", "run.grad_clip decides"),
    ("optimizer.params.lr", "auto", "run.init_lr decides"),
    ("bf16.enabled", "auto", "run.precision decides"),
    ("fp8_training", {"enabled": True}, "never had this key"),
    ("tensor_parallel.autotp_size", 2, "not supported by this runner yet"),
    ("expert_parallel.autoep_size", 2, "not supported by this runner yet"),
    ("sequence_parallel_size", 2, "not supported by this runner yet"),
    ("pipeline.stages", 2, "not supported by this runner yet"),
    ("amp", {"enabled": True}, "run.precision"),
    ("elasticity", {"enabled": True}, "global_batch_size"),
    ("compression_training", {}, "is gone"),
    ("nebula", {"enabled": True}, "run.save_every"),
    ("curriculum_learning", {"enabled": True}, "run.seed"),
    ("progressive_layer_drop", {}, "has been removed"),  # DeepSpeed's own words
    ("zero_optimization.mics_shard_size", 8, "zero_hpz_partition_size"),
    ("zero_optimization.zeropp_loco_param", {}, "LoCo"),
    ("zero_optimization.cpu_offload", True, "offload_optimizer: {device: cpu}"),
    ("scheduler", {"type": "WarmupLR"}, "run.lr_sched"),
    ("optimizer.type", "OneBitAdam", "1-bit optimizers are gone"),
    ("optimizer.type", "Lamb", "run.optimizer.name takes adamw, adamw_8bit or muon"),
    ("optimizer.params.torch_adam", True, "has no effect"),
    ("gradient_allreduce_op", "sum", "the training loop needs 'mean'"),
    ("zero_optimization.offload_param.device", "cpu", "needs zero_optimization.stage 3"),
    ("zero_optimization.offload_optimizer.device", "nvme", "this folder must be given"),
]


@pytest.mark.parametrize(("path", "value", "text"), BAD)
def test_lint_refuses(path: str, value: Any, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        lint(nest(path, value))
    assert text in str(caught.value)
    assert str(caught.value).startswith(f"run.deepspeed_config.{path.rpartition('.')[0]}")


def test_lint_reports_all_findings_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        lint({"fp8": {}, "zero_optimization": {"stagee": 1, "overlap_comm": 3}, "aio": {"depth": 1}})
    lines = str(caught.value).splitlines()
    paths = ["fp8", "zero_optimization.stagee", "zero_optimization.overlap_comm", "aio.depth"]
    assert [line.split(":")[0] for line in lines] == [f"run.deepspeed_config.{path}" for path in paths]


def test_lint_leaves_the_settings_alone() -> None:
    settings = {"zero_optimization": {"stage": 1.0, "reduce_bucket_size": 2e8}}
    lint(settings)
    assert isinstance(settings["zero_optimization"]["stage"], float)


# Batch plan


@pytest.mark.parametrize(
    ("keys", "ranks", "plan"),
    [
        ({"batch_size_train": 4}, 8, (32, 4, 1)),
        ({"batch_size_train": 4, "accum_grad_iters": 3}, 2, (24, 4, 3)),
        ({"batch_size_train": 4, "global_batch_size": 32}, 2, (32, 4, 4)),
        ({"accum_grad_iters": 4, "global_batch_size": 32}, 2, (32, 4, 4)),
        ({"global_batch_size": 32}, 4, (32, 8, 1)),
        ({"batch_size_train": 4, "accum_grad_iters": 4, "global_batch_size": 32}, 2, (32, 4, 4)),
    ],
)
def test_batch_plan(keys: dict[str, int], ranks: int, plan: tuple[int, int, int]) -> None:
    run = decode(RunConfig, {"max_steps": 1, **keys})
    assert batch_plan(run, ranks) == BatchPlan(*plan)


@pytest.mark.parametrize(
    ("keys", "ranks", "texts"),
    [
        ({"batch_size_train": 8, "global_batch_size": 60}, 4, ["60 = 8 (batch_size_train)", "4 (ranks)", "32 or 64"]),
        ({"global_batch_size": 10}, 4, ["10 = batch_size_train x 1", "8 or 12"]),
        ({"global_batch_size": 2}, 4, ["a multiple of 4, such as 4"]),
        (
            {"batch_size_train": 4, "accum_grad_iters": 2, "global_batch_size": 32},
            2,
            ["4 (batch_size_train) x 2", "= 16, not 32"],
        ),
    ],
)
def test_batch_plan_shows_the_multiplication(keys: dict[str, int], ranks: int, texts: list[str]) -> None:
    run = decode(RunConfig, {"max_steps": 1, **keys})
    with pytest.raises(ConfigError) as caught:
        batch_plan(run, ranks)
    assert all(text in str(caught.value) for text in texts), str(caught.value)
    assert str(caught.value).startswith("run.global_batch_size")


# Derive


def test_derive_takes_the_numbers_of_run() -> None:
    settings = derive_for(ranks=2, accum_grad_iters=3, grad_clip=0.5, precision="bf16")
    assert settings == {
        "train_batch_size": 24,
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 3,
        "gradient_clipping": 0.5,
        "bf16": {"enabled": True},
        "fp16": {"enabled": False},
        "zero_optimization": {"stage": 2},
        "wall_clock_breakdown": False,
    }


def test_derive_without_clipping_and_in_float32() -> None:
    settings = derive_for(grad_clip=None, precision="fp32")
    assert settings["gradient_clipping"] == 0.0
    assert not settings["bf16"]["enabled"]
    assert not settings["fp16"]["enabled"]


def test_derive_keeps_the_rest_and_makes_whole_numbers_integers() -> None:
    given = {
        "wall_clock_breakdown": True,
        "fp16": {"initial_scale_power": 12},
        "bfloat16": {"check_grad_overflow": False},
        "zero_optimization": {"stage": 3.0, "reduce_bucket_size": 2e8, "offload_optimizer": None},
    }
    settings = derive_for(deepspeed_config=given, precision="fp16")
    assert settings["wall_clock_breakdown"] is True
    assert settings["fp16"] == {"initial_scale_power": 12, "enabled": True}
    assert settings["bf16"] == {"check_grad_overflow": False, "enabled": False}
    assert "bfloat16" not in settings
    assert settings["zero_optimization"] == {"stage": 3, "reduce_bucket_size": 200_000_000}
    assert all(isinstance(number, int) for number in settings["zero_optimization"].values())
    assert "offload_optimizer" in given["zero_optimization"]  # what the user wrote stays as it was


def test_derive_accepts_the_same_number_twice() -> None:
    params = {"lr": 0.0001, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.05}
    optimizer = {"type": "AdamW", "params": params}
    same = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1,
            "gradient_clipping": 1, "bf16": {"enabled": True}, "optimizer": optimizer}  # fmt: skip
    settings = derive_for(ranks=2, deepspeed_config=same, init_lr=1e-4)
    assert "optimizer" not in settings
    assert settings["train_batch_size"] == 8


@pytest.mark.parametrize(
    ("path", "value", "owner", "right"),
    [
        ("train_batch_size", 16, "run.global_batch_size", "8"),
        ("train_micro_batch_size_per_gpu", 2, "run.batch_size_train", "4"),
        ("gradient_accumulation_steps", 2, "run.accum_grad_iters", "1"),
        ("gradient_clipping", 0.5, "run.grad_clip", "1.0"),
        ("bf16.enabled", False, "run.precision", "True"),
        ("bfloat16.enabled", False, "run.precision", "True"),
        ("fp16.enabled", True, "run.precision", "False"),
        ("optimizer.params.lr", 2e-5, "run.init_lr", "0.0001"),
        ("optimizer.params.betas", [0.9, 0.99], "run.optimizer.betas", "[0.9, 0.999]"),
        ("optimizer.params.eps", 1e-7, "run.optimizer.eps", "1e-08"),
        ("optimizer.params.weight_decay", 0.0, "run.weight_decay", "0.05"),
        ("optimizer.params.max_grad_norm", 5.0, "run.grad_clip", "1.0"),
    ],
)
def test_derive_refuses_two_owners_that_disagree(path: str, value: Any, owner: str, right: str) -> None:
    with pytest.raises(ConfigError) as caught:
        derive_for(ranks=2, deepspeed_config=nest(path, value))
    shown = path.replace("bfloat16", "bf16")
    assert f"run.deepspeed_config.{shown}: this is {value}, but {owner} makes it {right}." in str(caught.value)


def test_derive_refuses_a_plan_for_another_number_of_ranks() -> None:
    run = make_run()
    with pytest.raises(ConfigError, match="does not fit 3"):
        derive(run, batch_plan(run, 2), data_parallel_size=3)


# Load


def test_load_gives_a_copy_of_a_mapping() -> None:
    given = {"zero_optimization": {"stage": 1}}
    load(given)["zero_optimization"]["stage"] = 3
    assert given == {"zero_optimization": {"stage": 1}}


def test_presets_folder_holds_exactly_the_presets() -> None:
    assert sorted(file.stem for file in (configs_dir() / "deepspeed").glob("*.json")) == PRESETS


@pytest.mark.parametrize("name", PRESETS)
def test_preset_by_name_lints_and_has_its_stage(name: str) -> None:
    settings = load(make_run(deepspeed_config=name).deepspeed_config)
    lint(settings)
    assert settings["zero_optimization"]["stage"] == int(name[4])
    assert ("offload_optimizer" in settings["zero_optimization"]) == name.endswith("offload")


def test_preset_with_overrides_keeps_the_rest() -> None:
    override = {"zero_optimization": {"reduce_bucket_size": 1}, "steps_per_print": 5}
    settings = load(make_run(deepspeed_config={"preset": "zero3", **override}).deepspeed_config)
    preset = load("zero3")
    assert settings == {
        "zero_optimization": {**preset["zero_optimization"], "reduce_bucket_size": 1},
        "steps_per_print": 5,
    }


def test_json_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 1}}))
    monkeypatch.chdir(tmp_path)
    run = make_run(deepspeed_config="ds.json")
    assert run.deepspeed_config == str(tmp_path / "ds.json")
    assert load(run.deepspeed_config) == {"zero_optimization": {"stage": 1}}


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("{", "not valid JSON"),
        ("[1]", "must hold a JSON object"),
        ('{"fp16": {}, "fp16": {}}', "fp16 is given twice"),
    ],
)
def test_bad_json_file(tmp_path: Path, content: str, text: str) -> None:
    (tmp_path / "ds.json").write_text(content)
    with pytest.raises(ConfigError, match=text):
        load(str(tmp_path / "ds.json"))


@pytest.mark.parametrize("value", ["zeroo3", "missing/zero3.json", {"preset": "zero_3"}])
def test_missing_file_or_preset_names_the_presets(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"one of zero0, zero1, .*Did you mean 'zero3'"):
        load(value)


def test_preset_must_be_a_name() -> None:
    with pytest.raises(ConfigError, match=r"run\.deepspeed_config\.preset"):
        load({"preset": 3})


@pytest.mark.parametrize(
    ("level", "settings", "expected"),
    [
        ("warning", {}, "warning"),
        ("error", {"wall_clock_breakdown": True, "flops_profiler": {"enabled": True}}, "error"),  # these just print
        ("warning", {"comms_logger": {"enabled": True, "verbose": True}}, "info"),
        ("error", {"memory_breakdown": True}, "info"),
        ("debug", {"dump_state": True}, "debug"),
    ],
)
def test_deepspeed_speaks_loud_enough_for_what_was_asked_of_it(
    level: str, settings: dict[str, Any], expected: str
) -> None:
    run = make_run(log_level=level, deepspeed_config=settings)
    assert log_level(run, derive(run, batch_plan(run, 1), data_parallel_size=1)) == expected


# Against DeepSpeed itself


def test_deepspeed_accepts_what_is_derived() -> None:
    from deepspeed.runtime.config import DeepSpeedConfig

    for name in PRESETS:
        for precision in ("fp32", "bf16", "fp16"):
            run = make_run(deepspeed_config=name, precision=precision, accum_grad_iters=2, grad_clip=0.7)
            config = DeepSpeedConfig(derive(run, batch_plan(run, 1), data_parallel_size=1))
            assert config.zero_optimization_stage == int(name[4])
            assert (config.train_batch_size, config.gradient_accumulation_steps) == (8, 2)
            assert math.isclose(config.gradient_clipping, 0.7)
            assert config.bfloat16_config.enabled == (precision == "bf16")
            assert config.float16_config.enabled == (precision == "fp16")
            offload = config.zero_config.offload_optimizer
            assert (offload is not None and offload.device == "cpu") == name.endswith("offload")


@pytest.mark.parametrize(("path", "value"), GOOD)
def test_deepspeed_agrees_with_what_lint_accepts(path: str, value: Any) -> None:
    """Were a key of GOOD wrong, DeepSpeed's strict classes would refuse it; those that it ignores are read above."""
    from deepspeed.runtime.config import DeepSpeedConfig

    settings = checked(nest(path, value))
    batch = {"train_micro_batch_size_per_gpu": settings.pop("train_micro_batch_size_per_gpu", 4)}
    settings.pop("train_batch_size", None)
    config = DeepSpeedConfig({**batch, **settings})
    assert config.train_micro_batch_size_per_gpu == 4


@pytest.mark.parametrize(
    ("ranks", "keys", "stage"),
    [
        (2, {}, 2),
        (1, {}, 0),
        (1, {"precision": "fp16"}, 2),
        (1, {"deepspeed_config": {"zero_optimization": {"overlap_comm": True}}}, 2),
        (1, {"deepspeed_config": "zero3"}, 3),
        (2, {"deepspeed_config": "zero0"}, 0),
    ],
)
def test_the_stage_of_a_run_that_names_none(ranks: int, keys: dict[str, Any], stage: int) -> None:
    """A single rank has nothing to share."""
    assert derive_for(ranks, **keys)["zero_optimization"]["stage"] == stage
    assert zero_stage(make_run(**keys), ranks) == stage


def test_without_deepspeed_there_is_no_stage() -> None:
    assert zero_stage(make_run(engine="torch", deepspeed_config="zero3"), 2) == 0
