"""One HTML page and its pictures, from records. No torch."""
