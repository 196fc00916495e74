"""Every command: `lavis-ds X ...`, and `scripts/X.py ...` for launchers. Heavy imports wait until they are needed."""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import NoReturn

import lavis_ds
from lavis_ds.errors import ConfigError, LavisError

Command = Callable[[argparse.Namespace], int]

_LAST_WORDS_S = 2.0
"""How long the others stay for the rank that tells, since launchers end every rank soon after the first."""


class _Parser(argparse.ArgumentParser):
    """Argument errors look like every other error."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}.", where=f"{self.prog}", hint=f"See `{self.prog} --help`.")


def parser() -> argparse.ArgumentParser:
    """The command-line interface."""
    root = _Parser(prog="lavis-ds", description="Train vision-language models with DeepSpeed.")
    root.add_argument("--version", action="version", version=lavis_ds.__version__)
    commands = root.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=_Parser)

    train = _add(commands, "train", _train, "train a model; under deepspeed or torchrun use scripts/train.py")
    _add_config(train)
    train.add_argument(
        "--resume", metavar="auto|none|DIR", help="continue from the newest complete checkpoint, or from DIR"
    )
    train.add_argument(
        "--job-id", metavar="NAME", help="name of the run folder in run.output_dir; a time stamp if left out"
    )
    train.add_argument("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)  # launchers add it

    evaluate = _add(commands, "evaluate", _evaluate, "score a checkpoint on a split")
    _add_config(evaluate, required=False)
    evaluate.add_argument(
        "--checkpoint", metavar="DIR", required=True, help="checkpoint folder, or a run folder for its newest one"
    )
    evaluate.add_argument("--split", help="split to evaluate; run.test_splits if left out")
    evaluate.add_argument("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)

    generate = _add(commands, "generate", _generate, "ask a trained model about a picture")
    generate.add_argument(
        "--checkpoint", metavar="DIR", required=True, help="checkpoint folder, or a run folder for its newest one"
    )
    generate.add_argument("--prompt", required=True, help="what to ask")
    generate.add_argument(
        "--image", action="append", default=[], metavar="FILE", help="picture; may be given several times"
    )
    generate.add_argument("--max-new-tokens", type=int, default=64, help="longest answer, in tokens")
    generate.add_argument("--temperature", type=float, default=0.0, help="0 takes the most likely token each time")

    show = _add(
        commands, "show-config", _show_config, "print the resolved configuration, or every key with its meaning"
    )
    _add_config(show, required=False)
    show.add_argument("--help-keys", action="store_true", help="print every key with type, default and meaning")

    listing = _add(commands, "list", _list, "print the registered names")
    listing.add_argument(
        "kind", nargs="?", help="models, builders, tasks, processors, runners, lr_schedulers, ...; all if left out"
    )
    listing.add_argument(
        "--plugin", action="append", default=[], metavar="FILE", help="also list what this file or module registers"
    )

    _add_data(commands)

    _add_export(commands)

    report = _add(commands, "report", _report, "write one HTML page for a run, or several compared")
    report.add_argument("runs", nargs="+", metavar="RUN", help="run folder")
    report.add_argument(
        "--output",
        metavar="FILE",
        help="where to write it; report.html in the run folder, or comparison.html beside the first",
    )
    return root


def _add_export(commands: argparse._SubParsersAction[_Parser]) -> None:
    export = _add(commands, "export", _export, "write a checkpoint as a Hugging Face folder, and compare the two")
    export.add_argument(
        "--checkpoint",
        "--run",
        metavar="DIR",
        required=True,
        help="checkpoint folder, or a run folder for its newest one",
    )
    export.add_argument("--to", "--output", metavar="DIR", required=True, help="folder to make; nothing is overwritten")
    export.add_argument(
        "--dtype",
        choices=["auto", "float32", "bfloat16", "float16"],
        default="auto",
        help="type of the weights; auto, as in the checkpoint, if left out",
    )
    export.add_argument(
        "--adapter",
        choices=["merge", "keep"],
        default="merge",
        help="adapters: added to the weights, or kept as a PEFT adapter; merge if left out",
    )
    export.add_argument("--merge-lora", dest="adapter", action="store_const", const="merge", help="as --adapter merge")
    export.add_argument(
        "--dataset",
        metavar="NAME",
        help="entry of `datasets:` whose processors go along; the first with pictures if left out",
    )
    export.add_argument(
        "--skip-check",
        action="store_true",
        help="do not load the folder and compare logits, which needs memory for the whole model in float32",
    )


def _add_data(commands: argparse._SubParsersAction[_Parser]) -> None:
    data = commands.add_parser("data", help="look at data, count its tokens, build its indices, write shards")
    tools = data.add_subparsers(dest="tool", required=True, metavar="TOOL", parser_class=_Parser)

    inspect = _add(tools, "inspect", _data_inspect, "show samples as the model sees them")
    _add_config(inspect)
    inspect.add_argument("--split", help="split to look at; run.train_splits if left out")
    inspect.add_argument("--dataset", metavar="NAME", help="only samples of this entry of `datasets:`")
    inspect.add_argument(
        "--num", type=int, default=4, metavar="N", help="the first N samples of an epoch; 4 if left out"
    )
    inspect.add_argument(
        "--index", type=int, nargs="+", default=[], metavar="N", help="the samples with these numbers in their dataset"
    )
    inspect.add_argument(
        "--seed-epoch", type=int, default=0, metavar="E", help="epoch that decides order and augmentation; the first, 0"
    )
    inspect.add_argument("--html", metavar="FILE", help="write a page with pictures instead")

    stats = _add(tools, "stats", _data_stats, "count tokens and pictures, and compute padding and packing")
    _add_config(stats)
    stats.add_argument("--split", help="split to count; run.train_splits if left out")
    stats.add_argument(
        "--pack-lengths",
        type=int,
        nargs="+",
        default=[],
        metavar="T",
        help="tokens of a packed row; the run's, twice and four times that if left out",
    )
    _add_num_gpus(stats)
    stats.add_argument("--json", action="store_true", help="print JSON")

    index = _add(tools, "index", _data_index, "build every index and cache that a run would need")
    _add_config(index)
    index.add_argument(
        "--split", nargs="+", default=[], help="splits; all that the run trains and evaluates on if left out"
    )
    _add_num_processes(index)
    _add_num_gpus(index)

    shard = _add(tools, "shard", _data_shard, "write a split as webdataset shards; goes on where it was stopped")
    _add_config(shard)
    shard.add_argument("--split", default="train", help="split to write; train if left out")
    shard.add_argument("--to", metavar="DIR", required=True, help="folder of the shards")
    shard.add_argument("--dataset", metavar="NAME", help="only this entry of `datasets:`")
    shard.add_argument("--max-samples", type=int, default=10_000, metavar="N", help="most samples of a shard; 10000")
    shard.add_argument("--max-bytes", default="1GiB", metavar="SIZE", help="longest shard, such as 500MiB; 1GiB")
    _add_num_processes(shard)


def _add_num_gpus(command: argparse.ArgumentParser) -> None:
    command.add_argument("--num-gpus", type=int, default=1, metavar="N", help="ranks of the run; 1 if left out")


def _add_num_processes(command: argparse.ArgumentParser) -> None:
    command.add_argument("--num-processes", type=int, metavar="N", help="processes at work; one a CPU if left out")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command. Returns the exit code: 0 done, 2 the input is wrong, 75 stopped and resumable, 1 anything else."""
    debug = "--debug" in (sys.argv if arguments is None else arguments)
    try:
        parsed = parser().parse_args(arguments)
        command: Command = parsed.run
        return command(parsed)
    except LavisError as error:
        if debug:
            traceback.print_exc()
        elif _speaks(error):
            print(f"\n{_rank_prefix()}error: {error}\n", file=sys.stderr)
        elif _in_process_group():
            time.sleep(_LAST_WORDS_S)
        return error.exit_code


