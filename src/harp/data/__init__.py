"""Data sets, file formats and batches."""

__all__ = ["batches", "dataset", "datasets", "decodable", "formats", "registry", "streaming", "webdataset"]
