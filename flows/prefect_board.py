"""What Prefect shows of a job beside its states: artifacts, tags and events.

A server that is away never costs the job anything: a progress update is dropped at once, what is
shown at the end is tried again as long as Prefect's client tries (about a minute), and one line of
log says so. Events wait in Prefect's own queue.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any
from uuid import UUID

import httpx
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import ArtifactCreate, ArtifactUpdate
from prefect.context import FlowRunContext
from prefect.events import emit_event
from prefect.logging import get_run_logger
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings

from flows import prefect_text as text
from flows.progress import Snapshot
from flows.report_apart import draw_apart
from flows.shard_run import ShardRun
from flows.spec import JobSpec
from flows.summary import JobSummary

UPDATE_S = 3.0
"""Seconds between updates of the progress artifact, in the first minutes."""

UPDATES_AN_AGE = 100
"""Later on an update comes when the run is that part older: hours take hundreds, not thousands."""


class Board:
    """The artifacts, tags and events of one flow run. Made inside it, and used in its own thread;
    only `shard_done` is for the threads of its task runs.

    Args:
        spec: the job.
        job_id: of the output.
        key: begins the artifacts' keys; None: one for the output.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        spec: JobSpec,
        job_id: str,
        *,
        key: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        context = FlowRunContext.get()
        assert context is not None, "made outside of a flow run"
        assert context.flow_run is not None
        self._flow_run = context.flow_run
        self._client = get_client(sync_client=True)
        self._log: logging.Logger | logging.LoggerAdapter[Any] = get_run_logger()
        self._spec = spec
        self._resource = f"headrace.job.{job_id}"
        self._key = text.output_key(spec.output) if key is None else f"headrace-{text.slug(key)}"
        self._clock = clock
        self._began_s = self._due_s = clock()
        self._progress_id: UUID | None = None
        self._away = False

    # -- while it runs --

    def tag(self, *more: str) -> None:
        """Put the job's tags on the flow run, beside those it has."""
        model = text.model_name(self._spec.model)
        ours = {"headrace", f"model:{model}", f"task:{self._spec.task}", *more}
        with self._reaching("the tags", retry=False):
            self._client.update_flow_run(
                self._flow_run.id, tags=sorted(ours | set(self._flow_run.tags))
            )

    def progress(self, snapshot: Snapshot, *, force: bool = False) -> None:
        """Bring the progress artifact up to date, when it is due."""
        now_s = self._clock()
        if now_s < self._due_s and not force:
            return
        self._due_s = now_s + max(UPDATE_S, (now_s - self._began_s) / UPDATES_AN_AGE)
        percent, line = 100.0 * snapshot.fraction, snapshot.line()
        with self._reaching("progress", retry=False):
            if self._progress_id is None:
                self._progress_id = self._create("progress", "progress", percent, line)
            else:
                update = ArtifactUpdate(data=percent, description=line)
                self._client.update_artifact(self._progress_id, update)

    def shard_done(self, run: ShardRun) -> None:
        """Tell that a shard is committed."""
        emit_event(
            "headrace.shard.done",
            resource={
                "prefect.resource.id": f"{self._resource}.shard.{run.index}",
                "prefect.resource.name": f"shard {run.index} of {self._spec.output}",
            },
            related=[{"prefect.resource.id": self._resource, "prefect.resource.role": "job"}],
            payload=text.event_payload(run),
        )

    # -- at its end --

    def close(self, summary: JobSummary, runs: Sequence[ShardRun], why: str) -> None:
        """Show what the job did: table, page, links, events.

        Args:
            summary: the job.
            runs: its shards that this run has committed.
            why: the final state's message.
        """
        report, decisions, fault = draw_apart(self._spec)
        if fault is not None:
            self._log.warning("there is no report of the job: %s", fault)
        page = text.summary_page(summary, why, decisions)
        with self._reaching("the results"):
            rows = json.dumps(text.shard_table(runs))
            self._create("table", "shards", rows, text.table_description(runs))
            self._create("markdown", "summary", page, "What the job did")
            if report is not None:
                link = f"[report of the job]({text.link_to(report)})"
                self._create("markdown", "report", link, "What the job did and why")
            link = f"[{summary.output}]({text.link_to(summary.output)})"
            self._create("markdown", "output", link, "Where the results are")
        if summary.error_rate > self._spec.max_error_rate:
            self._emit("headrace.job.error-rate-exceeded", summary)
        self._emit("headrace.job.done", summary)

    def _emit(self, event: str, summary: JobSummary) -> None:
        emit_event(
            event,
            resource={
                "prefect.resource.id": self._resource,
                "prefect.resource.name": self._spec.output,
            },
            payload={**text.job_payload(summary), "max_error_rate": self._spec.max_error_rate},
        )

    # -- the server --

    def _create(self, kind: str, name: str, data: Any, description: str) -> UUID:
        created = self._client.create_artifact(
            ArtifactCreate(
                key=f"{self._key}-{name}",
                type=kind,
                data=data,
                description=description,
                flow_run_id=self._flow_run.id,
            )
        )
        return created.id

    @contextmanager
    def _reaching(self, what: str, *, retry: bool = True) -> Generator[None]:
        """A call that may find the server away: then the block is left, and the job goes on."""
        once = temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0})
        try:
            with nullcontext() if retry else once:
                yield
        except httpx.HTTPError as fault:
            if not self._away:
                self._log.warning(
                    "the Prefect server does not take %s (%s: %s); the job goes on",
                    what,
                    type(fault).__name__,
                    fault,
                )
            self._away = True
        else:
            if self._away:
                self._log.info("the Prefect server is back")
            self._away = False
