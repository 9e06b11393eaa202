"""`import firepool` and `import firepool_ray as firepool` are the same thing: this file hands over to the SDK."""

import sys

import firepool_ray

sys.modules[__name__] = firepool_ray
