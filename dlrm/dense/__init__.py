"""Dense weights in flat buffers, and the guard of their updates."""
