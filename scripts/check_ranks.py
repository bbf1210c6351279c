"""Whether several ranks reply as one process does: greedy, held-out prompts of k3-mini.

    python scripts/check_ranks.py --ranks 2 4 --prompts 50 [--draft nanok3/models/k3_mini_draft]

With a draft one process decodes without it, so the ranks' drafts are judged too. Replies are cut at
--max-tokens. Where one differs, its first difference is told with the gap of the best two logits
there, in the one process: sums over ranks round otherwise, so a near tie may fall the other way.
Fails at a difference with a gap of 1e-3 or more. --loose leaves strict mode.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from nanok3.config import EngineConfig
from nanok3.engine import Engine
from nanok3.request import Request

ROOT = Path(__file__).parent.parent
HELD_OUT = ROOT / "tests" / "data" / "mini_heldout.json"
MODEL_DIR = ROOT / "nanok3" / "models" / "k3_mini"
NEAR_TIE = 1e-3


def replies(
    gpus: int, num_prompts: int, max_tokens: int, settings: EngineConfig, draft: Path | None
) -> list[Request]:
    prompts = json.loads(HELD_OUT.read_text())["prompts"][:num_prompts]
    engine = Engine.load(MODEL_DIR, settings=settings, gpus=gpus, draft=draft)
    start = time.monotonic()
    requests = []
    for prompt in prompts:
        params = engine.sampling(temperature=0.0, max_tokens=max_tokens)
        options = prompt["options"]
        requests.append(engine.submit(prompt["messages"], params, tools=prompt["tools"], **options))
        requests[-1].gaps = []
    engine.run(requests)
    seconds = time.monotonic() - start
    total = sum(r.num_output for r in requests)
    print(f"{gpus} ranks: {total} tokens in {seconds:.1f} s, {total / seconds:.1f} a second")
    engine.close()
    return requests


def compare(right: list[Request], got: list[Request]) -> list[float]:
    """The gaps at the first differences."""
    found = []
    for i, (one, many) in enumerate(zip(right, got, strict=True)):
        if one.ids == many.ids:
            continue
        pairs = zip(one.ids, many.ids, strict=False)
        place = next((k for k, (a, b) in enumerate(pairs) if a != b), None)
        assert place is not None and one.gaps is not None, "one is the beginning of the other"
        found.append(one.gaps[place - one.num_prompt])
        print(f"prompt {i}: differs at token {place - one.num_prompt}, gap {found[-1]:.2e}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--prompts", type=int, default=50)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--draft", type=Path, default=None)
    parser.add_argument("--loose", action="store_true")
    given = parser.parse_args()
    settings = EngineConfig(strict=not given.loose)
    count = given.prompts, given.max_tokens, settings
    right = replies(1, *count, None)
    worst = 0.0
    for gpus in given.ranks:
        gaps = compare(right, replies(gpus, *count, given.draft))
        print(f"{gpus} ranks: {len(right) - len(gaps)} of {len(right)} the same")
        worst = max([worst, *gaps])
    sys.exit(1 if worst >= NEAR_TIE else 0)


if __name__ == "__main__":
    main()
