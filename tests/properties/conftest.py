"""How many examples a property is tried on: few and the same ones in `make test`, many new ones in `make fuzz`."""

import os

from hypothesis import HealthCheck, settings

_COMMON = {"deadline": None, "suppress_health_check": list(HealthCheck)}  # a model's first forward takes a second
settings.register_profile("test", max_examples=20, derandomize=True, database=None, **_COMMON)
settings.register_profile("fuzz", max_examples=2000, print_blob=True, **_COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "test"))
