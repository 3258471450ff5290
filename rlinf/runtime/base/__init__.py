"""What every room uses: errors, the clock, calls, tasks and threads, protocols of what lies above. No I/O."""
