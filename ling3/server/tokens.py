"""`/tokenize` and `/detokenize`: the token ids of texts and conversations, and the text of ids."""

import asyncio
from typing import Annotated, Any

import pydantic
from starlette.requests import Request
from starlette.responses import Response

from ling3.server.errors import ApiError
from ling3.server.known_fields import Known, List
from ling3.server.messages import rendered
from ling3.server.service import Service
from ling3.text.json_text import dumped

PART = 2**16
"""The number of ids that are encoded as JSON at once."""


class Tokenize(Known):
    """A request for the token ids of a text or a conversation."""

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool = True
    messages: List[dict[str, Any]] | None = pydantic.Field(None, min_length=1)
    chat_template_kwargs: dict[str, Any] | None = None


class Detokenize(Known):
    """A request for the text of token ids."""

    model: str | None = None
    tokens: List[Annotated[int, pydantic.Field(ge=0, lt=2**31)]]


async def about(request: Request) -> Response:
    """Answers requests for `/tokenizer_info`: the special tokens by name, and the chat template."""
    service: Service = request.app.state.service
    tokenizer = service.tokenizer
    template = tokenizer.chat_template
    said = {"eos_token": None, **tokenizer.special_tokens}
    source = None if template is None else template.source
    return Response(dumped({**said, "chat_template": source}), media_type="application/json")


async def tokenize(service: Service, asked: Tokenize) -> Response:
    """Answers requests for the token ids of a text or a conversation."""
    return Response(await asyncio.to_thread(_tokenized, service, asked), media_type="application/json")


async def detokenize(service: Service, asked: Detokenize) -> Response:
    """Answers requests for the text of token ids."""
    text = await asyncio.to_thread(service.tokenizer.decode, asked.tokens, skip_special_tokens=False)
    return Response(dumped({"prompt": text}), media_type="application/json")


def _tokenized(service: Service, asked: Tokenize) -> str:
    """The response's JSON, encoded in parts: encoding holds the GIL, and the event loop waits for each part."""
    if (asked.prompt is None) == (asked.messages is None):
        raise ApiError(400, "expected either prompt or messages", "prompt")
    if asked.prompt is not None:
        ids = service.encode(asked.prompt, "prompt", asked.add_special_tokens)
    else:
        _, ids = rendered(service, asked.messages or [], asked.chat_template_kwargs)
    tokens = ", ".join(dumped(ids[i : i + PART])[1:-1] for i in range(0, len(ids), PART))
    head = dumped({"count": len(ids), "max_model_len": service.engine.max_model_len})
    return f'{head[:-1]}, "tokens": [{tokens}]}}'
