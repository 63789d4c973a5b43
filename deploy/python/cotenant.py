"""Leases of memory from cotenant for a Python program. One file: install its package, or copy it beside yours. Needs only `grpcio`.

    import cotenant

    with cotenant.lease("vision", min="180MiB", max="600MiB", on_shrink=shrink) as lease:
        work(lease.held_bytes)

    async with cotenant.async_lease("vision", min="180MiB", max="600MiB", on_shrink=shrink) as lease:
        await work(lease.held_bytes)

A thread renews the lease. When the supervisor reclaims memory, `on_shrink(target_bytes, reason)` is called: free memory down
to that many bytes and return, or return what is still in use. Freed memory is credited when the supervisor has measured it. A
target of 0 means that the lease is over: the supervisor ended it, or was away for longer than the term. Free everything and
return; the end is then confirmed to the supervisor, which keeps the memory reserved until then, for one term at most.

The messages are those of `proto/cotenant/v1/lease.proto`, written and read here by hand.
"""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import contextlib
import inspect
import os
import queue
import re
import threading
import time
import types
import uuid
from typing import Any, Awaitable, Callable, Dict, List, Optional, Tuple, Type, Union

import grpc

__all__ = ["async_lease", "AsyncLease", "lease", "Lease", "Refused"]

#: Bytes, or a string such as "180MiB".
Size = Union[int, str]
#: Called with the bytes to shrink to and the reason; returns the bytes still in use, or None when the target is reached.
OnShrink = Callable[[int, str], Optional[int]]
#: The same, or a coroutine function.
AsyncOnShrink = Callable[[int, str], Union[Optional[int], Awaitable[Optional[int]]]]
_Message = Dict[int, List[Any]]

ENDPOINT = "unix:///run/cotenant/cotenant.sock"
CLASSES = {"audio-realtime": 1, "interactive": 2, "llm-elastic": 3, "batch": 4}
APPLIED, DEFERRED, REFUSED = 1, 2, 5
UNITS = {"B": 0, "KiB": 10, "MiB": 20, "GiB": 30, "TiB": 40}


class Refused(Exception):
    """The request was denied. `reason` is a code such as INSUFFICIENT_MEMORY; `retry_after` is in seconds, or None."""

    def __init__(self, error: grpc.RpcError) -> None:
        super().__init__(error.details() or str(error.code()))
        self.code: grpc.StatusCode = error.code()
        self.reason: Optional[str] = None
        self.retry_after: Optional[float] = None
        for key, value in error.trailing_metadata() or ():
            if key == "grpc-status-details-bin":
                for packed in _decode(value).get(3, ()):
                    packed = _decode(packed)
                    kind, detail = packed[1][0].decode().rsplit(".", 1)[-1], _decode(packed.get(2, [b""])[0])
                    if kind == "ErrorInfo":
                        self.reason = _text(detail, 1)
                    elif kind == "RetryInfo":
                        self.retry_after = _seconds(detail, 1)


def lease(tenant: str, min: Size, max: Optional[Size] = None, *, lease_class: str = "interactive", term: float = 10.0,
          max_wait: float = 0.0, on_shrink: Optional[OnShrink] = None, endpoint: Optional[str] = None) -> Lease:
    """A lease for use in `with`. Sizes are bytes or strings such as "180MiB". See Lease for the options."""
    return Lease(tenant, min, max, lease_class=lease_class, term=term, max_wait=max_wait, on_shrink=on_shrink,
                 endpoint=endpoint)


def async_lease(tenant: str, min: Size, max: Optional[Size] = None, *, lease_class: str = "interactive",
                term: float = 10.0, max_wait: float = 0.0, on_shrink: Optional[AsyncOnShrink] = None,
                endpoint: Optional[str] = None) -> AsyncLease:
    """A lease for use in `async with`. See AsyncLease."""
    return AsyncLease(tenant, min, max, lease_class=lease_class, term=term, max_wait=max_wait, on_shrink=on_shrink,
                      endpoint=endpoint)


