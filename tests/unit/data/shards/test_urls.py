from __future__ import annotations

import pytest

from lavis_ds.data.shards.urls import absolute, expand, is_local, shard_names, sidecar
from lavis_ds.errors import ConfigError


def test_paths_globs_braces_and_urls(write_tar, tmp_path) -> None:
    paths = [write_tar(f"shards/{n:03d}.tar", {"a.txt": b""}) for n in range(3)]
    (tmp_path / "shards/000.tar.index.npz").touch()
    assert expand(str(tmp_path / "shards/{000..002}.tar")) == paths
    assert expand([str(tmp_path / "shards/*"), "https://x/{0..1}.tar?k=1", "s3://b/c.tar"]) == [
        *paths,
        "https://x/0.tar?k=1",
        "https://x/1.tar?k=1",
        "s3://b/c.tar",
    ]
    assert expand(["shards/00[12].tar", "shards/{000}.tar".replace("{000}", "000")]) == [*paths[1:], paths[0]]
    assert expand("pipe:curl http://x/{7..8}.tar") == ["pipe:curl http://x/7.tar", "pipe:curl http://x/8.tar"]


def test_globs_of_fsspec() -> None:
    import fsspec

    fs = fsspec.filesystem("memory")
    for name in ("b", "a"):
        fs.pipe(f"/urls/{name}.tar", b"x")
    assert expand("memory://urls/*.tar") == ["memory:///urls/a.tar", "memory:///urls/b.tar"]
    with pytest.raises(ConfigError, match="matches no shard"):
        expand("memory://urls/*.zip")


def test_what_is_not_there_is_named_with_what_is(write_tar, tmp_path) -> None:
    write_tar("shards/train-000.tar", {"a.txt": b""})
    folder = tmp_path / "shards"
    with pytest.raises(
        ConfigError, match=rf"datasets\.x: there is no such shard.*'train-000\.tar'.*{folder} holds train"
    ):
        expand(str(folder / "train-00.tar"), "datasets.x")
    with pytest.raises(ConfigError, match=r"matches no shard.*Did you mean 'shards'\?"):
        expand(str(tmp_path / "shard/*.tar"))
    with pytest.raises(ConfigError, match="braces"):
        expand("{a.tar")
    with pytest.raises(ConfigError, match="web server"):
        expand("http://x/*.tar")
    with pytest.raises(ConfigError, match="named twice"):
        expand([str(folder / "*"), str(folder / "train-000.tar")])
    with pytest.raises(ConfigError, match="no shards are named"):
        expand([])
    with pytest.raises(ConfigError, match="the address can't be opened"):
        expand("nosuch://b/*.tar")


def test_what_is_local() -> None:
    assert absolute("file:///a/b.tar") == "/a/b.tar"
    assert absolute("a.tar").endswith("/a.tar")
    for url in ("http://x", "s3://b/c", "hf://datasets/x", "simplecache::s3://b", "pipe:cat x"):
        assert not is_local(url)
        assert absolute(url) == url
    assert is_local("a:b/c.tar")


def test_names_are_short_and_unique() -> None:
    assert shard_names(["/a/000.tar", "https://x/001.tar?k=1"]) == ["000", "001"]
    assert shard_names(["/d/a/000.tar", "/d/b/000.tar"]) == ["a/000", "b/000"]
    assert len(set(shard_names(["https://x/0.tar?k=1", "https://x/0.tar?k=2"]))) == 2
    assert sidecar("https://x/0.tar?k=1") == "https://x/0.tar.index.npz?k=1"
    assert sidecar("/a/0.tar") == "/a/0.tar.index.npz"
