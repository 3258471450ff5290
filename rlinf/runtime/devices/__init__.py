"""Leases of devices and memory on them: decided on the controller, held around calls. Knows no queues."""
