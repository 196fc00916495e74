"""The three blocks of a run, `model:`, `datasets:` and `run:`, and the options that every kind of part has."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from lavis_ds import registry
from lavis_ds.config.base import ComponentOf, Config, LocalPath, NamedConfig
from lavis_ds.errors import RegistryError


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Names = Annotated[list[str], BeforeValidator(_as_list)]
"""A list of names; a single one may be written without brackets."""

Paths = Annotated[list[LocalPath], BeforeValidator(_as_list)]

PresetName = Annotated[str, Field(pattern=r"^\w+$")]
"""The name of a file in configs/deepspeed, without ending: `zero3`."""

Interval = Literal["epoch"] | Annotated[int, Field(ge=1)]
"""How often: a number of optimizer steps, or `epoch`."""


class ModelConfig(Config):
    """Options that every model has."""

    arch: str = Field(description="registered name of the model")
    model_type: str | None = Field(
        None, description="named defaults, read from configs/models/<arch>/<model_type>.yaml"
    )
    pretrained: LocalPath | None = Field(
        None,
        description="weights of the whole model to start from: a checkpoint folder of an earlier run or of DeepSpeed, "
        "a folder of weights, or a LAVIS or MiniGPT4Qwen .pth",
    )
    finetuned: LocalPath | None = Field(
        None, description="weights that go over `pretrained`, of the same kinds; some parts alone are enough"
    )
    freeze: Names = Field(
        default_factory=list,
        description="what does not train: names of parts (vision, ...) or patterns such as language.*.layers.0.*",
    )
    max_txt_len: int = Field(512, ge=8, description="longest sample in tokens, image tokens included")


class ProcessorConfig(NamedConfig):
    """Options that every processor has."""

    augments: ClassVar[bool] = False
    """Whether it changes pictures at random, so that evaluation needs another one."""

    @property
    def has_fixed_lengths(self) -> bool:
        """Whether a sample has as many tokens in every epoch, so that rows can be planned by them."""
        return True


class ProcessorsConfig(Config):
    """The processor used in training and the one used in evaluation (the same where only one is given)."""

    train: Annotated[ProcessorConfig, ComponentOf(registry.processors)] = Field(
        description="processor of training splits"
    )
    eval: Annotated[ProcessorConfig, ComponentOf(registry.processors)] = Field(description="processor of evaluation")

    @model_validator(mode="before")
    @classmethod
    def _one_for_both(cls, value: Any) -> Any:
        if isinstance(value, str) or (isinstance(value, dict) and "name" in value):
            return {"train": value, "eval": value}
        if isinstance(value, dict) and "train" in value and "eval" not in value:
            return {**value, "eval": value["train"]}
        return value


class ImageProcessorsConfig(ProcessorsConfig):
    """As above for pictures; where only a `train` that augments is given, evaluation resizes to the same size."""

    @model_validator(mode="before")
    @classmethod
    def _eval_without_augmentation(cls, value: Any) -> Any:
        if isinstance(value, dict) and isinstance(value.get("train"), dict) and "eval" not in value:
            name = value["train"].get("name")
            if name in registry.processors and getattr(registry.processors.config_class(name), "augments", False):
                kept = {key: value["train"][key] for key in ("image_size", "max_file_pixels") if key in value["train"]}
                return {**value, "eval": {"name": "image_eval", **kept}}
        return value


class VideoConfig(Config):
    """Which frames of a video the model sees; each is a picture of its own, but where the model takes videos whole."""

    num_frames: int | None = Field(None, ge=1, description="frames a video, evenly spaced; this or fps")
    fps: float | None = Field(None, gt=0, description="frames a second of the video, at most max_frames of them")
    max_frames: int = Field(32, ge=1, description="most frames of a video")
    timestamps: bool = Field(False, description="write each picture's time before it, as `<12.5 s>`")

    @model_validator(mode="after")
    def _one_rate(self) -> VideoConfig:
        if self.num_frames is not None and self.fps is not None:
            raise ValueError(f"num_frames ({self.num_frames}) and fps ({self.fps}) are both given; keep one")
        if self.num_frames is not None and self.num_frames > self.max_frames:
            raise ValueError(f"num_frames ({self.num_frames}) is larger than max_frames ({self.max_frames})")
        return self


class DatasetConfig(Config):
    """Options that every dataset builder has."""

    builder: str = Field(description="registered name of the builder; the entry's own name where it is left out")
    annotations: dict[str, Paths] = Field(default_factory=dict, description="split name -> annotation file or files")
    image_root: LocalPath | None = Field(None, description="folder that image and video paths are relative to")
    weight: float | None = Field(
        None, gt=0, description="share in the mixture, beside the weights of the other datasets; for all or for none"
    )
    repeat: float = Field(1.0, gt=0, description="passes over this dataset in an epoch of the run, such as 0.5 or 3")
    max_samples: int | None = Field(None, ge=1, description="use only the first so many samples of a training split")
    video: VideoConfig = Field(default_factory=VideoConfig, description="frames taken from videos")
    vis_processor: ImageProcessorsConfig | None = Field(
        None, description="turns a picture into pixels; left out for text-only data"
    )
    text_processor: ProcessorsConfig = Field(
        default_factory=lambda: ProcessorsConfig.model_validate("chat"),
        description="turns a conversation into token ids and labels",
    )


class DataConfig(Config):
    """How samples become batches, and what happens to those that can't be used."""

    batching: Literal["padded", "grouped", "packed"] = Field(
        "padded",
        description="padded: a sample a row; grouped: the same, samples of like length together; packed: rows of "
        "`pack_length` tokens filled with whole samples (batch sizes then count rows)",
    )
    pack_length: int | None = Field(
        None, ge=8, description="tokens of a packed row; model.max_txt_len where left out, and never less"
    )
    pack_views: int | None = Field(
        None,
        ge=1,
        description="views in a packed row: pictures, their tiles, or at native resolution their patches; any number "
        "where left out",
    )
    plan_window: int = Field(
        8192, ge=1, description="neighbours in the random order, in samples, that are grouped or packed together"
    )
    temperature: float | None = Field(
        None, ge=1, description="datasets are drawn in proportion to size ** (1 / temperature); 1 is by size"
    )
    max_bad_fraction: float = Field(
        0.01, ge=0, le=1, description="share of the samples that may turn out unusable before the run stops"
    )
    worker_timeout_s: int = Field(
        300, ge=1, description="seconds after which a data-loading process that gives no batch ends the run"
    )

    @model_validator(mode="after")
    def _views_are_of_packs(self) -> DataConfig:
        if self.pack_views is not None and self.batching != "packed":
            raise ValueError(f"pack_views is for batching: packed, and batching is {self.batching}")
        return self


