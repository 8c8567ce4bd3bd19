"""What newcomers get wrong most likely: each error says what was found, where, what was expected and what to do."""

import dataclasses
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

import ling3

IDS = [5, 17, 3]


@pytest.fixture(scope="module")
def at(tmp_path_factory):
    """nano, its tokenizer and engines, and directories that hold no checkpoint."""
    model, tokenizer = ling3.load("nano"), ling3.load_tokenizer("nano")
    there = tmp_path_factory.mktemp("there")
    (there / "file.safetensors").write_text("x")
    (there / "empty").mkdir()
    (there / "notes").mkdir()
    (there / "notes" / "a.txt").write_text("x")
    return Things(model, tokenizer, ling3.Engine(model, tokenizer), ling3.Engine(model), there)


@dataclasses.dataclass(frozen=True)
class Things:
    model: ling3.CausalLM
    tokenizer: ling3.Tokenizer
    engine: ling3.Engine
    without_tokenizer: ling3.Engine
    there: pathlib.Path


MISTAKES = {
    "text in the place of ids": (
        lambda at: at.model("Sam has"),
        "argument 'tokens' is 'Sam has'; expected Int[Array, 'batch seq']; give the ids of the text: "
        "jnp.array([tokenizer.encode(text)])",
    ),
    "a list in the place of an array": (
        lambda at: at.model([IDS]),
        "'tokens' is [[5, 17, 3]]; expected Int[Array, 'batch seq']; give ids as an array: jnp.array([[1, 2, 3]])",
    ),
    "one sequence in the place of a batch": (
        lambda at: at.model(jnp.array(IDS)),
        "'tokens' is i32[3]; expected Int[Array, 'batch seq']; a single sequence is a batch of one: tokens[None]",
    ),
    "ids of floats": (
        lambda at: at.model(jnp.ones((1, 3))),
        "argument 'tokens' is f32[1,3]; expected Int[Array, 'batch seq']",
    ),
    "an id of another vocabulary": (
        lambda at: at.model(jnp.array([[5, 50_000]])),
        "tokens[0, 1] is 50000, expected an id in [0, 1237)",
    ),
    "no tokens": (
        lambda at: at.model(jnp.zeros((1, 0), jnp.int32)),
        "tokens has the shape (1, 0), expected at least one row and one column",
    ),
    "jax.jit of a model": (
        lambda at: jax.jit(at.model)(jnp.array([IDS])),
        "jax.jit(model) cannot take it: model(tokens) is compiled already",
    ),
    "a step with a cache of another batch": (
        lambda at: at.model.step(jnp.array([IDS]), at.model.init_cache(2, 16)),
        "tokens has 1 rows and the cache 2: give a row of tokens for each, or init_cache",
    ),
    "a trace of a text": (
        lambda at: ling3.trace(at.model, "Sam has"),
        "argument 'tokens' is 'Sam has'; expected Int[Array, 'batch seq']; give the ids of the text",
    ),
    "generate with a name for a model": (
        lambda at: ling3.generate("nano", [IDS]),
        "argument 'model' is 'nano'; expected CausalLM; load it: ling3.load('nano')",
    ),
    "an engine of a name": (
        lambda at: ling3.Engine("nano"),
        "argument 'model' is 'nano'; expected CausalLM; load it: ling3.load('nano')",
    ),
    "generate with text": (
        lambda at: ling3.generate(at.model, ["Sam has"]),
        "prompt 0 is 'Sam has', expected a list of token ids (see ling3.load_tokenizer)",
    ),
    "generate with one prompt in the place of a list": (
        lambda at: ling3.generate(at.model, IDS),
        "prompt 0 is 5, expected a list of token ids (see ling3.load_tokenizer)",
    ),
    "an empty prompt": (
        lambda at: ling3.generate(at.model, [[]]),
        "prompt 0 is empty, expected at least one token id",
    ),
    "another library's name of a parameter": (
        lambda at: ling3.generate(at.model, [IDS], max_new_tokens=5),
        "ling3.generate has no parameter 'max_new_tokens'; did you mean max_tokens?",
    ),
    "a parameter that there is not": (
        lambda at: ling3.generate(at.model, [IDS], num_beams=5),
        "ling3.generate has no parameter 'num_beams'; expected one of temperature, top_p, ",
    ),
    "a temperature below 0": (
        lambda at: ling3.generate(at.model, [IDS], temperature=-1),
        "temperature is -1, expected a number in [0, 1e9]",
    ),
    "more tokens than the context": (
        lambda at: ling3.generate(at.model, [IDS], max_tokens=100_000),
        "prompt 0 has 3 tokens and max_tokens is 100000: 100003 together, but there is room for 2048 (the model's "
        "max_position_embeddings, or a smaller max_model_len); shorten one or the other",
    ),
    "stop strings without an engine": (
        lambda at: ling3.generate(at.model, [IDS], stop=["x"]),
        "stop is ('x',), which ling3.generate cannot do: use an Engine",
    ),
    "text for an engine without a tokenizer": (
        lambda at: at.without_tokenizer.generate("Sam has"),
        "prompt 0 is text, and this engine has no tokenizer: give token ids",
    ),
    "a message in the place of a list": (
        lambda at: at.engine.generate({"role": "user", "content": "hi"}),
        "prompts are {'role': 'user', 'content': 'hi'}, expected a list; a chat is a list of messages",
    ),
    "a chat template for a text": (
        lambda at: at.tokenizer.apply_chat_template("hi"),
        "messages: a str, where a list of {'role', 'content'} was expected",
    ),
    "a message without a role": (
        lambda at: at.tokenizer.apply_chat_template([{"content": "hi"}]),
        "messages[0]: 'role' is missing; a message has a 'role' and its 'content'",
    ),
    "a directory that there is not": (
        lambda at: ling3.load(at.there / "nano"),
        "no checkpoint directory at ",
    ),
    "a file in the place of a directory": (
        lambda at: ling3.load(at.there / "file.safetensors"),
        "file.safetensors is a file: give the directory that holds config.json and the weights",
    ),
    "a directory without a checkpoint": (
        lambda at: ling3.load(at.there / "empty"),
        "config.json: 1 problem\n  cannot be read (",
    ),
    "a configuration without weights": (
        lambda at: ling3.load("tiny"),
        "found no .safetensors file; expected model.safetensors, or shards with model.safetensors.index.json; for "
        "random weights use ling3.init(config) or --random-weights",
    ),
    "a dtype that is not computed": (
        lambda at: ling3.load("nano", jnp.float16),
        "dtype: found float16; expected None, jnp.float32 or jnp.bfloat16",
    ),
    "a tokenizer that there is not": (
        lambda at: ling3.load_tokenizer("tiny"),
        "tokenizer.json is missing: a checkpoint's tokenizer is its tokenizer.json",
    ),
    "a directory that is taken": (
        lambda at: ling3.save(at.model, at.there / "notes"),
        "is not empty; give another directory, or overwrite it (overwrite=True, --overwrite)",
    ),
    "a number in the place of a key": (
        lambda at: ling3.init(at.model.config, key=0),
        "argument 'key' is 0; expected Union[Key[Array, ''], UInt32[Array, '2'], UInt32[Array, '4']]; give a key: "
        "jax.random.key(0)",
    ),
    "a size as text": (
        lambda at: ling3.Ling3Config(hidden_size="1536"),
        "hidden_size: found '1536'; expected an integer from 1 to 1,048,576; correct it",
    ),
    "a cut of what the model has not": (
        lambda at: ling3.ablate.no_sink(at.model),
        "this model has no attention sink that can be cut: no module of it has a field attn_sink that may be None. "
        "What can be cut: ",
    ),
    "a cut of a layer that there is not": (
        lambda at: ling3.ablate.no_output_gate(at.model, layers=[99]),
        "layers: found [99]; the layers of this model with output gate are [0, 1, 2, 3]",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_error_says_what_to_do(at, mistake):
    call, said = MISTAKES[mistake]
    with pytest.raises((TypeError, ValueError, OSError)) as error:
        call(at)
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("generate", "./nanoo", "-p", "hi"), "no checkpoint directory at "),
        (("generate", "nano", "-p", ""), "the prompt is empty"),
        (("generate", "tiny", "-p", "hi"), "tokenizer.json is missing"),
        (("generat", "nano"), "Available subcommands: generate"),
        (("generate", "nano", "--max-token", "3"), "--max-tokens"),
        (("generate", "-p", "hi"), "MODEL"),
    ],
)
def test_a_command_says_so_too(capsys, arguments, said):
    from ling3 import cli  # noqa: PLC0415

    try:
        code = cli.main(arguments)
    except SystemExit as left:
        code = left.code
    assert code == 2 and said in capsys.readouterr().err


def test_training_without_its_extra_names_it():
    hidden = "import sys; sys.modules['optax'] = None; from ling3.train import train"
    done = subprocess.run([sys.executable, "-c", hidden], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and done.stderr.endswith(
        "training needs optax, which is not installed: pip install 'ling3[train]'\n"
    )
