"""The process of a worker: `python -m flows.fleet.process FD`, started by `ProcessLink`.

FD is a socket to the coordinator. When that closes, whatever closed it, the process is gone within
an instant: nobody waits for its work any more.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from flows.fleet.messages import Failed, dumps, loads
from workers.errors import BackendError

if TYPE_CHECKING:
    from flows.fleet.make_worker import AnyWorker
    from flows.fleet.messages import Event, WorkerSetup


def main() -> None:
    """Run one worker to its end."""
    # The coordinator decides when a worker ends; a terminal's Ctrl-C goes to the whole group.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    connection = Connection(int(sys.argv[1]))
    cores, setup = loads(connection.recv_bytes())
    if cores:
        os.sched_setaffinity(0, cores)
    run_worker(connection, setup)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # a device that hangs is not waited for


def run_worker(connection: Connection, setup: WorkerSetup) -> None:
    """Load, then work and listen."""
    from flows.fleet.make_worker import make_worker
    from storage.allocator import use_system_allocator

    use_system_allocator(keep_large=setup.spec.task == "generate")
    lock = threading.Lock()

    def emit(event: Event) -> None:
        data = dump_event(event)
        with lock:
            connection.send_bytes(data)

    worker = make_worker(setup, emit)
    listener = threading.Thread(target=_listen, args=(connection, worker), daemon=True)
    listener.start()
    try:
        ready = worker.load()
    except Exception as fault:  # noqa: BLE001 - told to the coordinator, which raises it
        emit(Failed(fault))
        return
    emit(ready)
    worker.run()


def _listen(connection: Connection, worker: AnyWorker) -> None:
    """Take commands until the coordinator is gone."""
    while True:
        try:
            data = connection.recv_bytes()
        except (EOFError, OSError):
            os._exit(1)
        worker.handle(loads(data))


def dump_event(event: Event) -> bytes:
    """An event to be sent; a fault that cannot travel goes as its text."""
    if not isinstance(event, Failed):
        return dumps(event)
    try:
        data = dumps(event)
        loads(data)
    except Exception:  # noqa: BLE001 - whatever a foreign exception does when it is pickled
        fault = event.fault
        return dumps(Failed(BackendError(f"{type(fault).__name__}: {fault}")))
    return data


if __name__ == "__main__":
    main()
