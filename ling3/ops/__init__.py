"""Operators as pure functions of arrays: for each a Protocol and a plain form, and kernels in `cpu` and `gpu`."""
