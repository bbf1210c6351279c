"""Writes what `nanok3 plan` prints now into docs/memory.md, in place of what it printed before.

python scripts/write_plans.py
"""

from __future__ import annotations

import io
import sys
from contextlib import redirect_stdout
from pathlib import Path

from nanok3.cli import run

PAGE = Path(__file__).parents[1] / "docs" / "memory.md"


def printed(command: str) -> str:
    text = io.StringIO()
    with redirect_stdout(text):
        code = run(command.split()[2:])
    assert code == 0, command
    return f"{command}\n{text.getvalue()}"


def main() -> int:
    parts = PAGE.read_text().split("```\n")
    parts[1::2] = [printed(part.splitlines()[0]) for part in parts[1::2]]
    PAGE.write_text("```\n".join(parts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
