"""Seeds: every random number is drawn from a seed that names what it is for."""

import hashlib


def derive(seed: int, *purpose: int | str) -> int:
    """A seed of 63 bits for a purpose, the same on every machine and in every process.

    Work that seeds itself by (seed, epoch, step) has no hidden state: it resumes anywhere, bit for bit.
    """
    text = "/".join(str(part) for part in (seed, *purpose))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
