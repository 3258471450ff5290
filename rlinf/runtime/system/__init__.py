"""The system's surface: spawning and scopes, local systems, torchrun, the end of a job, looking in."""