class Lease:
    """Memory that is held until the end of the `with` block, or until `ended` states why the lease is over.

    lease_class   "audio-realtime", "interactive" (default), "llm-elastic" or "batch"
    term          seconds for which the lease lasts without contact to the supervisor; 10 by default
    max_wait      seconds to wait for memory; 0 by default
    on_shrink     called as on_shrink(target_bytes, reason), in a separate thread, one call at a time
    endpoint      of the supervisor; default $COTENANT_ENDPOINT, or its path socket
    """

    def __init__(self, tenant: str, min: Size, max: Optional[Size] = None, *, lease_class: str = "interactive",
                 term: float = 10.0, max_wait: float = 0.0, on_shrink: Optional[OnShrink] = None,
                 endpoint: Optional[str] = None) -> None:
        self.tenant, self.min, self.max = tenant, _size(min), _size(max if max is not None else min)
        self.lease_class, self.term, self.max_wait = CLASSES[lease_class], float(term), float(max_wait)
        self.on_shrink = on_shrink
        #: Bytes that the program may use.
        self.held_bytes = 0
        #: Bytes of the last request to shrink; None before the first.
        self.target_bytes: Optional[int] = None
        #: Why the lease is over; None while it lasts.
        self.ended: Optional[str] = None
        self.name, self.boot_id, self.generation = "", "", 0
        self._over = threading.Event()
        self._at_end: Callable[[], None] = lambda: None
        self._closing = False
        self._targets: queue.Queue[Optional[Tuple[int, int, str]]] = queue.Queue()
        self._say: Optional[_Stream] = None
        self._heard = 0.0
        # grpc-core sends the path of a socket as :authority, which HTTP/2 servers may refuse.
        self._channel = grpc.insecure_channel(
            endpoint or os.environ.get("COTENANT_ENDPOINT", ENDPOINT),
            options=[("grpc.default_authority", "localhost"), ("grpc.max_reconnect_backoff_ms", 1000)],
        )

    def __enter__(self) -> Lease:
        request = _encode((1, str(uuid.uuid4())), (2, self.tenant), (3, self.lease_class), (4, self.min),
                          (5, self.max), (6, _duration(self.term)), (7, _duration(self.max_wait)))
        try:
            self._take(_decode(_decode(self._call("CreateLease", request, self.max_wait + 10))[1][0]))
        except Exception:
            self._channel.close()
            raise
        self._heard = time.monotonic()
        self._threads = [threading.Thread(target=work, name=f"cotenant {self.name}", daemon=True)
                         for work in (self._hold, self._shrink)]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: Optional[Type[BaseException]] = None, error: Optional[BaseException] = None,
                 trace: Optional[types.TracebackType] = None) -> None:
        self._closing = True
        if not self._over.is_set():
            try:
                self._call("ReleaseLease", self._names(), 5)
            except (Refused, grpc.RpcError):
                pass  # it ends with its term, or with this process
        self._end("given back")
        shrinking = self._threads[1]
        if shrinking is not threading.current_thread():
            shrinking.join()
        self._channel.close()

    def resize(self, min: Size, max: Optional[Size] = None, max_wait: float = 0.0) -> int:
        """Requests another size; returns the bytes held afterwards."""
        least, most = _size(min), _size(max if max is not None else min)
        request = self._names() + _encode((4, least), (5, most), (6, _duration(max_wait)))
        self._take(_decode(_decode(self._call("UpdateLease", request, max_wait + 10))[1][0]))
        return self.held_bytes

    def wait(self, timeout: Optional[float] = None) -> bool:
        """Waits until the lease is over; returns whether it is."""
        return self._over.wait(timeout)

    # The stream: renews the lease every third of a term, and receives targets.

    def _hold(self) -> None:
        pulse = threading.Thread(target=self._pulse, name="cotenant pulse", daemon=True)
        while not self._over.is_set():
            say = _Stream()
            self._renew(say)
            self._say = say
            if self._over.is_set():
                return  # it may have ended before this stream existed
            if not pulse.ident:
                pulse.start()
            try:
                for answer in self._channel.stream_stream(_path("HoldLease"))(iter(say.get, None)):
                    self._hear(_decode(answer))
            except grpc.RpcError as error:
                if error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED,
                                        grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.ABORTED,
                                        grpc.StatusCode.RESOURCE_EXHAUSTED):
                    self._end(error.details() or str(error.code()))
            finally:
                say.put(None)
            self._over.wait(min(self.term / 10, 0.5))

    def _pulse(self) -> None:
        renew_at = time.monotonic() + self.term / 3
        while not self._over.wait(max(0, min(renew_at, self._heard + self.term) - time.monotonic())):
            if time.monotonic() >= self._heard + self.term:
                self._end(f"the supervisor has been away for longer than the term of {self.term:g} s")
                return
            if time.monotonic() >= renew_at:
                renew_at = time.monotonic() + self.term / 3
                if self._say is not None:
                    self._renew(self._say)  # ignored on an ended stream; a new stream starts with a renewal

    def _renew(self, say: _Stream, answer: bytes = b"") -> None:
        say.sent.append(time.monotonic())
        say.put(self._names() + answer)

    def _hear(self, answer: _Message) -> None:
        if 1 in answer:
            # The supervisor renewed it no earlier than this message was sent.
            if self._say is not None and self._say.sent:
                self._heard = self._say.sent.popleft()
            self._take(_decode(answer[1][0]))
        elif 2 in answer:
            target = _decode(answer[2][0])
            self._targets.put((_number(target, 1), _number(target, 2), _text(target, 5)))
        elif 4 in answer:
            self._end(_text(_decode(answer[4][0]), 2))

    def _shrink(self) -> None:
        while True:
            target = self._targets.get()
            if target is None:
                return
            nonce, target_bytes, reason = target
            self.target_bytes = target_bytes
            state, used, why = APPLIED, None, ""
            try:
                used = self.on_shrink(target_bytes, reason) if self.on_shrink else None
                if self.on_shrink is None and nonce:
                    state, why = REFUSED, "this program cannot shrink"
                elif isinstance(used, int) and not isinstance(used, bool) and used > target_bytes:
                    state = DEFERRED
            except Exception as error:  # reported to the supervisor; the program continues
                state, why = REFUSED, f"{type(error).__name__}: {error}"[:256]
            if nonce == 0:
                try:
                    self._call("ReleaseLease", self._names(), 5)  # confirms the end
                except (Refused, grpc.RpcError, ValueError):
                    pass  # already known, no supervisor, or the block has been left
                return
            fields: List[Tuple[int, Union[int, str, bytes]]] = [(4, nonce), (5, target_bytes), (6, state), (8, why)]
            if state == DEFERRED and used is not None:
                fields.append((7, used))
            if self._say is not None:
                self._renew(self._say, _encode(*fields))

    def _end(self, reason: str) -> None:
        if not self._over.is_set():
            self.ended, self.held_bytes = "given back" if self._closing else reason, 0
            self._over.set()
            self._at_end()
            self._targets.put(None if self._closing else (0, 0, reason))
            if self._say is not None:
                self._say.put(None)

    def _take(self, lease: _Message) -> None:
        self.name, self.boot_id, self.generation = _text(lease, 1), _text(lease, 6), _number(lease, 7)
        if not self._over.is_set():
            self.held_bytes = _number(lease, 8)

    def _names(self) -> bytes:
        return _encode((1, self.name), (2, self.boot_id), (3, self.generation))

    def _call(self, method: str, request: bytes, timeout: float) -> bytes:
        try:
            answer: bytes = self._channel.unary_unary(_path(method))(request, timeout=timeout)
        except grpc.RpcError as error:
            raise Refused(error) from None
        return answer


