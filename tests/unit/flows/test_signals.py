"""The first signal stops a run in good order, the second at once."""

from __future__ import annotations

import signal

import pytest

from flows.signals import SIGNALS, StopOnSignal


class Run:
    def __init__(self) -> None:
        self.reasons: list[str] = []

    def stop(self, reason: str) -> None:
        self.reasons.append(reason)


@pytest.mark.parametrize("number", SIGNALS)
def test_first_signal_stops_and_second_interrupts(number: signal.Signals) -> None:
    run = Run()
    with StopOnSignal() as signals:
        signals.attach(run)
        signal.raise_signal(number)
        assert run.reasons == [number.name]
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
    assert run.reasons == [number.name]


def test_signal_before_the_run_interrupts() -> None:
    with StopOnSignal(), pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGTERM)


def test_handlers_are_put_back() -> None:
    before = [signal.getsignal(number) for number in SIGNALS]
    with StopOnSignal():
        assert [signal.getsignal(number) for number in SIGNALS] != before
    assert [signal.getsignal(number) for number in SIGNALS] == before
