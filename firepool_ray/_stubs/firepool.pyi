# For type checkers, which find no types in a one-file module of a wheel: installed as `firepool-stubs/__init__.pyi`.
from firepool_ray import *  # noqa: F403
