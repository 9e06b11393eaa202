"""`python -m firepool_broker` is the console script `firepool-broker`."""

import sys

from firepool_broker.main import main

sys.exit(main())
