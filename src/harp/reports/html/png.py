"""Pictures inside a page: raw bytes to PNG (ISO/IEC 15948), grey or in colour, as a data URI."""

import base64
import struct
import zlib


def encode(pixels: bytes, width: int, height: int, channels: int) -> bytes:
    """A PNG file of rows of pixels, one or three bytes each."""
    if channels not in (1, 3) or len(pixels) != width * height * channels:
        raise ValueError(f"{len(pixels)} bytes are no {width}x{height} picture of {channels} channels")
    stride = width * channels
    rows = b"".join(b"\0" + pixels[start : start + stride] for start in range(0, len(pixels), stride))
    header = struct.pack(">IIBBBBB", width, height, 8, 2 if channels == 3 else 0, 0, 0, 0)
    chunks = (b"IHDR", header), (b"IDAT", zlib.compress(rows, 9)), (b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(name, content) for name, content in chunks)


def _chunk(name: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))


def uri(file: bytes) -> str:
    """A PNG file as the address of an image that needs no other file."""
    return "data:image/png;base64," + base64.b64encode(file).decode("ascii")
