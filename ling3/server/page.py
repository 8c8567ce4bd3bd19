"""`/`: the chat page, a single file. Its policy allows no other scripts or resources."""

import base64
import hashlib
import pathlib
import re

from starlette.requests import Request
from starlette.responses import Response

PAGE = (pathlib.Path(__file__).parent / "page.html").read_text(encoding="utf-8")


def _hashed(tag: str) -> str:
    """The source for a Content-Security-Policy that allows the page's inline element."""
    [content] = re.findall(f"<{tag}>(.*?)</{tag}>", PAGE, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"


POLICY = (
    f"default-src 'none'; script-src {_hashed('script')}; style-src {_hashed('style')}; img-src data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


async def answer(request: Request) -> Response:
    """Answers requests for the chat page."""
    return Response(PAGE, media_type="text/html", headers=HEADERS)
