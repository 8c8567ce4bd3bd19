"""Checks of the headers Host (names of this server) and Origin (pages that may send requests).

A browser lets every page send requests, but a page of another origin cannot read the answers, unless its host name
resolves to this server's address (DNS rebinding); the Host header then has that name.
"""

import dataclasses
import ipaddress
import socket
import urllib.parse
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import Scope

from ling3.runtime.quoting import printable
from ling3.server.errors import ApiError

LOOPBACK = ("localhost", "127.0.0.1", "::1")
WILDCARDS = ("0.0.0.0", "::", "")


@dataclasses.dataclass(frozen=True)
class Hosts:
    """The host names that requests may use for this server; "*" in `allowed` allows any."""

    allowed: frozenset[str]
    """Names that the server was started with; pages of these hosts may send requests too."""
    others: frozenset[str] = frozenset(LOOPBACK)
    addresses: bool = False
    """Whether any IP address is allowed: DNS rebinding needs a name."""

    @classmethod
    def of(cls, listening: str, allowed: Sequence[str] = ()) -> "Hosts":
        """The hosts of a server that listens on `listening`: that host, loopback names and the `allowed` names.

        On a wildcard address, any IP address and this machine's name are allowed too. Raises ValueError for an invalid
        name.
        """
        names = frozenset(name if name == "*" else _name(f"//{name}") or "" for name in allowed)
        if "" in names:
            raise ValueError(
                f"--allow-host: {', '.join(map(repr, allowed))}, expected names of hosts such as example.org"
            )
        wild = listening in WILDCARDS
        here = socket.gethostname() if wild else listening
        return cls(names, frozenset({*LOOPBACK, here.lower()}), wild)

    def has(self, host: str) -> bool:
        """Whether the value of a header `Host` is one of these hosts."""
        name = _name(f"//{host}")
        if name is None:
            return "*" in self.allowed
        return not {name, "*"}.isdisjoint(self.allowed) or name in self.others or (self.addresses and _is_address(name))


@dataclasses.dataclass(frozen=True)
class Origins:
    """Refuses requests for other hosts, and from pages of neither this host nor the `allowed` origins."""

    hosts: Hosts | None
    """None allows any host."""
    allowed: Sequence[str]

    def refusal(self, scope: Scope) -> ApiError | None:
        """An ApiError 403 if the request is not allowed, else None."""
        headers = Headers(scope=scope)
        hosts = headers.getlist("host")
        if self.hosts is not None and not (len(hosts) == 1 and self.hosts.has(hosts[0])):
            given = printable(", ".join(hosts), 80) or "missing"
            message = f"the Host is {given}, which is no name of this server (ling3 serve --allow-host)"
            return ApiError(403, message, code="host_not_allowed")
        for origin in headers.getlist("origin"):
            if not self._may(origin, hosts):
                message = f"pages of {printable(origin, 80)} may not ask this server (ling3 serve --allow-origin)"
                return ApiError(403, message, code="origin_not_allowed")
        return None

    def _may(self, origin: str, hosts: Sequence[str]) -> bool:
        if origin in self.allowed or "*" in self.allowed:
            return True
        if self.hosts is not None and _name(origin) in self.hosts.allowed:
            return True
        place = origin.lower().partition("://")[2]
        return place != "" and [place] == [host.lower() for host in hosts]


def _name(url: str) -> str | None:
    """The host of a URL in lower case, without port, brackets and trailing dot; None if there is none."""
    try:
        return (urllib.parse.urlsplit(url).hostname or "").removesuffix(".") or None
    except ValueError:
        return None


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
