"""The published file formats of image data sets, read into numpy arrays.

No reader trusts its file. Every size in a header is compared with the bytes that are really there before anything is
allocated, no pickle can call a function, and whatever is wrong ends in a `DataError` that names the file and what was
expected. Nothing here knows of torch, of splits or of batches.
"""

from harp.data.formats.archive import read_archive
from harp.data.formats.bounded import DEFLATE_RATIO, LARGEST, Array, Bytes, File, Integers, Payload, read_file
from harp.data.formats.byte_ranges import Extents, Names, Place, read_place, whole_files
from harp.data.formats.cifar import PIXELS, read_cifar_batch, read_cifar_binary
from harp.data.formats.folder import SUFFIXES, Listed, files_by_class, joined, list_image_folder, memory_size
from harp.data.formats.idx import read_idx
from harp.data.formats.images import Centre, careful, cut, pillow, planes, upright
from harp.data.formats.matlab import read_mat5
from harp.data.formats.matlab_structures import read_mat5_records
from harp.data.formats.npz import read_npz
from harp.data.formats.tar import Member, TarIndex

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
    "safe_pickle",
    "upright",
    "whole_files",
]
