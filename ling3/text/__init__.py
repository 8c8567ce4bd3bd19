"""From text to ids and back: tokenizer, chat template, detokenizer."""
