"""Sessions in a signed cookie, as Gym's servers keep them."""

from fastapi import FastAPI
from starlette.middleware.sessions import SessionMiddleware


def add_session_cookie(app: FastAPI, class_name: str, instance: str) -> None:
    """Name the cookie for class and instance, and sign it with that name: it outlives the process.

    It also outlives any change of the clock: the checkpoint that holds it may be restored a year later, or elsewhere.
    """
    name = f"{class_name}___{instance}"
    app.add_middleware(SessionMiddleware, secret_key=name, session_cookie=name, max_age=None)
