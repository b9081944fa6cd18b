"""Where data sets come from: one kind of source a file, all of them read into a `DataSet`."""

__all__ = [
    "base",
]
