from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from lavis_ds.batch import IGNORE_INDEX, SEGMENT_STRIDE, DatasetCounts, Sample, Unusable
from lavis_ds.data.collate import Collator
from lavis_ds.errors import DataError

PAD = 0
X = IGNORE_INDEX


def sample(
    length: int, targets: tuple[int, ...] = (), num_images: int = 0, image_index: tuple[int, ...] = (), **fields: Any
) -> Sample:
    """Ids 11, 12, ...; `targets` are positions; picture number n is all n + 1."""
    ids = torch.arange(11, 11 + length)
    labels = torch.full((length,), X)
    labels[list(targets)] = ids[list(targets)]
    images = torch.arange(1, num_images + 1, dtype=torch.uint8).view(-1, 1, 1, 1).expand(num_images, 3, 2, 2)
    given = {
        "id": f"s{length}",
        "input_ids": ids,
        "labels": labels,
        "position_ids": torch.arange(length),
        "images": images,
        "image_index": torch.tensor(image_index, dtype=torch.int64),
    }
    return Sample(**{**given, **fields})


def collator(**options: Any) -> Collator:
    fixed = {"image_shape": (3, 2, 2), "tokens_per_image": 2, "pad_to_multiple_of": 4, "datasets": ["d"]}
    settings: dict[str, Any] = {**fixed, **options}
    return Collator(PAD, **settings)


def test_right_padding() -> None:
    first = sample(5, targets=(3, 4), num_images=1, image_index=(1, 2), references={"answer": "a"})
    second = sample(3, targets=(2,))
    batch = collator()([[first], [second]])
    assert batch.shape == (2, 8)
    assert batch.input_ids.tolist() == [[11, 12, 13, 14, 15, PAD, PAD, PAD], [11, 12, 13, PAD, PAD, PAD, PAD, PAD]]
    assert batch.labels.tolist() == [[X, X, X, 14, 15, X, X, X], [X, X, 13, X, X, X, X, X]]
    assert batch.position_ids.tolist() == [list(range(8))] * 2
    assert batch.attention_mask.tolist() == [[True] * 5 + [False] * 3, [True] * 3 + [False] * 5]
    assert batch.image_index.tolist() == [1, 2]
    assert batch.images is not None
    assert batch.images.tolist() == first.images.tolist()
    assert batch.target_index.tolist() == [2, 3, 8 + 1]
    assert batch.segment_ids is None
    assert (batch.num_targets, batch.num_tokens, batch.num_samples) == (3, 8, 2)
    assert batch.num_pairs == (5 * 5 + 3 * 3) / 2
    assert batch.sample_ids == ("s5", "s3")
    assert batch.references == ({"answer": "a"}, None)
    assert batch.attention_mask.dtype == torch.bool
    assert batch.images.dtype == torch.uint8
    assert {
        t.dtype for t in (batch.input_ids, batch.labels, batch.position_ids, batch.image_index, batch.target_index)
    } == {torch.int64}


def test_every_target_index_points_at_the_token_before_a_target() -> None:
    batch = collator()([[sample(9, targets=(1, 2, 7))], [sample(6, targets=(5,))]])
    following = batch.labels.flatten()[batch.target_index + 1]
    assert following.tolist() == [12, 13, 18, 16]
    assert len(following) == batch.num_targets


def test_left_padding_ends_all_prompts_together() -> None:
    batch = collator(padding_side="left")([[sample(5)], [sample(3, num_images=1, image_index=(0, 1))]])
    assert batch.input_ids.tolist() == [[PAD] * 3 + [11, 12, 13, 14, 15], [PAD] * 5 + [11, 12, 13]]
    assert batch.position_ids.tolist() == [[0, 0, 0, 0, 1, 2, 3, 4], [0, 0, 0, 0, 0, 0, 1, 2]]
    expected = (batch.attention_mask.cumsum(1) - 1).clamp(min=0)
    assert torch.equal(batch.position_ids, expected)
    assert batch.image_index.tolist() == [8 + 5, 8 + 6]


def test_empty_rows_go_last_and_count_for_nothing() -> None:
    real = sample(5, targets=(4,), references={"answer": "a"})
    unusable = Unusable("b", None, "broken")
    batch = collator()([[], [real], []], [unusable])
    assert batch.shape[0] == 3
    assert batch.input_ids[0, :5].tolist() == [11, 12, 13, 14, 15]
    assert batch.attention_mask.sum(1).tolist() == [5, 1, 1]
    assert batch.target_index.tolist() == [3]
    assert (batch.num_targets, batch.num_tokens, batch.num_samples, batch.sample_ids) == (1, 5, 1, ("s5",))
    assert batch.references == ({"answer": "a"},)
    assert batch.unusable == (unusable,)


def test_a_batch_of_empty_rows_has_one_index_and_no_target() -> None:
    batch = collator(datasets=["a", "b"])([[], []])
    assert batch.target_index.tolist() == [0]
    assert batch.labels.flatten()[batch.target_index + 1].tolist() == [X]
    assert (batch.num_targets, batch.target_weight, batch.num_samples, batch.references) == (0, 0, 0, None)
    assert batch.target_dataset is not None
    assert batch.images is not None
    assert batch.images.shape == (1, 3, 2, 2)


