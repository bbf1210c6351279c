"""A conversation at the terminal: what is typed, what is answered, what is kept.

Every turn renders the whole conversation again, with its reasoning, and the engine goes on from
what is cached of it: all but the last token, where the answer kept to its channels and no stop
string cut it short. An answer that Ctrl-C stopped stays in the conversation as far as it came; one
stopped before its first word is dropped together with its question.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from nanok3.console import Interrupts, Printer, TextError, note
from nanok3.engine import Engine, RequestError
from nanok3.record import Asked, Recorder, recording
from nanok3.reply import Reply, message_from_reply
from nanok3.request import Request, Result
from nanok3.sampling import SamplingParams

HELP = """\
/help          this text
/reset         forget the conversation and begin anew
/save FILE     write the conversation to FILE as JSON messages; FILE must not exist
Ctrl-C         stop the answer; what it said so far stays in the conversation
Ctrl-C twice   leave; so does Ctrl-D
Begin a text that starts with a slash with a space."""


def follow(
    engine: Engine, request: Request, printer: Printer | None, interrupts: Interrupts
) -> Result:
    """The request's result, shown while it comes; Ctrl-C ends it between two steps."""
    try:
        while not request.done:
            if interrupts.count:
                engine.cancel(request)
            else:
                engine.step()
            for event in request.take_events():
                if printer is not None:
                    printer.show(event)
    finally:
        engine.cancel(request)  # nothing happens to one that is done
        if printer is not None:
            printer.finish()
    return request.result()


class ChatSession:
    """One conversation; `run` returns how it ended: True at the end of the input, False by Ctrl-C.

    Where nobody sits at the terminal, a turn that cannot be served ends it with the error.
    """

    def __init__(
        self,
        engine: Engine,
        params: SamplingParams,
        *,
        thinking: bool,
        effort: str,
        recorder: Recorder | None = None,
    ) -> None:
        self.messages: list[dict[str, Any]] = []
        self._ids: list[int] = []  # the last prompt and its reply
        self._engine = engine
        self._params = params
        self._thinking = thinking
        self._effort = effort
        self._recorder = recorder
        self._interrupts = Interrupts()
        self._attended = sys.stdin.isatty()

    def run(self) -> bool:
        with self._interrupts:
            while True:
                try:
                    line = self._interrupts.read_line()
                    if line is None:
                        return True
                    self.take(line)
                except KeyboardInterrupt:
                    note("")
                    if self._interrupts.count > 1:
                        return False
                    note("(Ctrl-C again leaves; /help)")
                except (RequestError, TextError) as error:
                    if not self._attended:
                        raise
                    note(f"nanok3: {error}")

    def take(self, line: str) -> None:
        """One line: a command, or a text to answer."""
        if not line.startswith("/"):
            if line.strip():
                self.answer(line)
            return
        command, _, argument = line.partition(" ")
        if command == "/help":
            note(HELP)
        elif command == "/reset":
            self.messages, self._ids = [], []
            note("(a new conversation)")
        elif command == "/save":
            self.save(argument.strip())
        else:
            note(f"nanok3: no command is called {command}; /help lists them")

    def answer(self, text: str) -> Result:
        """Asks, shows the answer while it comes, and keeps both. RequestError: nothing changed."""
        asked = [*self.messages, {"role": "user", "content": text}]
        request = self._engine.submit(
            asked,
            self._params,
            thinking=self._thinking,
            thinking_effort=self._effort,
            before=self._ids,
        )
        start = time.monotonic()
        with recording(self._recorder, request, Asked(asked, None, self._thinking)):
            result = follow(self._engine, request, Printer(show_thinking=True), self._interrupts)
        _report(result, time.monotonic() - start)
        reply = Reply(result.reasoning, result.text, result.tool_calls, [], result.well_formed)
        if result.text or result.reasoning or result.tool_calls:
            self.messages = [*asked, message_from_reply(reply)]
            # Without its end token an answer that ended out of place still spells what is rendered.
            ended = result.finish_reason in ("stop", "tool_calls")
            self._ids = request.ids[: -1 if ended else None]
        else:
            note("(no answer; the question is dropped)")
        return result

    def save(self, name: str) -> None:
        if not name:
            note("nanok3: /save needs the name of a file")
            return
        path = Path(name)
        text = json.dumps(self.messages, ensure_ascii=False, indent=1) + "\n"
        try:
            path = path.expanduser()
            file = path.open("x", encoding="utf-8", errors="backslashreplace")
        except FileExistsError:
            note(f"nanok3: {path} exists; name another file")
            return
        except (OSError, RuntimeError, ValueError) as error:  # no such home; a NUL in the name
            note(f"nanok3: {path} cannot be written: {getattr(error, 'strerror', error)}")
            return
        try:
            with file:
                file.write(text)
        except OSError as error:
            path.unlink(missing_ok=True)  # half a conversation looks like a whole one
            note(f"nanok3: {path} cannot be written: {error.strerror}; the conversation goes on")
            return
        note(f"(saved {len(self.messages)} messages to {path})")


def _report(result: Result, seconds: float) -> None:
    """How it ended, where that is not the ordinary way, and what it took."""
    usage = result.usage
    ends = {
        "cancelled": "stopped; ",
        "length": "cut off at the most tokens; ",
        "error": f"ended early, {result.error}; ",
    }
    note(
        f"({ends.get(result.finish_reason, '')}{usage.completion_tokens} tokens, "
        f"{usage.completion_tokens / max(seconds, 1e-9):.1f} a second; "
        f"{usage.cached_tokens} of {usage.prompt_tokens} prompt tokens were cached)"
    )
