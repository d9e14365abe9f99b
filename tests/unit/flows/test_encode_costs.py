"""What encoding costs is kept from job to job, and damage to it ends nothing."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from flows.encode_costs import cost_key, learn_cost, load_cost
from flows.spec import EngineSpec
from schedulers.encode_cost import EncodeCost, EncodeSample

TRUTH = EncodeCost.of_tokens(call_s=0.05, token_s=2e-5, mean_tokens=10)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path))
    return tmp_path / "encode-costs"


def calls(cost: EncodeCost, sizes: list[int]) -> list[EncodeSample]:
    return [EncodeSample(n, 10 * n, cost.call_of(n, 10 * n)) for n in sizes]


def test_nothing_is_known_at_first() -> None:
    assert load_cost("k") is None


def test_what_was_measured_is_known_to_the_next_job() -> None:
    learnt = learn_cost("k", calls(TRUTH, [10, 100, 1000, 4000, 50, 700]))
    assert learnt is not None
    assert learnt.call_s == pytest.approx(TRUTH.call_s, rel=0.01)
    assert learnt.token_s == pytest.approx(TRUTH.token_s, rel=0.01)
    assert load_cost("k") == learnt
    assert load_cost("another") is None


def test_calls_of_one_size_tell_nothing_by_themselves(cache: Path) -> None:
    assert learn_cost("k", calls(TRUTH, [500] * 20)) is None
    assert learn_cost("k", []) is None
    assert list(cache.glob("*")) == []


def test_calls_of_one_size_leave_the_fixed_part_as_it_was_known() -> None:
    learn_cost("k", calls(TRUTH, [10, 100, 1000, 4000, 50, 700]))
    learnt = learn_cost("k", calls(TRUTH, [500] * 20))
    assert learnt is not None
    assert learnt.call_s == pytest.approx(TRUTH.call_s, rel=0.02)
    assert learnt.call_of(500, 5000) == pytest.approx(TRUTH.call_of(500, 5000), rel=0.02)


@pytest.mark.parametrize(
    "damage",
    [
        "", "{", "[]", "null", "3", '"text"', '{"call_s": 1}', "\x00\xff",
        '{"call_s": "a", "text_s": 1}',
        '{"call_s": -1, "text_s": 1}',
        '{"call_s": NaN, "text_s": 1}',
        '{"call_s": true, "text_s": null}',
        '{"call_s": 0.1, "text_s": 0.1, "more": 1}',
        '{"call_s": 0.1, "text_s": 0.1, "mean_tokens": 0}',
    ],
)  # fmt: skip
def test_a_damaged_file_is_as_good_as_none_and_is_written_anew(
    cache: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    cache.mkdir()
    (cache / "k.json").write_bytes(damage.encode("latin-1"))
    assert load_cost("k") is None
    assert "k.json is ignored" in caplog.text
    learnt = learn_cost("k", calls(TRUTH, [10, 100, 1000, 4000, 50, 700]))
    assert load_cost("k") == learnt is not None


def test_a_folder_that_cannot_be_written_is_a_warning(
    cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache.write_text("a file where the folder should be")
    assert learn_cost("k", calls(TRUTH, [10, 100, 1000, 4000, 50, 700])) is not None
    assert "cannot be kept" in caplog.text


def test_the_file_is_the_cost(cache: Path) -> None:
    learnt = learn_cost("k", calls(TRUTH, [10, 100, 1000, 4000, 50, 700]))
    assert learnt is not None
    assert [path.name for path in cache.iterdir()] == ["k.json"]
    assert json.loads((cache / "k.json").read_text()) == asdict(learnt)


def test_a_cost_is_of_one_model_task_device_format_and_share_of_the_machine() -> None:
    engines = [
        EngineSpec(), EngineSpec(dtype="bfloat16"), EngineSpec(workers=2), EngineSpec(device="cpu")
    ]  # fmt: skip
    keys = {
        cost_key(model, task, engine)
        for model in ("m1", "m2")
        for task in ("embed", "score")
        for engine in engines
    }
    assert len(keys) == 16
    assert cost_key("m1", "embed", EngineSpec(max_seqs=3)) in keys
    assert cost_key("m1", "embed", EngineSpec(workers=1)) in keys
