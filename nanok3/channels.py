"""Reads K3's reply, id by id, into reasoning, content and tool calls, as it is generated.

There is one parser: a stream takes its events as they come, `parse` folds the same events of a
whole reply. It works on ids, so text that merely looks like a marker stays text, and nothing is
held back but an unfinished marker. A reply that leaves the grammar is never an error: its text
becomes content, each departure is told in a warning, and no special token is part of any text.
Writing prompts is `chat.py`'s, the records are `reply.py`'s, ids to text is the tokenizer's.

    [reasoning close(think) open(response)] content close(response)
    [open(tools) call+ close(tools)] close(message) <|end_of_msg|>
    call = open(call, tool, index) (argument* | json) close(call)
    argument = open(argument, key, type) value close(argument)
    json = open(json, type) text close(json)

Bodies are not escaped; special tokens alone end them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from nanok3.chat import CLOSE, END_OF_MSG, OPEN, SEP
from nanok3.reply import ContentDelta, Event, ParseWarning, ReasoningDelta, Reply, ToolCall
from nanok3.tokenizer import StreamDecoder, Tokenizer

STOP_TOKENS = (END_OF_MSG, "[EOS]")  # either ends generation, and is to be pushed like any id
MAX_HEADER = 4096  # characters held back for a marker; a longer one is shown as text

_CHANNELS = ("think", "response", "tools")  # opened without attributes
_TAGS = (*_CHANNELS, "message", "call", "argument", "json")  # none is the beginning of another
_HEADER = re.compile(r'(\w+)((?: \w+="[^"]*")*)')
_ATTRIBUTE = re.compile(r' (\w+)="([^"]*)"')

# (where the parser is, the marker it meets) -> where it then is. Any other pair is a departure.
_GRAMMAR = {
    ("think", "close think"): "after think",
    ("after think", "open response"): "response",
    ("response", "close response"): "after response",
    ("after response", "open tools"): "tools",
    ("after response", "close message"): "after message",
    ("tools", "open call"): "call",
    ("call", "open argument"): "argument",
    ("argument", "close argument"): "call",
    ("call", "open json"): "json",
    ("json", "close json"): "call",
    ("call", "close call"): "tools",
    ("tools", "close tools"): "after tools",
    ("after tools", "close message"): "after message",
}


def parse(tokenizer: Tokenizer, ids: Iterable[int], thinking: bool) -> Reply:
    """The reply that `ids` hold; `thinking` as in the prompt they continue."""
    parser = ChannelParser(tokenizer, thinking)
    for token in ids:
        parser.push(token)
    parser.finish()
    return parser.reply()


@dataclass
class _PendingCall:
    """A call whose close has not come yet."""

    name: str
    pieces: list[str]  # its text so far, shown as content if the call comes to nothing
    arguments: dict[str, str] = field(default_factory=dict)  # key -> the value's JSON
    json_text: str | None = None  # of a json block, which stands instead of arguments
    key: str = ""  # of the argument that is open
    kind: str = ""  # its type
    value: list[str] = field(default_factory=list)  # what it, or the json block, holds so far


class ChannelParser:
    """The parser of one reply. It ends at a stop token or at `finish`, whichever comes first."""

    def __init__(self, tokenizer: Tokenizer, thinking: bool) -> None:
        self.ended = False
        self._tokenizer = tokenizer
        self._decoder = StreamDecoder(tokenizer)  # a fresh one after every special token
        self._where = "think" if thinking else "response"
        self._stray = False  # text outside of every channel has been shown since the last marker
        self._verb = ""  # of the marker being read, if one is
        self._header = ""  # what that marker says so far
        self._call: _PendingCall | None = None
        self._num_calls = 0
        self._exact = True
        self._complete = False
        self._warned: set[str] = set()
        self._log: list[Event] = []
        self._new = 0  # events of the log that no push has returned yet start here

    def push(self, token: int) -> list[Event]:
        """What became known with this id. Ids after the end of the reply are ignored."""
        if self.ended:
            self._warn("ids after the end of the reply were ignored")
        elif (name := self._tokenizer.special_name(token)) is None:
            self._take(self._decoder.push(token))
        else:
            self._flush()
            if name == SEP and self._verb:
                self._end_marker(separated=True)
            else:
                self._end_marker(separated=False)
                self._meet(name)
        return self._take_events()

    def finish(self) -> list[Event]:
        """What is left when no more ids come; an unfinished marker or call is left out."""
        if not self.ended:
            self._flush()
            self._verb = self._header = ""
            if self._call is not None:
                self._warn(f"the reply was cut off in a call of {self._call.name}, which is lost")
                self._call = None
            self.ended = True
        return self._take_events()

    def reply(self) -> Reply:
        """All that was reported so far, as one record."""
        return Reply(
            reasoning="".join(e.text for e in self._log if isinstance(e, ReasoningDelta)),
            content="".join(e.text for e in self._log if isinstance(e, ContentDelta)),
            tool_calls=[e for e in self._log if isinstance(e, ToolCall)],
            warnings=[e.text for e in self._log if isinstance(e, ParseWarning)],
            well_formed=self._exact and self._complete,
        )

    def _meet(self, name: str) -> None:
        """A special token that ends no marker."""
        if name in (OPEN, CLOSE):
            self._verb = "open" if name == OPEN else "close"
        elif name in STOP_TOKENS:
            self._complete = name == END_OF_MSG and self._where == "after message"
            if not self._complete:
                self._depart(f"the reply ended with {name} {self._place()}")
            self._drop_call()
            self.ended = True
        else:
            self._depart(f"the special token {name} was dropped {self._place()}")
            self._drop_call()

    # ---- text ----

    def _flush(self) -> None:
        """Take what the decoder holds back: no character goes on across a special token."""
        self._take(self._decoder.finish())
        self._decoder = StreamDecoder(self._tokenizer)

    def _take(self, text: str) -> None:
        if not self._verb:
            self._put(text)
            return
        self._header += text
        if not _may_grow(self._verb, self._header):
            self._end_marker(separated=False)

    def _put(self, text: str) -> None:
        """Text outside of markers, to where the parser is."""
        if not text:
            return
        if self._where == "think":
            self._log.append(ReasoningDelta(text))
        elif self._where == "response":
            self._log.append(ContentDelta(text))
        elif self._where in ("argument", "json"):
            self._pending().value.append(text)
        else:
            self._depart(f"there was text {self._place()}")
            if text.strip():
                self._drop_call()
            if not self._stray:
                text = text.lstrip()  # line breaks between markers are nobody's content
            if text:
                self._log.append(ContentDelta(text))
                self._stray = True

    # ---- markers ----

    def _end_marker(self, *, separated: bool) -> None:
        """Act on the marker being read, if one is. Without its separator it counts all the same:
        K3 sometimes leaves that out, and waiting for it would hide the rest of the reply."""
        verb, header = self._verb, self._header
        self._verb = self._header = ""
        if not verb:
            return
        marker = _read_marker(verb, header)
        if marker is None:
            self._depart(f"there was an unknown marker {self._place()}")
            self._drop_call()
            self._put(header)
            return
        tag, attributes, rest = marker
        if not separated:
            self._depart(f"the separator of {verb} {tag} was missing")
        self._cross(verb, tag, attributes, header)
        self._put(rest)

    def _cross(self, verb: str, tag: str, attributes: dict[str, str], header: str) -> None:
        step = f"{verb} {tag}"
        if (self._where, step) in _GRAMMAR and self._accept(step, attributes, header):
            self._move(_GRAMMAR[self._where, step])
            return
        self._depart(f"there was an unexpected {step} {self._place()}")
        if self._call is not None:
            self._drop_call()
            if (self._where, step) in _GRAMMAR:  # the marker that follows the call, too early
                self._cross(verb, tag, attributes, header)
                return
        if verb == "open" and tag in _CHANNELS:
            self._move(tag)
        elif step == "close message":
            self._move("after message")
        elif verb == "open":
            self._put(header)

    def _accept(self, step: str, attributes: dict[str, str], header: str) -> bool:
        """Note what a marker of the grammar means for a call; False if it lacks what that needs."""
        if step == "open call":
            name = attributes.get("tool", "")
            if name and attributes != {"tool": name, "index": str(self._num_calls + 1)}:
                self._depart(f"a call of {name} was not numbered as it should be")
            self._call = _PendingCall(name, [header]) if name else None
            return bool(name)
        if self._call is None:
            return True
        call = self._call
        if step in ("open argument", "open json"):
            is_json = step == "open json"
            if call.json_text is not None or (is_json and call.arguments):
                return False
            if not is_json and not {"key", "type"} <= attributes.keys():
                return False
            call.pieces.append(header)
            call.key, call.kind = attributes.get("key", ""), attributes.get("type", "")
        elif step == "close call":
            self._report(call)
            self._call = None
        else:  # close argument, close json
            text = "".join(call.value)
            call.value.clear()
            call.pieces.append(text)
            if step == "close json":
                call.json_text = text
            else:
                self._add_argument(call, text)
        return True

    def _move(self, where: str) -> None:
        self._where = where
        self._stray = False

    # ---- calls ----

    def _pending(self) -> _PendingCall:
        assert self._call is not None, "in a call without a call"
        return self._call

    def _add_argument(self, call: _PendingCall, text: str) -> None:
        if call.key in call.arguments:
            self._warn(f"argument {call.key} of {call.name} came twice; the last one counts")
        if call.kind != "string" and _is_json(text):
            call.arguments[call.key] = text.strip()
            return
        if call.kind != "string":
            self._warn(f"argument {call.key} of {call.name} is not JSON and was kept as a string")
        call.arguments[call.key] = json.dumps(text, ensure_ascii=False)

    def _report(self, call: _PendingCall) -> None:
        pairs = [f"{json.dumps(k, ensure_ascii=False)}: {v}" for k, v in call.arguments.items()]
        arguments = "{" + ", ".join(pairs) + "}" if call.json_text is None else call.json_text
        if not (arguments.lstrip().startswith("{") and _is_json(arguments)):
            self._warn(f"the arguments of a call of {call.name} are not a JSON object")
        index = self._num_calls
        self._num_calls += 1
        self._log.append(ToolCall(index, f"call_{index}", call.name, arguments))

    def _drop_call(self) -> None:
        """Give the pending call up, if there is one; what it said is then content."""
        if self._call is None:
            return
        self._warn(f"a call of {self._call.name} was malformed; its text is in the content")
        text = "\n".join([*self._call.pieces, "".join(self._call.value)])
        self._call = None
        self._move("tools")
        self._log.append(ContentDelta(text))
        self._stray = True

    # ---- events ----

    def _place(self) -> str:
        return self._where if self._where.startswith("after") else f"in {self._where}"

    def _depart(self, text: str) -> None:
        """Warn of a departure from the grammar."""
        self._exact = False
        self._warn(text)

    def _warn(self, text: str) -> None:
        if text not in self._warned:  # a broken reply may repeat itself thousands of times
            self._warned.add(text)
            self._log.append(ParseWarning(text))

    def _take_events(self) -> list[Event]:
        events = self._log[self._new :]
        self._new = len(self._log)
        return events


def _may_grow(verb: str, header: str) -> bool:
    """Whether a marker that says this so far is one, given more text or its separator."""
    if any(tag.startswith(header) for tag in _TAGS):
        return True
    has_attributes = header.startswith(tuple(f"{tag} " for tag in _TAGS if tag not in _CHANNELS))
    return verb == "open" and has_attributes and len(header) <= MAX_HEADER


def _read_marker(verb: str, header: str) -> tuple[str, dict[str, str], str] | None:
    """The tag, its attributes and the text after a missing separator; None if it is no marker."""
    for tag in _TAGS if verb == "close" else _CHANNELS:
        if header.startswith(tag):
            return tag, {}, header[len(tag) :]
    match = _HEADER.fullmatch(header)
    if match is None or match[1] not in _TAGS:
        return None
    pairs = _ATTRIBUTE.findall(match[2])
    # &amp; last: it may hide the & of another escape.
    return match[1], {k: v.replace("&quot;", '"').replace("&amp;", "&") for k, v in pairs}, ""


def _is_json(text: str) -> bool:
    try:
        json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return False
    return True


def _refuse(constant: str) -> None:
    """NaN and the infinities, which Python reads but JSON does not have."""
    raise ValueError(constant)