def script(command: str) -> NoReturn:
    """What `scripts/<command>.py` calls."""
    _exit(_guarded([command, *sys.argv[1:]]))


def entry_point() -> NoReturn:
    """What the installed `lavis-ds` calls."""
    _exit(_guarded(None))


def _guarded(arguments: Sequence[str] | None) -> int:
    """As `main`, with 1 for whatever nobody foresaw."""
    try:
        return main(arguments)
    except KeyboardInterrupt:
        return 130
    except Exception as error:  # noqa: BLE001  (the last line of defence: the process must end, whatever it was)
        if _in_process_group() and _is_loss_of_a_rank(error):
            line = str(error).strip().splitlines()[0]
            print(
                f"{_rank_prefix()}ended, since another rank did, whose error is the one to read ({line})",
                file=sys.stderr,
            )
        else:
            print(f"{_rank_prefix()}{traceback.format_exc()}", file=sys.stderr)
        return 1


def _is_loss_of_a_rank(error: Exception) -> bool:
    from lavis_ds.distributed import is_loss_of_a_rank

    return is_loss_of_a_rank(error)


def _exit(code: int) -> NoReturn:
    """Leave at once after a failure in a process group: waiting for ranks that wait for this one would hang."""
    sys.stdout.flush()
    sys.stderr.flush()
    if code not in (0, 75) and _in_process_group():
        os._exit(code)
    sys.exit(code)


def _in_process_group() -> bool:
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_available() and distributed.is_initialized()


def _speaks(error: LavisError) -> bool:
    """Before the ranks have met, all find the same mistake and one tells; afterwards each tells its own."""
    return (_in_process_group() and not error.is_of_all_ranks) or os.environ.get("RANK", "0") == "0"


def _rank_prefix() -> str:
    return f"[rank {os.environ['RANK']}] " if _in_process_group() and os.environ.get("WORLD_SIZE", "1") != "1" else ""


