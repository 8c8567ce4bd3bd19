"""The parts of the engine around its loop (`serve.py`): scheduler, memory pool, programs, sampling and requests."""