class TaskConfig(NamedConfig):
    """Options that every task has."""


class RunnerConfig(NamedConfig):
    """Options that every runner has."""


class OptimizerConfig(Config):
    """Optimizer settings besides the learning rate."""

    name: Literal["adamw", "adamw_8bit", "muon"] = Field(
        "adamw",
        description="adamw (Loshchilov & Hutter, https://arxiv.org/abs/1711.05101); adamw_8bit: its moments in 8 bits "
        "(bitsandbytes); muon: Muon for matrices of hidden layers, AdamW for all else",
    )
    betas: tuple[float, float] = Field((0.9, 0.999), description="decay rates of the two moment averages")
    eps: float = Field(1e-8, gt=0, description="added to the denominator")
    momentum: float = Field(0.95, ge=0, lt=1, description="decay rate of Muon's average of gradients")
    stochastic_rounding: bool = Field(
        False, description="keep adamw's master weights and moments in bf16 too, rounded at random, not to nearest"
    )


class ParamGroupConfig(Config):
    """Settings of the parameters that a pattern selects; what is left out stays as in `run`."""

    lr: float | None = Field(None, ge=0, description="peak learning rate of these parameters")
    weight_decay: float | None = Field(None, ge=0, description="weight decay of these parameters")
    layer_decay: float | None = Field(
        None, gt=0, le=1, description="factor of lr from each layer to the one before it; the pattern must name a part"
    )


