"""What a reply may say next, where a request fixes its form: which ids are left after each id.

A request with a JSON `response_format`, or with tools that it must call, has a `Grammar`. The
runner forbids what `mask` leaves out and the request passes every id of its output to `take`. The
grammar covers the whole reply after the thinking, so its value stands in the response channel and
nowhere else, and only the closing markers can follow it. Thinking is free text, and ends.

Grammars are texts in the Lark form of llguidance, which compiles them and finds the ids. It is
given the bytes of every id and never text, so that how an id would be spelled cannot matter.
Markers are special ids, which no text or JSON can contain. Calls are written in `tool_grammar.py`.

V ids in the vocabulary, D drafts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nanok3.chat import CLOSE, END_OF_MSG, OPEN, SEP
from nanok3.tokenizer import Tokenizer
from nanok3.tool_grammar import TEXT, Markers, json_rule, literal, tool_rules

_TO_BOOL = bytes([0] + [1] * 255)


class TokenTable:
    """The bytes of a vocabulary as llguidance wants them; one for all grammars of an engine."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Raises ValueError where llguidance is not installed."""
        try:  # here, so that all else works without it
            import llguidance
        except ImportError:
            raise ValueError(
                "response_format and tool_choice=required need the package llguidance; "
                "install it with pip install llguidance"
            ) from None
        self._matcher = llguidance.LLMatcher
        # Its marker of special ids is the byte FF, which UTF-8 has not: such ids become nothing.
        ordinary = [tokenizer.token_bytes(id) for id in range(tokenizer.num_ranks)]
        names = [tokenizer.token_bytes(id) for id in range(len(ordinary), tokenizer.vocab_size)]
        table = _Table(
            tokens=[b"" if b"\xff" in token else token for token in ordinary] + names,
            special_token_ids=list(range(len(ordinary), tokenizer.vocab_size)),
            eos_token_id=tokenizer.special_id(END_OF_MSG),
        )
        self.tokens = llguidance.LLTokenizer(llguidance.TokenizerWrapper(table))
        self.close = tokenizer.special_id(CLOSE)
        self.markers = Markers(*(f"<[{tokenizer.special_id(m)}]>" for m in (OPEN, CLOSE, SEP)))
        self.thinking = torch.zeros(tokenizer.vocab_size, dtype=torch.bool)  # [V] allowed there
        self.thinking[: tokenizer.num_ranks] = True
        self.thinking[self.close] = True

    def problem(self, lark: str) -> str:
        """What makes this no grammar, or nothing."""
        error = self._matcher.validate_grammar(self._matcher.grammar_from_lark(lark), self.tokens)
        if not error or error.startswith("WARNING"):
            first = self.matcher(lark)
            begins = any(first.compute_logit_bias()) and not first.is_error()
            return "" if begins else "it allows no value"
        text = re.split(r"\n\s*\d+ \|", error)[0]  # what follows shows the grammar
        return " ".join(re.sub(r"^.*failed to compile JSON schema: ", "", text).split())

    def matcher(self, lark: str) -> Any:
        return self._matcher(self.tokens, self._matcher.grammar_from_lark(lark), log_level=0)


@dataclass(frozen=True)
class _Table:
    """What llguidance reads of a tokenizer."""

    tokens: list[bytes]
    special_token_ids: list[int]
    eos_token_id: int
    bos_token_id: None = None

    def __call__(self, text: str | bytes) -> list[int]:
        """Encoding, which it wants for ids that it would put in by itself; it is not asked to."""
        raw = text if isinstance(text, bytes) else text.encode()
        return [self.tokens.index(bytes([byte])) for byte in raw]


