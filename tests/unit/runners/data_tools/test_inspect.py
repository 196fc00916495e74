"""What `lavis-ds data inspect` shows is what training gets."""

from __future__ import annotations

import base64
import html
import io
import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console

from lavis_ds.batch import IGNORE_INDEX
from lavis_ds.data.order import SampleKey
from lavis_ds.runners.data_tools.encoded import Encoded
from lavis_ds.runners.data_tools.samples import look
from lavis_ds.runners.data_tools.terminal import show
from tests.tiny_project import metrics
from tests.unit.runners.data_tools.conftest import Command
from tests.unit.runners.test_data_modes import train

MakeEncoded = Callable[..., Encoded]
URI = re.compile(r'src="data:image/(\w+);base64,([^"]+)"')


def ids(printed: str) -> list[str]:
    return re.findall(r"^(\S+)  sample \d+ of its dataset$", printed, re.M)


class TestChosenSamples:
    def test_they_are_the_first_of_the_run(self, project: Path, command: Command) -> None:
        assert train(project, "first", "run.stop_at_step=2") == 75
        seen = [i for line in metrics(project.parent / "output/first") for i in line["data/sample_ids"]]
        assert ids(command("inspect", "--cfg", project, "--num", 8)) == seen

    def test_another_epoch_has_another_order_and_augmentation(self, project: Path, command: Command) -> None:
        first, other = (ids(command("inspect", "--cfg", project, "--num", 99, "--seed-epoch", e)) for e in (0, 1))
        assert first != other
        assert sorted(first) == sorted(other)

    def test_by_number(self, project: Path, command: Command) -> None:
        printed = command("inspect", "--cfg", project, "--dataset", "words", "--index", 3, 0)
        assert ids(printed) == ["words/train/3:w3", "words/train/0:w0"]

    def test_a_split_that_is_evaluated_in_its_own_order_with_its_own_processors(
        self, project: Path, command: Command, encoded: MakeEncoded
    ) -> None:
        printed = command("inspect", "--cfg", project, "--split", "val", "--num", 9)
        assert ids(printed) == [f"tiny/val/{k}:s{k}" for k in range(5)]
        processors = [
            type(encoded(project, split=split).data.sources[0].image_processor).__name__ for split in ("val", "train")
        ]
        assert processors == ["ImageEval", "ImageTrain"]

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--dataset", "wrods"], "Did you mean 'words'?"),
            (["--index", "1"], "Add --dataset tiny."),
            (["--index", "9", "--dataset", "words"], "Expected: 0 to 8."),
            (["--dataset", "words", "--split", "val"], "has no split 'val'"),
            (["--split", "tset"], "no dataset has a split 'tset'"),
            (["--num", "0"], "start at 1"),
        ],
    )
    def test_what_there_is_not(self, project: Path, arguments: list[str], message: str, command: Command) -> None:
        assert message in command("inspect", "--cfg", project, *arguments, code=2)

    def test_only_the_dataset_asked_for_is_read(self, project: Path, command: Command) -> None:
        absent = "datasets.words.annotations.train=/absent.json"
        assert "absent.json" in command("inspect", "--cfg", project, "--options", absent, code=2)
        assert command("inspect", "--cfg", project, "--dataset", "tiny", "--options", absent)


class TestLook:
    def test_it_is_the_sample_of_training_taken_apart(self, project: Path, encoded: MakeEncoded) -> None:
        made = encoded(project)
        for index in range(22):
            key = SampleKey(0, index, 1, 0)
            found, sample = look(made, key), made.data[key]
            assert found.sample is not None
            assert found.id == sample.id
            trained = torch.zeros_like(sample.input_ids, dtype=torch.bool)
            for stretch in found.stretches:
                places = slice(stretch.start, stretch.start + stretch.num_tokens)
                trained[places] = stretch.weight > 0
                own = [i for piece in stretch.pieces for i in piece.ids]
                assert own == (sample.input_ids[places].tolist() if stretch.picture is None else [])
            assert torch.equal(trained, sample.labels != IGNORE_INDEX)
            views = [picture.views for picture in found.pictures]
            assert torch.equal(torch.cat(views) if views else sample.images, sample.images)
            folded = [stretch.num_tokens for stretch in found.stretches if stretch.picture is not None]
            assert folded == [4] * len(views)

    def test_the_number_of_the_dataset_stays_that_of_the_run(self, project: Path, encoded: MakeEncoded) -> None:
        """Else another augmentation would be shown."""
        assert [s.name for s in encoded(project, dataset="words").data.sources] == ["tiny", "words"]
        assert encoded(project, dataset="words").data.sizes == (0, 9)

    def test_pictures_of_turns_left_out(self, project: Path, encoded: MakeEncoded, tmp_path: Path) -> None:
        turns = [{"role": r, "content": c} for r, c in [("user", "what"), ("assistant", "no")]]
        picture = {"type": "image", "image": str(project.parent / "images/0_0.png")}
        turns += [{"role": "user", "content": [picture]}, {"role": "assistant", "content": "red"}]
        (tmp_path / "a.jsonl").write_text(json.dumps({"messages": turns}))
        entry = "{builder: messages, annotations: {train: %s}, vis_processor: {name: image_eval, image_size: 32}}"
        made = encoded(
            project, f"datasets.long={entry % (tmp_path / 'a.jsonl')}", "model.max_txt_len=30", dataset="long"
        )
        found = look(made, SampleKey(2, 0, 0, 0))
        assert found.sample is not None
        assert found.sample.num_dropped_turns == 2
        assert [len(picture.views) for picture in found.pictures] == [0]


