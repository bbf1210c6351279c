"""What K3 answers, as records: the events of a stream and the whole reply; and back to a message.

`channels.py` makes them from ids; `chat.py` renders the message again in the next prompt.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ReasoningDelta:
    text: str


@dataclass(frozen=True)
class ContentDelta:
    text: str


@dataclass(frozen=True)
class ToolCall:
    """A complete call; one that was cut off is never reported."""

    index: int  # its place in the reply, from 0
    id: str  # unique within the reply
    name: str
    arguments: str  # JSON of an object, unless a warning says that the model wrote something else


@dataclass(frozen=True)
class ParseWarning:
    """One sentence; the same sentence comes once a reply."""

    text: str


Event = ReasoningDelta | ContentDelta | ToolCall | ParseWarning


@dataclass(frozen=True)
class Reply:
    """A whole reply."""

    reasoning: str
    content: str
    tool_calls: list[ToolCall]
    warnings: list[str]
    well_formed: bool  # followed the grammar to the letter and ended with <|end_of_msg|>


def message_from_reply(reply: Reply) -> dict[str, Any]:
    """The assistant message with which a conversation goes on; K3 wants its reasoning back."""
    message: dict[str, Any] = {"role": "assistant", "content": reply.content}
    if reply.reasoning:
        message["reasoning_content"] = reply.reasoning
    if reply.tool_calls:
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in reply.tool_calls
        ]
    return message
