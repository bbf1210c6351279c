"""Random numbers by counting: a number is a hash of (seed, position, stream), never a next value.

So a token's number depends on nothing but its own request and place, whatever else runs beside it,
and needs no state that would have to be rolled back with a rejected draft. The hash is splitmix64's
scrambling, once for each of the three words, in whole numbers: the same bits on every device.
"""

from __future__ import annotations

from torch import Tensor

# What a number is for. One drawn more than once at a position needs a fresh stream each time, such
# as `stream + NUM_STREAMS * step`: a draft that was rejected has used its number up.
TARGET, DRAFT, ACCEPT, RESIDUAL = range(4)
NUM_STREAMS = 4

_GOLDEN = 0x9E3779B97F4A7C15 - 2**64  # splitmix64's constants, as signed numbers
_MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX_2 = 0x94D049BB133111EB - 2**64


def uniform(seeds: Tensor, positions: Tensor, stream: int | Tensor) -> Tensor:
    """[T] f64 in [0, 1), from `seeds` [T] i64, `positions` [T] and a stream for all or each [T]."""
    state = _mix(seeds + _GOLDEN)
    state = _mix(state + positions)
    state = _mix(state + stream)
    return _shift_right(state, 11).double() * 2.0**-53


def _mix(x: Tensor) -> Tensor:
    """64 bits scrambled, one to one; i64 products wrap."""
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """A shift that brings in zeros, where `>>` alone copies the sign."""
    return x.bitwise_right_shift(bits).bitwise_and(2 ** (64 - bits) - 1)
