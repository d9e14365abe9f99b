"""The command line over real files and a small model, from `plan` to `status`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flows.cli import main
from tests.e2e.conftest import SAMPLE

pytestmark = pytest.mark.e2e

PROMPT = "Say what this is for: {{ description }}"


class Shell:
    """Runs `flows` in this process and keeps what it said."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys
        self.out = ""
        self.err = ""

    def __call__(self, *args: object) -> int:
        with pytest.raises(SystemExit) as ended:
            main([str(arg) for arg in args])
        self.out, self.err = self._capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return ended.value.code


@pytest.fixture
def flows(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Shell:
    monkeypatch.setenv("COLUMNS", "200")
    return Shell(capsys)


def results(output: Path) -> list[dict[str, object]]:
    files = sorted((output / "results").glob("*.parquet"))
    return [row for file in files for row in pq.read_table(file).to_pylist()]


def test_job_from_plan_to_status(flows: Shell, tiny_model: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    job = (
        SAMPLE, "--model", tiny_model, "--prompt", PROMPT, "--id-column", "package",
        "--limit", 12, "--max-tokens", 6, "--dtype", "float32", "--memory", "1GiB",
        "--output", output,
    )  # fmt: skip

    assert flows("plan", *job) == 0
    assert "12 in 1 shard" in flows.out
    assert not output.exists()

    assert flows("validate", *job) == 0
    assert "prompt: reads description" in flows.out
    assert not output.exists()

    assert flows("run", *job, "--local") == 0
    assert f"{SAMPLE} -> {output}: generate with {tiny_model}" in flows.err
    assert "12 of 12" in flows.out
    rows = results(output)
    assert len({row["row_id"] for row in rows}) == len(rows) == 12

    assert flows("status", output) == 0
    assert "12 of 12 (100.0%)" in flows.out
    assert "no, complete" in flows.out

    assert flows("run", *job, "--local") == 0
    assert results(output) == rows

    for command in ("run", "validate"):
        assert flows(command, *job, "--max-tokens", 7) == 2
        assert "max_tokens" in flows.err
        assert "--overwrite" in flows.err


def test_job_file_with_options_on_top(flows: Shell, tiny_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    spec = {"input": str(SAMPLE), "prompt": PROMPT, "model": str(tiny_model), "limit": 200}
    path.write_text(json.dumps(spec))
    assert flows("plan", "--job", path, "--limit", 7) == 0
    assert "7 in 1 shard" in flows.out


def test_prompt_without_columns_still_answers_every_row(
    flows: Shell, tiny_model: Path, tmp_path: Path
) -> None:
    job = (
        SAMPLE, "--model", tiny_model, "--prompt", "Say hello.", "--limit", 3, "--max-tokens", 4,
        "--memory", "1GiB", "--local", "--output", tmp_path / "out",
    )  # fmt: skip
    assert flows("run", *job) == 0
    assert [row["status"] for row in results(tmp_path / "out")] == ["ok"] * 3


def test_c25_job_of_bad_rows_fails(flows: Shell, tiny_model: Path, tmp_path: Path) -> None:
    source = tmp_path / "in.parquet"
    pq.write_table(pa.table({"text": ["", " ", None, "fine"]}), source)
    job = (
        source, "--model", tiny_model, "--prompt-column", "text", "--max-tokens", 4,
        "--memory", "1GiB", "--local", "--output", tmp_path / "out",
    )  # fmt: skip
    assert flows("run", *job) == 1
    assert flows("run", *job, "--max-error-rate", 0.5) == 0
    by_status = [row["status"] for row in results(tmp_path / "out")]
    assert by_status == ["error", "error", "skipped", "ok"]


def test_c22_bad_schema_fails_at_validate(flows: Shell, tmp_path: Path) -> None:
    job = (SAMPLE, "--prompt", PROMPT, "--model", "no-such-model", "--output", tmp_path / "out")
    for schema in ('{"type": "objekt"}', "{}", '{"type": '):
        assert flows("validate", *job, "--output-schema", schema) == 2
        assert "schema" in flows.err
        assert "no-such-model" not in flows.err, "the schema comes before the model"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--prompt", "{{ descripton }}"], "did you mean 'description'?"),
        (["--prompt", "{{ description"], "template"),
        (["--prompt-column", "body"], "Columns: package, section, description"),
        (["--prompt", "{{ section }}", "--keep-columns", "nosuch"], "nosuch"),
        (["--prompt", "{{ section }}", "--id-column", "section"], "section"),
        (["--prompt", "{{ section }}", "--model", "no-such-model"], "no-such-model"),
    ],
)
def test_mistake_is_told_before_torch_is_imported(
    tmp_path: Path, args: list[str], message: str
) -> None:
    script = (
        "import sys\nfrom flows.cli import main\ncode = None\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit as ended: code = ended.code\n"
        "heavy = [m for m in ('torch', 'prefect', 'transformers') if m in sys.modules]\n"
        "sys.exit(f'imported {heavy}' if heavy else code)"
    )
    command = [sys.executable, "-c", script, "run", str(SAMPLE), *args, "--output", "out"]
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, cwd=tmp_path,
        env={"PYTHONPATH": str(SAMPLE.parents[2]), "HOME": str(tmp_path)},
    )  # fmt: skip
    assert (done.returncode, "Traceback" in done.stderr) == (2, False), done.stderr
    assert message in done.stderr
    assert not (tmp_path / "out").exists()


def test_c49_log_without_terminal_has_lines(flows: Shell, tiny_model: Path, tmp_path: Path) -> None:
    assert flows(
        "run", SAMPLE, "--model", tiny_model, "--prompt", PROMPT, "--limit", 3, "--max-tokens", 4,
        "--memory", "1GiB", "--local", "--output", tmp_path / "out",
    ) == 0  # fmt: skip
    assert "loading the model" in flows.err.splitlines()
