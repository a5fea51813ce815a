"""The tables of `--print-plan`: shards and tiers of the static pipeline, and the balance of the work."""
