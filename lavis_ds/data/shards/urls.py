"""What a user writes for shards (paths, globs, brace patterns, URLs, `pipe:` commands) -> one URL a shard."""

from __future__ import annotations

import glob
import os
import re
from collections import Counter
from collections.abc import Sequence
from urllib.parse import urlsplit

from braceexpand import UnbalancedBracesError, braceexpand  # type: ignore[attr-defined]

from lavis_ds.data.shards.fsspec_source import filesystem
from lavis_ds.errors import ConfigError, did_you_mean

SIDECAR_SUFFIX = ".index.npz"
"""Name of the index that may lie beside a shard: `000000.tar.index.npz`."""

PIPE = "pipe:"

_REMOTE = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*::?//|[a-z0-9]+::")
_SHOWN = 5


def is_pipe(url: str) -> bool:
    """Whether `url` is a command whose output is a shard: it can be read from front to back only."""
    return url.startswith(PIPE)


def is_http(url: str) -> bool:
    return url.startswith(("http://", "https://"))


def is_local(url: str) -> bool:
    """Whether `url` is a path on this machine."""
    return not is_pipe(url) and _REMOTE.match(url) is None


def absolute(url: str) -> str:
    """`url`, with a local path made absolute and `file://` taken off."""
    url = url.removeprefix("file://")
    return os.path.abspath(os.path.expanduser(url)) if is_local(url) else url


def expand(patterns: str | Sequence[str], where: str | None = None) -> list[str]:
    """The shards that `patterns` name, in the order given; those of a glob sorted by name.

    Args:
        patterns: local paths, URLs and `pipe:` commands, with braces (`{000..012}`, `{a,b}`) and, but for HTTP and
            pipes, globs (`*`, `?`, `[0-9]`).
        where: configuration key or option, for messages.

    Raises:
        ConfigError: nothing is given, a pattern names nothing that exists, or two name the same shard.
    """
    patterns = [patterns] if isinstance(patterns, str) else patterns
    urls = [url for pattern in patterns for one in _braces(pattern, where) for url in _globbed(absolute(one), where)]
    if not urls:
        raise ConfigError("no shards are named.", where=where, expected="at least one path, pattern or URL")
    url, count = Counter(urls).most_common(1)[0]
    if count > 1:
        raise ConfigError("a shard is named twice.", where=where, given=url, expected="patterns that do not overlap")
    return urls


def shard_names(urls: Sequence[str]) -> list[str]:
    """A short name for each shard, unique among them: the file's without `.tar`, else the path below what all share."""
    paths = [_path(url) for url in urls]
    names = [os.path.basename(path) for path in paths]
    if _repeats(names):
        folders = [os.path.dirname(path) + "/" for path in paths]
        shared = os.path.commonprefix(folders).rpartition("/")[0]  # noqa: RUF071 (commonpath refuses mixed addresses)
        names = [path[len(shared) :].lstrip("/") for path in paths]
    if _repeats(names):
        names = [f"{number}-{name}" for number, name in enumerate(names)]
    return [name.removesuffix(".tar") for name in names]


def sidecar(url: str) -> str:
    """Where the index that travels with a shard lies."""
    if not is_http(url):
        return url + SIDECAR_SUFFIX
    parts = urlsplit(url)
    return parts._replace(path=parts.path + SIDECAR_SUFFIX).geturl()


def _path(url: str) -> str:
    return urlsplit(url).path if is_http(url) else url


def _repeats(names: Sequence[str]) -> bool:
    return len(set(names)) < len(names)


def _braces(pattern: str, where: str | None) -> list[str]:
    try:
        return list(braceexpand(pattern, escape=False))
    except UnbalancedBracesError as error:
        raise ConfigError(f"the braces do not match ({error}).", where=where, given=pattern) from None


def _globbed(url: str, where: str | None) -> list[str]:
    if is_pipe(url):
        return [url]
    if is_http(url):
        if "*" in url:
            raise ConfigError(
                "a web server can't be asked what a pattern matches.",
                where=where,
                given=url,
                expected="braces, such as {000..012}",
            )
        return [url]
    if is_local(url):
        return _local(url, where)
    if not glob.has_magic(url):
        return [url]
    fs, path = filesystem(url)
    found = sorted(fs.unstrip_protocol(match) for match in fs.glob(path) if not match.endswith(SIDECAR_SUFFIX))
    if not found:
        raise ConfigError("the pattern matches no shard.", where=where, given=url)
    return found


def _local(path: str, where: str | None) -> list[str]:
    if os.path.isfile(path):
        return [path]
    found = sorted(glob.glob(path, recursive=True)) if glob.has_magic(path) else []
    shards = [match for match in found if os.path.isfile(match) and not match.endswith(SIDECAR_SUFFIX)]
    if not shards:
        raise ConfigError(
            "the pattern matches no shard." if glob.has_magic(path) else "there is no such shard.",
            where=where,
            given=path,
            hint=_what_is_there(path),
        )
    return shards


def _what_is_there(path: str) -> str:
    """The nearest folder that exists, and what it holds that resembles `path`."""
    below, folder = os.path.basename(path), os.path.dirname(path)
    while not os.path.isdir(folder):
        below, folder = os.path.basename(folder), os.path.dirname(folder)
    entries = sorted(entry for entry in os.listdir(folder) if not entry.startswith("."))
    if not entries:
        return f"{folder} is empty."
    shown = ", ".join(entries[:_SHOWN]) + (f" and {len(entries) - _SHOWN} more" if len(entries) > _SHOWN else "")
    return f"{did_you_mean(below, entries)} {folder} holds {shown}.".strip()
