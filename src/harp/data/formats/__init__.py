"""Readers of file formats that several data sets use.

No reader trusts its file: every size in a header is compared with the bytes that are really there before anything is
allocated, no pickle can call a function, and every problem is a `DataError` that names the file and what was expected.
"""

__all__ = ["bounded", "images", "safe_pickle"]
