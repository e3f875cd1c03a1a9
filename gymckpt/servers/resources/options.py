"""Reading the options of a bundled server."""

from typing import Any, TypeVar

from pydantic import ValidationError

from gymckpt.errors import UsageError
from gymckpt.settings import Settings

S = TypeVar("S", bound=Settings)


def read_options(model: type[S], instance: str, options: dict[str, Any]) -> S:
    """`options` as `model`; raises `UsageError` naming the server and the option."""
    try:
        return model.model_validate(options)
    except ValidationError as error:
        first = error.errors()[0]
        raise UsageError(f"options of {instance}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from error