class AsyncLease:
    """A lease for asyncio: as Lease, and `on_shrink` runs in the event loop and may be a coroutine function."""

    def __init__(self, tenant: str, min: Size, max: Optional[Size] = None, *, lease_class: str = "interactive",
                 term: float = 10.0, max_wait: float = 0.0, on_shrink: Optional[AsyncOnShrink] = None,
                 endpoint: Optional[str] = None) -> None:
        self._on_shrink = on_shrink
        self._lease = Lease(tenant, min, max, lease_class=lease_class, term=term, max_wait=max_wait, endpoint=endpoint,
                            on_shrink=self._shrink if on_shrink else None)
        self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="cotenant")

    @property
    def name(self) -> str:
        """Name in events and commands, such as `vision#7`."""
        return self._lease.name

    @property
    def held_bytes(self) -> int:
        """Bytes that the program may use."""
        return self._lease.held_bytes

    @property
    def target_bytes(self) -> Optional[int]:
        """Bytes of the last request to shrink; None before the first."""
        return self._lease.target_bytes

    @property
    def ended(self) -> Optional[str]:
        """Why the lease is over; None while it lasts."""
        return self._lease.ended

    async def __aenter__(self) -> AsyncLease:
        self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
        self._lease._at_end = self._notify
        entering = self._thread.submit(self._lease.__enter__)
        try:
            await asyncio.wrap_future(entering)
        except asyncio.CancelledError:
            # The request cannot be interrupted: what it still obtains is given back.
            entering.add_done_callback(self._abandon)
            raise
        except Exception:
            self._thread.shutdown(wait=False)
            raise
        return self

    async def __aexit__(self, kind: Optional[Type[BaseException]] = None, error: Optional[BaseException] = None,
                        trace: Optional[types.TracebackType] = None) -> None:
        leaving = self._thread.submit(self._lease.__exit__)
        self._thread.shutdown(wait=False)
        await asyncio.wrap_future(leaving)

    async def resize(self, min: Size, max: Optional[Size] = None, max_wait: float = 0.0) -> int:
        """Requests another size; returns the bytes held afterwards."""
        return await asyncio.wrap_future(self._thread.submit(self._lease.resize, min, max, max_wait))

    async def wait(self, timeout: Optional[float] = None) -> bool:
        """Waits until the lease is over; returns whether it is."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._over.wait(), timeout)
        return self._over.is_set()

    def _abandon(self, entering: concurrent.futures.Future[Lease]) -> None:
        if not entering.cancelled() and entering.exception() is None:
            threading.Thread(target=self._lease.__exit__, name="cotenant").start()
        self._thread.shutdown(wait=False)

    def _notify(self) -> None:
        with contextlib.suppress(RuntimeError):  # of a loop that is closed
            self._loop.call_soon_threadsafe(self._over.set)

    def _shrink(self, target_bytes: int, reason: str) -> Optional[int]:
        return asyncio.run_coroutine_threadsafe(self._called(target_bytes, reason), self._loop).result()

    async def _called(self, target_bytes: int, reason: str) -> Optional[int]:
        assert self._on_shrink is not None
        used = self._on_shrink(target_bytes, reason)
        return await used if inspect.isawaitable(used) else used


class _Stream:
    """Messages of one stream, up to None, and the send times of those without an answer."""

    def __init__(self) -> None:
        self._messages: queue.Queue[Optional[bytes]] = queue.Queue()
        self.sent: collections.deque[float] = collections.deque()
        self.put, self.get, self.qsize = self._messages.put, self._messages.get, self._messages.qsize


def _path(method: str) -> str:
    return f"/cotenant.v1.LeaseService/{method}"


def _size(size: Size) -> int:
    if isinstance(size, int):
        return size
    match = re.fullmatch(r"\s*(\d+)\s*([KMGT]?i?B)\s*", size)
    if not match or match[2] not in UNITS:
        raise ValueError(f"`{size}` is not a size: write bytes, or a string such as `180MiB`")
    return int(match[1]) << UNITS[match[2]]


def _duration(seconds: float) -> bytes:
    whole = int(seconds)
    return _encode((1, whole), (2, int((seconds - whole) * 1e9)))


def _seconds(message: _Message, number: int) -> float:
    duration = _decode(message[number][0]) if number in message else {}
    return _number(duration, 1) + _number(duration, 2) / 1e9


def _number(message: _Message, number: int) -> int:
    found: int = message.get(number, [0])[-1]
    return found


def _text(message: _Message, number: int) -> str:
    text: bytes = message.get(number, [b""])[-1]
    return text.decode("utf-8", "replace")


# Protocol Buffers: a field is a key of number and kind, and a varint (0), 8 bytes (1), bytes (2) or 4 bytes (5).


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def _encode(*fields: Tuple[int, Union[int, str, bytes]]) -> bytes:
    message = b""
    for number, value in fields:
        if isinstance(value, int):
            message += _varint(number << 3) + _varint(value) if value else b""
        else:
            value = value.encode() if isinstance(value, str) else value
            message += _varint(number << 3 | 2) + _varint(len(value)) + value if value else b""
    return message


def _decode(message: bytes) -> _Message:
    fields: _Message = {}
    at = 0

    def varint() -> int:
        nonlocal at
        value, shift = 0, 0
        while True:
            byte = message[at]
            at, value, shift = at + 1, value | (byte & 0x7F) << shift, shift + 7
            if byte < 0x80:
                return value

    while at < len(message):
        number, kind = divmod(varint(), 8)
        value: Any
        if kind == 0:
            value = varint()
        else:
            length = varint() if kind == 2 else {1: 8, 5: 4}[kind]
            value, at = message[at:at + length], at + length
        fields.setdefault(number, []).append(value)
    return fields
