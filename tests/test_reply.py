"""That a reply can be put back in its conversation."""

from __future__ import annotations

from nanok3.reply import Reply, ToolCall, message_from_reply


def test_message_from_reply() -> None:
    call = ToolCall(0, "call_0", "f", '{"a": 1}')
    assert message_from_reply(Reply("why", "so", [call], ["w"], True)) == {
        "role": "assistant",
        "content": "so",
        "reasoning_content": "why",
        "tool_calls": [
            {
                "id": "call_0",
                "type": "function",
                "function": {"name": "f", "arguments": '{"a": 1}'},
            }
        ],
    }
    assert message_from_reply(Reply("", "", [], [], False)) == {
        "role": "assistant",
        "content": "",
    }
