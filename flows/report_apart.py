"""A job's report drawn in a process of its own: figures and queries over all of the telemetry take
memory that a job's process should not have at its end, after hours without growing.

    python -m flows.report_apart < {"output": ..., "credentials": ..., "policy": ...}
"""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import closing
from typing import NamedTuple

from flows.credentials import storage_options
from flows.spec_model import JobSpec
from storage.errors import StorageError

LONGEST_S = 600.0
"""Seconds after which a report is given up."""


class Drawn(NamedTuple):
    """What came of a report.

    Attributes:
        place: where the page is; None: there is none.
        decisions: what the policy decided, or what became of partitions, in sentences.
        fault: why there is no page.
    """

    place: str | None
    decisions: str | None
    fault: str | None = None


def draw_apart(spec: JobSpec) -> Drawn:
    """Write a job's report into its output, from a process of its own. Does not raise."""
    wanted = {
        "output": spec.output,
        "credentials": spec.credentials,
        "policy": spec.engine.policy,
    }
    command = [sys.executable, "-m", "flows.report_apart"]
    try:
        done = subprocess.run(
            command, input=json.dumps(wanted), capture_output=True, text=True, check=True,
            timeout=LONGEST_S,
        )  # fmt: skip
        return Drawn(*json.loads(done.stdout.splitlines()[-1]))
    except subprocess.CalledProcessError as fault:
        said = fault.stderr.strip().rpartition("\n")[2]
        return Drawn(None, None, said or f"its process ended with status {fault.returncode}")
    except (OSError, subprocess.TimeoutExpired, ValueError, IndexError, TypeError) as fault:
        return Drawn(None, None, str(fault))


def draw(output: str, credentials: str | None, policy: str) -> Drawn:
    """Write a job's report, and say what it decided."""
    from flows.report import write_report

    try:
        place = write_report(output, credentials=credentials)
        return Drawn(place, _decisions(output, credentials, policy))
    except StorageError as fault:
        return Drawn(None, None, str(fault))


def _decisions(output: str, credentials: str | None, policy: str) -> str:
    """When the policy switched between prefill and decode apart and together, and why; of a job
    that encodes, what became of its partitions.
    """
    from flows.report_data import Telemetry
    from flows.report_encodes import encode_facts
    from flows.report_tables import policy_sentence, superbatch_sentence
    from storage.ledger import JOB
    from storage.objects import ObjectStore
    from storage.record import JobRecord
    from storage.views import open_views

    store = ObjectStore(output, storage_options=storage_options(credentials, output))
    record = JobRecord.from_bytes(store.read(JOB), store.path(JOB))
    with closing(open_views(store)) as con:
        telemetry = Telemetry(con)
        facts = encode_facts(record, store, telemetry)
        if facts is not None:
            return superbatch_sentence(facts)
        return policy_sentence(policy, telemetry, telemetry.switches())


if __name__ == "__main__":
    sys.stdout.write(json.dumps(draw(**json.loads(sys.stdin.read()))))
