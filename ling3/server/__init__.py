"""An HTTP server of OpenAI's and Anthropic's protocols over an engine (the extra `serve`)."""
