"""Continuous batching: the loop, its scheduler, the pool on the device, requests and what becomes of them."""
