"""`/`: the chat page, a single file. Its policy allows no other scripts or resources."""

import pathlib

from starlette.requests import Request
from starlette.responses import Response

from ling3.runtime.page_policy import content_policy

TEMPLATE = (pathlib.Path(__file__).parent / "page.html").read_text(encoding="utf-8")
POLICY = f"{content_policy(TEMPLATE)}; img-src data:; connect-src 'self'"
PAGE = TEMPLATE.replace("{{policy}}", POLICY)
"""The page, which states its policy too, for copies of it that come without the server's headers."""
HEADERS = {
    "Content-Security-Policy": f"{POLICY}; frame-ancestors 'none'",  # browsers ignore this one outside of headers
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


async def answer(request: Request) -> Response:
    """Answers requests for the chat page."""
    return Response(PAGE, media_type="text/html", headers=HEADERS)
