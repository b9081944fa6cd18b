"""Images that stay in their files: a tensor in all but its memory, decoded where it is indexed.

images = Streamed(extents, Centre(224))       # shape (N, 3, 224, 224), uint8
some = images[:256]                           # an ordinary tensor: these are read and decoded now
part = images.subset(indices)                 # still in their files
"""

import hashlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from harp.data.formats import Bytes, Centre, Extents, Place, careful, pillow, read_place, upright
from harp.errors import DataError

_WORTH_THREADS = 16  # images


class Streamed(Tensor):
    """Encoded images in the place of a tensor of bytes [N, 3, size, size].

    Shape, type and length are those of the decoded images. Indexing by a number, a slice, indices or a mask decodes
    just these. Whatever else would be computed of a tensor is refused: it would read all of the data.
    """

    extents: Extents
    look: Centre
    rows: Tensor

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # as torch's own wrappers do

    @staticmethod
    def __new__(cls, extents: Extents, look: Centre, rows: Tensor | None = None) -> "Streamed":
        """Images of `extents`, all or those of `rows`, as `look` cuts and resizes them."""
        pillow()  # said now that it is missing, not in the middle of a training
        chosen = torch.arange(len(extents)) if rows is None else rows
        shape = (len(chosen), 3, look.size, look.size)
        made: Streamed = Tensor._make_wrapper_subclass(cls, shape, dtype=torch.uint8)
        made.extents, made.look, made.rows = extents, look, chosen
        return made

    def __init__(self, extents: Extents, look: Centre, rows: Tensor | None = None) -> None:
        pass

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]  # the stub has no func
        """Refuse to compute."""
        raise DataError(f"streamed images can't be used in {func}: take some of them by index first")

    def __repr__(self) -> str:  # type: ignore[override]  # the contents are not shown
        return f"Streamed({tuple(self.shape)}, from {self.extents.root})"

    def __deepcopy__(self, memo: Any) -> "Streamed":
        return self  # nothing of it ever changes

    def __reduce_ex__(self, protocol: Any) -> Any:
        return Streamed, (self.extents, self.look, self.rows)

    def __getitem__(self, key: Any) -> Tensor:
        if isinstance(key, tuple):
            raise DataError(f"streamed images are indexed by image alone, not by {len(key)} axes")
        rows = self.rows[key]
        places = [self.extents.place(row) for row in rows.reshape(-1).tolist()]
        images, failures = decode(places, self.look.size, lambda image, _: self.look(image))
        for reason in failures.values():
            raise DataError(reason)
        return images[0] if rows.ndim == 0 else images

    def subset(self, indices: Tensor) -> "Streamed":
        """The images at `indices`, in that order, still in their files."""
        return Streamed(self.extents, self.look, self.rows[indices])

    def places(self, indices: Tensor) -> list[Place]:
        """Where the images at `indices` are."""
        return [self.extents.place(row) for row in self.rows[indices].tolist()]

    def digest(self) -> str:
        """A digest of the names and sizes of the files and of how they are cut: no image is read."""
        found = hashlib.blake2b(f"{self.extents.digest()} {self.look} {len(self)};".encode(), digest_size=16)
        found.update(self.rows.contiguous().numpy().data)
        return found.hexdigest()


def decode(places: Sequence[Place], size: int, look: Callable[[Any, int], Bytes]) -> tuple[Tensor, dict[int, str]]:
    """Read and decode images to bytes [N, 3, size, size], by as many threads as torch computes with.

    `look(image, row)` makes the pixels of a Pillow image. Rows that can't be decoded stay zero, and are told with the
    reason.
    """
    images = torch.zeros(len(places), 3, size, size, dtype=torch.uint8)
    pixels, failures = images.numpy(), dict[int, str]()

    def one(row: int) -> None:
        try:
            pixels[row] = look(upright(read_place(places[row]), places[row].name), row)
        except DataError as error:
            failures[row] = str(error)

    threads = torch.get_num_threads()
    with careful():
        if threads == 1 or len(places) < _WORTH_THREADS:
            for row in range(len(places)):
                one(row)
        else:
            with ThreadPoolExecutor(threads) as pool:
                list(pool.map(one, range(len(places))))
    return images, dict(sorted(failures.items()))
