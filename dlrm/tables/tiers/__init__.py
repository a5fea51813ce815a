"""Tables in two tiers of memory: frequently named rows on the device, the others in host memory."""
