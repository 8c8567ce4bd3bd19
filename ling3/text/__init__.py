"""Text to token ids and back: tokenizer, chat template, detokenizer, and the parser of replies and tool calls."""
