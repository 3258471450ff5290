"""Where roles run, when they own a device, and how far that is from the best: pure logic, no torch, no process."""
