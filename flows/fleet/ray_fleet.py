"""Workers as Ray actors: Ray places them, gives them GPUs and starts their processes; the
coordinator is the same as for processes of one machine.

What workers say goes through a mailbox, an actor beside the coordinator, as a worker cannot call a
driver that has come in as a client. A worker waits until the mailbox has each word, so nothing that
it has said is lost with it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from typing import Any

import ray

from flows.errors import SpecError
from flows.fleet.links import Deliver
from flows.fleet.messages import Command, Event, Failed, Gone, WorkerSetup, dumps, loads
from flows.fleet.process import dump_event

POLL_S = 0.02
LOCAL = "local"
"""The cluster that is started for the job, on this machine."""

_log = logging.getLogger(__name__)
Letter = tuple[int, int, bytes]
"""Worker, its life, an event."""


class _Mailbox:
    """Letters of all workers, in order of arrival. One call at a time."""

    def __init__(self) -> None:
        self._letters: list[Letter] = []

    def put(self, letter: Letter) -> None:
        self._letters.append(letter)

    def take(self) -> list[Letter]:
        letters, self._letters = self._letters, []
        return letters


def _in_group(name: str) -> Any:
    """Marks a method that has a thread of its own in its actor."""
    method: Any = ray.method
    return method(concurrency_group=name)


class _RayWorker:
    """Hosts one `Worker`. `run` and `handle` have a thread each: commands keep their order."""

    def __init__(self, mailbox: Any, index: int, life: int) -> None:
        self._mailbox = mailbox
        self._index = index
        self._life = life
        self._worker: Any = None

    def run(self, setup: bytes) -> None:
        """The worker's whole life."""
        from flows.fleet.make_worker import make_worker

        worker = make_worker(loads(setup), self._emit)
        try:
            ready = worker.load()
        except Exception as fault:  # noqa: BLE001 - told to the coordinator, which raises it
            self._emit(Failed(fault))
            return
        self._worker = worker
        self._emit(ready)
        worker.run()

    @_in_group("commands")
    def handle(self, command: bytes) -> None:
        if self._worker is not None:
            self._worker.handle(loads(command))

    def _emit(self, event: Event) -> None:
        ray.get(self._mailbox.put.remote((self._index, self._life, dump_event(event))))


