"""An OpenAI-compatible HTTP server over an engine (the extra `serve`)."""
