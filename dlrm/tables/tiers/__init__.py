"""Tables in two tiers of memory: rows that are named often on the device, the others in host memory."""
