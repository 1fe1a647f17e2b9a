"""Who does how much, and how: calibration, memory, shares, strategy."""
