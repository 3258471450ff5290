"""Models that no machine here can hold: their bytes on each device of a layout, and their seconds by its hardware."""
