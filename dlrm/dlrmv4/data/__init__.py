"""DLRMv4's data: the reference's cache files, anchors and windows, histories, batches, generated and real Yambda."""
