"""Images that stay in their files: an object in place of a tensor, which decodes the images that are indexed.

images = Streamed(encoded, Centre(224))       # shape (N, 3, 224, 224), uint8
some = images[:256]                           # an ordinary tensor: these are read and decoded now
part = images.subset(indices)                 # still in their files
"""

import hashlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from harp.data.formats.bounded import Bytes
from harp.data.formats.byte_ranges import EncodedImages, Place, read_place
from harp.data.formats.images import Centre, decode_image, pillow, strict_warnings
from harp.errors import DataError

_WORTH_THREADS = 16  # images from which several threads pay off


class Streamed(Tensor):
    """Encoded images in place of a tensor of bytes [N, 3, size, size].

    Shape, type and length are those of the decoded images. Indexing by a number, a slice, indices or a mask decodes
    only those images. All other operations of tensors are refused, because they would read all of the data.

    Arguments:
        encoded: the places of the images.
        crop: how an image is cropped and resized.
        rows: indices into `encoded`; default: all of them.
    """

    encoded: EncodedImages
    crop: Centre
    rows: Tensor

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # as torch's own wrappers do

    @staticmethod
    def __new__(cls, encoded: EncodedImages, crop: Centre, rows: Tensor | None = None) -> "Streamed":  # noqa: D102 (documented by the class)
        pillow()  # if it is missing, fail now and not in the middle of a training
        rows = torch.arange(len(encoded)) if rows is None else rows
        shape = (len(rows), 3, crop.size, crop.size)
        images: Streamed = Tensor._make_wrapper_subclass(cls, shape, dtype=torch.uint8)
        images.encoded, images.crop, images.rows = encoded, crop, rows
        return images

    def __init__(self, encoded: EncodedImages, crop: Centre, rows: Tensor | None = None) -> None:
        pass

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]  # the stub has no func
        raise DataError(f"streamed images can't be used in {func}: take some of them by index first")

    def __repr__(self) -> str:  # type: ignore[override]  # the contents are not shown
        return f"Streamed({tuple(self.shape)}, from {self.encoded.root})"

    def __deepcopy__(self, memo: Any) -> "Streamed":
        return self  # it never changes

    def __reduce_ex__(self, protocol: Any) -> Any:
        return Streamed, (self.encoded, self.crop, self.rows)

    def __getitem__(self, key: Any) -> Tensor:
        if isinstance(key, tuple):
            raise DataError(f"streamed images are indexed by image alone, not by {len(key)} axes")
        rows = self.rows[key]
        places = [self.encoded.place(row) for row in rows.reshape(-1).tolist()]
        images, failures = decode(places, self.crop.size, lambda image, _: self.crop(image))
        for reason in failures.values():
            raise DataError(reason)
        return images[0] if rows.ndim == 0 else images

    def subset(self, indices: Tensor) -> "Streamed":
        """The images at `indices`, in that order, still in their files."""
        return Streamed(self.encoded, self.crop, self.rows[indices])

    def places(self, indices: Tensor) -> list[Place]:
        """The places of the images at `indices`."""
        return [self.encoded.place(row) for row in self.rows[indices].tolist()]

    def digest(self) -> str:
        """A digest of the names and sizes of the files and of how they are cropped; no image is read."""
        digest = hashlib.blake2b(f"{self.encoded.digest()} {self.crop} {len(self)};".encode(), digest_size=16)
        digest.update(self.rows.contiguous().numpy().data)
        return digest.hexdigest()


def decode(places: Sequence[Place], size: int, crop: Callable[[Any, int], Bytes]) -> tuple[Tensor, dict[int, str]]:
    """Read and decode images to bytes [N, 3, size, size], with as many threads as torch uses.

    `crop(image, row)` gives the pixels of a Pillow image. Also returns the rows that can't be decoded, which stay zero,
    and the reasons.
    """
    images = torch.zeros(len(places), 3, size, size, dtype=torch.uint8)
    pixels, failures = images.numpy(), dict[int, str]()

    def decode_row(row: int) -> None:
        try:
            pixels[row] = crop(decode_image(read_place(places[row]), places[row].name), row)
        except DataError as error:
            failures[row] = str(error)

    threads = torch.get_num_threads() if len(places) >= _WORTH_THREADS else 1
    with strict_warnings():
        if threads == 1:
            for row in range(len(places)):
                decode_row(row)
        else:
            with ThreadPoolExecutor(threads) as pool:
                list(pool.map(decode_row, range(len(places))))
    return images, dict(sorted(failures.items()))
