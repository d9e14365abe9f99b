"""Faults in front of a real S3 server: a proxy that refuses, breaks off, cuts short and waits.

    with FaultProxy(server.endpoint) as proxy:
        proxy.add("slow_down", times=3, method="PUT")
        ... requests to proxy.endpoint ...
        assert proxy.num_faults == 3

Signatures stay good: they cover the host that the client named, and that is passed on.
"""

from __future__ import annotations

import asyncio
import io
import random
import re
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, Self

import aiohttp
from aiohttp import web
from yarl import URL

FaultKind = Literal[
    "slow_down", "internal", "expired", "drop_before", "drop_after", "truncate", "delay"
]
ANSWERS: dict[str, tuple[int, str]] = {
    "slow_down": (503, "SlowDown"),
    "internal": (500, "InternalError"),
    "expired": (400, "ExpiredToken"),
}
TRANSIENT: tuple[FaultKind, ...] = (
    "slow_down", "internal", "drop_before", "drop_after", "truncate",
)  # fmt: skip
_HOP_BY_HOP = {"connection", "content-length", "expect", "keep-alive", "transfer-encoding"}


@dataclass
class Fault:
    """What is done to the requests that it is for.

    Attributes:
        kind: `slow_down`, `internal`, `expired`: an answer of S3, in place of the server's.
            `drop_before`, `drop_after`: the connection breaks, before or after the server has done
            it. `truncate`: half of the answer's body, then the connection breaks. `delay`: the
            answer takes `delay_s` longer.
        times: to so many requests; None: to all.
        method: of HTTP; None: any.
        path: pattern that is searched in path and query.
        key: only to requests that are signed with this access key.
        chance: to that share of the requests.
        on_fault: called when it is done.
    """

    kind: FaultKind
    times: int | None = 1
    method: str | None = None
    path: str = ""
    key: str = ""
    chance: float = 1.0
    delay_s: float = 0.0
    on_fault: Callable[[], None] = field(default=lambda: None)

    def is_for(self, request: web.Request) -> bool:
        signed = request.headers.get("Authorization", "")
        return (
            self.times != 0
            and self.method in (None, request.method)
            and re.search(self.path, request.raw_path) is not None
            and self.key in signed
        )


class FaultProxy:
    """A server on a free port of this machine, in a thread of its own.

    Args:
        upstream: the server behind it.
        seed: of the chances.

    Attributes:
        requests: how many came, by method.
        faults: how many were done, by kind.
    """

    def __init__(self, upstream: str, *, seed: int = 0) -> None:
        self._upstream = upstream
        self._random = random.Random(seed)
        self._faults: list[Fault] = []
        self._lock = threading.Lock()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="fault-proxy", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ended: asyncio.Event | None = None
        self._client: aiohttp.ClientSession | None = None
        self.endpoint = ""
        self.requests: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()

    @property
    def num_faults(self) -> int:
        return sum(self.faults.values())

    def add(self, kind: FaultKind, **fields: Any) -> Fault:
        """From now on do that; see `Fault`."""
        fault = Fault(kind, **fields)
        with self._lock:
            self._faults.append(fault)
        return fault

    def clear(self) -> None:
        """From now on do nothing."""
        with self._lock:
            self._faults.clear()

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(30)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._loop is not None and self._ended is not None
        self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join(30)

    # -- the thread --

    def _serve(self) -> None:
        asyncio.run(self._run())

    async def _run(self) -> None:
        self._loop, self._ended = asyncio.get_running_loop(), asyncio.Event()
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with aiohttp.ClientSession(
            connector=connector, auto_decompress=False
        ) as self._client:
            app = web.Application(client_max_size=1 << 30)
            app.router.add_route("*", "/{path:.*}", self._answer)
            runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            host, port = runner.addresses[0][:2]
            self.endpoint = f"http://{host}:{port}"
            self._ready.set()
            await self._ended.wait()
            await runner.cleanup()

    def _pick(self, request: web.Request) -> Fault | None:
        """The first fault that is for a request, as far as chance wants it."""
        with self._lock:
            self.requests[request.method] += 1
            for fault in self._faults:
                if fault.is_for(request) and self._random.random() < fault.chance:
                    if fault.times is not None:
                        fault.times -= 1
                    self.faults[fault.kind] += 1
                    return fault
        return None

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        fault = self._pick(request)
        kind = None if fault is None else fault.kind
        if fault is not None:  # not in this thread: it may send requests through here itself
            await asyncio.to_thread(fault.on_fault)
        if kind in ANSWERS:
            return _refusal(*ANSWERS[kind])
        if kind == "drop_before":
            return _broken_off(request)
        if fault is not None and kind == "delay":
            await asyncio.sleep(fault.delay_s)
        try:
            status, headers, payload = await self._forward(request, body)
        except aiohttp.ClientError:
            return _broken_off(request)  # the server is gone
        if kind == "drop_after":
            return _broken_off(request)
        if kind == "truncate" and len(payload) > 1:
            return await _half(request, status, headers, payload)
        return web.Response(status=status, headers=headers, body=payload or None)

    async def _forward(
        self, request: web.Request, body: bytes
    ) -> tuple[int, dict[str, str], bytes]:
        assert self._client is not None
        headers = {
            name: value
            for name, value in request.headers.items()
            if name.lower() not in _HOP_BY_HOP
        }
        url = URL(self._upstream + request.raw_path, encoded=True)
        async with self._client.request(
            request.method, url, headers=headers, data=io.BytesIO(body), allow_redirects=False,
            skip_auto_headers=("Accept", "Accept-Encoding", "Content-Type", "User-Agent"),
        ) as answer:  # fmt: skip
            payload = await answer.read()
            kept = {
                name: value
                for name, value in answer.headers.items()
                if name.lower() not in _HOP_BY_HOP
            }
            if request.method == "HEAD" and "Content-Length" in answer.headers:
                kept["Content-Length"] = answer.headers["Content-Length"]
            return answer.status, kept, payload


def _refusal(status: int, code: str) -> web.Response:
    text = (
        '<?xml version="1.0" encoding="UTF-8"?>'
        f"<Error><Code>{code}</Code><Message>injected by the tests</Message></Error>"
    )
    return web.Response(status=status, text=text, content_type="application/xml")


def _broken_off(request: web.Request) -> web.Response:
    if request.transport is not None:
        request.transport.abort()
    return web.Response()


async def _half(
    request: web.Request, status: int, headers: dict[str, str], payload: bytes
) -> web.StreamResponse:
    answer = web.StreamResponse(status=status, headers=headers)
    answer.content_length = len(payload)
    await answer.prepare(request)
    await answer.write(payload[: len(payload) // 2])
    if request.transport is not None:
        request.transport.close()
    return answer
