"""Who may use a device and what is loaded on it: leases on the controller, and around calls. Knows no queues."""
