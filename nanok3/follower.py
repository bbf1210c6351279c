"""`python -m nanok3.follower PARENT DIR SETTINGS [DRAFT]`: a rank other than 0, of `launch.py`.

Its place comes from the environment, as torchrun gives it; PARENT is the process id of rank 0,
SETTINGS an `EngineConfig` as JSON. What it writes to stderr is its log.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time

from nanok3.config import EngineConfig
from nanok3.exits import LOST

WATCH_S = 0.5


def main(parent: str, model_dir: str, settings: str, draft: str | None = None) -> None:
    threading.Thread(target=end_with, args=(int(parent),), daemon=True).start()
    from nanok3.engine import Engine  # takes seconds, in which rank 0 may be gone

    chosen = EngineConfig(**json.loads(settings))
    # This follows rank 0 and ends the process.
    Engine.load(model_dir, device=chosen.device, dtype=chosen.dtype, settings=chosen, draft=draft)


def end_with(parent: int) -> None:
    """Nobody else tells of rank 0's death before it has a store."""
    while os.getppid() == parent:
        time.sleep(WATCH_S)
    print("rank 0 is gone", file=sys.stderr, flush=True)
    os._exit(LOST)


if __name__ == "__main__":
    main(*sys.argv[1:])
