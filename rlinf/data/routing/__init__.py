"""Which experts of a mixture each token goes to: as arrays beside samples (`routes`), and in the model (`routers`).

Engines tell of it and trainers repeat it, so both take it from here.
"""
