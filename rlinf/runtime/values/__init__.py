"""Promises and how values travel: encoding by the cheapest route, kept values, references. Knows no queues."""
