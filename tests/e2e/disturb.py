"""A job of two workers from `s3://` to `s3://` under Prefect, disturbed at random moments.

    python -m tests.e2e.disturb --rounds 20 --outage-s 30

Each round one of four is hit: a worker is killed, the coordinator is killed (and the job started
again), the S3 server is killed and comes back after a while, the Prefect server likewise. At the
end every row is there once, and equal to the undisturbed run's.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from flows.spec import JobSpec
from tests.e2e.cases import in_one_process
from tests.e2e.jobs import Behaviour, comparable, write_dataset
from tests.e2e.test_s3_workers import read_remote
from tests.services.postgres import postgres
from tests.services.prefect_server import PrefectServer, prefect_server
from tests.services.seaweed import SeaweedServer, client

ROOT = Path(__file__).parents[2]
KINDS = ("worker", "coordinator", "s3", "prefect")
ROWS_A_ROUND = 2500
STEP_S = 0.03


@dataclass
class Disturbed:
    """One job, and what is done to it.

    Args:
        s3: the server of its input and output.
        prefect: the server that it reports to.
        spec: the job.
        outage_s: seconds that a server is away.
    """

    s3: SeaweedServer
    prefect: PrefectServer
    spec: JobSpec
    folder: Path
    outage_s: float
    hits: Counter[str] = field(default_factory=Counter[str])
    job: subprocess.Popen[bytes] | None = None
    statuses: list[int] = field(default_factory=list)

    def start(self) -> None:
        """The job, as `flows run --prefect` does it, in a session of its own."""
        file = self.folder / "job.json"
        file.write_text(json.dumps(self.spec.model_dump(mode="json")))
        environ = {**self.prefect.env(), **self.s3.environment()}
        environ |= Behaviour(delay_s=STEP_S).environ()
        with (self.folder / "out.log").open("ab") as log:
            self.job = subprocess.Popen(
                [sys.executable, "-m", "tests.e2e.jobs", str(file), "--flow"],
                cwd=ROOT,
                env=environ,
                start_new_session=True,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    @property
    def is_running(self) -> bool:
        return self.job is not None and self.job.poll() is None

    def workers(self) -> list[psutil.Process]:
        """The job's worker processes."""
        assert self.job is not None
        try:
            children = psutil.Process(self.job.pid).children(recursive=True)
            return [child for child in children if "flows.fleet.process" in child.cmdline()]
        except psutil.NoSuchProcess:
            return []

    def hit(self, kind: str) -> None:
        """Disturb the job."""
        if kind == "worker":
            workers = self.workers()
            if workers:
                random.choice(workers).kill()
        elif kind == "coordinator":
            assert self.job is not None
            self.job.kill()
            self.job.wait()
            self.start()
        else:
            server: Any = self.s3 if kind == "s3" else self.prefect
            server.kill()
            time.sleep(self.outage_s)
            server.start()
        self.hits[kind] += 1

    def run(self, kinds: list[str], rng: random.Random) -> None:
        """Disturb it once for each kind, then let it end; it is started again when it failed."""
        self.start()
        for kind in kinds:
            time.sleep(rng.uniform(1.0, 6.0))
            if not self.is_running:
                assert self.job is not None
                self.statuses.append(self.job.returncode)
                if self.job.returncode == 0:
                    break  # it was done before all rounds were
                self.start()
                time.sleep(1.0)
            self.hit(kind)
        while True:
            assert self.job is not None
            self.statuses.append(self.job.wait(timeout=600))
            if self.statuses[-1] == 0:
                return
            assert len(self.statuses) < 12, self.log()
            self.start()

    def log(self) -> str:
        """The end of what the job said."""
        return (self.folder / "out.log").read_text(errors="replace")[-3000:]


def disturb(
    s3: SeaweedServer,
    prefect: PrefectServer,
    folder: Path,
    *,
    rounds: int,
    outage_s: float,
    seed: int = 0,
) -> Counter[str]:
    """Run a job through so many rounds and check its rows; returns how often each kind hit."""
    rng = random.Random(seed)
    kinds = [KINDS[index % len(KINDS)] for index in range(rounds)]
    rng.shuffle(kinds)
    bucket = s3.new_bucket()
    rows = write_dataset(folder / "in.parquet", ROWS_A_ROUND * rounds)
    with client(s3.endpoint) as fs:
        fs.put_file(str(rows), f"{bucket}/in.parquet")
    spec = JobSpec.model_validate(
        {
            "input": f"s3://{bucket}/in.parquet",
            "output": f"s3://{bucket}/out",
            "prompt": "{{ text }}",
            "keep_columns": ["n"],
            "shard_tokens": 20_000,
            "checkpoint_s": 1.0,
            "sampling": {"max_tokens": 12},
            "engine": {"workers": 2, "max_seqs": 32},
        }
    )
    disturbed = Disturbed(s3, prefect, spec, folder, outage_s)
    disturbed.run(kinds, rng)
    found = comparable(read_remote(s3, f"{bucket}/out"))
    assert [row["n"] for row in found] == list(range(ROWS_A_ROUND * rounds))
    assert found == undisturbed(spec, rows, folder)
    print(f"hits {dict(disturbed.hits)}, exit statuses {disturbed.statuses}")
    return disturbed.hits


def undisturbed(spec: JobSpec, rows: Path, folder: Path) -> list[dict[str, Any]]:
    """The same job on local files, in one process."""
    from flows.runner import run_job
    from tests.e2e.jobs import read_results, worker_model

    output = folder / "undisturbed"
    alone = in_one_process(spec, output, input=str(rows))
    assert run_job(alone, find_model=worker_model).complete
    return comparable(read_results(output))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--outage-s", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        s3 = SeaweedServer(folder / "seaweed")
        s3.start()
        try:
            with (
                postgres(folder / "postgres.log") as database_url,
                prefect_server(folder, database_url) as prefect,
            ):
                disturb(
                    s3, prefect, folder,
                    rounds=arguments.rounds, outage_s=arguments.outage_s, seed=arguments.seed,
                )  # fmt: skip
        finally:
            s3.stop()
    os._exit(0)


if __name__ == "__main__":
    main()
