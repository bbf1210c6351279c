"""Replies written by a test instead of by a model: the sampler is told what to say.

As a program, `python scripted.py REPLIES.json ARGUMENTS...`, it runs the command line in that way,
one reply a request: {"reasoning", "content", "delay": seconds a step}.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nanok3 import decode as decode_module
from nanok3.chat import Segment
from nanok3.engine import Engine
from nanok3.sampling import SampledTokens
from nanok3.tokenizer import Tokenizer


def reply_ids(tokenizer: Tokenizer, reasoning: str, content: str) -> list[int]:
    """A whole reply with thinking, as K3 writes it."""
    segments = []
    for part in (
        reasoning,
        *("<|close|>", "think", "<|sep|>", "<|open|>", "response", "<|sep|>"),
        content,
        *("<|close|>", "response", "<|sep|>", "<|close|>", "message", "<|sep|>", "<|end_of_msg|>"),
    ):
        segments.append(Segment("control" if part.startswith("<|") else "text", part))
    return tokenizer.encode_segments(segments)


class Script:
    """Stands in for `sample` while one request runs at a time."""

    def __init__(self) -> None:
        self.ids: list[int] = []

    def __call__(self, logits: Tensor, *others: Any) -> SampledTokens:
        assert len(logits) == 1, "one request at a time"
        return SampledTokens(torch.tensor([self.ids.pop(0)]), torch.tensor([True]), None)


def main(replies: list[dict[str, Any]], arguments: list[str]) -> None:
    from nanok3.cli import main as cli_main

    script = Script()
    submit, step = Engine.submit, Engine.step
    delay = 0.0

    def scripted_submit(self: Engine, *args: Any, **options: Any) -> Any:
        nonlocal delay
        request = submit(self, *args, **options)
        reply = replies.pop(0)
        assert self.tokenizer is not None
        script.ids = reply_ids(self.tokenizer, reply["reasoning"], reply["content"])
        delay = reply.get("delay", 0.0)
        return request

    def slow_step(self: Engine) -> None:
        time.sleep(delay)
        step(self)

    decode_module.sample = script
    Engine.submit, Engine.step = scripted_submit, slow_step  # type: ignore[method-assign]
    sys.argv = ["nanok3", *arguments]
    cli_main()


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()), sys.argv[2:])
