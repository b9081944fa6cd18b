"""npz: numpy's own format for several arrays."""

import io
import math
import zipfile
from collections.abc import Sequence

import numpy as np

from harp.data.formats.bounded import DEFLATE_RATIO, LARGEST, Array, File, first_line, read_file
from harp.errors import DataError


def names_in_npz(file: File) -> tuple[str, ...]:
    """The names of the arrays of an .npz file."""
    name, data = read_file(file, "an .npz file")
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            return tuple(member.removesuffix(".npy") for member in archive.namelist())
    except Exception as error:  # zipfile raises nearly anything on damaged bytes
        raise DataError(f"{name}: damaged ({first_line(error)}), expected an .npz file of numpy") from error


def read_npz(file: File, keys: Sequence[str]) -> dict[str, Array]:
    """Read the named arrays of numbers of an .npz file; pickled objects are refused."""
    name, data = read_file(file, "an .npz file")
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            present = [member.removesuffix(".npy") for member in archive.namelist()]
            for key in keys:
                if key not in present:
                    names = ", ".join(present)[:200] or "none"
                    raise DataError(f"{name}: no array {key} among {names}, expected {keys}")
            return {key: _array(f"{name}/{key}", archive, f"{key}.npy") for key in keys}
    except DataError:
        raise
    except Exception as error:  # zipfile and numpy's header parser raise nearly anything on damaged bytes
        raise DataError(f"{name}: damaged ({first_line(error)}), expected an .npz file of numpy") from error


def _array(name: str, archive: zipfile.ZipFile, member: str) -> Array:
    """One array, whose header must agree with the size of the member."""
    info = archive.getinfo(member)
    if info.file_size > min(LARGEST, DEFLATE_RATIO * info.compress_size + 64):
        raise DataError(f"{name}: claims {info.file_size:,} bytes, expected at most {LARGEST:,}, and real ones")
    data = archive.read(info)
    stream = io.BytesIO(data)
    version = np.lib.format.read_magic(stream)
    header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, fortran, dtype = header(stream)
    if dtype.kind not in "iufb":
        raise DataError(f"{name}: an array of {dtype}, expected numbers")
    if math.prod(shape) * dtype.itemsize != len(data) - stream.tell():
        raise DataError(f"{name}: {len(data) - stream.tell():,} bytes, expected {shape} values of {dtype.itemsize}")
    return np.frombuffer(data, dtype, offset=stream.tell()).reshape(shape, order="F" if fortran else "C")
