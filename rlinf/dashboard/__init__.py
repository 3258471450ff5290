"""The page of runs: written once as a file (`rlinf report`, `rlinf compare`) and served live (`rlinf watch`).

`state` has all that a page shows as JSON, `report` makes the file, `server`, `events` and `runs` serve it; scripts and
styles are in `page/`.
"""
