"""A small byte-level BPE tokenizer in the Hugging Face format.

Its vocabulary has all 256 bytes, so that any text round-trips, six control tokens in Ling-3's form, every number 0..99
as one token, and the words of the corpus.
"""

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT = "<|endoftext|>"
END_OF_TURN = "<|role_end|>"
CONTROL_TOKENS = (END_OF_TEXT, END_OF_TURN, "<role>", "</role>", "<think>", "</think>")

# An operator includes the blanks around it, and a full stop the blank before a number; digits are split into pieces of
# one or two; the rest is split as usual into words with their leading blank, punctuation, and white space.
PIECES = r" [-+×=] (?=[0-9])|\. (?=[0-9])|[0-9]{1,2}| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\n+|\s+(?!\S)|\s"

CHAT_TEMPLATE = (
    "{%- set thinking = enable_thinking is defined and enable_thinking -%}"
    "{%- set system = messages[0].content + '\\n' if messages and messages[0].role == 'system' else '' -%}"
    "{{- '<role>SYSTEM</role>' + system + 'detailed thinking ' + ('on' if thinking else 'off') + '<|role_end|>' -}}"
    "{%- for message in messages -%}"
    "{%- if message.role == 'user' -%}"
    "{{- '<role>HUMAN</role>' + message.content + '<|role_end|>' -}}"
    "{%- elif message.role == 'assistant' -%}"
    "{{- '<role>ASSISTANT</role>\\n<think></think>' + message.content + '<|role_end|>' -}}"
    "{%- elif message.role != 'system' or not loop.first -%}"
    "{{- raise_exception('a message is of the system (the first only), the user or the assistant') -}}"
    "{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}"
    "{{- '<role>ASSISTANT</role>\\n<think>' + ('' if thinking else '</think>') -}}"
    "{%- endif -%}"
)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Trains a tokenizer on `texts`; its vocabulary has at most `vocab_size` tokens, the control tokens first.

    Raises ValueError if `vocab_size` leaves no room for the control tokens, the bytes and the two-digit numbers.
    """
    fixed = len(CONTROL_TOKENS) + 256 + 90
    if vocab_size < fixed:
        raise ValueError(f"vocab_size {vocab_size} is too small: the tokens that are always there are {fixed}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in CONTROL_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    corpus = list(texts)
    every_number = " ".join(map(str, range(10, 100)))
    tokenizer.train_from_iterator([*corpus, *[every_number] * max(1, len(corpus))], trainer)
    return tokenizer


def write_tokenizer(tokenizer: Tokenizer, directory: Path, context: int) -> None:
    """Writes the tokenizer's files and `generation_config.json`; `context` is the model's context in tokens."""
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_TURN,
        "pad_token": END_OF_TEXT,
        "additional_special_tokens": list(CONTROL_TOKENS[2:]),
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n")
    generation = {
        "eos_token_id": [tokenizer.token_to_id(END_OF_TURN), tokenizer.token_to_id(END_OF_TEXT)],
        "pad_token_id": tokenizer.token_to_id(END_OF_TEXT),
        "do_sample": False,
    }
    (directory / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
