"""The text of an error: where, what, given, expected, next step; and the nearest names."""

from __future__ import annotations

import pytest

from lavis_ds import errors
from lavis_ds.errors import ConfigError, LavisError, closest, did_you_mean


def test_full_text() -> None:
    error = LavisError("it is wrong.", where="run.seed", given=3, expected="less than 2", hint="Use 1.")
    assert str(error) == "run.seed: it is wrong. Given: 3. Expected: less than 2. Use 1."
    assert (error.where, error.given) == ("run.seed", 3)


def test_what_is_not_said_leaves_no_trace() -> None:
    assert str(LavisError("it is wrong.")) == "it is wrong."


@pytest.mark.parametrize("given", [0, False, "", []])
def test_a_falsy_value_is_shown_too(given: object) -> None:
    assert f"Given: {given}." in str(LavisError("it is wrong.", given=given))


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("ConfigError", 2),
        ("RegistryError", 2),
        ("DataError", 2),
        ("CheckpointError", 2),
        ("NonFiniteError", 1),
        ("LavisError", 1),
    ],
)
def test_exit_codes(name: str, code: int) -> None:
    cls = getattr(errors, name)
    assert issubclass(cls, LavisError)
    assert cls.exit_code == code


def test_a_registry_error_is_a_configuration_error() -> None:
    assert issubclass(errors.RegistryError, ConfigError)


def test_closest_is_best_first_and_ignores_case() -> None:
    assert closest("Max_Stepz", ["max_epoch", "seed", "max_steps"])[0] == "max_steps"
    assert closest("resnet", ["ResNet"]) == ["ResNet"]
    assert len(closest("aaaa", ["aaab", "aaac", "aaad", "aaae"])) == 3


def test_did_you_mean() -> None:
    assert did_you_mean("sed", ["seed", "task"]) == "Did you mean 'seed'?"
    assert did_you_mean("zzz", ["seed", "task"]) == ""
