"""Measuring an engine: throughput, and latency at a request rate."""
