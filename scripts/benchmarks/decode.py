"""How fast JPEG files become pixels of the vision encoder's size, by library, on one thread.

    python scripts/benchmarks/decode.py --output docs/benchmarks/results/decode.json

The files are made here: smooth gradients, shapes with sharp edges, mild noise, quality 90. Every library gives the same
(3, 224, 224) uint8 pixels but for rounding and filters; `difference` is the mean distance to the first row's pixels in
levels of 255, and `worst` that of the worst picture (`image_train`, which crops, is compared with itself without scaled
decoding; the crops are drawn anew at the smaller size, so theirs is mostly that of two crops one pixel apart). "scaled"
lets libjpeg halve, quarter, ... the picture while it decodes. OpenCV and simplejpeg take part where they are installed.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import os
import platform
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import PIL.ImageDraw
import PIL.ImageFilter
import torch
from torch import Tensor

from lavis_ds.data.configs import ImageEvalConfig, ImageTrainConfig
from lavis_ds.data.conversation import Image
from lavis_ds.data.processors.base import ImageProcessor
from lavis_ds.data.processors.image import ImageEval, ImageTrain, resized
from lavis_ds.data.processors.views import as_views

SIZE = 224
MIN_SCALE = 0.5
"""Smallest crop of `image_train`, its default."""
Read = Callable[[str], Tensor]


def picture(width: int, height: int, rng: np.random.Generator) -> PIL.Image.Image:
    """Smooth colours, some shapes with sharp edges, and noise of a camera's strength."""
    small = PIL.Image.fromarray(rng.integers(0, 256, (4, 5, 3), np.uint8))
    image = small.resize((width, height), PIL.Image.Resampling.BICUBIC)
    draw = PIL.ImageDraw.Draw(image)
    for _ in range(25):
        x, y = rng.integers(0, width), rng.integers(0, height)
        w, h = rng.integers(width // 60, width // 4, 2)
        colour = tuple(int(value) for value in rng.integers(0, 256, 3))
        shape = (draw.ellipse, draw.rectangle)[int(rng.integers(2))]
        shape((int(x), int(y), int(x + w), int(y + h)), fill=colour)
    image = image.filter(PIL.ImageFilter.GaussianBlur(0.7))
    noisy = np.asarray(image) + rng.normal(0, 4, (height, width, 3))
    return PIL.Image.fromarray(noisy.clip(0, 255).astype(np.uint8))


def write_files(folder: Path, count: int, width: int, height: int) -> list[str]:
    rng, paths = np.random.default_rng(0), [str(folder / f"{number}.jpg") for number in range(count)]
    for path in paths:
        picture(width, height, rng).save(path, quality=90)
    return paths


def own(processor: ImageProcessor) -> Read:
    """A processor of this package."""
    return lambda path: as_views(processor(processor.open(Image(path)), np.random.default_rng(0))).pixels[0]


def pillow_resize(image: PIL.Image.Image) -> Tensor:
    resized = image.resize((SIZE, SIZE), PIL.Image.Resampling.BICUBIC)
    return torch.from_numpy(np.array(resized)).permute(2, 0, 1).contiguous()


def pillow(resize: Callable[[PIL.Image.Image], Tensor], *, scaled: bool = False) -> Read:
    def read(path: str) -> Tensor:
        with PIL.Image.open(path) as image:
            if scaled:
                image.draft(None, (SIZE, SIZE))
            return resize(image.convert("RGB"))

    return read


def torchvision() -> Read:
    from torchvision.io import ImageReadMode, decode_jpeg, read_file

    return lambda path: torch_resize(decode_jpeg(read_file(path), mode=ImageReadMode.RGB))


def opencv(scaled: bool) -> Read:
    cv2: Any = importlib.import_module("cv2")
    cv2.setNumThreads(1)
    flags = cv2.IMREAD_REDUCED_COLOR_2 if scaled else cv2.IMREAD_COLOR

    def read(path: str) -> Tensor:
        pixels = cv2.imdecode(np.fromfile(path, np.uint8), flags)
        pixels = cv2.resize(pixels, (SIZE, SIZE), interpolation=cv2.INTER_AREA)  # the only one of its that antialiases
        return torch.from_numpy(cv2.cvtColor(pixels, cv2.COLOR_BGR2RGB)).permute(2, 0, 1).contiguous()

    return read


def simplejpeg(resize: Callable[[Any], Tensor], *, scaled: bool = False) -> Read:
    library: Any = importlib.import_module("simplejpeg")
    least = {"min_height": SIZE, "min_width": SIZE} if scaled else {}
    return lambda path: resize(library.decode_jpeg(Path(path).read_bytes(), "RGB", **least))


def torch_resize(image: Any) -> Tensor:
    pixels = image if isinstance(image, Tensor) else torch.from_numpy(np.array(image)).permute(2, 0, 1)
    return resized(pixels, SIZE, SIZE)


def readers() -> dict[str, Read]:
    """By name; libraries that are not installed are left out."""
    evaluation, training = ImageEvalConfig(image_size=SIZE), ImageTrainConfig(image_size=SIZE)
    makers: dict[str, Callable[[], Read]] = {
        "pillow": lambda: pillow(pillow_resize),
        "pillow, scaled": lambda: pillow(pillow_resize, scaled=True),
        "pillow + torch": lambda: pillow(torch_resize),
        "pillow, scaled + torch": lambda: pillow(torch_resize, scaled=True),
        "torchvision + torch": torchvision,
        "opencv": lambda: opencv(False),
        "opencv, scaled": lambda: opencv(True),
        "simplejpeg + torch": lambda: simplejpeg(torch_resize),
        "simplejpeg, scaled + torch": lambda: simplejpeg(torch_resize, scaled=True),
        "image_eval": lambda: own(ImageEval(evaluation)),
        "image_eval, scaled_decode": lambda: own(ImageEval(evaluation.model_copy(update={"scaled_decode": True}))),
        "image_train, no scaled_decode": lambda: own(
            ImageTrain(training.model_copy(update={"scaled_decode": False, "min_scale": MIN_SCALE}))
        ),
        "image_train": lambda: own(ImageTrain(training.model_copy(update={"min_scale": MIN_SCALE}))),
    }
    made = {}
    for name, make in makers.items():
        try:
            made[name] = make()
        except ModuleNotFoundError as error:
            print(f"{name}: left out, {error.name} is not installed")
    return made


def differences(read: Read, reference: Read, paths: list[str]) -> dict[str, float]:
    each = [(read(path).float() - reference(path).float()).abs().mean().item() for path in paths]
    return {"difference": round(statistics.mean(each), 2), "worst": round(max(each), 2)}


def measure(width: int, height: int, count: int, rounds: int) -> dict[str, Any]:
    """Images per second, median of rounds in which every library reads every file once, in turn."""
    with tempfile.TemporaryDirectory() as folder:
        paths, by_name = write_files(Path(folder), count, width, height), readers()
        seconds: dict[str, list[float]] = {name: [] for name in by_name}
        for _ in range(rounds + 1):  # the first warms up
            for name, read in by_name.items():
                start = time.perf_counter()
                for path in paths:
                    read(path)
                seconds[name].append(time.perf_counter() - start)
        rates = {name: [count / taken for taken in times[1:]] for name, times in seconds.items()}
        base = statistics.median(rates["pillow"])
        rows = {}
        for name, read in by_name.items():
            reference = by_name["image_train, no scaled_decode" if name.startswith("image_train") else "pillow"]
            rate = statistics.median(rates[name])
            rows[name] = {
                "images_per_s": round(rate, 1),
                "lowest_round": round(min(rates[name]), 1),
                "highest_round": round(max(rates[name]), 1),
                "times_pillow": round(rate / base, 2),
                **differences(read, reference, paths),
            }
        size = statistics.mean(Path(path).stat().st_size for path in paths)
    return {"width": width, "height": height, "mean_file_bytes": round(size), "libraries": rows}


def versions() -> dict[str, str]:
    names = ("pillow", "torch", "torchvision", "opencv-python-headless", "simplejpeg", "numpy")
    installed = {dist.metadata["Name"].lower(): dist.version for dist in importlib.metadata.distributions()}
    return {"python": platform.python_version(), **{name: installed[name] for name in names if name in installed}}


def main() -> None:
    warnings.simplefilter("ignore", DeprecationWarning)  # torchvision's decoders are deprecated: counted, not chosen
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=["640x480", "1600x1200"], help="sizes of the pictures")
    parser.add_argument("--count", type=int, default=64, help="files of each size")
    parser.add_argument("--rounds", type=int, default=7, help="passes over the files that are measured")
    parser.add_argument("--output", type=Path, help="JSON file to write besides printing")
    options = parser.parse_args()
    torch.set_num_threads(1)
    load = os.getloadavg()[0]
    sizes = [tuple(map(int, size.split("x"))) for size in options.sizes]
    result = {
        "result_size": SIZE,
        "files": options.count,
        "rounds": options.rounds,
        "load_before": round(load, 2),
        "versions": versions(),
        "sizes": [measure(width, height, options.count, options.rounds) for width, height in sizes],
    }
    text = json.dumps(result, indent=2)
    print(text)
    if options.output:
        options.output.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