class Grammar:
    """How far one reply has come in its grammar."""

    def __init__(self, table: TokenTable, matcher: Any, thinking: bool, lark: str) -> None:
        self.lark = lark  # the text that `matcher` was made of
        self.warning: str | None = None  # why nothing is enforced any more
        self._table = table
        self._matcher = matcher
        self._thinking = thinking  # the channel is open, and no id of the grammar has come yet

    def mask(self) -> Tensor | None:
        """Which ids may come next, bool [V]; None if any may."""
        if self.warning is not None:
            return None
        if self._thinking:
            return self._table.thinking
        try:
            allowed = self._matcher.compute_logit_bias().translate(_TO_BOOL)  # a byte for each id
        except Exception as error:  # it must not end the step that other requests are in
            self._give_up(str(error))
            return None
        if self._matcher.is_error() or 1 not in allowed:
            self._give_up()
            return None
        return torch.frombuffer(bytearray(allowed), dtype=torch.bool)

    def take(self, token: int) -> None:
        """The next id. One that no mask would let through ends the enforcing, with a warning."""
        if self.warning is not None:
            return
        if self._thinking and token != self._table.close:
            return
        self._thinking = False
        try:
            if not self._matcher.consume_token(token):
                self._give_up()
        except Exception as error:
            self._give_up(str(error))

    def copy(self) -> Grammar:
        """The same state, independent of this one."""
        twin = Grammar(self._table, self._matcher.deep_copy(), self._thinking, self.lark)
        twin.warning = self.warning
        return twin

    def masks(self, drafts: Sequence[int]) -> Tensor:
        """The masks before each draft and after the last, bool [D + 1, V]; the state stays.

        After a draft that is itself not allowed, which no verification can accept, all are.
        """
        ahead = self.copy()
        rows = torch.ones(len(drafts) + 1, len(self._table.thinking), dtype=torch.bool)
        for i in range(len(rows)):
            mask = ahead.mask()
            if mask is None:
                break
            rows[i] = mask
            if i == len(drafts) or not mask[drafts[i]]:
                break
            ahead.take(drafts[i])
        return rows

    def _give_up(self, reason: str | None = None) -> None:
        reason = self._matcher.get_error() if reason is None else reason
        reason = " ".join(reason.split()) or "no id is left"
        self.warning = f"the form of the reply was not enforced to its end: {reason[:200]}"


def build_grammar(
    table_of: Callable[[], TokenTable],
    *,
    tools: Sequence[Mapping[str, Any]],
    thinking: bool,
    tool_choice: str | None,
    response_format: Mapping[str, Any] | None,
) -> Grammar | None:
    """The grammar of a conversation's reply, None if it is free; `chat.render` took the arguments.

    Raises ValueError with what in a schema is not supported.
    """
    schema = _schema(response_format)
    must_call = tool_choice == "required"
    if schema is None and not must_call:
        return None
    table = table_of()
    if must_call and not tools:
        raise ValueError("tool_choice is required, but no tools are given; declare at least one")
    m = table.markers
    rules = ['%llguidance {"no_forcing": true}']  # fixed text in any tokens that spell it
    value = "text"
    if schema is not None:
        value = "value"
        rules.append(f"value: {json_rule(schema)}")
        if problem := table.problem(f"start: value\n{rules[-1]}"):
            raise ValueError(f"response_format: this schema is not supported: {problem}")
    may_call = bool(tools) and tool_choice != "none"
    if may_call:
        rules += tool_rules(tools, m, table.problem)
    end_thinking = f"{m.close} {literal('think')} {m.sep} {m.open} {literal('response')} {m.sep}"
    end_response = f"{m.close} {literal('response')} {m.sep}"
    forms = [] if must_call else [f"value {end_response}"]
    if may_call:
        forms.append(f"{value}{'?' if schema is not None else ''} {end_response} tools")
    rules += [
        f"start: {end_thinking if thinking else ''} reply {m.close} {literal('message')} {m.sep}",
        f"reply: {' | '.join(forms)}",
        f"text: {TEXT}",
    ]
    lark = "\n".join(rules)
    if problem := table.problem(lark):
        raise ValueError(f"the form of the reply cannot be enforced: {problem}")
    return Grammar(table, table.matcher(lark), thinking, lark)


def _schema(response_format: Mapping[str, Any] | None) -> dict[str, Any] | None:
    kind = None if response_format is None else response_format.get("type")
    if response_format is None or kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    return dict(json.loads(json.dumps(response_format["json_schema"]["schema"])))
