"""Seeds for random numbers, derived from one seed and the purpose of the numbers."""

import hashlib


def derive(seed: int, *purpose: int | str) -> int:
    """A 63-bit seed for a purpose, the same on every machine and in every process.

    Work that derives its seeds from (seed, epoch, step) has no hidden random state: it can resume at any step with
    identical results.
    """
    text = "/".join(str(part) for part in (seed, *purpose))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
