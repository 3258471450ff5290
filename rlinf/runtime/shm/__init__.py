"""Memory that processes of one machine share: the arena of a host, views into it, its free list. Knows no messages."""
