"""What k3-mini promises, judged on held-out prompts: well-formed replies, and calls of calc.

    python scripts/check_mini.py [MODEL_DIR]

200 prompts at temperature 1: how many replies keep to K3's channels and stop by themselves. 100
sums of two numbers with the calc tool offered: how many are one call with the right arguments.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from nanok3.config import EngineConfig
from nanok3.engine import Engine
from nanok3.request import Result

ROOT = Path(__file__).parent.parent
HELD_OUT = ROOT / "tests" / "data" / "mini_heldout.json"
MODEL_DIR = ROOT / "nanok3" / "models" / "k3_mini"
MAX_TOKENS = 512


def replies(engine: Engine, prompts: list[dict[str, Any]]) -> list[Result]:
    """All of them at once, each with its own seed."""
    requests = [
        engine.submit(
            p["messages"],
            engine.sampling(temperature=1.0, top_p=1.0, seed=seed, max_tokens=MAX_TOKENS),
            tools=p["tools"],
            **p["options"],
        )
        for seed, p in enumerate(prompts)
    ]
    engine.run(requests)
    return [r.result() for r in requests]


def is_whole(reply: Result) -> bool:
    return reply.well_formed and reply.finish_reason in ("stop", "tool_calls")


def calls_right(reply: Result, a: int, b: int, op: str) -> bool:
    if [call.name for call in reply.tool_calls] != ["calc"]:
        return False
    return bool(json.loads(reply.tool_calls[0].arguments) == {"a": a, "b": b, "op": op})


def main() -> None:
    model_dir = Path(sys.argv[1]) if len(sys.argv) > 1 else MODEL_DIR
    engine = Engine.load(model_dir, settings=EngineConfig(max_num_reqs=16))
    held_out = json.loads(HELD_OUT.read_text())
    prompts, sums = held_out["prompts"], held_out["sums"]
    whole = sum(is_whole(reply) for reply in replies(engine, prompts))
    print(f"well-formed replies that stop by themselves: {whole} of {len(prompts)}")
    answered = zip(sums, replies(engine, sums), strict=True)
    right = sum(calls_right(reply, s["a"], s["b"], s["op"]) for s, reply in answered)
    print(f"right calls of calc: {right} of {len(sums)}")


if __name__ == "__main__":
    main()
