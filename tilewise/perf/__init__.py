"""How fast and why: measurements, the hardware's limits, and the memory traffic of each algorithm."""
