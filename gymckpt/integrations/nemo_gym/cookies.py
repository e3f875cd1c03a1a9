"""Gym's session cookie: which session a request carries, and a cookie that carries a session of our choice.

Its name is `<class>___<instance>`, which is its signing key too (Starlette's session, signed by itsdangerous): it stays
valid across a restart of the server. Their servers refuse one that is two weeks old, or from the future by their clock.
A checkpoint may be restored later than that: what is signed counts here whatever its time, and is signed anew for them.
"""

import base64
import binascii
from http.cookies import CookieError, SimpleCookie
from typing import Any

from itsdangerous import BadSignature, TimestampSigner

from gymckpt import jsoncodec
from gymckpt.participant.prefix import Scope

SESSION_ID = "session_id"


def session_of(scope: Scope, cookie: str) -> dict[str, Any]:
    """What the request's cookie named `cookie` carries; empty without a validly signed one."""
    data = _signed(scope, cookie)
    try:
        session = jsoncodec.loads(base64.b64decode(data)) if data is not None else {}
    except (binascii.Error, ValueError):
        return {}
    return session if isinstance(session, dict) else {}


def session_id_of(scope: Scope, cookie: str) -> str | None:
    """The session that the request's cookie names."""
    return _named(session_of(scope, cookie), SESSION_ID)


def with_session_id(scope: Scope, cookie: str, session_id: str) -> Scope:
    """`scope` with the cookie named `cookie` carrying `session_id`, whatever it carried before."""
    return _carrying(scope, cookie, base64.b64encode(jsoncodec.dumps({SESSION_ID: session_id})))


def renewed(scope: Scope, cookie: str) -> Scope:
    """`scope` with what the cookie named `cookie` carries signed now; as it is where nothing validly signed is."""
    data = _signed(scope, cookie)
    return scope if data is None else _carrying(scope, cookie, data)


def _signed(scope: Scope, cookie: str) -> bytes | None:
    value = _cookies(scope).get(cookie)
    try:
        return None if value is None else TimestampSigner(cookie).unsign(value.encode())
    except BadSignature:
        return None


def _carrying(scope: Scope, cookie: str, data: bytes) -> Scope:
    cookies = {**_cookies(scope), cookie: TimestampSigner(cookie).sign(data).decode()}
    kept = [(name, value) for name, value in scope["headers"] if name.lower() != b"cookie"]
    written = "; ".join(f"{name}={value}" for name, value in cookies.items())
    return {**scope, "headers": [*kept, (b"cookie", written.encode("latin-1"))]}


def _cookies(scope: Scope) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, value in scope["headers"]:
        if name.lower() == b"cookie":
            try:
                found.update({key: morsel.value for key, morsel in SimpleCookie(value.decode("latin-1")).items()})
            except CookieError:
                continue
    return found


def _named(session: object, key: str) -> str | None:
    value = session.get(key) if isinstance(session, dict) else None
    return value if isinstance(value, str) and value else None
