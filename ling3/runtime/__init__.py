"""What every process needs: type checks, caches on disk, progress, strict files, messages."""