class RayFleet:
    """A connection to a cluster, for the workers of one job. Close it.

    Args:
        address: of the cluster: `auto`, `ray://HOST:PORT`, or `local`, which starts one here.
        num_workers: how many actors; None: one a GPU of the cluster, or one a node.
        device: of the job.

    Attributes:
        num_workers: how many there will be.
        workers_a_host: that share a machine's memory, at most.

    Raises:
        SpecError: the cluster cannot be reached, or has not enough for the workers.
    """

    def __init__(self, address: str, *, num_workers: int | None, device: str) -> None:
        self._owns_ray = not ray.is_initialized()
        if self._owns_ray:
            _connect(address)
        resources = ray.cluster_resources()
        num_gpus = int(resources.get("GPU", 0)) if device in ("auto", "cuda") else 0
        num_nodes = sum(bool(node["Alive"]) for node in ray.nodes())
        self.num_workers = num_workers or num_gpus or num_nodes
        self.workers_a_host = -(-self.num_workers // num_nodes)
        num_cpus = int(resources.get("CPU", 0))
        for what, number in (("GPUs", num_gpus), ("CPUs", num_cpus)):
            if self.num_workers > number > 0:
                self._leave()
                raise SpecError(
                    f"workers is {self.num_workers}, but the Ray cluster at {address!r} has "
                    f"{number} {what}; ask for fewer"
                )
        self._gpus = 1 if num_gpus else 0
        self._cpus = num_cpus // self.num_workers
        self._mailbox: Any = _remote(_Mailbox, num_cpus=0).remote()
        self._links: dict[tuple[int, int], RayLink] = {}
        self._lives: dict[int, int] = {}
        self._closed = threading.Event()
        self._reader = threading.Thread(target=self._read, name="ray mailbox", daemon=True)
        self._reader.start()

    def make_link(self, setup: WorkerSetup, index: int, deliver: Deliver) -> RayLink:
        """A worker's next life."""
        life = self._lives[index] = self._lives.get(index, 0) + 1
        actor_class = _remote(
            _RayWorker,
            num_cpus=self._cpus,
            num_gpus=self._gpus,
            max_restarts=0,  # the coordinator starts another one, with what is left of the work
            concurrency_groups={"commands": 1},
        )
        link = RayLink(setup, actor_class, self._mailbox, index, life, deliver)
        self._links[index, life] = link
        return link

    def _read(self) -> None:
        """Deliver what is in the mailbox."""
        while not self._closed.is_set():
            try:
                letters = ray.get(self._mailbox.take.remote())
            except Exception as fault:  # noqa: BLE001 - without it nothing is heard any more
                if not self._closed.is_set():
                    _log.exception("the mailbox of the workers is gone")
                    for link in list(self._links.values()):
                        link.deliver(Failed(fault))
                return
            for index, life, data in letters:
                self._links[index, life].deliver(loads(data))
            if not letters:
                time.sleep(POLL_S)

    def close(self) -> None:
        """Give the actors and the connection back."""
        self._closed.set()
        self._reader.join(timeout=10.0)
        with contextlib.suppress(Exception):
            ray.kill(self._mailbox)
        self._leave()

    def _leave(self) -> None:
        if self._owns_ray:
            ray.shutdown()


class RayLink:
    """One life of a worker on a cluster."""

    def __init__(
        self,
        setup: WorkerSetup,
        actor_class: Any,
        mailbox: Any,
        index: int,
        life: int,
        deliver: Deliver,
    ) -> None:
        self.deliver = deliver
        self._setup = setup
        self._actor_class = actor_class
        self._mailbox = mailbox
        self._index = index
        self._life = life
        self._actor: Any = None
        self._thread = threading.Thread(target=self._wait, name=f"ray worker {index}", daemon=True)

    def start(self) -> None:
        self._actor = self._actor_class.remote(self._mailbox, self._index, self._life)
        self._ended = self._actor.run.remote(dumps(self._setup))
        self._thread.start()

    def _wait(self) -> None:
        """Until the actor has ended; what a dead one has not said is put behind its last letter."""
        try:
            ray.get(self._ended)
        except Exception as fault:  # noqa: BLE001 - however it ended, it is gone
            gone = dumps(Gone(" ".join(str(fault).split())[:300]))
            with contextlib.suppress(Exception):
                ray.get(self._mailbox.put.remote((self._index, self._life, gone)))

    def send(self, command: Command) -> None:
        if self._actor is not None:
            self._actor.handle.remote(dumps(command))

    def kill(self) -> None:
        if self._actor is not None:
            with contextlib.suppress(Exception):
                ray.kill(self._actor)

    def close(self) -> None:
        """An actor that has ended is killed, too: it holds its GPU until then."""
        if self._thread.is_alive():
            self._thread.join(timeout=20.0)
        self.kill()


def _connect(address: str) -> None:
    """Connect to a cluster, or start one.

    Raises:
        SpecError: it cannot be reached.
    """
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.WARNING}
    if address == LOCAL:
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        options |= {
            "include_dashboard": False,
            "_node_ip_address": "127.0.0.1",
            "runtime_env": {"env_vars": {"PYTHONPATH": path}},
        }
    else:
        options["address"] = address
    try:
        ray.init(**options)
    except (ConnectionError, ValueError, RuntimeError, TimeoutError) as fault:
        raise SpecError(
            f"cluster is {address!r}, but no Ray cluster answers there: "
            f"{' '.join(str(fault).split())[:200]}"
        ) from fault


def _remote(kind: type, **options: Any) -> Any:
    """An actor class."""
    make: Any = ray.remote
    return make(**options)(kind)
