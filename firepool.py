"""`import firepool` and `import firepool_ray as firepool` are the same thing: this file hands over to the SDK."""

import sys
from typing import TYPE_CHECKING

import firepool_ray

if TYPE_CHECKING:
    from firepool_ray import *  # noqa: F403 - for type checkers: the very names of `__all__`

sys.modules[__name__] = firepool_ray
