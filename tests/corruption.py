"""Every way to damage a file that tests try: each truncation and flipped bit of a small one, samples of a large one."""

import random
from collections.abc import Iterator

EXHAUSTIVE_BYTES = 4096
SAMPLES = 400


def truncations(data: bytes, rng: random.Random) -> Iterator[bytes]:
    """Shorter and shorter forms of `data`, the empty one included."""
    lengths = range(len(data)) if len(data) <= EXHAUSTIVE_BYTES else sorted(rng.sample(range(len(data)), SAMPLES))
    for length in lengths:
        yield data[:length]


def flips(data: bytes, rng: random.Random, *, every: int = 1) -> Iterator[bytes]:
    """`data` with one bit flipped: each bit of a small file (or one in `every`), a sample of a large one."""
    total = len(data) * 8
    bits = range(0, total, every) if len(data) <= EXHAUSTIVE_BYTES else sorted(rng.sample(range(total), SAMPLES))
    for bit in bits:
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        yield bytes(damaged)


def damages(data: bytes, rng: random.Random, *, every: int = 1) -> Iterator[bytes]:
    """Truncations and flips, and bytes added at the end."""
    yield from truncations(data, rng)
    yield from flips(data, rng, every=every)
    yield data + b"\0"
    yield data + data
