"""What can be said of a run before it starts: models, data, memory and time, without a process or a device."""
