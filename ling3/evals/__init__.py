"""Evaluations on the engine, in process: prompt files, answer parsers, resumable runs, perplexity, and a harness."""
