"""Ling-3's layers, one idea a file. Their fields are the checkpoint's names."""
