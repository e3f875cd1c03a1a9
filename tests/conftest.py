"""The gate asks the same questions every time; `pytest --hypothesis-profile explore` draws new ones."""

from hypothesis import settings

settings.register_profile("same", derandomize=True)
settings.register_profile("explore", derandomize=False, print_blob=True)
settings.load_profile("same")
