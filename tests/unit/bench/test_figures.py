"""Medians, ratios and checks of the throughput benchmark, from runs made up."""

from __future__ import annotations

from typing import Any

import pytest

from tests.bench.figures import Line, Run, checks_of, lines_of
from tests.bench.floor import Floor

FLOOR = Floor(flops=0.0, kv_read_bytes=0.0, matrix_s=1.5, memory_s=0.5)
MIB = 1 << 20


def run(side: str, elapsed_s: float, **changes: Any) -> Run:
    engine, _, dtype = side.partition(":")
    values: dict[str, Any] = {
        "workload": "mixed",
        "side": side,
        "engine": engine,
        "dtype": dtype or "bfloat16",
        "round": 0,
        "num_rows": 10,
        "num_prompt_tokens": 300,
        "num_output_tokens": 100,
        "elapsed_s": elapsed_s,
        "ready_s": 1.0,
        "first_token_s": 1.5,
        "job_s": elapsed_s + 1.0,
        "peak_bytes": 100 * MIB,
    }
    return Run(**{**values, **changes})


def lines(*runs: Run) -> dict[tuple[str, str], Line]:
    floors = {made.workload: FLOOR for made in runs}
    return {(line.workload, line.side): line for line in lines_of(runs, floors)}


def checked(*runs: Run, dtype: str = "bfloat16") -> dict[str, tuple[float, bool]]:
    found = checks_of(list(lines(*runs).values()), dtype)
    return {check.name: (check.value, check.holds) for check in found}


def test_a_line_is_the_median_of_its_runs() -> None:
    line = lines(run("headrace", 4.0), run("headrace", 9.0), run("headrace", 5.0))[
        "mixed", "headrace"
    ]
    assert (line.num_runs, line.elapsed_s, line.job_s) == (3, 5.0, 6.0)
    assert (line.rows_per_s, line.output_tokens_per_s, line.total_tokens_per_s) == (2, 20, 80)
    assert line.multiple_of_floor == 2.5


def test_ratios_are_ours_over_the_peer() -> None:
    found = lines(run("headrace", 4.0), run("vllm", 6.0, job_s=50.0, peak_bytes=400 * MIB))
    line = found["mixed", "vllm"]
    assert (line.ratio, line.ratio_with_start, line.ratio_of_peaks) == (1.5, 10.0, 0.25)
    assert found["mixed", "headrace"].ratio == 1.0


def test_workloads_are_compared_each_for_itself() -> None:
    found = lines(
        run("headrace", 4.0),
        run("vllm", 6.0),
        run("headrace", 4.0, workload="tiny"),
        run("vllm", 2.0, workload="tiny"),
    )
    assert found["mixed", "vllm"].ratio == 1.5
    assert found["tiny", "vllm"].ratio == 0.5


def test_the_best_peer_is_the_one_that_counts() -> None:
    found = checked(run("headrace", 4.0), run("vllm", 5.2), run("openvino", 4.4))
    name = "mixed: output tokens per second, in the best peer's (openvino)"
    assert found[name] == (pytest.approx(1.1), False)


def test_tiny_counts_start_up_for_each_named_peer() -> None:
    tiny = {"workload": "tiny"}
    found = checked(
        run("headrace", 2.0, job_s=4.0, **tiny),
        run("vllm", 1.0, job_s=24.0, **tiny),
        run("openvino", 1.0, job_s=3.0, **tiny),
        run("llamacpp", 1.0, job_s=3.0, **tiny),
    )
    verdicts = {name: value for name, value in found.items() if name.startswith("tiny")}
    assert list(verdicts.values()) == [(6.0, True), (0.75, False)]


def test_memory_is_compared_with_the_least_of_all_but_llamacpp() -> None:
    found = checked(
        run("headrace", 4.0),
        run("vllm", 4.0, peak_bytes=400 * MIB),
        run("openvino", 4.0, peak_bytes=80 * MIB),
        run("llamacpp", 4.0, peak_bytes=10 * MIB),
    )
    name = "peak memory, in the least of any peer but llama.cpp (mixed)"
    assert found[name] == (1.25, False)


def test_int8_is_compared_with_both_formats_of_the_peers() -> None:
    found = checked(
        run("headrace", 2.0, dtype="int8"),
        run("openvino:int8", 2.4),
        run("vllm:int8", 3.0),
        run("openvino:bfloat16", 4.0),
        dtype="int8",
    )
    assert {name: value for name, (value, _) in found.items() if "int8" in name} == {
        "mixed: int8 against bfloat16: output tokens per second, in the best peer's"
        " (openvino:bfloat16)": 2.0,
        "mixed: int8 against int8: output tokens per second, in the best peer's"
        " (openvino:int8)": 1.2,
    }


def test_without_peers_only_our_start_up_is_checked() -> None:
    assert checked(run("headrace", 4.0)) == {
        "seconds from the start of the process to the first token": (1.5, True)
    }
