"""Samples: file formats, synthetic sets with a known best AUC, batches, and the reader thread."""
