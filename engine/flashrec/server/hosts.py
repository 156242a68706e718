"""Which ``Host`` headers are answered: none of a web page whose name was rebound to this machine."""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from flashrec.errors import ConfigError

ANY = "*"
LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
_NAME = re.compile(r"[a-z0-9_]([a-z0-9_.-]{0,251}[a-z0-9_])?")
_PORT = re.compile(r":\d{0,5}\Z")
_SHOWN = 100


@dataclass(frozen=True, slots=True)
class Hosts:
    """The names that are answered, in lower case and without a port; ``None`` for any.

    A browser takes an attacker's page for one of this server as soon as the attacker's name resolves to this
    machine (DNS rebinding): ``Origin`` and ``Host`` then agree, and only the name itself gives it away.
    """

    names: tuple[str, ...] | None

    def refuses(self, header: bytes | None) -> str | None:
        """What to tell a client that sent this ``Host``; ``None`` where it is answered.

        A request without the header (HTTP/1.0) is: every browser sends one.
        """
        if self.names is None or header is None:
            return None
        name = name_of(header.decode("latin-1"))
        if name in self.names:
            return None
        shown = name[:_SHOWN]
        return (
            f"host: this server answers to {', '.join(self.names)}, not to {shown!r}. If that is its name on a "
            f"network, at a reverse proxy or at a port forward, start it with --allowed-host {shown or 'NAME'}, or let "
            "the proxy send one of these names as Host"
        )


def served_hosts(bound: str, allowed: Sequence[str]) -> Hosts:
    """The names for a server that listens on ``bound``, where its user allows ``allowed`` (checked) beside the usual.

    On a loopback address: this machine's names for itself, and ``bound``. On another one those, but any name at all
    where none is allowed by the user.
    """
    if ANY in allowed or (not allowed and not _is_loopback(bound)):
        return Hosts(None)
    usual = [*LOOPBACK, *([] if _is_wildcard(bound) else [name_of(bracketed(bound))])]
    return Hosts(tuple(dict.fromkeys([*usual, *(name_of(bracketed(name)) for name in allowed)])))


def check_allowed(allowed: Sequence[str]) -> None:
    """Raises :class:`ConfigError` for what is neither a host's name, nor an address, nor ``*``."""
    for name in allowed:
        if name != ANY and _address(name.strip("[]")) is None and not _NAME.fullmatch(name.lower()):
            raise ConfigError(f"allowed_hosts: a name or an address without scheme, port and path, or *, got {name!r}")


def name_of(authority: str) -> str:
    """The host in a ``Host`` header: lower case, without the port and the root's dot."""
    return _PORT.sub("", authority.strip().lower()).removesuffix(".")


def bracketed(name: str) -> str:
    """An IPv6 address as a ``Host`` header writes it, any other name as it is."""
    address = _address(name.strip("[]"))
    return f"[{address}]" if address is not None and address.version == 6 else name


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None


def _is_wildcard(bound: str) -> bool:
    address = _address(bound)
    return not bound or (address is not None and address.is_unspecified)


def _is_loopback(bound: str) -> bool:
    """Whether the address that ``bound`` stands for can be reached from this machine alone."""
    try:
        found = socket.getaddrinfo(bound, None, type=socket.SOCK_STREAM)[0][4][0]
    except OSError:
        return False
    address = _address(str(found).partition("%")[0])
    return bool(bound) and address is not None and address.is_loopback
