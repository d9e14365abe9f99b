"""Seconds of work beside the engine: each instant counts once, under the inner name."""

from __future__ import annotations

from contextlib import suppress

from flows.busy import BusyTimes, Meter, Work


class Clock:
    """Seconds that pass only when told."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_inner_work_interrupts_outer_work() -> None:
    clock, cpu = Clock(), Clock()
    meter = Meter("collector", clock=clock, cpu_clock=cpu)

    def work(elapsed_s: float, cpu_s: float) -> None:
        clock.now_s += elapsed_s
        cpu.now_s += cpu_s

    work(1000, 1000)  # of nobody
    for _ in range(2):
        with meter("writing"):
            work(1, 0.5)
            with suppress(ValueError), meter("catalogue"):
                work(10, 8)
                raise ValueError("it counts all the same")
            work(2, 1)
        work(1000, 1000)
    assert list(meter.works()) == [
        Work("collector", "writing", 3.0, 6.0), Work("collector", "catalogue", 16.0, 20.0),
    ]  # fmt: skip


def test_the_line_of_a_run_has_no_hole_but_its_steps() -> None:
    clock = Clock()
    busy = BusyTimes(clock=clock, began_s=98.0)
    busy.mark("imports")
    clock.now_s += 5
    busy.mark("loading the model")
    clock.now_s += 5
    busy.mark("first rows", at_s=107.0)
    clock.now_s += 20
    busy.skip_to(125.0)
    busy.mark("finishing")
    found = {work.work: work.elapsed_s for work in busy.works() if work.thread == "main"}
    assert found == {
        "imports": 2.0, "loading the model": 5.0, "first rows": 2.0, "finishing": 5.0
    }  # fmt: skip
    (process,) = [work for work in busy.works() if work.thread == "process"]
    assert process.elapsed_s == 32.0 and process.cpu_s is not None and process.cpu_s >= 0


def test_all_meters_of_a_run_are_read_together() -> None:
    busy = BusyTimes(clock=Clock())
    with busy.meter("feeder")("reading"), busy.meter("collector")("telemetry"):
        pass
    assert [(w.thread, w.work) for w in busy.works()][:2] == [
        ("feeder", "reading"), ("collector", "telemetry"),
    ]  # fmt: skip
