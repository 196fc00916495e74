"""A signal asks for a stop, and only while the loop runs."""

from __future__ import annotations

import contextlib
import os
import signal

import pytest

from lavis_ds.runners.stop import SIGNALS, StopRequest


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_signal_sets_the_flag_and_kills_nothing(number: signal.Signals) -> None:
    with StopRequest() as stop:
        assert not stop.requested
        os.kill(os.getpid(), number)
        assert stop.requested
        os.kill(os.getpid(), number)  # asking again changes nothing
        assert stop.requested


def test_handlers_come_back_even_after_an_error() -> None:
    def mine(number: int, frame: object) -> None:
        raise AssertionError("not ours to handle")

    before = {number: signal.signal(number, mine) for number in SIGNALS}
    try:
        with contextlib.suppress(ValueError), StopRequest():
            assert all(signal.getsignal(number) is not mine for number in SIGNALS)
            raise ValueError
        assert all(signal.getsignal(number) is mine for number in SIGNALS)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_ctrl_c_is_left_alone() -> None:
    before = signal.getsignal(signal.SIGINT)
    with StopRequest():
        assert signal.getsignal(signal.SIGINT) is before
