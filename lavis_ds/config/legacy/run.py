"""Old keys of `run:`."""

from __future__ import annotations

from typing import Any

from lavis_ds.config.legacy.block import Block, whole

_BY_LAUNCHER = "no longer needed; the launcher (deepspeed, torchrun, python) decides."
_RUN_DROPPED = {
    **dict.fromkeys(("device", "world_size", "dist_url", "distributed", "gpu", "rank", "dist_backend"), _BY_LAUNCHER),
    "find_unused_parameters": "no longer needed; the engine copes with unused parameters.",
    "use_dist_eval_sampler": "no longer needed; evaluation is always spread over the ranks.",
}
_RUNNERS = ("runner_base", "deepspeed_runner", "runner_iter")
_TASKS = ("image_text_pretrain", "deepspeed_image_text_pretrain")
_PRECISIONS = {"bf16": "bf16", "bfloat16": "bf16", "fp16": "fp16", "float16": "fp16"}

# DeepSpeed's numbers that `run:` owns; they move when `run:` leaves its key unset.
_DEEPSPEED_NUMBERS = {
    "train_batch_size": "global_batch_size",
    "train_micro_batch_size_per_gpu": "batch_size_train",
    "gradient_accumulation_steps": "accum_grad_iters",
    "gradient_clipping": "grad_clip",
    "optimizer.params.lr": "init_lr",
    "optimizer.params.weight_decay": "weight_decay",
    "optimizer.params.betas": "optimizer.betas",
    "optimizer.params.eps": "optimizer.eps",
}


def translate_run(run: Block) -> None:
    """Put today's keys in place of the old ones."""
    before = len(run.log.notices)
    run.rename_value("runner", _RUNNERS, "train")
    run.rename_value("task", _TASKS, "instruct")
    run.drop(_RUN_DROPPED)
    run.move("log_freq", "log_every")
    run.move("grad_norm_clip", "grad_clip")
    run.move("beta2", "optimizer.betas", lambda beta2: [0.9, beta2])
    _precision(run)
    if isinstance(run.values.get("deepspeed_config"), dict):
        _deepspeed_numbers(run, run.values["deepspeed_config"])
    _lengths(run)
    _resume(run)
    run.only("lr_layer_decay", 1, "is not supported. Remove it, or give layers their own lr in run.param_groups.")
    run.only("fsdp", False, "is not supported. Use run.deepspeed_config: zero3 instead.")
    if len(run.log.notices) > before:
        _differences(run)


def _precision(run: Block) -> None:
    values = run.values
    dtype = values.pop("autocast_dtype", None)
    if "amp" in values:
        amp = values.pop("amp")
        name = str(dtype or "fp16")  # LAVIS runs fp16 where no type is given
        if amp and name not in _PRECISIONS:
            run.refuse("autocast_dtype", f"must be bf16 or fp16. Given: {name}.")
        run.put("amp", "precision", _PRECISIONS.get(name, name) if amp else "fp32")
    if dtype is not None:
        run.notice("autocast_dtype", "no longer needed; run.precision says it.")
    run.drop({"loss_scale": "no longer needed; the loss is scaled, dynamically, with precision: fp16 and only then."})


def _deepspeed_numbers(run: Block, settings: dict[str, Any]) -> None:
    for old, new in _DEEPSPEED_NUMBERS.items():
        *blocks, name = old.split(".")
        source: Any = settings
        for block in blocks:
            source = source.get(block) if isinstance(source, dict) else None
        if isinstance(source, dict) and name in source and source[name] != "auto" and not _is_set(run.values, new):
            value = source.pop(name)
            run.put(f"deepspeed_config.{old}", new, None if new == "grad_clip" and not value else value)
    enabled = {name: settings[name].get("enabled") for name in ("bf16", "fp16") if isinstance(settings.get(name), dict)}
    if "precision" not in run.values and enabled and all(isinstance(on, bool) for on in enabled.values()):
        for name in enabled:
            del settings[name]["enabled"]
            if not settings[name]:
                del settings[name]
        chosen = next((name for name, on in enabled.items() if on), "fp32")
        run.put(" and ".join(f"deepspeed_config.{name}.enabled" for name in enabled), "precision", chosen)


def _is_set(values: Any, path: str) -> bool:
    for name in path.split("."):
        if not isinstance(values, dict) or name not in values:
            return False
        values = values[name]
    return True


def _lengths(run: Block) -> None:
    """Old lengths count micro-batches or epochs; ours count optimizer steps."""
    values = run.values
    accumulation = max(whole(values.get("accum_grad_iters", 1)), 1)
    note = f"micro-batches / {accumulation} accumulated" if accumulation > 1 else ""
    run.move("max_iters", "max_steps", lambda iters: -(-whole(iters) // accumulation), note)
    inner = -(-whole(values.get("iters_per_inner_epoch")) // accumulation)
    for old, new in (("save_freq", "save_every"), ("val_freq", "eval_every"), ("eval_freq", "eval_every")):
        if old in values:
            _interval(run, old, new, inner)
    if "iters_per_inner_epoch" in values:
        del values["iters_per_inner_epoch"]
        values.setdefault("save_every", inner)
        if values.get("valid_splits"):
            values.setdefault("eval_every", inner)
        run.notice("iters_per_inner_epoch", f"is now the steps between checkpoints and evaluations: {inner}.")


def _interval(run: Block, old: str, new: str, inner: int) -> None:
    every = whole(run.values.pop(old))
    if every <= 0:
        run.put(old, new, None, "never during training; the end is always saved" if new == "save_every" else "never")
    elif inner:
        run.put(old, new, every * inner, "optimizer steps")
    else:
        run.put(old, new, "epoch", f"every epoch, not every {every}; or give optimizer steps" if every > 1 else "")


def _resume(run: Block) -> None:
    keys = [key for key in ("resume_ckpt_load_dir", "resume_ckpt_tag") if key in run.values]
    if not keys:
        return
    folder, tag = run.values.pop("resume_ckpt_load_dir", None), run.values.pop("resume_ckpt_tag", None)
    if folder:
        run.put(" and ".join(keys), "resume_ckpt_path", f"{folder}/{tag}" if tag else folder)
    else:
        run.notice(" and ".join(keys), "no longer needed; run.resume_ckpt_path or --resume names a checkpoint.")


def _differences(run: Block) -> None:
    """Where an old file means something else by a key that kept its name."""
    if run.values.get("valid_splits") and "eval_every" not in run.values:
        run.values["eval_every"] = "epoch"
        run.notice("valid_splits", "are evaluated after every epoch, as before: run.eval_every: epoch.")
    if run.values.get("warmup_steps") and whole(run.values.get("accum_grad_iters", 1)) > 1:
        run.notice("warmup_steps", "counts optimizer steps; it used to count micro-batches.")
