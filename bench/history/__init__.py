"""The history of one configuration over commits and months: its times beside a reference's, changes, and the commit of
a change."""
