"""Commands about demonstrations: `rlinf record` makes them, `rlinf convert` brings them into another format."""
