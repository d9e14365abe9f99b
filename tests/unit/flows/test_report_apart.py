"""The report that another process draws."""

from __future__ import annotations

from pathlib import Path

from flows.report_apart import draw_apart
from flows.spec import JobSpec
from tests.report_encode_jobs import EncodeJob, write_encoded


def spec_of(output: Path) -> JobSpec:
    return JobSpec.model_validate(
        {"input": "in.parquet", "task": "embed", "prompt": "{{ text }}", "output": str(output)}
    )


def test_the_page_is_there_and_the_sentence_comes_back(tmp_path: Path) -> None:
    output = write_encoded(tmp_path, EncodeJob())
    drawn = draw_apart(spec_of(output))
    assert drawn.fault is None
    assert drawn.place == str(output / "report.html")
    assert "<html" in Path(drawn.place).read_text()
    assert drawn.decisions is not None
    assert drawn.decisions.startswith("11 partitions in 6 superbatches")


def test_what_is_wrong_is_told_in_a_line(tmp_path: Path) -> None:
    drawn = draw_apart(spec_of(tmp_path / "nothing"))
    assert drawn.place is None and drawn.decisions is None
    assert drawn.fault is not None
    assert "nothing" in drawn.fault and "\n" not in drawn.fault
