"""The page of runs: the same from files once (`rlinf report`, `rlinf compare`) and live (`rlinf watch`)."""
