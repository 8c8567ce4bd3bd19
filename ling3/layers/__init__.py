"""The layers, one idea per file. Their fields have the checkpoint's names."""