class TestPackedRows:
    def test_samples_lie_one_behind_the_other_each_in_segments_of_its_own(self) -> None:
        plain = sample(3, targets=(2,), num_images=1, image_index=(0, 1), position=5)
        branched = sample(4, targets=(1, 3), segment_ids=torch.tensor([0, 1, 2, 2]), position=3)
        branched = replace(branched, position_ids=torch.tensor([0, 1, 1, 2]))
        second = sample(2, num_images=1, image_index=(0, 1))
        batch = collator()([[plain, branched], [second]])
        assert batch.input_ids.tolist() == [[11, 12, 13, 11, 12, 13, 14, PAD], [11, 12] + [PAD] * 6]
        d = SEGMENT_STRIDE
        assert batch.segment_ids is not None
        assert batch.segment_ids.tolist() == [[0, 0, 0, d, d + 1, d + 2, d + 2, -1], [0, 0] + [-1] * 6]
        assert batch.position_ids[0].tolist() == [0, 1, 2, 0, 1, 1, 2, 3]
        assert batch.target_index.tolist() == [1, 3, 5]
        assert batch.image_index.tolist() == [0, 1, 8, 9]
        assert batch.images is not None
        assert len(batch.images) == 2
        assert (batch.sample_ids, batch.positions, batch.num_tokens) == (("s3", "s4", "s2"), (5, 3, 0), 9)

    def test_no_token_learns_to_predict_the_next_sample(self) -> None:
        batch = collator()([[sample(3, targets=(1, 2)), sample(3, targets=(1, 2))]])
        assert batch.target_index.tolist() == [0, 1, 3, 4]

    def test_weights_and_datasets_follow_their_targets(self) -> None:
        weighted = sample(3, targets=(1, 2), target_weights=torch.tensor([1.0, 0.5, 0.25]), dataset=1)
        batch = collator(datasets=["a", "b", "c"])([[sample(2, targets=(1,)), weighted], [sample(3, targets=(2,))]])
        assert batch.target_weights is not None
        assert batch.target_weights.tolist() == [1, 0.5, 0.25, 1]
        assert batch.target_dataset is not None
        assert batch.target_dataset.tolist() == [0, 1, 1, 0]
        assert (batch.num_targets, batch.target_weight) == (4, 2.75)
        assert batch.by_dataset == (
            DatasetCounts("a", 2, 5, 2.0), DatasetCounts("b", 1, 3, 0.75), DatasetCounts("c"),
        )  # fmt: skip

    def test_without_weights_and_with_one_dataset_there_is_nothing_to_carry(self) -> None:
        batch = collator()([[sample(3, targets=(1, 2)), sample(3, targets=(1,))]])
        assert (batch.target_weights, batch.target_dataset, batch.target_weight) == (None, None, 3.0)
        assert batch.by_dataset == (DatasetCounts("d", 2, 6, 3.0),)


def test_a_batch_without_pictures_has_one_blank_that_fills_nothing() -> None:
    text = [[sample(3, images=torch.empty((0, 3, 0, 0), dtype=torch.uint8))]]
    batch = collator()(text)
    assert batch.images is not None
    assert batch.images.shape == (1, 3, 2, 2)
    assert not batch.images.any()
    assert batch.image_index.shape == (0,)
    assert collator(image_shape=None, tokens_per_image=0)(text).images is None


def test_pictures_follow_the_rows_in_order() -> None:
    rows = [
        [sample(5, num_images=2, image_index=(0, 1, 2, 3))],
        [sample(3)],
        [sample(4, num_images=1, image_index=(1, 2))],
    ]
    batch = collator()(rows)
    assert batch.images is not None
    assert batch.images[:, 0, 0, 0].tolist() == [1, 2, 1]
    assert batch.image_index.tolist() == [0, 1, 2, 3, 17, 18]


def test_segments_of_mixed_rows() -> None:
    packed = sample(5, segment_ids=torch.tensor([0, 1, 1, 2, 2]), position_ids=torch.tensor([0, 1, 2, 1, 2]))
    batch = collator()([[packed], [sample(3)]])
    assert batch.segment_ids is not None
    assert batch.segment_ids.tolist() == [[0, 1, 1, 2, 2, -1, -1, -1], [0, 0, 0, -1, -1, -1, -1, -1]]
    assert batch.position_ids[0].tolist() == [0, 1, 2, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("bad", "options", "message"),
    [
        (sample(5, num_images=1, image_index=(1,)), {}, "1 places, 1 picture(s). Expected: 2 places (2 a picture)"),
        (sample(5, num_images=0, image_index=(1, 2)), {}, "2 places, 0 picture(s)"),
        (sample(5, num_images=1, image_index=(1, 2)), {"image_shape": (3, 4, 4)}, "another size"),
        (sample(5, num_images=1, image_index=(1, 2)), {"image_shape": None}, "no vision part"),
        (sample(5, targets=(0,)), {}, "first token is a target"),
    ],
)
def test_what_does_not_fit_names_the_sample(bad: Sample, options: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError) as caught:
        collator(**options).checked(replace(bad, id="the-bad-one"))
    assert str(caught.value).startswith("the-bad-one: ")
    assert message in str(caught.value)
