"""Errors of the workers, by who must act.

    WorkerError
    |-- ModelError            the user: the model cannot be loaded or run as asked (damaged,
    unsupported, refused)
    |   `-- UnsafeModelError  the model file asks for pickled weights or remote code, which are
    never executed |-- BackendError          the run is broken: the device failed in a way that no
    smaller batch can mend |-- DeviceOutOfMemory     the engine: shrink the batch and go on
    `-- InternalError         us: a broken invariant, with the story that led to it

A bad row is no exception: it is a `Result` with a `RowError`.
"""

from __future__ import annotations


class WorkerError(Exception):
    """Root of the tree."""


class ModelError(WorkerError):
    """The model cannot be loaded, or cannot do what was asked. The message says what, with which
    value, and what to do.
    """


class UnsafeModelError(ModelError):
    """The model would need code or pickled data from its files to be executed."""


class BackendError(WorkerError):
    """The device or library failed; the run cannot go on."""


class DeviceOutOfMemory(WorkerError):
    """The device had no memory for this batch. Nothing was sampled; KV already written may be
    written again.
    """


class InternalError(WorkerError):
    """Should never happen; please file a bug."""
