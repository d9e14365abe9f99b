"""Calibrations on disk and the command that makes them: written whole, read only when they fit."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest

from flows.calibrate import (
    Calibrated,
    ProgressLines,
    closing_lines,
    render_calibration,
    run_calibration,
    spec_of,
)
from flows.calibration import (
    calibration_path,
    hardware_of,
    load_calibration,
    processor_name,
    store_calibration,
)
from flows.cli import main
from flows.errors import SpecError
from flows.model import Model
from schedulers.calibration import Calibration, calibrated
from schedulers.cost import StepSample
from workers.backends.fake import FakeBackend

HARDWARE = {"device": "cpu", "processor": "a processor", "cores": 2}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def made(seconds: float = 0.01) -> Calibration:
    steps = [StepSample(n, 0, 0, seconds * n) for n in (16, 32, 64)]
    steps += [StepSample(0, n, 65 * n, seconds * n) for n in (1, 2, 4)]
    return calibrated(
        steps,
        hardware=HARDWARE,
        model_fingerprint="f00d",
        model="tiny",
        dtype="float32",
        created="2026-11-29T12:00:00+00:00",
        settings={"max_batch_tokens": 64, "max_seqs": 4, "block_size": 16},
    )


def load(**changes) -> Calibration | None:
    what = {"hardware": HARDWARE, "model_fingerprint": "f00d", "dtype": "float32"}
    return load_calibration(**(what | changes))


def test_what_is_stored_is_found(cache) -> None:
    assert load() is None
    path = store_calibration(made())
    assert path == cache / "calibrations" / f"{made().key}.json"
    assert load() == made()


@pytest.mark.parametrize(
    "other",
    [{"hardware": {**HARDWARE, "cores": 3}}, {"model_fingerprint": "beef"}, {"dtype": "bfloat16"}],
    ids=lambda other: next(iter(other)),
)
def test_other_hardware_model_or_dtype_has_none(other) -> None:
    store_calibration(made())
    assert load(**other) is None


def test_a_newer_one_replaces_it_and_leaves_no_other_file() -> None:
    store_calibration(made())
    path = store_calibration(made(0.02))
    assert load() == made(0.02)
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "Expecting value"),
        ("{", "Expecting property name"),
        ("\xff", "codec"),
        ("[]", "must be an object"),
        (json.dumps({**made().to_json(), "version": 0}), "version is 0"),
        (json.dumps({**made().to_json(), "dtype": "float16"}), "other hardware or model"),
    ],
)
def test_a_damaged_file_is_ignored_with_a_reason(text: str, reason: str, caplog) -> None:
    path = calibration_path(made().key)
    path.parent.mkdir(parents=True)
    path.write_text(text, encoding="latin-1")
    with caplog.at_level(logging.WARNING):
        assert load() is None
    assert reason in caplog.text
    assert store_calibration(made()) == path
    assert load() == made()


def test_a_failed_write_keeps_the_old_one(monkeypatch) -> None:
    path = store_calibration(made())

    def fails(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("os.replace", fails)
    with pytest.raises(SpecError, match=r"no space left.*HEADRACE_CACHE"):
        store_calibration(made(0.02))
    assert load() == made()
    assert list(path.parent.iterdir()) == [path]


def test_the_hardware_is_described() -> None:
    found = hardware_of("cpu")
    assert found.keys() == {"device", "processor", "cores", "threads", "torch", "platform"}
    assert found == hardware_of("cpu")
    assert processor_name() == found["processor"] != ""
    json.dumps(found)


def test_the_command_measures_stores_and_shows() -> None:
    backend = FakeBackend(check_slots=False)
    now_s = 0.0

    def clock() -> float:
        nonlocal now_s
        now_s += 0.01
        return now_s

    model = Model(
        fingerprint="f00d",
        generation_config={},
        load_tokenizer=lambda: pytest.fail("a calibration needs no tokenizer"),
        load_backend=lambda: backend,
    )
    told: list[str] = []
    done = run_calibration(
        spec_of({"max_batch_tokens": 128, "max_seqs": 128}),
        budget_s=5.0,
        model=model,
        clock=clock,
        on_progress=ProgressLines(told.append),
    )
    assert backend.closed
    assert told[0].endswith("loading the model")
    assert done.calibration.settings == {
        "max_batch_tokens": 128, "max_seqs": 128, "block_size": 16,
    }  # fmt: skip
    found = load(hardware=hardware_of("cpu"))
    assert found == done.calibration
    text = shown(done)
    for word in ("alpha_p", "beta_d", "us", "r*", "R^2 mixed", "0.90", str(done.path)):
        assert word in text


def test_a_noisy_measurement_says_so() -> None:
    steps = [step._replace(elapsed_s=step.elapsed_s * 2) for step in made().samples]
    noisy = replace(made(), samples=(*made().samples, *steps))
    path = Path("there")
    assert list(closing_lines(Calibrated(made(), path))) == ["stored in there"]
    assert "differ by 33%" in list(closing_lines(Calibrated(noisy, path)))[1]


def shown(done) -> str:
    from io import StringIO

    from rich.console import Console

    console = Console(width=200, file=StringIO())
    console.print(render_calibration(done))
    return console.file.getvalue()


def test_progress_is_told_when_it_changes_and_now_and_then() -> None:
    told: list[str] = []
    tell = ProgressLines(told.append, interval_s=5.0)
    for what, elapsed_s in (("a", 0), ("a", 4), ("b", 4.5), ("b", 9), ("b", 10)):
        tell(what, elapsed_s)
    assert [line.split() for line in told] == [
        ["0.0", "s", "a"], ["4.5", "s", "b"], ["10.0", "s", "b"],
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--model", "nosuch"], "nosuch"),
        (["--budget", "0"], "--budget is 0"),
        (["--max-seqs", "0"], "--max-seqs"),
        (["--memory", "lots"], "4GiB"),
        (["--prompt", "x"], "--prompt"),
    ],
)
def test_a_mistake_is_status_2_and_one_line(args, message: str, capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["calibrate", *args])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert message in said
    assert "Traceback" not in said
