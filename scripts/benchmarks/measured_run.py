"""A plugin of the benchmarks: a training run that also tells what it holds in memory and what its GPU waited for.

`run.runner: {name: measured, profiled_steps: 2}`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import torch
from pydantic import Field
from torch._C._autograd import DeviceType

from lavis_ds import distributed, registry
from lavis_ds.runners.configs import TrainRunnerConfig
from lavis_ds.runners.train import TrainRunner


class MeasuredRunConfig(TrainRunnerConfig):
    name: str = "measured"
    profiled_steps: int = Field(0, ge=0, description="steps at the end that are profiled; one before starts it")


@registry.register_runner("measured")
class MeasuredRun(TrainRunner):
    Config = MeasuredRunConfig

    def __init__(self, config: Any, job: Any, preflight: Any) -> None:
        super().__init__(config, job, preflight)
        self._num_profiled = config.run.runner.profiled_steps if torch.cuda.is_available() else 0
        self._profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
        self._found: dict[str, Any] = {}

    def run(self) -> int:
        code = super().run()
        if torch.cuda.is_available():
            self._found["held_bytes"] = torch.cuda.memory_allocated()
        self._found["parameters"] = sum(row.parameters for row in self.parts)
        if distributed.is_main():
            (self.job.folder / "measured.json").write_text(json.dumps(self._found))
        return code

    def _report_step(self, *arguments: Any) -> None:
        super()._report_step(*arguments)
        left = self.total_steps - self.state.step
        if self._num_profiled and left in (0, self._num_profiled):
            torch.cuda.synchronize()
            if left:
                self._profiler.start()
            else:
                self._profiler.stop()
                self._found |= self._profile(self._profiler.events())  # type: ignore[no-untyped-call]

    def _profile(self, events: Iterable[Any]) -> dict[str, Any]:
        """Seconds a step in which the GPU computed, talked to others, and only talked; and the longest kernels."""
        spans: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
        kernels: dict[str, float] = {}
        for event in events:
            if event.device_type == DeviceType.CUDA and not getattr(event, "is_user_annotation", False):
                spans["nccl" in event.name.lower()].append((event.time_range.start, event.time_range.end))
                kernels[event.name[:90]] = kernels.get(event.name[:90], 0.0) + event.time_range.elapsed_us()
        longest = sorted(kernels, key=lambda name: -kernels[name])[:20]
        talking, computing = covered(spans[True]), covered(spans[False])
        both = covered(spans[True] + spans[False])
        times = {"computing_s": computing, "talking_s": talking, "only_talking_s": both - computing, "busy_s": both}
        return {
            **{name: us / 1e6 / self._num_profiled for name, us in times.items()},
            "kernels_ms": {name: round(kernels[name] / 1e3 / self._num_profiled, 2) for name in longest},
        }


def covered(spans: list[tuple[float, float]]) -> float:
    """Length of the union."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total
