"""How the byte-level vocabularies of GGUF files split a text into pieces, by the name in `tokenizer.ggml.pre`.

A GGUF file does not contain the regular expressions of its tokenizer, only a name for them. The expressions here are
those of the published tokenizers, and the names are those of llama.cpp. A tokenizer with another expression gives other
ids for the same text, and a model that was not trained on these works worse without any error.
"""

from typing import Any, NamedTuple


def _words(first: str, rest: str, contraction: str = "") -> str:
    """The expression of words of letters of the class `first`, then of `rest`, with a sign before and a contraction."""
    before, after = r"[^\r\n\p{L}\p{N}]?", f"{contraction}?" if contraction else ""
    return f"{before}{first}*{rest}+{after}|{before}{first}+{rest}*{after}"


_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SYMBOLS_AND_SPACES = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_DIGIT, _NUMBERS = r"\p{N}", r"\p{N}{1,3}"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_SYMBOLS_AND_SPACES}"
_UFAKZEKA = rf"[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_SYMBOLS_AND_SPACES}"
_QWEN2 = rf"{_CONTRACTION}|{_UFAKZEKA}"
_QWEN35 = (
    rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_BAILING = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SYMBOLS_AND_SLASHES = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = rf"{_words(_UPPER, _LOWER)}|\p{{N}}|{_SYMBOLS_AND_SLASHES}"
_GPT4O = rf"{_words(_UPPER, _LOWER, _CONTRACTION)}|\p{{N}}{{1,3}}|{_SYMBOLS_AND_SLASHES}"
_NOT_HAN = r"&&[^\p{Han}]]"
KIMI = (
    rf"[\p{{Han}}]+|{_words(_UPPER[:-1] + _NOT_HAN, _LOWER[:-1] + _NOT_HAN, _CONTRACTION)}"
    rf"|\p{{N}}{{1,3}}|{_SYMBOLS_AND_SPACES}"
)
"""The pieces of Kimi's texts: Chinese characters; words with a sign or space before and a contraction after them; up to
three digits; signs with the line breaks after them; white space without a space before a word."""
_DEEPSEEK_V3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_EAST_ASIAN = "[一-龥ࠀ-一가-\ud7ff]+"
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _EAST_ASIAN, _DIGIT)
_DEEPSEEK_LETTERS = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝ"
    "Ὗ-ώᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
_DEEPSEEK_LLM = (
    *(r"[\r\n]", rf"\s?[{_DEEPSEEK_LETTERS}]+", r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$", _EAST_ASIAN, r"\p{N}+"),
)
_SEED = (
    rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_MINICPM5 = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}+|{_SYMBOLS_AND_SPACES}"
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"


class Splitting(NamedTuple):
    """The pieces of a text, which are the results of the regular expressions `patterns`, applied one after another.

    With `ignore_merges`, a piece that is a token becomes that token, whatever the merges say. `adds_bos` is what holds
    without `tokenizer.ggml.add_bos_token`. With `composes`, a text is normalized to Unicode's form NFC before.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    adds_bos: bool = False
    composes: bool = False

    def normalizer(self) -> dict[str, Any] | None:
        """The normalizer of `tokenizer.json`; None if texts are taken as they are."""
        return {"type": "NFC"} if self.composes else None

    def pre_tokenizer(self) -> dict[str, Any]:
        """The pre-tokenizer of `tokenizer.json`, which writes the pieces in GPT-2's alphabet of bytes at the end."""
        splits = [
            {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
            for pattern in self.patterns
        ]
        alphabet = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
        return {"type": "Sequence", "pretokenizers": [*splits, alphabet]}


_GROUPS = {
    Splitting((_LLAMA3,), ignore_merges=True, adds_bos=True): (
        *("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano"),
    ),
    Splitting((_LLAMA3,)): ("dbrx", "smaug-bpe", "chatglm-bpe"),
    Splitting((_LLAMA3,), ignore_merges=True): ("glm4", "glm5"),
    # Qwen and Cohere publish the normalizer NFC. llama.cpp leaves it out, which changes the ids of decomposed letters.
    Splitting((_QWEN2,), composes=True): ("qwen2",),
    Splitting((_QWEN2,)): (
        *("deepseek-r1-qwen", "kormo", "f2llmv2", "megrez", "stablelm2", "hunyuan", "solar-open", "grok-2"),
    ),
    Splitting((_QWEN35,), composes=True): ("qwen35",),
    Splitting((_DIGIT, _GPT2)): ("smollm", "starcoder", "refact", "codeshell", "exaone", "minerva-7b", "mellum2"),
    Splitting((_DIGIT, _GPT2), composes=True): ("command-r",),
    Splitting((_GPT2,)): (
        *("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "granite-docling", "gigachat", "a.x-4.0", "mellum"),
        *("modern-bert", "exaone4"),
    ),
    Splitting((_BAILING,)): ("bailingmoe", "bailingmoe2", "llada-moe"),
    Splitting((_TEKKEN,), ignore_merges=True, adds_bos=True): ("tekken",),
    Splitting((_GPT4O,)): ("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"),
    # Kimi's tokenizer takes a piece that is a token, and parts words at capitals. llama.cpp does neither.
    Splitting((KIMI,), ignore_merges=True): ("kimi-k2",),
    Splitting((_NUMBERS, "[一-龥぀-ゟ゠-ヿ]+", _DEEPSEEK_V3)): (
        *("deepseek-v3", "hunyuan-dense", "hy_v4", "joyai-llm"),
    ),
    Splitting(_DEEPSEEK_CODER): ("deepseek-coder",),
    Splitting(_DEEPSEEK_LLM): ("deepseek-llm",),
    Splitting((_SEED,)): ("seed-coder",),
    Splitting((_UFAKZEKA,)): ("ufakzeka",),
    Splitting((_NUMBERS, _MINICPM5), ignore_merges=True): ("minicpm5",),
    Splitting((_BLOOM,)): ("bloom", "gpt3-finnish", "poro-chat"),
    Splitting((_BLOOM, _DIGIT)): ("viking",),
    Splitting((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")): ("falcon",),
    Splitting((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")): ("default",),
}
SPLITTINGS = {name: splitting for splitting, names in _GROUPS.items() for name in names}
"""The known ways of splitting, by the name in `tokenizer.ggml.pre`."""
