"""Hypothesis settings of the plan tests. Nothing in this folder may need torch."""

from hypothesis import HealthCheck, settings

settings.register_profile("plan", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("plan")
