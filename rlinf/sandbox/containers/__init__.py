"""Containers for episodes: a machine of its own for each, by namespaces, by Docker or Podman, or on another machine."""
