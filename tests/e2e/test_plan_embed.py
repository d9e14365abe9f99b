"""`flows plan` of embedding jobs through the command line, and whether a job keeps to it."""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict, replace
from pathlib import Path

import duckdb
import numpy as np
import pytest

from flows.encode_costs import cost_key
from flows.model import Model, open_model
from flows.runner import run_job
from flows.spec import JobSpec
from schedulers.encode_cost import EncodeCost
from tests.e2e.cases import write_table
from tests.e2e.jobs import fake_encoder_model
from tests.e2e.test_cli_job import Shell
from tests.e2e.test_embed import embed_spec, lognormal, write_keyed

pytestmark = pytest.mark.e2e


@pytest.fixture
def flows(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Shell:
    monkeypatch.setenv("COLUMNS", "1000")
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    return Shell(capsys)


class Plan:
    """What `flows plan` says of an input, by name."""

    def __init__(self, flows: Shell, source: str, folder: Path, *options: object) -> None:
        output = folder / "planned"
        status = flows(
            "plan", source, "--task", "embed", "--prompt-column", "text", "--output", output,
            *options,
        )  # fmt: skip
        assert status == 0, flows.err
        assert not output.exists()
        self.text = flows.out

    def line(self, name: str) -> str:
        (found,) = [line for line in self.text.splitlines() if line.strip().startswith(name + " ")]
        return found.strip()[len(name) :].strip()

    def number(self, pattern: str) -> float:
        (found,) = re.findall(pattern, self.text)
        return float(found.replace(",", ""))


def measured(source: str, cost: EncodeCost) -> None:
    """As if an earlier job had found this cost here."""
    spec = JobSpec.model_validate({"input": source, "task": "embed", "prompt": {"column": "text"}})
    key = cost_key(open_model(spec).fingerprint, "embed", spec.engine)
    file = Path(os.environ["HEADRACE_CACHE"]) / "encode-costs" / f"{key}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(asdict(cost)))


def mean_tokens(plan: Plan) -> float:
    return plan.number(r"\(exact\), mean (\d+\.\d)")


@pytest.mark.parametrize("grouped", [True, False])
def test_many_small_partitions_pay(flows: Shell, tmp_path: Path, grouped: bool) -> None:
    sizes = lognormal(300, seed=3)
    source = write_keyed(tmp_path / "in.parquet", sizes, grouped=grouped)
    cost = EncodeCost.of_tokens(call_s=0.02, token_s=1e-4, mean_tokens=5.0)
    measured(source, cost)
    plan = Plan(flows, source, tmp_path, "--partition-by", "key")
    total, count = sum(sizes), len(sizes)
    assert plan.line("rows") == f"{total:,}, 384 numbers each"
    cv = np.std(sizes) / np.mean(sizes)
    assert plan.number(r"\(CV\) (\d+\.\d\d)") == pytest.approx(cv, abs=0.006)
    assert plan.line("partitions").startswith(
        f"{count:,}, mean {total / count:,.1f} texts, largest {max(sizes):,},"
    )
    text_s = 1e-4 * mean_tokens(plan)
    phi = count * 0.02 / (count * 0.02 + total * text_s)
    assert plan.number(r"(\d+\.\d)%: share of the calls") == pytest.approx(100 * phi, abs=0.5)
    calls = int(plan.line("encode calls").split()[0].replace(",", ""))
    assert 1 <= calls < count / 10
    fast = (count * 0.02 + total * text_s) / (calls * 0.02 + total * text_s)
    most = (count * 0.02 + total * text_s) / (0.02 + total * text_s)
    assert plan.number(r"(\d+\.\d+) predicted, at most") == pytest.approx(fast, rel=0.01)
    assert plan.number(r"predicted, at most (\d+\.\d+)") == pytest.approx(most, rel=0.01)
    assert plan.line("advice").startswith("Superbatching pays:")
    assert plan.line("cost").endswith("(measured here)")
    assert "20.0 ms a call" in plan.line("cost")


def test_one_partition_does_not_pay(flows: Shell, tmp_path: Path) -> None:
    source = write_keyed(tmp_path / "in.parquet", [300])
    plan = Plan(flows, source, tmp_path, "--partition-by", "key")
    assert plan.line("advice").startswith("Superbatching does not pay: there is one partition")
    assert plan.number(r"\(CV\) (\d+\.\d\d)") == 0
    assert plan.number(r"(\d+\.\d+) predicted, at most") == 1
    assert plan.line("cost").endswith("(assumed, not measured yet)")


@pytest.mark.parametrize("grouped", [True, False])
def test_large_partitions_do_not_pay(flows: Shell, tmp_path: Path, grouped: bool) -> None:
    source = write_keyed(tmp_path / "in.parquet", [700, 800, 900], grouped=grouped)
    measured(source, EncodeCost.of_tokens(call_s=0.1, token_s=2e-4, mean_tokens=5.0))
    plan = Plan(flows, source, tmp_path, "--partition-by", "key")
    said = plan.line("advice")
    assert said.startswith("Superbatching does not pay: partitions have 800 texts on average")
    assert plan.number(r"(\d+\.\d)%: share of the calls") < 10


def test_cheap_calls_do_not_pay(flows: Shell, tmp_path: Path) -> None:
    source = write_keyed(tmp_path / "in.parquet", [20] * 30)
    measured(source, EncodeCost.of_tokens(call_s=1e-5, token_s=1e-4, mean_tokens=5.0))
    plan = Plan(flows, source, tmp_path, "--partition-by", "key")
    assert plan.line("advice").startswith("Superbatching does not pay: a call costs 0.01 ms")


def test_nothing_to_encode(flows: Shell, tmp_path: Path) -> None:
    source = write_keyed(tmp_path / "in.parquet", [])
    plan = Plan(flows, source, tmp_path, "--partition-by", "key")
    assert plan.line("advice") == "There is nothing to encode."
    assert plan.line("encode calls").startswith("0 of ")


@pytest.mark.parametrize("grouped", [True, False])
def test_given_thresholds_are_planned_with_and_kept_to(
    flows: Shell, tmp_path: Path, grouped: bool
) -> None:
    sizes = [*lognormal(100, seed=5), 400]
    source = write_keyed(tmp_path / "in.parquet", sizes, grouped=grouped)
    plan = Plan(
        flows, source, tmp_path, "--partition-by", "key", "--superbatch-min", 40,
        "--superbatch-max", 150,
    )  # fmt: skip
    said = plan.line("encode calls")
    assert "of 40 to 150 texts; at most 750 texts in memory. The thresholds are given." in said
    calls = int(said.split()[0])
    spec = embed_spec(tmp_path, source, encode={"min_texts": 40, "max_texts": 150})
    run = calls_of(spec, fake_encoder_model())
    # Rows that are not grouped will be sorted; the plan has their keys as they first appear.
    assert calls == run if grouped else abs(calls - run) <= 0.1 * run


def calls_of(spec: JobSpec, model: Model) -> int:
    """Calls that a job really makes."""
    run_job(spec, model=model)
    with duckdb.connect(str(Path(spec.output) / "job.duckdb"), read_only=True) as con:
        return con.sql("select count(*) from encodes").fetchall()[0][0]


@pytest.mark.parametrize("max_texts", [50, 5000])
def test_without_partitions_each_shard_is_a_call_or_more(
    flows: Shell, tmp_path: Path, max_texts: int
) -> None:
    source = write_keyed(tmp_path / "in.parquet", [900])
    plan = Plan(flows, source, tmp_path, "--shard-tokens", 500, "--superbatch-max", max_texts)
    assert "phi" not in plan.text
    assert "advice" not in plan.text
    spec = embed_spec(
        tmp_path, source, partition_by=[], shard_tokens=500, encode={"max_texts": max_texts}
    )
    model = replace(fake_encoder_model(), load_tokenizer=open_model(spec).load_tokenizer)
    calls = int(plan.line("encode calls").split()[0])
    assert calls == calls_of(spec, model)
    assert calls > 900 * 5 / 500


def test_rows_without_texts_are_counted(flows: Shell, tmp_path: Path) -> None:
    source = write_table(
        tmp_path / "in.parquet", key=["a", None, "a", "b"], text=["one", None, " ", "two words"]
    )
    plan = Plan(flows, source, tmp_path, "--partition-by", "key")
    assert plan.line("rows null_prompt") == "1 of 4 looked at"
    assert plan.line("rows empty_prompt") == "1 of 4 looked at"
    assert plan.line("partitions").startswith("3, mean 1.3 texts, largest 2")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--partition-by", "kye"], "kye"),
        (["--partition-by", "key", "--superbatch-min", 9, "--superbatch-max", 3], "min_texts is 9"),
        (["--prompt-name", "query"], "no prompt 'query'"),
    ],
)
def test_what_would_not_run_is_not_planned(
    flows: Shell, tmp_path: Path, options: list[object], message: str
) -> None:
    source = write_keyed(tmp_path / "in.parquet", [3, 2])
    assert flows("plan", source, "--task", "embed", "--prompt-column", "text", *options) == 2
    assert message in flows.err
    assert "Traceback" not in flows.err
