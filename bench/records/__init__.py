"""Records as files: their form, reading, writing, and the statistics of their series. No torch."""
