"""LeRobot's data sets, versions 2 and 3, without its package or the hub: rows in parquet, pictures in videos."""
