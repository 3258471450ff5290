"""Common parts of measures: clocks, limits of the card, made-up work, bars."""
