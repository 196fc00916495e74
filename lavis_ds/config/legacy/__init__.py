"""Keys of LAVIS and MiniGPT4Qwen (MPP-LLaVA) YAMLs in this package's words, with one notice for each.

Sources: https://github.com/salesforce/LAVIS (`lavis/runners`, `lavis/projects`) and https://github.com/Coobiw/MPP-LLaVA
(`lavis/models/minigpt4qwen_models`, `lavis/projects`). What is neither known here nor translated stays in the tree, so
that `decode` refuses it by name. A key of ours that stands beside its old name wins.
"""

from __future__ import annotations

import copy
from typing import Any

from lavis_ds.config.legacy.block import Block, Log
from lavis_ds.config.legacy.datasets import translate_dataset
from lavis_ds.config.legacy.model import translate_model
from lavis_ds.config.legacy.run import translate_run
from lavis_ds.errors import ConfigError


def translate(tree: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The tree in our words, and one line for each old key: what became of it.

    Raises:
        ConfigError: an old key asks for what there is not; every such key is listed.
    """
    tree, log = copy.deepcopy(tree), Log()
    for name in ("env", "preprocess"):
        if name in tree:
            del tree[name]
            log.notices.append(f"{name}: no longer used; paths and processors are those of datasets:.")
    if isinstance(tree.get("run"), dict):
        translate_run(Block("run", tree["run"], log))
    if isinstance(tree.get("model"), dict):
        translate_model(Block("model", tree["model"], log))
    if isinstance(tree.get("datasets"), dict):
        tree["datasets"] = {name: translate_dataset(name, entry, log) for name, entry in tree["datasets"].items()}
    if log.refusals:
        raise ConfigError("\n".join(log.refusals))
    return tree, log.notices
