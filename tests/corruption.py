"""Every way to damage a file: each truncation and flipped bit of a small one, samples of a large one."""

import random
from collections.abc import Iterator

EXHAUSTIVE_BYTES = 4096
SAMPLES = 400


def truncations(data: bytes, rng: random.Random, *, samples: int | None = None) -> Iterator[bytes]:
    """Shorter forms of `data`: all of them for a small file, `samples` of them where that is given."""
    for length in _chosen(len(data), len(data), rng, samples):
        yield data[:length]


def flips(data: bytes, rng: random.Random, *, samples: int | None = None) -> Iterator[bytes]:
    """`data` with one bit flipped: each bit of a small file, `samples` of them where that is given."""
    for bit in _chosen(len(data) * 8, len(data), rng, samples):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        yield bytes(damaged)


def damages(data: bytes, rng: random.Random, *, samples: int | None = None) -> Iterator[bytes]:
    """Truncations and flips, and bytes added at the end."""
    yield from truncations(data, rng, samples=samples)
    yield from flips(data, rng, samples=samples)
    yield data + b"\0"
    yield data + data


def _chosen(count: int, size_bytes: int, rng: random.Random, samples: int | None) -> list[int]:
    if samples is None and size_bytes <= EXHAUSTIVE_BYTES:
        return list(range(count))
    return sorted(rng.sample(range(count), min(count, samples or SAMPLES)))
