"""The published file formats of image data sets, read into numpy arrays.

No reader trusts its file. Every size in a header is compared with the bytes that are really there before anything is
allocated, no pickle can call a function, and whatever is wrong ends in a `DataError` that names the file and what was
expected. Nothing here knows of torch, of splits or of batches.
"""

from harp.readers.archive import read_archive
from harp.readers.cifar import PIXELS, read_cifar_batch, read_cifar_binary
from harp.readers.extents import Extents, Names, Place, read_place, whole_files
from harp.readers.folder import (
    SUFFIXES,
    Listed,
    files_by_class,
    joined,
    list_image_folder,
    memory_size,
)
from harp.readers.idx import read_idx
from harp.readers.mat5 import read_mat5
from harp.readers.npz import read_npz
from harp.readers.payload import DEFLATE_RATIO, LARGEST, Array, Bytes, File, Integers, Payload, read_file
from harp.readers.pictures import Centre, careful, cut, pillow, planes, upright
from harp.readers.structures import read_mat5_records
from harp.readers.tar import Member, TarIndex

__all__ = [
    "DEFLATE_RATIO",
    "LARGEST",
    "PIXELS",
    "SUFFIXES",
    "Array",
    "Bytes",
    "Centre",
    "Extents",
    "File",
    "Integers",
    "Listed",
    "Member",
    "Names",
    "Payload",
    "Place",
    "TarIndex",
    "careful",
    "cut",
    "files_by_class",
    "joined",
    "list_image_folder",
    "memory_size",
    "pillow",
    "planes",
    "read_archive",
    "read_cifar_batch",
    "read_cifar_binary",
    "read_file",
    "read_idx",
    "read_mat5",
    "read_mat5_records",
    "read_npz",
    "read_place",
    "upright",
    "whole_files",
]
