"""Services for every process: type checks, caches on disk, progress, strict reading of files, messages."""