def _add(commands: argparse._SubParsersAction[_Parser], name: str, run: Command, text: str) -> argparse.ArgumentParser:
    command = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
    command.set_defaults(run=run)
    command.add_argument("--debug", action="store_true", help="print the traceback of an error")
    return command


def _add_config(command: argparse.ArgumentParser, *, required: bool = True) -> None:
    command.add_argument("--cfg", "--cfg-path", metavar="FILE", required=required, help="the project's YAML file")
    command.add_argument(
        "--options",
        "--cfg-options",
        nargs="*",
        action="extend",
        default=[],
        metavar="KEY=VALUE",
        help="overrides, such as run.init_lr=1e-4",
    )


def _train(arguments: argparse.Namespace) -> int:
    from lavis_ds.runners.launch import train

    return train(arguments.cfg, arguments.options, job_id=arguments.job_id, resume=arguments.resume)


def _evaluate(arguments: argparse.Namespace) -> int:
    from lavis_ds.runners.launch import evaluate

    return evaluate(arguments.checkpoint, arguments.cfg, arguments.options, split=arguments.split)


def _generate(arguments: argparse.Namespace) -> int:
    from lavis_ds.runners.generate import generate

    answer = generate(
        arguments.checkpoint,
        arguments.prompt,
        arguments.image,
        max_new_tokens=arguments.max_new_tokens,
        temperature=arguments.temperature,
    )
    print(answer)
    return 0


def _export(arguments: argparse.Namespace) -> int:
    from lavis_ds.runners.export.export import export

    return export(
        arguments.checkpoint,
        arguments.to,
        dtype=arguments.dtype,
        adapter=arguments.adapter,
        dataset=arguments.dataset,
        verify=not arguments.skip_check,
    )


def _show_config(arguments: argparse.Namespace) -> int:
    from lavis_ds.config import load, reference

    if arguments.help_keys:
        print(reference.text())
        return 0
    if arguments.cfg is None:
        raise ConfigError("--cfg FILE or --help-keys is needed.", where="lavis-ds show-config")
    loaded = load.load(arguments.cfg, arguments.options)
    for notice in loaded.notices:
        print(f"# {notice}")
    print(load.to_yaml(loaded.config), end="")
    return 0


def _list(arguments: argparse.Namespace) -> int:
    from pathlib import Path

    from lavis_ds import plugins, registry
    from lavis_ds.errors import did_you_mean

    plugins.load_all({"plugins": arguments.plugin}, Path.cwd())
    if arguments.kind is not None and arguments.kind not in registry.KINDS:
        hint = did_you_mean(arguments.kind, registry.KINDS)
        raise ConfigError(
            "there is no such kind of part.",
            where="lavis-ds list",
            given=arguments.kind,
            expected=f"one of {', '.join(registry.KINDS)}",
            hint=hint,
        )
    for kind, parts in registry.KINDS.items():
        if arguments.kind in (None, kind):
            if arguments.kind is None:
                print(f"{kind}:")
            for entry in parts:
                print(f"  {entry.name:<36} {entry.target}")
    return 0


def _data_inspect(arguments: argparse.Namespace) -> int:
    from lavis_ds.runners.data_tools.inspect import inspect

    return inspect(
        arguments.cfg,
        arguments.options,
        split=arguments.split,
        dataset=arguments.dataset,
        num=arguments.num,
        index=arguments.index,
        epoch=arguments.seed_epoch,
        html=arguments.html,
    )


def _data_stats(arguments: argparse.Namespace) -> int:
    from lavis_ds.runners.data_tools.stats import stats

    return stats(
        arguments.cfg,
        arguments.options,
        split=arguments.split,
        pack_lengths=arguments.pack_lengths,
        num_gpus=arguments.num_gpus,
        as_json=arguments.json,
    )


def _data_index(arguments: argparse.Namespace) -> int:
    from lavis_ds.runners.data_tools.index import index

    return index(
        arguments.cfg,
        arguments.options,
        splits=arguments.split,
        num_processes=arguments.num_processes,
        num_gpus=arguments.num_gpus,
    )


def _data_shard(arguments: argparse.Namespace) -> int:
    from lavis_ds.runners.data_tools.shard import shard

    return shard(
        arguments.cfg,
        arguments.options,
        split=arguments.split,
        dataset=arguments.dataset,
        folder=arguments.to,
        max_samples=arguments.max_samples,
        max_bytes=arguments.max_bytes,
        num_processes=arguments.num_processes,
    )


def _report(arguments: argparse.Namespace) -> int:
    from pathlib import Path

    from lavis_ds.runners.output import require_file
    from lavis_ds.runners.report import default_output, write_report

    runs = [Path(run) for run in arguments.runs]
    output = Path(arguments.output) if arguments.output else default_output(runs)
    if arguments.output or output.parent.is_dir():  # else there is no such run, as will be told
        require_file(output, "--output")
    print(write_report(runs, output))
    return 0
