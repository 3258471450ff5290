"""One copy of a model split over ranks: tokens, layers' matrices, experts."""
