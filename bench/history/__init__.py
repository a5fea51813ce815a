"""The history of one configuration over commits and months: its times relative to a reference, the changes, and the
commit that made a change."""
