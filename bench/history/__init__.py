"""One configuration over commits and months: its times beside a reference's, what changed, and which commit did it."""
