"""What measures share: clocks, limits of the card, FLOPs and bytes of a model, made-up work, bars."""
