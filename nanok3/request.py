"""One prompt on its way to a reply: its ids, its place in the caches, its text, how it ended.

The engine gives a request one id at a time with `take`; what comes out are the events of
`reply.py`. Whether the prompt was a conversation (a reply in channels) or bare ids (plain text, or
no text where the checkpoint has no tokenizer) is decided here and nowhere else.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from nanok3.channels import ChannelParser
from nanok3.grammar import Grammar
from nanok3.reply import ContentDelta, Event, ReasoningDelta, Reply, ToolCall
from nanok3.sampling import SamplingParams
from nanok3.stop import StopChecker, finish_reason
from nanok3.tokenizer import StreamDecoder, Tokenizer


@dataclass(frozen=True)
class TokenLogprob:
    """Natural-log probabilities under the model, before temperature, penalties and filters."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]  # the likeliest ids, likeliest first


@dataclass(frozen=True)
class Usage:
    """Counts of tokens."""

    prompt_tokens: int
    cached_tokens: int  # of the prompt, found in a snapshot instead of being computed
    completion_tokens: int


@dataclass(frozen=True)
class Result:
    """A finished request.

    `finish_reason`: "stop" (end of message, a stop id or a stop string), "tool_calls" (the same,
    and the reply calls tools), "length" (max_tokens or the end of the context), "cancelled", or
    "error" with the reason in `error`.
    """

    token_ids: list[int]
    text: str
    reasoning: str
    tool_calls: list[ToolCall]
    finish_reason: str
    usage: Usage
    error: str | None = None
    warnings: list[str] = field(default_factory=list)
    well_formed: bool = True  # the reply kept to K3's channels and ended by itself
    logprobs: list[TokenLogprob] | None = None


class PlainText:
    """The reply to bare ids: everything is content."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._decoder = StreamDecoder(tokenizer)

    def push(self, token: int) -> list[Event]:
        return [ContentDelta(self._decoder.push(token))]

    def finish(self) -> list[Event]:
        return [ContentDelta(self._decoder.finish())]

    def reply(self) -> Reply:
        return Reply("", "", [], [], True)


class Request:
    """State of one request; the engine moves it, `result()` reads it when `done`."""

    def __init__(
        self,
        prompt_ids: list[int],
        params: SamplingParams,
        stop_ids: frozenset[int],
        max_tokens: int,
        tokenizer: Tokenizer | None,
        thinking: bool | None,
        grammar: Grammar | None = None,
    ) -> None:
        """`thinking` is None for bare ids; a conversation's says which channel is open."""
        self.ids = list(prompt_ids)  # prompt, then output
        self.num_prompt = len(prompt_ids)
        self.params = params
        self.stop_ids = stop_ids
        self.max_tokens = max_tokens
        self.grammar = grammar  # what the next id may be; None = anything
        self.num_cached = 0  # of `ids`, in the caches
        self.num_reused = 0  # of those, from a snapshot
        self.page_keys: list[int] | None = None  # of its prompt, once it is looked at (reuse.py)
        self.in_flight = False  # a pass has begun, and `num_cached` does not say what it did
        self.slot: int | None = None
        self.blocks: list[int] = []
        self.finish_reason: str | None = None
        self.error: str | None = None
        self.logprobs: list[TokenLogprob] = []
        # Of each output id, best logit less second best; kept where it is a list (replay.py).
        self.gaps: list[float] | None = None
        self._parser: ChannelParser | PlainText | None = None
        self._silent_ids: set[int] = set()  # stop ids that are no part of the text
        if tokenizer is not None:
            channels = thinking is not None
            self._parser = (
                ChannelParser(tokenizer, bool(thinking)) if channels else PlainText(tokenizer)
            )
            # The parser of channels, and nobody else, has to meet the special ids that end a reply.
            self._silent_ids = {i for i in stop_ids if not channels or i < tokenizer.num_ranks}
        self._stop = StopChecker(params.stop)
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._events: list[Event] = []

    @property
    def num_output(self) -> int:
        return len(self.ids) - self.num_prompt

    @property
    def num_pending(self) -> int:
        """Ids that the model has not seen; 1 is a decode row, more are prefill."""
        return len(self.ids) - self.num_cached

    @property
    def done(self) -> bool:
        return self.finish_reason is not None

    def take(self, token: int) -> None:
        """The next id of the output. Ends the request if it is the last one."""
        self.ids.append(token)
        met_stop_id = token in self.stop_ids
        try:
            if self.grammar is not None:
                self.grammar.take(token)
            met_stop_text = token not in self._silent_ids and self._emit(self._read(token))
        except Exception as error:  # one request's text must not end the others
            self.finish("error", describe(error))
            return
        reason = finish_reason(
            met_stop_id=met_stop_id,
            met_stop_text=met_stop_text,
            num_output=self.num_output,
            max_tokens=self.max_tokens,
        )
        if reason is not None:
            self.finish(reason)

    def finish(self, reason: str, error: str | None = None) -> None:
        """Ends the request; what was held back comes out. Happens once."""
        if self.done:
            return
        self.finish_reason, self.error = reason, error
        if self._parser is None:
            return
        try:
            if not self._stop.stopped:
                self._emit(self._parser.finish())
            if not self._stop.stopped:
                self._show(ContentDelta(self._stop.finish()))
            if reason == "stop" and self._parser.reply().tool_calls:
                self.finish_reason = "tool_calls"
        except Exception as failure:
            self.finish_reason, self.error = "error", error or describe(failure)

    def take_events(self) -> list[Event]:
        """What came out since the last call."""
        events, self._events = self._events, []
        return events

    def result(self) -> Result:
        assert self.finish_reason is not None, "the request still runs"
        reply = self._parser.reply() if self._parser is not None else Reply("", "", [], [], True)
        warning = self.grammar.warning if self.grammar is not None else None
        return Result(
            token_ids=self.ids[self.num_prompt :],
            text="".join(self._content),
            reasoning="".join(self._reasoning),
            tool_calls=reply.tool_calls,
            finish_reason=self.finish_reason,
            usage=Usage(self.num_prompt, self.num_reused, self.num_output),
            error=self.error,
            warnings=reply.warnings + ([warning] if warning is not None else []),
            well_formed=reply.well_formed and self.error is None,
            logprobs=self.logprobs if self.params.logprobs is not None else None,
        )

    def _read(self, token: int) -> list[Event]:
        return [] if self._parser is None else self._parser.push(token)

    def _emit(self, events: list[Event]) -> bool:
        """Passes events on; content goes through the stop strings. True if one was met."""
        for event in events:
            if not isinstance(event, ContentDelta):
                self._show(event)
                continue
            armed = self.num_output > self.params.min_tokens
            text, stopped = self._stop.push(event.text, armed=armed)
            self._show(ContentDelta(text))
            if stopped:
                return True
        return False

    def _show(self, event: Event) -> None:
        if isinstance(event, ContentDelta | ReasoningDelta):
            if not event.text:
                return
            (self._content if isinstance(event, ContentDelta) else self._reasoning).append(
                event.text
            )
        self._events.append(event)


def describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
