"""What measures share: clocks, limits of the card, made-up work, bars."""
