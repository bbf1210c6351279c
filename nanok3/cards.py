"""GPUs by name: what they hold, and how fast they read it.

`memory` is a data sheet's figure in GB of 10**9 bytes; a driver shows a little more or less of it.
`bandwidth` is what a bulk-copy ring reads where this project has measured it, else a data sheet's,
which no kernel reaches: floors from it are lower than those of a measured card.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Card:
    memory: int  # bytes
    bandwidth: float  # bytes a second
    source: str  # of the bandwidth


NOMINAL = "nominal, of the data sheet"
CARDS = {
    "h100": Card(80_000_000_000, 3.35e12, NOMINAL),
    "h200": Card(141_000_000_000, 4.64e12, "measured: a bulk-copy ring, 4.8 nominal"),
    "b200": Card(180_000_000_000, 7.7e12, NOMINAL),
    "gb200": Card(186_000_000_000, 8.0e12, NOMINAL),
    "b300": Card(270_000_000_000, 7.7e12, NOMINAL),
    "gb300": Card(279_000_000_000, 8.0e12, NOMINAL),
}
DEFAULT = "h200"
