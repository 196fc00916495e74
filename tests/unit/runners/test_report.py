"""The report: what is on the page, what can't get into it, and what a broken run folder does."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from lavis_ds.errors import ConfigError
from lavis_ds.runners.observers.base import RunInfo
from lavis_ds.runners.observers.report import ReportObserver
from lavis_ds.runners.report import curves, write_report
from lavis_ds.runners.report.curves import Series, draw, nice_ticks, smooth

EVIL = "<script>alert('x')</script>\"><img src=x onerror=y>"


class Page(HTMLParser):
    """Tags with their attributes, and the text between them."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data

    def with_class(self, tag: str, name: str) -> list[dict[str, str | None]]:
        return [a for t, a in self.tags if t == tag and name in (a.get("class") or "").split()]


def make_run(folder: Path, *, steps: int = 120, lr: float = 1e-3, size: int = 32, images: int = 30) -> Path:
    (folder / "eval").mkdir(parents=True)
    (folder / "pictures").mkdir()
    (folder / "config.yaml").write_text(
        f"model: {{arch: vlm}}\ndatasets: {{shapes: {{builder: easy_vqa, image_root: {folder / 'pictures'}}}}}\n"
        f"run: {{init_lr: {lr}, precision: bf16, max_steps: {steps}}}\n"
    )
    (folder / "environment.json").write_text(json.dumps({"packages": {"torch": "2.14.1", "flash-attn": None}}))
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            record = {"step": step, "train/loss": 3 / step, "train/lr": lr, "train/grad_norm": 1.0 + step % 3}
            file.write(json.dumps({**record, "throughput/tokens_per_s": 5e4, "time/step_s": 0.5}) + "\n")
    for step in (steps // 2, steps):
        metrics = {"accuracy": step / steps * 0.8, "accuracy/what": 0.25, "baseline/accuracy": 0.31}
        name = f"test_step_{step:08d}"
        (folder / "eval" / f"{name}.json").write_text(json.dumps({"split": "test", "step": step, "metrics": metrics}))
        records = [make_record(folder, i, size) for i in range(images)]
        (folder / "eval" / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    return folder


def make_record(folder: Path, index: int, size: int) -> dict[str, Any]:
    Image.new("RGBA", (size, size), (index, 0, 0, 128)).save(folder / "pictures" / f"{index}.png")
    is_right = index % 2 == 0
    return {
        "id": f"test/{index}", "images": [f"{index}.png"], "question": f"question {index}?", "answer": "red",
        "prediction": "red" if is_right else "blue", "correct": is_right, "question_type": "what",
    }  # fmt: skip


def test_a_whole_page(tmp_path: Path) -> None:
    path = write_report([make_run(tmp_path / "quick")])
    assert path == tmp_path / "quick" / "report.html"
    page = Page(path)
    for text in (
        "quick",
        "Loss",
        "Learning rate",
        "Gradient norm",
        "Throughput",
        "80.0 %",
        "baseline 31.0 %",
        "bf16",
        "2.14.1",
    ):
        assert text in page.text
    assert (
        len(page.with_class("path", "band")) == 4
    )  # loss, gradient norm, tokens/s, step time; the learning rate has none
    assert [a["style"] for a in page.with_class("span", "fill")] == ["width:80.00%", "width:25.00%"]
    assert [a["style"] for a in page.with_class("span", "baseline")] == ["left:31.00%"]
    assert "arch: vlm" in page.text
    assert "Not on this page" not in page.text


def test_the_page_loads_and_runs_nothing(tmp_path: Path) -> None:
    page = Page(write_report([make_run(tmp_path / "a")]))
    assert not {"script", "link", "iframe", "object"} & {tag for tag, _ in page.tags}
    links = [v for _, attrs in page.tags for k, v in attrs.items() if k in ("src", "href", "xlink:href") and v]
    assert links
    assert all(link.startswith(("data:image/", "#")) for link in links)


def test_gallery_is_a_spread_of_24_with_right_and_wrong_marked(tmp_path: Path) -> None:
    page = Page(write_report([make_run(tmp_path / "a", images=60)]))
    examples = page.with_class("figure", "example")
    assert len(examples) == 24
    assert "24 of 60 samples" in page.text
    assert "question 0?" in page.text
    assert "question 59?" in page.text
    right = [int(i) % 2 == 0 for i in re.findall(r"test/(\d+)", page.text)]
    assert ["correct" in str(e["class"]) for e in examples] == right


@pytest.mark.parametrize(("size", "kind", "is_tiny"), [(32, "png", True), (400, "jpeg", False)])
def test_pictures_are_thumbnails_and_tiny_ones_stay_crisp(tmp_path: Path, size: int, kind: str, is_tiny: bool) -> None:
    page = Page(write_report([make_run(tmp_path / "a", size=size, images=2)]))
    pictures = [a for tag, a in page.tags if tag == "img"]
    assert len(pictures) == 2
    assert all(str(a["src"]).startswith(f"data:image/{kind};base64,") for a in pictures)
    assert bool(page.with_class("img", "tiny")) == is_tiny


def test_text_from_data_stays_text(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a&<b>", images=1)
    record = {
        "id": EVIL,
        "images": [],
        "question": EVIL,
        "answer": EVIL,
        "prediction": EVIL,
        "correct": False,
        "question_type": EVIL,
    }
    (folder / "eval" / "test_step_00000120.jsonl").write_text(json.dumps(record) + "\n")
    (folder / "eval" / "x_step_00000120.json").write_text(
        json.dumps({"split": EVIL, "step": 120, "metrics": {EVIL: 1.0}})
    )
    (folder / "environment.json").write_text(json.dumps({EVIL: EVIL}))
    (folder / "config.yaml").write_text(f"model: {{arch: {json.dumps(EVIL)}}}\n")
    page = Page(write_report([folder]))
    assert "script" not in {tag for tag, _ in page.tags}
    assert not any("onerror" in attrs for _, attrs in page.tags)
    assert page.text.count(EVIL) >= 9
    assert "a&<b>" in page.text


def test_missing_and_damaged_pieces_become_sentences(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a", images=2)
    (folder / "environment.json").unlink()
    (folder / "config.yaml").write_text("model: [unclosed\n")
    (folder / "pictures" / "0.png").write_bytes(b"no picture")
    (folder / "eval" / "test_step_00000060.json").write_text("{")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 121, "tra')
    page = Page(write_report([folder]))
    assert "environment.json is missing." in page.text
    assert "config.yaml can't be read" in page.text
    assert "eval/test_step_00000060.json can't be read" in page.text
    assert "metrics.jsonl has 1 unreadable line, left out." in page.text
    assert "picture not readable" in page.text
    assert len(page.with_class("path", "line")) == 5


def test_a_folder_with_only_a_config_gives_a_page(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("run: {seed: 3}\n")
    page = Page(write_report([tmp_path]))
    assert "metrics.jsonl is missing." in page.text
    assert "There are no evaluations yet." in page.text
    assert "svg" not in {tag for tag, _ in page.tags}


def test_what_is_no_run_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no run folder"):
        write_report([tmp_path])
    with pytest.raises(ConfigError, match="1 to 8"):
        write_report([])
    assert list(tmp_path.iterdir()) == []


def test_comparison_has_a_column_and_a_curve_a_run(tmp_path: Path) -> None:
    first, second = make_run(tmp_path / "one" / "run"), make_run(tmp_path / "two" / "run", lr=2e-3)
    page = Page(write_report([first, second], tmp_path / "out" / "c.html"))
    assert "2 runs compared" in page.text
    assert "one/run" in page.text  # the folders have the same name, so their parents tell them apart
    assert "two/run" in page.text
    assert len(page.with_class("tr", "differs")) == 1  # the learning rate
    for color in ("c0", "c1"):
        assert len([a for a in page.with_class("path", "line") if color in str(a["class"])]) == 6
    assert len(page.with_class("figure", "example")) == 24


def test_comparison_lies_beside_the_first_run_by_default(tmp_path: Path) -> None:
    paths = [make_run(tmp_path / name, images=1) for name in "ab"]
    assert write_report(paths) == tmp_path / "comparison.html"


def test_observer_writes_after_evaluation_and_at_the_end(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a", images=1)
    observer = ReportObserver()
    observer.on_start(RunInfo(folder, 120, {}), None)
    assert not (folder / "report.html").exists()
    observer.on_evaluate("test", 120, {"accuracy": 0.8}, [])
    assert "Accuracy" in (folder / "report.html").read_text()
    (folder / "report.html").unlink()
    observer.on_end("finished")
    assert "Accuracy" in (folder / "report.html").read_text()


def test_a_curve_keeps_its_spikes_and_its_ends() -> None:
    steps = np.arange(1, 5001, dtype=float)
    values = np.full(5000, 2.0)
    values[3210], values[100], values[7] = 500.0, np.inf, np.nan
    chart = draw("Gradient norm", [Series("g", 0, steps, values, "noisy")])
    assert chart is not None
    assert "largest 500" in chart.note
    assert "Not finite, not drawn: 2 values." in chart.note
    points = [tuple(map(float, p.split())) for p in chart.series[0].line.removeprefix("M").split("L")]
    assert len(points) <= 280
    assert points[-1][0] == curves.WIDTH - curves.RIGHT
    assert (
        min(float(p.split()[1]) for p in chart.series[0].band.strip("MZ").split("L")) < curves.TOP
    )  # the spike leaves the frame
    assert chart.hovers[-1].text.startswith("step 5,000\ng 2")
    assert sum(h.width for h in chart.hovers) == pytest.approx(
        curves.WIDTH - curves.LEFT - curves.RIGHT, abs=5
    )  # rounded to 0.1 each


@pytest.mark.parametrize("values", [[1.0], [2.0, 2.0, 2.0], [0.0, 0.0], [-3.0, -1.0], [1e-9, 3e-9]])
def test_odd_curves_have_finite_coordinates(values: list[float]) -> None:
    chart = draw("x", [Series("x", 0, np.arange(1.0, len(values) + 1), np.array(values))])
    assert chart is not None
    numbers = [float(n) for n in re.findall(r"[-\w.]+", chart.series[0].line.replace("M", " ").replace("L", " "))]
    assert all(0 <= n <= curves.WIDTH for n in numbers)
    assert chart.y_ticks


def test_nothing_finite_is_no_chart() -> None:
    assert draw("x", [Series("x", 0, np.array([1.0]), np.array([np.nan]))]) is None


def test_smooth_is_a_weighted_mean_from_the_first_value_on() -> None:
    assert smooth(np.array([4.0, 4.0, 4.0]), 10).tolist() == pytest.approx([4.0, 4.0, 4.0], rel=1e-15)
    # keep = 1 - 2 / (3 + 1) = 1/2: (0.5 * 1 + 4) / 1.5
    assert smooth(np.array([1.0, 4.0]), 3).tolist() == [1.0, 3.0]


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [(0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1.0]), (0, 2000, [0, 500, 1000, 1500, 2000]), (-3, 2, [-3, -2, -1, 0, 1, 2])],
)
def test_ticks_are_round(low: float, high: float, ticks: list[float]) -> None:
    assert nice_ticks(low, high) == pytest.approx(ticks, abs=1e-12)  # i * step: at most one rounding
