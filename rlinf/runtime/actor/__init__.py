"""Actors and the host that they live on: calls in and out, and how they are run. Knows neither devices nor streams."""
