"""The command line: options are pinned and cheap to show; mistakes are one line and status 2."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Any

import pytest
import typer.main

from flows.cli import app, main
from flows.options import with_spec_options

HEAVY = ("torch", "prefect", "pyarrow", "duckdb", "transformers", "jinja2", "numpy")
SPEC_OPTIONS = """
    --prompt --prompt-column --messages-column --system --raw-prompt --model --revision --task
    --output --id-column --keep-columns --limit --max-tokens --min-tokens --temperature --top-k
    --top-p --min-p --repetition-penalty --presence-penalty --frequency-penalty --stop
    --stop-token-id --ignore-eos --logprobs --n --seed --output-schema --guided --on-too-long
    --policy --dtype --device --memory --max-batch-tokens --max-seqs --deterministic
    --overflow-probability --sizing --workers --cluster --start-timeout-s
    --shard-tokens --checkpoint-s --row-timeout-s --max-error-rate --retry-errors --overwrite
    --credentials --partition-by --vector-dtype --normalize --pooling --prompt-name --choice
    --superbatch-min --superbatch-max --job
""".split()
OPTIONS = {
    "run": {*SPEC_OPTIONS, "--prefect", "--profile"},
    "plan": set(SPEC_OPTIONS),
    "validate": set(SPEC_OPTIONS),
    "status": {"--credentials"},
    "calibrate": {
        "--model",
        "--revision",
        "--dtype",
        "--device",
        "--memory",
        "--max-batch-tokens",
        "--max-seqs",
        "--budget",
    },
    "report": {"--to", "--credentials"},
    "profile": {"--credentials"},
    "simulate": {
        "--synthetic",
        "--rows",
        "--concurrency",
        "--policy",
        "--hardware",
        "--max-seqs",
        "--max-batch-tokens",
        "--capacity-tokens",
        "--seed",
        "--credentials",
    },
    "deploy": {"--job", "--work-pool", "--cron", "--timezone"},
    "serve": {"--job", "--cron", "--timezone", "--limit"},
    "version": set[str](),
}


def parse(*args: str) -> dict[str, Any]:
    """What a command gets of its arguments."""
    got: list[dict[str, Any]] = []
    probe = typer.Typer()

    def take(flat: dict[str, Any]) -> None:
        got.append(flat)

    probe.command()(with_spec_options(take))
    with pytest.raises(SystemExit) as ended:
        probe(list(args))
    assert ended.value.code == 0
    return got[0]


def fails(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as ended:
        main(list(args))
    assert isinstance(ended.value.code, int)
    return ended.value.code, capsys.readouterr().err


def test_the_list_of_options_is_pinned() -> None:
    group: Any = typer.main.get_command(app)
    found = {
        name: {param.opts[0] for param in command.params if param.opts[0].startswith("--")}
        for name, command in group.commands.items()
    }
    assert found == OPTIONS


def test_only_what_is_given_reaches_the_spec() -> None:
    assert parse("in.parquet") == {"input": "in.parquet"}
    assert parse() == {}


def test_options_are_parsed_to_their_types() -> None:
    flat = parse(
        "in", "--top-k", "5", "--temperature", "0.5", "--stop", "a", "--stop", "b,c",
        "--stop-token-id", "7", "--no-guided", "--deterministic", "--max-error-rate", "0",
    )  # fmt: skip
    assert flat == {
        "input": "in",
        "top_k": 5,
        "temperature": 0.5,
        "stop": ["a", "b,c"],
        "stop_token_id": [7],
        "guided": False,
        "deterministic": True,
        "max_error_rate": 0.0,
    }


def test_kept_columns_are_repeated_or_separated_by_commas() -> None:
    assert parse("in", "--keep-columns", "a, b", "--keep-columns", "c")["keep_columns"] == [
        "a", "b", "c",
    ]  # fmt: skip


def test_c15_choices_are_checked_by_the_parser(capsys: pytest.CaptureFixture[str]) -> None:
    for choice in ("error", "truncate_left", "truncate_right", "fail"):
        assert parse("in", "--on-too-long", choice)["on_too_long"] == choice
    code, said = fails(capsys, "run", "in", "--prompt", "x", "--on-too-long", "skip")
    assert code == 2
    assert "truncate_left" in said


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["run"], "no input"),
        (["run", "in.parquet"], "needs a prompt"),
        (["run", "in", "--prompt", "x", "--prompt-column", "y"], "give only one"),
        (["run", "in", "--prompt", "x", "--top-p", "2"], "--top-p"),
        (["plan", "in", "--prompt", "x", "--memory", "lots"], "4GiB"),
        (["validate", "in", "--prompt", "x", "--job", "nosuch.yaml"], "nosuch.yaml"),
        (["run", "nosuch.parquet", "--prompt", "x"], "nosuch.parquet"),
        (["run", "in", "--nosuch", "x"], "--nosuch"),
        (["status", "nosuch-output"], "nosuch-output"),
    ],
)
def test_usage_mistake_is_status_2_and_no_traceback(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Any,
    args: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    code, said = fails(capsys, *args)
    assert code == 2
    assert message in said
    assert "Traceback" not in said


def test_help_is_quick_and_imports_nothing_heavy() -> None:
    script = (
        "import sys\nfrom flows.cli import main\n"
        "try: main(['run', '--help'])\n"
        "except SystemExit: pass\n"
        f"sys.exit(','.join(m for m in {HEAVY!r} if m in sys.modules) or None)"
    )
    started_s = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", script], check=False, capture_output=True, text=True
    )
    elapsed_s = time.perf_counter() - started_s
    assert (done.returncode, done.stderr) == (0, "")
    assert "--max-error-rate" in done.stdout
    assert elapsed_s < 2.0, "0.2 s on an idle machine"


def test_version_is_that_of_the_distribution(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("headrace ")
