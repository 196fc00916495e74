"""What is printed: plain lines where the output is no terminal, a live bar where it is one."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from lavis_ds.runners.observers.base import RunInfo
from lavis_ds.runners.observers.console import ConsoleObserver

EXPECTED = """\
model   vlm [base]
engine  deepspeed, zero_stage 2
Resumed after step 10 of 40.
step 20/40  50.0%  loss 0.5000  lr 1.00e-04  grad norm 1.25  12.35k tokens/s  left 2:00
Checkpoint of step 20: /runs/a b/[x]/step_20
test after step 20, 1 predictions

 metric             value   baseline
 ───────────────────────────────────
 accuracy          86.2 %     34.0 %
 accuracy/yes_no   91.0 %
 loss               0.512

step 30/40  75.0%  loss 0.3333  lr 1.00e-04  grad norm 1.25  12.35k tokens/s  left 1:00
left out 2 samples [see quarantine.jsonl]
step 40/40 100.0%  loss 0.2500  lr 1.00e-04  grad norm 1.25  12.35k tokens/s  left 0:00
Run finished after step 40 of 40 in 3:00.
"""


def ticking(seconds_a_step: float) -> tuple[Callable[[], float], Callable[[], None]]:
    now = [100.0]

    def tick() -> None:
        now[0] += seconds_a_step

    return lambda: now[0], tick


def watch(console: Console) -> None:
    clock, tick = ticking(6.0)
    observer = ConsoleObserver(10, console, clock)
    summary = {"model": "vlm [base]", "engine": "deepspeed, zero_stage 2"}
    observer.on_start(RunInfo(Path("/runs"), 40, {}, summary, start_step=10), None)
    for step in range(11, 41):
        tick()
        numbers = {
            "train/loss": 10 / step,
            "train/lr": 1e-4,
            "train/grad_norm": 1.25,
            "throughput/tokens_per_s": 12345.6,
        }
        observer.on_step(step, {**numbers, "data/sample_ids": ["a"]})
        if step == 20:
            observer.on_checkpoint(step, Path("/runs/a b/[x]/step_20"))
            scores = {"accuracy": 0.862, "accuracy/yes_no": 0.91, "loss": 0.512, "baseline/accuracy": 0.34}
            observer.on_evaluate("test", step, scores, [{"id": "1"}])
        if step == 30:
            observer.on_message("left out 2 samples [see quarantine.jsonl]")
    observer.on_end("finished")
    observer.close()


def test_plain_output() -> None:
    out = io.StringIO()
    watch(Console(file=out, width=80, highlight=False, force_terminal=False))
    assert "\r" not in out.getvalue()
    assert "\x1b" not in out.getvalue()
    assert [line.rstrip() for line in out.getvalue().splitlines()] == EXPECTED.splitlines()


def test_plain_lines_are_never_wrapped() -> None:
    out = io.StringIO()
    path = Path("/runs") / ("long" * 60)
    ConsoleObserver(10, Console(file=out, width=40)).on_checkpoint(3, path)
    assert out.getvalue() == f"Checkpoint of step 3: {path}\n"


def test_a_terminal_gets_a_bar_and_no_step_lines() -> None:
    out = io.StringIO()
    watch(Console(file=out, width=120, force_terminal=True, color_system=None, legacy_windows=False))
    text = out.getvalue()
    assert "step 40/40" in text
    assert "100%" in text
    assert "loss 0.2500" in text
    assert "step 20/40  50.0%" not in text
    assert "Run finished after step 40" in text.rstrip().splitlines()[-1]