class RunConfig(Config):
    """How to train: the only owner of batch size, learning rate, precision and clipping."""

    task: Annotated[TaskConfig, ComponentOf(registry.tasks)] = Field(
        default="instruct",
        validate_default=True,
        description="registered name of the task, or a mapping with `name` and its options",
    )
    runner: Annotated[RunnerConfig, ComponentOf(registry.runners)] = Field(
        default="train", validate_default=True, description="registered name of the training loop"
    )
    engine: Literal["deepspeed", "torch"] = Field(
        "deepspeed", description="what computes and updates; torch is the plain reference"
    )
    output_dir: LocalPath = Field(default="output", validate_default=True, description="run folders are made in here")
    seed: int = Field(42, ge=0, description="seed of initialisation, data order and augmentation")
    train_splits: Names = Field(default_factory=lambda: ["train"], description="splits trained on")
    valid_splits: Names = Field(default_factory=list, description="splits evaluated during training")
    test_splits: Names = Field(default_factory=list, description="splits evaluated after training")
    evaluate: bool = Field(False, description="only evaluate, do not train")

    max_epoch: int | None = Field(None, ge=1, description="passes over the training data")
    max_steps: int | None = Field(None, ge=1, description="optimizer steps; use this or max_epoch")
    stop_at_step: int | None = Field(
        None, ge=1, description="save and stop after this step with exit code 75; schedules still run to the end"
    )

    global_batch_size: int | None = Field(
        None, ge=1, description="samples an optimizer step, over all ranks and micro-batches"
    )
    batch_size_train: int | None = Field(None, ge=1, description="samples in a micro-batch of one rank")
    accum_grad_iters: int | None = Field(
        None, ge=1, description="micro-batches a rank accumulates before an optimizer step"
    )
    batch_size_eval: int = Field(8, ge=1, description="samples in an evaluation batch of one rank")

    precision: Literal["fp32", "bf16", "fp16"] = Field(
        "bf16", description="number format of the forward and backward pass"
    )
    compile: Literal["auto"] | bool = Field(
        "auto",
        description="compile the layers, which fuses what runs between matrix products; auto does it on a GPU, and the "
        "run's start says so",
    )
    optimizer: OptimizerConfig = Field(
        default_factory=OptimizerConfig, description="optimizer settings besides the learning rate"
    )
    init_lr: float = Field(1e-4, gt=0, description="peak learning rate")
    min_lr: float = Field(0.0, ge=0, description="learning rate at the end of the schedule")
    warmup_lr: float = Field(0.0, ge=0, description="learning rate at step 0 of the warm-up")
    warmup_steps: int | None = Field(None, ge=0, description="optimizer steps of warm-up; this or warmup_ratio")
    warmup_ratio: float | None = Field(None, ge=0, lt=1, description="warm-up as a share of all optimizer steps")
    lr_sched: str = Field("cosine", description="registered learning-rate schedule")
    weight_decay: float = Field(0.05, ge=0, description="weight decay of matrices; vectors (biases, norms) have none")
    param_groups: dict[str, ParamGroupConfig] = Field(
        default_factory=dict, description="part or pattern -> its own lr or weight_decay; the first that matches counts"
    )
    grad_clip: float | None = Field(1.0, gt=0, description="largest global gradient norm; null switches clipping off")

    on_non_finite: Literal["stop", "skip", "rewind"] = Field(
        "stop",
        description="what a loss or gradient that is not finite does: end the run, leave the weights alone once, or "
        "take weights and optimizer back to the newest checkpoint and go on with the data that come next",
    )
    max_skipped_steps: int = Field(5, ge=1, description="steps in a row that may be skipped before the run ends anyway")
    max_rewinds: int = Field(3, ge=1, description="times a run may go back before it ends anyway")

    num_workers: int = Field(2, ge=0, description="data-loading processes a rank")
    log_every: int = Field(10, ge=1, description="optimizer steps between console lines; metrics.jsonl gets every step")
    log_sample_ids: bool = Field(False, description="write every step's sample ids to metrics.jsonl")
    observers: Names = Field(
        default_factory=lambda: ["console", "jsonl", "tensorboard", "report"],
        description="who watches the run: console, jsonl, tensorboard, wandb, report",
    )
    eval_every: Interval | None = Field(
        None, description="optimizer steps between evaluations of valid_splits, or `epoch`"
    )
    save_every: Interval | None = Field(
        "epoch", description="optimizer steps between checkpoints, or `epoch`; the end is saved as well"
    )
    save_last: bool = Field(
        True, description="save the end of the run; a run that is stopped before its end is saved in any case"
    )
    save_every_minutes: float | None = Field(
        None, gt=0, description="also save when this much time has passed since the last checkpoint"
    )
    save_in_background: bool = Field(
        False,
        description="train on while a checkpoint is written; needs host memory for a copy of each rank's share, and on "
        "rank 0 of the whole weights",
    )
    save_trainable_only: bool = Field(
        False,
        description="leave frozen weights out of checkpoints where they can be read again from a path, hub id or file "
        "that the model names; their checksums are kept, and compared when the checkpoint is used",
    )
    keep_last: int = Field(2, ge=1, description="newest complete checkpoints kept")
    keep_every: int | None = Field(None, ge=1, description="checkpoints of steps that this divides are kept, too")
    keep_best: str | None = Field(
        None,
        description="metric of an evaluation during training, such as val/accuracy: its best step is saved at once and "
        "kept, too; of loss the lowest is best, of all others the highest",
    )
    resume_ckpt_path: LocalPath | None = Field(
        None, description="checkpoint to resume from; `--resume` takes its place"
    )
    dist_timeout_s: int = Field(
        600, ge=10, description="seconds after which a collective that a rank did not join ends the run"
    )
    stall_timeout_s: int | None = Field(
        None,
        ge=1,
        description="seconds at one place of a step after which all ranks write their stacks and the run ends; three "
        "quarters of dist_timeout_s where left out",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "warning", description="how much DeepSpeed and transformers say"
    )
    deepspeed_config: dict[str, Any] | PresetName | LocalPath = Field(
        default_factory=dict,
        union_mode="left_to_right",
        description="DeepSpeed's own settings: the name of a preset (zero0 ... zero3, zero2_offload, zero3_offload), "
        "a JSON file, or a mapping, with `preset` where it starts from one",
    )

    @model_validator(mode="after")
    def _check_combinations(self) -> RunConfig:
        if self.max_epoch is not None and self.max_steps is not None:
            raise ValueError(f"max_epoch ({self.max_epoch}) and max_steps ({self.max_steps}) are both given; keep one")
        if self.max_epoch is None and self.max_steps is None and not self.evaluate:
            raise ValueError("neither max_epoch nor max_steps is given; set one")
        if self.warmup_steps is not None and self.warmup_ratio is not None:
            raise ValueError(
                f"warmup_steps ({self.warmup_steps}) and warmup_ratio ({self.warmup_ratio}) are both given; keep one"
            )
        if self.batch_size_train is None and self.global_batch_size is None:
            raise ValueError("neither batch_size_train nor global_batch_size is given; set one")
        if self.keep_best is not None:
            split = self.keep_best.partition("/")[0]
            if split not in self.valid_splits or self.eval_every is None:
                raise ValueError(
                    f"keep_best ({self.keep_best}) names no split that is evaluated during training; "
                    f"valid_splits is {self.valid_splits}, eval_every is {self.eval_every}"
                )
        if self.stall_timeout_s is not None and self.stall_timeout_s >= self.dist_timeout_s:
            raise ValueError(
                f"stall_timeout_s ({self.stall_timeout_s}) must be less than dist_timeout_s ({self.dist_timeout_s}), "
                "which would end the run first"
            )
        if self.optimizer.stochastic_rounding:
            needed = {"optimizer.name": "adamw", "precision": "bf16", "engine": "deepspeed"}
            given = {"optimizer.name": self.optimizer.name, "precision": self.precision, "engine": self.engine}
            wrong = [f"{key} {value} instead of {needed[key]}" for key, value in given.items() if value != needed[key]]
            if wrong:
                raise ValueError(f"optimizer.stochastic_rounding does not go with {', '.join(wrong)}")
        if self.min_lr > self.init_lr:
            raise ValueError(f"min_lr ({self.min_lr}) is larger than init_lr ({self.init_lr})")
        try:
            registry.lr_schedulers.entry(self.lr_sched)
        except RegistryError as error:
            raise ValueError(f"lr_sched: {error}") from None
        return self


class RootConfig(Config):
    """One run."""

    plugins: Names = Field(
        default_factory=list, description="Python files or modules that register a project's own parts"
    )
    model: Annotated[ModelConfig, ComponentOf(registry.models)] = Field(description="what is trained")
    datasets: dict[str, Annotated[DatasetConfig, ComponentOf(registry.builders)]] = Field(
        min_length=1, description="what it learns from"
    )
    data: DataConfig = Field(default_factory=DataConfig, description="how samples become batches")
    run: RunConfig = Field(description="how it is trained")

    @model_validator(mode="after")
    def _rows_hold_any_sample(self) -> RootConfig:
        length, longest = self.data.pack_length, self.model.max_txt_len
        if length is not None and length < longest:
            raise ValueError(
                f"data.pack_length ({length}) is less than model.max_txt_len ({longest}), so some samples fit no row"
            )
        return self
