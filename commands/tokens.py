"""Where the control token comes from: a variable or a file, never the command line."""

import os
import secrets
from pathlib import Path
from typing import Final

from pydantic import SecretStr

from gymckpt.errors import UsageError

VARIABLE: Final = "GYMCKPT_CONTROL_TOKEN"
MAX_TOKEN_BYTES: Final = 4096


def control_token(file: Path | None) -> SecretStr | None:
    """The token in `file`, else in `GYMCKPT_CONTROL_TOKEN`, else None; raises `UsageError` on an unusable file."""
    if file is None:
        given = os.environ.get(VARIABLE, "")
        return SecretStr(given) if given else None
    try:
        with file.open("rb") as opened:
            data = opened.read(MAX_TOKEN_BYTES + 1)
    except OSError as error:
        raise UsageError(f"--control-token-file {file}: {error.strerror}") from error
    text = data.decode("ascii", "replace").strip()
    if not text or len(data) > MAX_TOKEN_BYTES or not text.isprintable():
        raise UsageError(f"--control-token-file {file} does not hold one line with a token")
    return SecretStr(text)


def required_control_token(file: Path | None) -> SecretStr:
    """The token; raises `UsageError` when none is given."""
    token = control_token(file)
    if token is None:
        raise UsageError("the control plane needs a token", hint=f"set {VARIABLE}, or give --control-token-file FILE")
    return token


def fresh_token() -> SecretStr:
    """A token that nobody has seen: embedded servers get a new one at every start."""
    return SecretStr(secrets.token_urlsafe(32))
