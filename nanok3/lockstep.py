"""Engines in step: what rank 0 is asked to do, every rank does, in the same order.

Rank 0 alone has people. Before each of its steps it sends one message: who has come, who was
cancelled, and that a step follows. Every rank then schedules, computes, draws and ends requests by
itself; since all hold the same bits, all do the same. The message carries a digest of how far rank
0's requests are, so that a rank which does otherwise ends all of them instead of spoiling replies.

How a message travels is for `comm/host.py`; what a step does, for the engine.
"""

from __future__ import annotations

import pickle
import signal
import sys
import threading
import traceback
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import NoReturn, TypeVar

from nanok3.comm.exchange import PeerLost
from nanok3.comm.host import Host
from nanok3.exits import DONE, LOST
from nanok3.request import Request
from nanok3.sampling import SamplingParams

Done = TypeVar("Done")


@dataclass(frozen=True)
class Submit:
    number: int
    ids: list[int]
    params: SamplingParams
    stop_ids: frozenset[int]
    max_tokens: int
    thinking: bool | None
    grammar: str | None  # its text
    keeps_gaps: bool


@dataclass(frozen=True)
class Cancel:
    number: int


@dataclass(frozen=True)
class Step:
    digest: int  # of the requests as they are before it


@dataclass(frozen=True)
class Logits:
    ids: list[int]


@dataclass(frozen=True)
class End:
    """Of the run, as it should be."""


Event = Submit | Cancel | Step | Logits | End


def digest(requests: dict[int, Request]) -> int:
    """How far each of these is, in the order in which they came."""
    now = [(n, len(r.ids), r.ids[-1], r.num_cached, r.done) for n, r in requests.items()]
    return zlib.crc32(repr(now).encode())


class Leader:
    """Rank 0's end."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._requests: dict[int, Request] = {}  # that the others know, or will, until done
        self._numbers = 0
        self._outbox: list[Cancel | tuple[int, Request, bool | None]] = []
        self._lost: str | None = None
        host.start_heartbeat()

    def submit(self, request: Request, thinking: bool | None) -> None:
        self._outbox.append((self._numbers, request, thinking))
        self._requests[self._numbers] = request
        self._numbers += 1

    def cancel(self, request: Request) -> None:
        """To be called before the request ends here."""
        number = next((n for n, r in self._requests.items() if r is request), None)
        if number is not None and not request.done:
            self._outbox.append(Cancel(number))

    def step(self, move: Callable[[], None]) -> None:
        """`move` on all ranks."""
        self._lead(Step(digest(self._requests)), move)
        self._requests = {n: r for n, r in self._requests.items() if not r.done}

    def logits(self, ids: Sequence[int], move: Callable[[], Done]) -> Done:
        return self._lead(Logits(list(ids)), move)

    def end(self) -> bool:
        """Lets the others end; False if they cannot be told."""
        if self._lost is None:
            try:
                with self._host.busy():
                    self._host.send(pickle.dumps([End()]))
            except PeerLost as error:
                self._lost = str(error)
        self._host.close()
        return self._lost is None

    def _lead(self, event: Step | Logits, move: Callable[[], Done]) -> Done:
        """The message, then this rank's part. An error ends the requests, and serving."""
        if self._lost is not None:
            raise PeerLost(self._lost)
        with self._host.busy(), uninterrupted():
            try:
                self._host.send(pickle.dumps([*self._take_outbox(), event]))
                return move()
            except ValueError:  # a refusal, which the others come to as well
                raise
            except Exception as error:
                self._lose(error)
                raise

    def _lose(self, error: Exception) -> None:
        self._host.stop()
        self._lost = str(error)
        if not isinstance(error, PeerLost):
            self._lost = f"a step failed on rank 0: {error!r}"
            self._host.fail(self._lost)
        for request in self._requests.values():
            if not request.done:
                request.finish("error", self._lost)

    def _take_outbox(self) -> Iterator[Event]:
        for item in self._outbox:
            yield item if isinstance(item, Cancel) else submitted(*item)
        self._outbox = []


def submitted(number: int, request: Request, thinking: bool | None) -> Submit:
    return Submit(
        number,
        request.ids[: request.num_prompt],
        request.params,
        request.stop_ids,
        request.max_tokens,
        thinking,
        None if request.grammar is None else request.grammar.lark,
        request.gaps is not None,
    )


@dataclass(frozen=True)
class Moves:
    """What an engine does when it is told."""

    submit: Callable[[Submit], Request]
    cancel: Callable[[Request], None]
    step: Callable[[], None]
    logits: Callable[[list[int]], object]


def follow(host: Host, moves: Moves) -> NoReturn:
    """Does what rank 0 says, and ends the process when that ends."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for rank 0
    try:
        _obey(host, moves)
    except PeerLost as error:
        print(f"rank {host.place.rank} ends: {error}", file=sys.stderr, flush=True)
        sys.exit(LOST)
    sys.exit(DONE)


def _obey(host: Host, moves: Moves) -> None:
    """Raises PeerLost, or whatever a step raises; rank 0 is then told."""
    requests: dict[int, Request] = {}
    try:
        while True:
            for event in pickle.loads(host.receive()):
                match event:
                    case Submit():
                        requests[event.number] = moves.submit(event)
                    case Cancel():
                        moves.cancel(requests[event.number])
                    case Step():
                        if digest(requests) != event.digest:
                            raise RuntimeError("its requests are not where those of rank 0 are")
                        moves.step()
                        requests = {n: r for n, r in requests.items() if not r.done}
                    case Logits():
                        try:
                            moves.logits(event.ids)
                        except ValueError:
                            traceback.print_exc()  # rank 0 refuses it as well
                    case End():
                        return
    except Exception as error:
        host.fail(str(error) if isinstance(error, PeerLost) else repr(error))
        raise


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Ctrl-C comes at the end of this: half a step would leave the ranks in different places."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    is_held = False

    def hold(number: int, frame: FrameType | None) -> None:
        nonlocal is_held
        is_held = True

    before = signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if is_held:
            signal.raise_signal(signal.SIGINT)