class TestTerminal:
    def test_trained_tokens_stand_in_brackets(self, project: Path, command: Command) -> None:
        item = json.loads((project.parent / "train.json").read_text())[3]
        printed = command("inspect", "--cfg", project, "--dataset", "tiny", "--index", 3)
        text = printed.split("\n\n", 2)[2].rstrip("\n")
        (question, answer) = (turn["value"] for turn in item["conversations"])
        question = question.replace("<image>", "{}").format("<picture 1: 4 tokens>", "<picture 2: 4 tokens>")
        assert text == f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n⟦{answer}<|im_end|>⟧"
        assert printed.count("40 x 40 -> 1 view of 32 x 32") == 2
        assert "pictures 2" in printed

    def test_trained_tokens_are_coloured_where_there_is_colour(self, project: Path, encoded: MakeEncoded) -> None:
        found = look(encoded(project), SampleKey(1, 0, 0, 0))
        colour, plain = io.StringIO(), io.StringIO()
        show([found], Console(file=colour, force_terminal=True, color_system="standard"))
        show([found], Console(file=plain, force_terminal=True, color_system="standard", no_color=True))
        assert "⟦" not in colour.getvalue()
        assert "\x1b[1;32m" in colour.getvalue()
        assert "⟦" in plain.getvalue()

    def test_weights_views_frames_and_what_is_wrong(self, talk: Path, command: Command) -> None:
        printed = command("inspect", "--cfg", talk, "--index", 0, 1, 2, 3)
        weighted, clip, absent, long = printed.split("\ntalk/train/")[1:]
        assert "weights of targets 0.5, 1, pictures 1, views 3" in weighted
        assert "80 x 40 -> 3 views of 32 x 32" in weighted
        assert "⟦0.5x red 红<|im_end|>⟧" in weighted
        assert "what␛[31m <b>is</b> <|im_end|> [this]<|im_end|>" in weighted
        assert "⟦a é 😀<|im_end|>⟧" in weighted
        assert "<picture 1: 4 tokens><picture 2: 4 tokens>what" in clip
        assert clip.count("32 x 24 -> 1 view") == 2
        assert f"{talk.parent}/clip/1.png" in clip
        assert "can't be used: talk/train/2" in absent
        assert "no such image file" in absent
        assert f"user: <image {talk.parent}/absent.png>what\nassistant: no" in absent
        assert "is too long" in long
        assert "Expected: at most 256" in long

    def test_segments_of_independent_questions(self, project: Path, command: Command) -> None:
        processor = "datasets.tiny.text_processor={name: chat, turns: independent}"
        printed = command("inspect", "--cfg", project, "--dataset", "tiny", "--index", 8, "--options", processor)
        assert "segments 4" in printed  # the prefix and three questions
        assert re.findall(r"<segment \d>", printed) == ["<segment 1>", "<segment 2>", "<segment 3>"]


class TestSheet:
    def test_it_holds_what_the_model_sees(
        self, project: Path, command: Command, encoded: MakeEncoded, tmp_path: Path
    ) -> None:
        path = tmp_path / "new" / "sheet.html"
        printed = command("inspect", "--cfg", project, "--dataset", "tiny", "--index", 3, "--html", path)
        assert printed == f"{path}\n"
        pictures = [
            np.asarray(Image.open(io.BytesIO(base64.b64decode(data)))) for kind, data in URI.findall(path.read_text())
        ]
        originals = [np.asarray(Image.open(project.parent / "images" / f"3_{k}.png")) for k in range(2)]
        seen = encoded(project).data[SampleKey(0, 3, 0, 0)].images.permute(0, 2, 3, 1).numpy()
        for shown, expected in zip(pictures, [originals[0], seen[0], originals[1], seen[1]], strict=True):
            assert np.array_equal(shown, expected)  # small pictures are embedded without loss

    def test_texts_are_escaped_and_nothing_is_loaded(self, talk: Path, command: Command, tmp_path: Path) -> None:
        command("inspect", "--cfg", talk, "--index", 0, 1, 2, 3, "--html", tmp_path / "s.html")
        page = (tmp_path / "s.html").read_text()
        assert "<script" not in page
        assert "\x1b" not in page
        assert not re.search(r'(src|href)="(?!data:image)', page)
        for token in ("<|im_end|>", "红"):
            assert html.escape(token) in page
        trained = re.findall(r'<b class="trained".*?</b>', page, re.S)
        texts = [html.unescape(re.sub(r"<sup>.*?</sup>|<[^>]+>", "", stretch)) for stretch in trained]
        assert texts == ["red 红<|im_end|>", "a é 😀<|im_end|>", "over<|im_end|>"]
        assert "<sup>0.5x</sup>" in trained[0]
        assert "weight 0.5" in trained[0]
        assert page.count("Can&#39;t be used") + page.count("Can't be used") == 2


def test_the_start_of_a_stream(project: Path, command: Command, tmp_path: Path) -> None:
    shards = tmp_path / "shards"
    command("shard", "--cfg", project, "--dataset", "words", "--to", shards)
    annotations = f"format: messages, annotations: {{train: {shards}/*.tar}}"
    entry = f"datasets.stream={{builder: webdataset, {annotations}, stream: true}}"
    command_line = ["inspect", "--cfg", project, "--dataset", "stream", "--num", 9, "--options", entry]
    assert len(set(ids(command(*command_line)))) == 9
    assert "from its start only" in command(*command_line, "--seed-epoch", 1, code=2)
    assert "neither length nor index" in command("stats", "--cfg", project, "--options", entry, code=2)
