"""The security policy of a page that is one file: it runs its own script alone and makes no text into HTML."""

import base64
import hashlib
import re


def content_policy(page: str) -> str:
    """The Content-Security-Policy of a page with one inline script and one inline style, both without attributes.

    It allows these two by their hashes, and no inline handler, no other script, and nothing from elsewhere. Trusted
    Types refuse strings where a browser would parse them as HTML or as a script, `innerHTML` for instance.
    """
    return (
        f"default-src 'none'; script-src {_hashed(page, 'script')}; style-src {_hashed(page, 'style')}; "
        "base-uri 'none'; form-action 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    )


def _hashed(page: str, tag: str) -> str:
    """The source that allows the page's inline `tag` element."""
    [inside] = re.findall(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()}'"
