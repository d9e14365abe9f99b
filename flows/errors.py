"""Errors of the flows, by who must act.

    FlowsError
    |-- SpecError    the user: the job as described cannot be run (unknown column, contradiction)
    |-- ServerError  the user: the Prefect server does not answer, or refuses
    `-- JobFailed    the run is broken and ended early; the message says where and why

What storage and the workers raise passes through; `cli.py` turns the user's own mistakes into one
line.
"""

from __future__ import annotations


class FlowsError(Exception):
    """Root of the tree."""


class SpecError(FlowsError):
    """The job as described cannot be run. The message says what, with which value, what to do."""


class ServerError(FlowsError):
    """The Prefect server cannot be used. The message says where it was looked for, what to do."""


class JobFailed(FlowsError):
    """The run ended early. What was finished is durable; the same command goes on from there."""
